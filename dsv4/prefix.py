"""Prefix reuse: states of prompts and answers that were run before, so that the next one that begins alike goes on there."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import warnings
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .errors import StateError
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

SHORTEST = 16  # tokens: a shorter prefix is run again as quickly as restored
RECENT = 64  # prompts among which a shared beginning is looked for
NAME = re.compile("[0-9a-f]{32}[.]prefix")  # of files
LOGITS = "logits"  # beside the state's arrays: float32 [vocab] after the last token, where they were known


@dataclass
class Entry:
    """The state after some tokens; snapshot None: it is in the file and not read yet."""

    tokens: int
    bytes: int
    snapshot: Snapshot | None
    path: Path | None


class PrefixStore:
    """States by the tokens they follow from, within a byte budget; the one longest unused goes first.

    A state is kept after every prompt, after every answer, and where a prompt parts from one before it. What is found is
    what the tokens would leave, bit for bit, drafts included (Session.snapshot). directory: states are also files, found
    again by the next process; they count in the same budget. A file that is damaged is removed with a warning, one of
    another checkpoint, or by another name than this gives, is left alone. One thread uses a store.
    """

    def __init__(self, engine: Engine, budget: int, directory: str | Path | None = None):
        self.identity, self.budget = engine.identity, budget
        self.bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # by the tokens' bytes; the longest unused first
        self._recent: deque[np.ndarray] = deque(maxlen=RECENT)
        self._directory = Path(directory) if directory is not None else None
        self._warned = False
        self._disk = ThreadPoolExecutor(1, "dsv4-prefix") if directory is not None else None  # files change in order
        if self._directory is not None:
            self._find_files()

    def __len__(self) -> int:
        return len(self._entries)

    # ------------------------------------------------------------------ use
    def restore(self, session: Session, tokens: list[int]) -> int:
        """Put an empty session where the longest known beginning of `tokens` leaves it → how long that is, or 0.

        All of them count where the logits of the last one are known: session.logits has them then.
        """
        data = np.asarray(tokens, np.int32).tobytes()
        for length in sorted({entry.tokens for entry in self._entries.values() if entry.tokens <= len(tokens)}, reverse=True):
            key = data[: 4 * length]
            found = self._read(key) if key in self._entries else None
            if found is None or (length == len(tokens) and LOGITS not in found.arrays):
                continue
            arrays = dict(found.arrays)
            logits = arrays.pop(LOGITS, None)
            try:
                session.restore(replace(found, arrays=arrays))
            except StateError as error:  # whole, but of another layout; the session is as it was
                self._discard(key, error)
                continue
            session.logits = None if logits is None else logits.copy()
            self._entries.move_to_end(key)
            return length
        return 0

    def shared(self, tokens: list[int]) -> int:
        """How much of a new prompt one of the recent ones began with; 0 where that is not worth a state."""
        new = np.asarray(tokens, np.int32)
        longest = max((_common(new, old) for old in self._recent), default=0)
        self._recent.append(new)
        longest = min(longest, len(new) - 1)
        return longest if longest >= SHORTEST else 0

    def keep(self, session: Session) -> None:
        """Keep the session's state, unless it is known, short or larger than the whole budget."""
        tokens = np.asarray(session.tokens, np.int32)
        key = tokens.tobytes()
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        size = tokens.nbytes + session.engine.pool.export_bytes(len(tokens))
        size += 0 if session.logits is None else session.logits.nbytes
        if len(tokens) < SHORTEST or size > self.budget:
            return
        snapshot = session.snapshot()
        if session.logits is not None:
            snapshot.arrays[LOGITS] = session.logits.copy()
        path = self._path(key) if self._directory is not None else None
        self._add(key, Entry(len(tokens), size, snapshot, path))
        if path is not None:
            self._disk.submit(self._save, snapshot, path)

    def close(self) -> None:
        """Wait until the files are written."""
        if self._disk is not None:
            self._disk.shutdown()

    # ------------------------------------------------------------------ budget
    def _add(self, key: bytes, entry: Entry) -> None:
        self._entries[key] = entry
        self.bytes += entry.bytes
        while self.bytes > self.budget:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.bytes -= entry.bytes
        if entry.path is not None:
            self._disk.submit(entry.path.unlink, missing_ok=True)

    # ------------------------------------------------------------------ files
    def _path(self, key: bytes) -> Path:
        digest = hashlib.sha256(self.identity.encode() + key).hexdigest()
        return self._directory / f"{digest[:32]}.prefix"

    def _save(self, snapshot: Snapshot, path: Path) -> None:
        try:
            snapshot.save(path)
        except StateError as error:
            self._warn(f"prefix: a state is kept in memory alone; {error}")

    def _find_files(self) -> None:
        """Entries for the files of this checkpoint, the oldest first."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            files = [(_state(path), path) for path in self._directory.glob("*.prefix") if NAME.fullmatch(path.name)]
        except OSError as error:
            raise StateError(f"prefix_dir {self._directory}: expected a directory to write to; {error.strerror}") from error
        files = [(state.st_mtime, state.st_size, path) for state, path in files if state is not None]
        for _, size, path in sorted(files):
            try:
                tokens = Snapshot.tokens_of(path, self.identity)
            except StateError as error:
                self._remove(path, error)
                continue
            if tokens is not None and path == self._path(tokens.tobytes()):
                self._add(tokens.tobytes(), Entry(len(tokens), size, None, path))

    def _read(self, key: bytes) -> Snapshot | None:
        """An entry's state, from its file where need be; None, and no entry any more, where that is damaged."""
        entry = self._entries[key]
        if entry.snapshot is None:
            try:
                entry.snapshot = Snapshot.load(entry.path)
            except StateError as error:
                self._discard(key, error)
        return entry.snapshot

    def _discard(self, key: bytes, error: StateError) -> None:
        path = self._entries[key].path
        self._drop(key)
        self._remove(path, error)

    def _remove(self, path: Path, error: StateError) -> None:
        self._warn(f"prefix: a damaged file was removed; {error}")
        with suppress(OSError):  # where that may not be, it is passed over
            path.unlink()

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _state(path: Path) -> os.stat_result | None:
    """Of a file; None where there is none, or no longer: other processes may use the directory, too."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state if stat.S_ISREG(state.st_mode) else None


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n

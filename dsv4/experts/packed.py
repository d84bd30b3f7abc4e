"""A packed copy of a checkpoint's experts: each one's bytes of a rank in one run, as they lie in a slot.

The file: 8 bytes with the length of the header (little-endian), the header (JSON: format, version, identity of the
checkpoint, parts, banks, shapes), zeros up to a multiple of 4096; for every part, bank and expert layout.nbytes bytes;
a CRC-32 of each of these (uint32, little-endian); the SHA-256 of header and CRCs. parts: among how many ranks the experts
are divided.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..errors import CapacityError, CheckpointError
from ..files import replacing
from ..split import Split
from ..weights import DEEP_LIMIT, check
from .sources import CheckpointExperts, read_expert

FORMAT, VERSION = "dsv4-experts", "1"
_PAGE = 4096
_HEADER_LIMIT = 1 << 24


class PackedExperts:
    """One rank's experts in a packed file. A sources.Source."""

    def __init__(self, path: str | os.PathLike, like: CheckpointExperts, identity: str, split: Split):
        """like: the same experts in the checkpoint. Raises CheckpointError for a file of another checkpoint or number of
        ranks, of another format, and for a truncated or damaged one.

        The bytes of experts are compared with their checksums where there are less than 4 GB of them; verify() does it
        for any number.
        """
        self.path, self.layout, self.banks = Path(path), like.layout, like.banks
        try:
            self._file = open(self.path, "rb", buffering=0)
        except OSError as error:
            raise self._error("a packed file that can be read", error.strerror) from None
        header, self._start = self._header()
        parts = header.get("parts")
        if header.get("identity") != identity:
            raise self._error(f"a copy of checkpoint {identity[:12]}", f"one of {str(header.get('identity'))[:12]}; pack it again")
        if parts != split.experts:
            raise self._error(
                f"experts divided among {split.experts}, as on {split.size} rank(s)", f"{parts} parts; pack it with --ranks {split.size}"
            )
        if (header.get("banks"), header.get("shapes")) != (self.banks, [list(shape) for shape in self.layout.shapes]):
            raise self._error("the layers and sizes of the checkpoint", "others: damaged; pack it again")
        self._total = sum(self.banks.values())
        self._first = (split.rank if parts > 1 else 0) * self._total
        self._records = dict(zip(self.banks, np.cumsum([0, *self.banks.values()]).tolist()))
        self._crcs = self._trailer(header, parts * self._total)
        self._map = np.memmap(self._file, np.uint8, "r")
        if self._total * self.layout.nbytes < DEEP_LIMIT:
            self.verify()

    def _error(self, expected: str, found: Any) -> CheckpointError:
        return CheckpointError(f"packed experts {self.path}: expected {expected}; found {found}")

    def _header(self) -> tuple[dict, int]:
        """(header, where the experts begin)"""
        length = int.from_bytes(self._file.read(8), "little")
        text = self._file.read(length) if length <= _HEADER_LIMIT else b""
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise self._error(f"a file of format {FORMAT}, made by `pack`", "another one, or a damaged header")
        if header.get("version") != VERSION:
            raise self._error(f"format version {VERSION}", header.get("version"))
        return header, _padded(8 + length)

    def _trailer(self, header: dict, records: int) -> np.ndarray:
        """The CRCs, uint32 [records], after the file's length and the checksum of header and CRCs were compared."""
        at = self._start + records * self.layout.nbytes
        size = os.fstat(self._file.fileno()).st_size
        if size != at + 4 * records + 32:
            raise self._error(f"{at + 4 * records + 32} bytes", f"{size}: truncated; pack it again")
        self._file.seek(at)
        crcs, digest = self._file.read(4 * records), self._file.read(32)
        if digest != hashlib.sha256(_text(header) + crcs).digest():
            raise self._error("header and checksums as they were written", "others: damaged; pack it again")
        return np.frombuffer(crcs, "<u4")

    def check_whole(self) -> None:
        """As Checkpoint.check_whole."""
        size = os.fstat(self._file.fileno()).st_size
        if size < len(self._map):
            raise self._error(f"{len(self._map)} bytes, as when it was opened", f"{size}: cut short while in use; pack it again")

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare this rank's experts with their checksums. Raises CheckpointError at the first that differs."""
        done = 0
        for prefix, experts in self.banks.items():
            for expert in range(experts):
                if zlib.crc32(self.data(prefix, expert)) != self._crcs[self._record(prefix, expert)]:
                    raise self._error(f"{prefix}experts.{expert} as it was written", "other bytes: damaged; pack it again")
                done += self.layout.nbytes
                if progress:
                    progress(done, self._total * self.layout.nbytes)

    def _record(self, prefix: str, expert: int) -> int:
        return self._first + self._records[prefix] + expert

    def _begin(self, prefix: str, expert: int) -> int:
        return self._start + self._record(prefix, expert) * self.layout.nbytes

    def data(self, prefix: str, expert: int) -> np.ndarray:
        """uint8 [layout.nbytes] where the file is mapped."""
        begin = self._begin(prefix, expert)
        return self._map[begin : begin + self.layout.nbytes]

    def pieces(self, prefix: str, expert: int) -> np.ndarray:
        begin, fd = self._begin(prefix, expert), self._file.fileno()
        return np.array([(fd, begin + to, n * k, 1, n * k, to, i % 2)
                         for i, (to, (n, k)) in enumerate(zip(self.layout.starts, self.layout.shapes))], np.int64)  # fmt: skip

    def where(self, prefix: str, expert: int, piece: int) -> str:
        return f"packed experts {self.path}: {prefix}experts.{expert}"


def _padded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _text(header: dict) -> bytes:
    return json.dumps(header, sort_keys=True).encode()


def pack(
    directory: str | os.PathLike,
    path: str | os.PathLike,
    ranks: int = 1,
    threads: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Write a packed copy of the experts in a checkpoint directory, for so many ranks → its bytes.

    One expert is held at a time. The file appears whole or not at all: whatever fails, an older one stays. Scales are
    checked. Raises ConfigError, CheckpointError, CapacityError.
    """
    config = ModelConfig.load(directory)
    with Checkpoint(directory) as checkpoint:
        stages = check(checkpoint, config).stages
        splits = [Split.of(config, rank, ranks) for rank in range(ranks)][: Split.of(config, 0, ranks).experts]
        sources = [CheckpointExperts(checkpoint, config, stages, split) for split in splits]
        layout, banks = sources[0].layout, sources[0].banks
        header = {"format": FORMAT, "version": VERSION, "identity": checkpoint.identity, "parts": len(sources),
                  "banks": banks, "shapes": layout.shapes}  # fmt: skip
        text = _text(header)
        records = len(sources) * sum(banks.values())
        total = _padded(8 + len(text)) + records * (layout.nbytes + 4) + 32
        if any(Path(path).resolve() == (checkpoint.directory / shard.name).resolve() for shard in checkpoint.shards):
            raise CheckpointError(f"packed experts {path}: expected another file than a shard of the checkpoint itself")
        _check_room(Path(path), total)
        report = (lambda done: progress("pack", done, records * layout.nbytes)) if progress else lambda done: None
        try:
            with replacing(path) as file:
                file.write((len(text).to_bytes(8, "little") + text).ljust(_padded(8 + len(text)), b"\0"))
                crcs = []
                for data in _experts(sources, threads):
                    file.write(data)
                    crcs.append(zlib.crc32(data))
                    report(len(crcs) * layout.nbytes)
                sums = np.array(crcs, "<u4").tobytes()
                file.write(sums + hashlib.sha256(text + sums).digest())
        except OSError as error:
            raise CheckpointError(
                f"packed experts {path}: expected to write {total} bytes, found: {error.strerror or error}"
            ) from error
    return total


def check_packed(
    directory: str | os.PathLike,
    path: str | os.PathLike,
    ranks: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Compare all of a packed file with its checksums, and what it says with a checkpoint → its bytes.

    Raises CheckpointError.
    """
    config = ModelConfig.load(directory)
    with Checkpoint(directory) as checkpoint:
        stages, identity = check(checkpoint, config).stages, checkpoint.identity
        for rank in range(Split.of(config, 0, ranks).experts):
            split = Split.of(config, rank, ranks)
            PackedExperts(path, CheckpointExperts(checkpoint, config, stages, split), identity, split).verify(
                partial(progress, f"rank {rank}") if progress else None
            )
    return os.path.getsize(path)


def _experts(sources: list[CheckpointExperts], threads: int) -> Iterator[np.ndarray]:
    """Every expert's bytes, in the order of the file; the same array again and again."""
    buffer = np.zeros(sources[0].layout.nbytes, np.uint8)  # the gaps stay zeros
    for source in sources:
        for prefix, experts in source.banks.items():
            for expert in range(experts):
                read_expert(source, prefix, expert, buffer, threads)
                yield buffer


def _check_room(path: Path, needed: int) -> None:
    """Say at once that the disk is too small, rather than after hours. An older file stays until the new one is whole."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir():
        raise CheckpointError(f"packed experts {path}: expected the name of a file in a directory that is there")
    free = shutil.disk_usage(folder).free
    if free < needed and (path.is_file() or not path.exists()):
        raise CapacityError(f"packed experts {path}: expected {needed} bytes free in {folder}, found {free}")

"""Snapshots: a sequence's state on its own, in memory or in a file."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from .errors import StateError
from .files import replacing

FORMAT = "dsv4-snapshot"
VERSION = "1"


@dataclass(frozen=True)
class Snapshot:
    """tokens int32 [length] consumed so far; arrays as Pool.export names them; identity of the checkpoint."""

    identity: str
    tokens: np.ndarray
    arrays: dict[str, np.ndarray]

    def checksum(self) -> str:
        """sha256 over names, types, shapes and bytes."""
        digest = hashlib.sha256(self.identity.encode())
        for name, array in sorted({**self.arrays, "tokens": self.tokens}.items()):
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array))
        return digest.hexdigest()

    def save(self, path: str | os.PathLike) -> None:
        """Write a file at once or not at all: on any failure an older file of that name stays as it was."""
        from safetensors.numpy import save

        meta = {"format": FORMAT, "version": VERSION, "identity": self.identity, "checksum": self.checksum()}
        data = save({**self.arrays, "tokens": self.tokens}, metadata=meta)
        try:
            with replacing(path) as file:
                file.write(data)
        except OSError as error:
            raise StateError(
                f"snapshot {path}: expected to write {len(data)} bytes, found: {error.strerror or error}"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike) -> Snapshot:
        """Read a file that save() wrote. Raises StateError for any other, and for a damaged one."""
        meta, arrays = _read(path, lambda file: {name: file.get_tensor(name) for name in file.keys()})
        snapshot = cls(meta.get("identity", ""), arrays.pop("tokens"), arrays)
        if snapshot.checksum() != meta.get("checksum"):
            raise StateError(f"snapshot {path}: expected checksum {meta.get('checksum')}, found damaged content")
        return snapshot

    @staticmethod
    def tokens_of(path: str | os.PathLike, identity: str) -> np.ndarray | None:
        """The tokens of a file that save() wrote, without reading the rest; None where it is of another checkpoint."""
        meta, arrays = _read(path, lambda file: {"tokens": file.get_tensor("tokens")} if "tokens" in file.keys() else {})
        return arrays["tokens"] if meta.get("identity") == identity else None


def _read(path: str | os.PathLike, get: Callable[[Any], dict]) -> tuple[dict, dict[str, np.ndarray]]:
    """(metadata, what get(file) takes, the tokens among it) of a snapshot file. Raises StateError for any other."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            meta, arrays = file.metadata() or {}, get(file)
    except OSError as error:
        raise StateError(f"snapshot {path}: expected a readable file; {error}") from error
    except (SafetensorError, TypeError) as error:  # TypeError: a type that no snapshot has
        raise StateError(f"snapshot {path}: expected a whole snapshot file, found a damaged one ({error})") from error
    if meta.get("format") != FORMAT:
        raise StateError(f"snapshot {path}: expected a file of format {FORMAT}, found {meta.get('format')!r}")
    if meta.get("version") != VERSION:
        raise StateError(f"snapshot {path}: expected format version {VERSION}, found {meta.get('version')!r}")
    if "tokens" not in arrays:
        raise StateError(f"snapshot {path}: expected a tensor called tokens, found none")
    return meta, arrays

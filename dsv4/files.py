"""Writing files whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends, and vanishes if it raises.

    An older file stays until then. A link is followed; what is no regular file (a device, a pipe) is written to as it
    is. Raises OSError where it cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    name = os.fsdecode(os.fsencode(path.name)[:200])  # a file's name has at most 255 bytes
    temporary = path.with_name(f".{name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replaceable(path: str | os.PathLike) -> bool:
    """Whether replacing(path) can write: for a file its directory must exist and be writable, as the new one begins there."""
    try:
        path = Path(os.path.realpath(path))
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except (OSError, ValueError):  # a name that no file can have
        return False
    return not stat.S_ISDIR(mode) and os.access(path.parent if stat.S_ISREG(mode) else path, os.W_OK)

"""A checkpoint directory: safetensors index and shard headers, and read-only views of the tensors by name.

A safetensors file is an 8-byte little-endian header length, that many bytes of JSON (tensor name → dtype, shape,
data_offsets) and the data. Everything that headers and file sizes can tell is checked on opening; the data itself is
mapped, not read, shard by shard when first asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple

import numpy as np

from .config import ModelConfig
from .errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_POINTER = b"version https://git-lfs"
_CHUNK = 1 << 24  # bytes read at a time when values are checked
_SMALL = 64 * 1024  # identity: tensors up to this many bytes count in full,
_SAMPLES = 512  # and this many of the larger ones by a few bytes

# bf16 and the 8-bit floats have no NumPy type: their bits
DTYPES = {
    "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "F8_E5M2": np.uint8,
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "BOOL": np.bool_,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where a tensor lies: bytes begin..end (exclusive) of the shard file."""

    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    """A shard file: its size in bytes and how many tensors it holds."""

    name: str
    nbytes: int
    tensors: int


class Checkpoint:
    """The tensors of DIRECTORY. Raises CheckpointError, naming file and tensor, for anything that does not fit."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: not found; expected a checkpoint directory")
        self._files: dict[str, BinaryIO] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._tensors: dict[str, TensorInfo] = {}
        index = _read_index(self.directory)
        shards = sorted(set(index.values())) if index is not None else [SINGLE]
        self.shards = tuple(self._open_shard(name, index) for name in shards)
        lost = [name for name in index or () if name not in self._tensors]
        if lost:
            raise CheckpointError(
                f"{self.directory / INDEX}: names {len(lost)} tensor(s) that their shard does not hold: "
                f"{lost[0]} is not in {index[lost[0]]}"
            )
        self.total_bytes = sum(info.nbytes for info in self._tensors.values())

    def _open_shard(self, name: str, index: dict[str, str] | None) -> Shard:
        path = self.directory / name
        size, tensors = _read_header(path, name)
        for tensor, info in tensors.items():
            if tensor in self._tensors:
                raise CheckpointError(f"{path}: {tensor} is already in {self._tensors[tensor].shard}: expected once")
            if index is not None and index.get(tensor) != name:
                listed = f"lists it in {index[tensor]}" if tensor in index else "does not list it"
                raise CheckpointError(f"{path}: holds {tensor}, but {INDEX} {listed}")
            self._tensors[tensor] = info
        return Shard(name, size, len(tensors))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """dtype, shape and place of a tensor."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.directory}: no tensor {name}")
        return self._tensors[name]

    def view(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        """The tensor, or a part of it, as a read-only array over the mapped file, of the type DTYPES gives (bf16, fp8:
        their bits).

        Only a tensor that does not lie on a multiple of its item size is copied.
        """
        info = self.info(name)
        if info.shard not in self._maps:
            self._maps[info.shard] = mmap.mmap(self._file(info.shard).fileno(), 0, access=mmap.ACCESS_READ)
        dtype = np.dtype(DTYPES[info.dtype])
        array = np.frombuffer(self._maps[info.shard], dtype, math.prod(info.shape), info.begin).reshape(info.shape)
        array = array[part]
        if info.begin % dtype.itemsize:
            array = np.require(array, requirements=["ALIGNED", "OWNDATA"])
            array.flags.writeable = False
        return array

    def lies(self, name: str, part: tuple[slice, slice]) -> tuple[int, int, int, int, int]:
        """Where a part of a matrix lies: file descriptor, first byte, bytes from row to row, rows, bytes of a row."""
        info = self.info(name)
        item, (rows, columns) = np.dtype(DTYPES[info.dtype]).itemsize, part
        pitch = info.shape[1] * item
        begin = info.begin + rows.start * pitch + columns.start * item
        return self._file(info.shard).fileno(), begin, pitch, rows.stop - rows.start, (columns.stop - columns.start) * item

    def read(self, name: str, start: int, count: int) -> bytes:
        """`count` bytes of a tensor from its byte `start` on: for small pieces here and there.

        A page touched through the map makes the system read megabytes around it; this reads what is asked for.
        """
        info = self.info(name)
        data = os.pread(self._file(info.shard).fileno(), count, info.begin + start)
        if len(data) != count:
            raise CheckpointError(f"{self.directory / info.shard}: {name}: cut short since it was opened")
        return data

    def _file(self, shard: str) -> BinaryIO:
        if shard not in self._files:
            try:
                file = self._files[shard] = open(self.directory / shard, "rb", buffering=0)
            except OSError as error:
                raise CheckpointError(f"{self.directory / shard}: cannot be read: {error.strerror}") from None
            if hasattr(os, "posix_fadvise"):  # Linux
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return self._files[shard]

    def check_values(self, name: str, below: int = 0, part: tuple[slice, ...] | None = None) -> None:
        """Raises CheckpointError if the tensor holds a NaN, an infinity or, of integers, one outside 0..below−1.

        Reads the whole tensor, or a part of it (an index). fp4 codes (I8) are all valid and pass unread.
        """
        info, fault = self.info(name), _faults(below).get(self.info(name).dtype)
        if fault is None:
            return
        wrong, expectation = fault
        for piece, element in self._pieces(name) if part is None else self._pieces_of(name, part):
            found = wrong(piece)
            if found.any():
                at = int(found.argmax())
                raise CheckpointError(
                    f"{self.directory / info.shard}: {name}: expected {expectation}, "
                    f"found {piece.flat[at]} at element {element(at)} (stored {info.dtype})"
                )

    def _pieces(self, name: str) -> Iterator[tuple[np.ndarray, Callable[[int], int]]]:
        """A tensor piece by piece, each with a function from a place in it to the element of the tensor."""
        info = self.info(name)
        dtype = np.dtype(DTYPES[info.dtype])
        for start in range(0, info.nbytes, _CHUNK):
            piece = np.frombuffer(self.read(name, start, min(_CHUNK, info.nbytes - start)), dtype)
            yield piece, (start // dtype.itemsize).__add__

    def _pieces_of(self, name: str, part: tuple[slice, ...]) -> Iterator[tuple[np.ndarray, Callable[[int], int]]]:
        """The same of a part, some of its rows at a time."""
        view, shape = self.view(name, part), self.info(name).shape
        rows = max(1, _CHUNK * len(view) // max(1, view.nbytes))
        for first in range(0, len(view), rows):
            piece, start = view[first : first + rows], [s.start for s in part]
            start[0] += first

            def element(at: int, piece=piece, start=start) -> int:
                place = [at + begin for at, begin in zip(np.unravel_index(at, piece.shape), start)]
                return int(np.ravel_multi_index(place, shape))

            yield piece, element

    def check_whole(self) -> None:
        """Raises CheckpointError where a mapped shard is shorter than when it was opened: touching what is gone would end
        the process. Microseconds.
        """
        for shard in self.shards:
            if shard.name in self._maps:
                size = os.fstat(self._files[shard.name].fileno()).st_size
                if size < shard.nbytes:
                    raise CheckpointError(
                        f"{self.directory / shard.name}: expected {shard.nbytes} bytes, as when it was opened; found {size}: "
                        "cut short while in use; fetch it again"
                    )

    def close(self) -> None:
        """Close files and forget the maps; arrays already handed out keep theirs alive."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._maps.clear()

    @property
    def identity(self) -> str:
        """SHA-256 (hex) of config, tensor names, dtypes and shapes, every small tensor and samples of the large ones.

        The same for another sharding or spelling of the same model, and different for another fine-tune of it (norms
        and biases are small). Reads some megabytes, never the whole.
        """
        digest = hashlib.sha256(json.dumps(asdict(ModelConfig.load(self.directory)), sort_keys=True).encode())
        names = self.names()
        digest.update(json.dumps([(n, self.info(n).dtype, self.info(n).shape) for n in names]).encode())
        sizes = {name: self.info(name).nbytes for name in names}
        small = [name for name in names if sizes[name] <= _SMALL]
        large = [name for name in names if sizes[name] > _SMALL]
        for name in small:
            digest.update(self.read(name, 0, sizes[name]))
        for name in large[:: len(large) // _SAMPLES + 1]:
            digest.update(self.read(name, sizes[name] // 2, 64))
        return digest.hexdigest()


def _faults(below: int) -> dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]]:
    """dtype → what marks its bad values, and what is expected instead."""
    return {
        "F8_E8M0": (lambda x: x == 0xFF, "no NaN (0xFF) scale"),
        "F8_E4M3": (lambda x: (x & 0x7F) == 0x7F, "no NaN (0x7F, 0xFF) code"),
        "BF16": (lambda x: (x & 0x7F80) == 0x7F80, "finite values"),
        "F32": (lambda x: ~np.isfinite(x), "finite values"),
        "I64": (lambda x: (x < 0) | (x >= below), f"integers below {below}"),
    }


def _read_json(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    _refuse_pointer(path, data)
    return _parse(data, path, "file")


def _parse(data: bytes, path: Path, what: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in found if names.count(key) > 1)
            raise CheckpointError(f"{path}: {what} names {twice} twice")
        return found

    try:
        return json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {what} is not JSON: {error}") from None


def _refuse_pointer(path: Path, data: bytes) -> None:
    if data.startswith(_POINTER):
        raise CheckpointError(f"{path}: a git-lfs pointer, not the data; fetch the large files (git lfs pull)")


def _read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name → shard file; None for a directory with one shard and no index."""
    path = directory / INDEX
    if not path.exists():
        if (directory / SINGLE).exists():
            return None
        raise CheckpointError(f"{directory}: expected {INDEX} or {SINGLE}, found neither")
    index = _read_json(path)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{path}: expected an object with weight_map (tensor name to shard file)")
    for tensor, shard in names.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: {tensor}: expected the name of a shard file beside it, found {shard!r}")
        if not (directory / shard).is_file():
            raise CheckpointError(f"{path}: {tensor}: its shard {shard} is missing from {directory}")
    return names


def _read_header(path: Path, name: str) -> tuple[int, dict[str, TensorInfo]]:
    """(file size, tensors) of a shard; every byte of the data belongs to exactly one tensor."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(len(_POINTER))
            _refuse_pointer(path, start)
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(f"{path}: truncated or not safetensors: header of {length} bytes in {size}")
            file.seek(8)
            header = _parse(file.read(length), path, "header")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    tensors = {tensor: _tensor_info(path, tensor, entry, name, data) for tensor, entry in header.items()}
    _check_cover(path, tensors, data, size)
    return size, tensors


def _tensor_info(path: Path, tensor: str, entry: Any, shard: str, data: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path}: {tensor}: expected dtype, shape and data_offsets, found {entry!r}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: {tensor}: unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(f"{path}: {tensor}: expected integers >= 0 in shape and data_offsets, found {entry!r}")
    needed = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: {tensor}: {dtype} {list(shape)} needs {needed} bytes, its data_offsets span {end - begin}"
        )
    return TensorInfo(dtype, shape, shard, data + begin, data + end)


def _check_cover(path: Path, tensors: dict[str, TensorInfo], data: int, size: int) -> None:
    """The tensors fill the data without overlap, gap or end beyond the file."""
    at, before = data, "the header"
    for tensor, info in sorted(tensors.items(), key=lambda item: item[1][3:]):
        if info.end > size:
            raise CheckpointError(
                f"{path}: truncated: {tensor} ends at byte {info.end}, the file has {size}; fetch the shard again"
            )
        if info.begin != at:
            how = "overlaps" if info.begin < at else "leaves a gap after"
            raise CheckpointError(f"{path}: {tensor} {how} {before}: expected byte {at}, found {info.begin}")
        at, before = info.end, tensor
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes after the last tensor ({before}) belong to none")

"""The gather: pieces of files into memory, with several threads; and its faults."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dsv4 import _staging
from dsv4.errors import InputError

UNIT = 256 << 10  # bytes a thread takes at a time (gather.c)
POISON = 0xA5


@pytest.fixture
def file(tmp_path):
    """(descriptor, its bytes): random, without 0xFF."""
    data = np.random.default_rng(0).integers(0, 255, 6 * UNIT + 1234, np.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    with open(path, "rb") as opened:
        yield opened.fileno(), data


def expected(data, pieces, size):
    """What the buffer must hold, POISON between the pieces."""
    buffer = np.full(size, POISON, np.uint8)
    for _, offset, pitch, rows, length, to, _ in pieces:
        for row in range(rows):
            begin = offset + row * pitch
            buffer[to + row * length : to + (row + 1) * length] = data[begin : begin + length]
    return buffer


def shapes(rng):
    """Kinds of pieces: (pitch, rows, bytes)."""
    length = int(rng.integers(1, 300))
    return [
        (length, int(rng.integers(1, 3000)), length),  # adjacent rows
        (length + int(rng.integers(1, 700)), int(rng.integers(1, 900)), length),  # columns of a matrix
        (UNIT + 17, 3, int(rng.integers(1, UNIT))),  # rows longer than a unit
        (7, 1, 5), (1, 0, 1), (5, 9, 0),  # one row, none, empty ones
        (2 * UNIT, 2, 2 * UNIT), (2 * UNIT + 3, 1, 2 * UNIT + 3),  # several units
    ]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 500])
def test_pieces_of_every_kind(file, threads):
    fd, data = file
    rng = np.random.default_rng(threads)
    for _ in range(12):
        pieces, to = [], 0
        for pitch, rows, length in rng.permutation(shapes(rng)).tolist():
            span = (rows - 1) * pitch + length if rows else 0
            to += int(rng.integers(0, 70))  # odd starts, gaps
            pieces.append((fd, int(rng.integers(0, len(data) - span)), pitch, rows, length, to, 1))
            to += rows * length
        buffer = np.full(to + 9, POISON, np.uint8)
        assert _staging.gather(buffer, np.array(pieces, np.int64), threads) is None
        np.testing.assert_array_equal(buffer, expected(data, pieces, to + 9))


def one(fd, offset, pitch, rows, length, scales=0, to=0):
    return np.array([(fd, offset, pitch, rows, length, to, scales)], np.int64)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("pitch, rows, length", [(4 * UNIT, 1, 4 * UNIT), (640, 2000, 64), (UNIT + 5, 4, 100)])
def test_a_file_that_ends_early(file, threads, pitch, rows, length):
    """The last byte wanted is the first one missing; with the file a byte longer all is well."""
    fd, data = file
    offset = len(data) - ((rows - 1) * pitch + length)
    buffer = np.zeros(rows * length, np.uint8)
    assert _staging.gather(buffer, one(fd, offset, pitch, rows, length), threads) is None
    piece, at, found = _staging.gather(buffer, one(fd, offset + 1, pitch, rows, length), threads)
    assert (piece, at, found) == (0, len(data), "the end of the file")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_nan_scale_is_found_where_it_is(tmp_path, threads):
    data = np.zeros((4096, 300), np.uint8)
    data[3071, 123] = 0xFF
    path = tmp_path / "scales"
    data.tofile(path)
    with open(path, "rb") as opened:
        fd, buffer = opened.fileno(), np.empty(data.size, np.uint8)
        at = 3071 * 300 + 123
        assert _staging.gather(buffer, one(fd, 0, 300, 4096, 300, scales=1), threads) == (0, at, "a NaN (0xFF) scale")
        assert _staging.gather(buffer, one(fd, 100, 300, 4096, 50, scales=1), threads) == (0, at, "a NaN (0xFF) scale")
        assert _staging.gather(buffer, one(fd, 130, 300, 4096, 50, scales=1), threads) is None  # beside it
        assert _staging.gather(buffer, one(fd, 0, 300, 4096, 300), threads) is None  # codes may be 0xFF


def test_a_file_that_cannot_be_read(file):
    piece, _, found = _staging.gather(np.zeros(8, np.uint8), one(987654, 0, 8, 1, 8), 2)
    assert piece == 0 and found == os.strerror(9)


@pytest.mark.parametrize(
    "piece",
    [(-1, 8, 1, 8), (0, 8, 2, 9), (0, 8, -1, 8), (0, 8, 1, -8), (0, 0, 1, 0), (0, 8, 9, 8), (0, 65, 1, 65)],
    ids=["offset", "pitch", "rows", "bytes", "no pitch", "too many rows", "too long"],
)
def test_pieces_outside_the_buffer_are_refused(file, piece):
    for to in (0, 60, -1, 1 << 62):
        with pytest.raises(InputError, match="within a buffer of 64 bytes"):
            _staging.gather(np.zeros(64, np.uint8), one(file[0], *piece, to=to), 1)
    with pytest.raises(InputError, match="expected pieces"):
        _staging.gather(np.zeros(64, np.uint8), np.zeros((1, 6), np.int64), 1)


CUT = """
import sys
from pathlib import Path
from dsv4.cli_support import load_engine
engine, _ = load_engine(sys.argv[1], {"threads": 1}, None)
ops, gate, calls = engine.model.ops, engine.model.ops.gate, []
def cutting(*arguments):
    calls.append(1)
    if len(calls) == 2:
        for path in Path(sys.argv[1]).glob("*.safetensors"):
            with open(path, "r+b") as file:
                file.truncate(4096)
    return gate(*arguments)
ops.gate = cutting
engine.session().prefill([1, 2, 3])
print("not reached")
"""


def test_a_mapped_file_cut_short_in_the_middle_of_a_forward_says_so(nano_dir, tmp_path):
    shutil.copytree(nano_dir, tmp_path / "nano")
    done = subprocess.run([sys.executable, "-c", CUT, str(tmp_path / "nano")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("dsv4: error: mapped files: expected them as when they were opened")
    assert done.stderr.count("\n") == 1

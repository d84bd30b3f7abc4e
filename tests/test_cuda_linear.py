"""The CUDA backend's linears, run on the CPU: exact decoding, accuracy, and the same bits for any number of rows."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compare import rel_l2, same_bits
from cpu_cases import FORMATS, decoded, inputs, weights
from cuda_ops import HostOps, emulated, only_emulated
from emulation.launcher import REVERSE

from dsv4 import formats
from dsv4.errors import BackendError, CheckpointError, InputError
from dsv4.ops.reference import ReferenceOps

# N and K: tiles of 16 and 128 whole and cut, one block and several parts, scale blocks cut, K that needs padding
SHAPES = [(1, 32), (130, 384), (33, 1056), (16, 2048)]
ODD_SHAPES = [(3, 7), (131, 129), (9, 1041)]
ROWS = (1, 2, 7, 8, 9, 17, 31, 32, 33, 63, 64, 65, 72, 128, 129, 130)


def mixed(t: int, k: int) -> np.ndarray:
    """Rows of which every other is rounded to e4m3 (one piece), the rest not (two), a few of them far larger or smaller;
    every block of 128 of a row has a scale of its own."""
    x = inputs(t, k) * np.exp2(np.arange(k) // 128 * 5 % 7 + np.arange(t)[:, None] % 3).astype(np.float32)
    x[::2] = ReferenceOps().act_quant(x[::2])
    x[3::8] *= np.float32(2.0**40)
    x[5::8] *= np.float32(2.0**-60)
    return x


@pytest.mark.parametrize("fmt", FORMATS)
def test_accuracy(cuda, fmt):
    for n, k in SHAPES if fmt == "fp4" else SHAPES + ODD_SHAPES:
        w = weights(fmt, n, k)
        exact = decoded(*w).T
        for t in (1, 3, 20, 70) if n * k < 60_000 else (1, 20, 40):
            x = inputs(t, k)
            y = cuda.linear(x, cuda.matrix(*w))
            assert y.dtype == np.float32 and rel_l2(y, x.astype(np.float64) @ exact) <= 3e-7, (n, k, t)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_do_not_see_each_other(cuda, fmt):
    n, k = 21, 1280
    x, w = mixed(130, k), cuda.matrix(*weights(fmt, n, k))
    whole = cuda.linear(x, w)
    assert np.isfinite(whole).all()
    for t in ROWS:
        same_bits(cuda.linear(x[:t], w), whole[:t], f"first {t} rows")
        if t % 3 == 0:
            same_bits(cuda.linear(x[130 - t :], w), whole[130 - t :], f"last {t} rows")
    for row in (1, 2, 63, 64, 129):
        same_bits(cuda.linear(x[row : row + 1], w), whole[row : row + 1], f"row {row}")


@pytest.mark.emulated
@pytest.mark.parametrize("fmt", FORMATS)
def test_any_order_of_threads(fmt):
    n, k = 40, 640
    x, w = mixed(40, k), weights(fmt, n, k)
    found = []
    for order in (0, REVERSE, 3):
        ops = HostOps(emulated(order=order))
        found.append([ops.linear(x[:t], ops.matrix(*w)) for t in (1, 9, 40)])
    for other in found[1:]:
        for a, b in zip(found[0], other):
            same_bits(b, a)


@pytest.mark.parametrize("slices", (2, 8))
@pytest.mark.parametrize("fmt", FORMATS)
def test_slices(cuda, fmt, slices):
    n, width = 18, 1024 if slices == 2 else 128
    fmt, weight, *scale = weights(fmt, n, slices * width)
    x, whole = mixed(40, slices * width), cuda.matrix(fmt, weight, *scale)

    def part(array, i):
        each = array.shape[1] // slices
        return np.ascontiguousarray(array[:, i * each : (i + 1) * each])

    sums = [cuda.linear(part(x, i), cuda.matrix(fmt, *(part(a, i) for a in (weight, *scale)))) for i in range(slices)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
    for t in (1, 12, 40):
        same_bits(cuda.linear(x[:t], whole, slices), sums[0][:t], f"{t} rows")


def test_more_parts_than_warps(cuda):
    """Eight slices of several parts: more sums than 32 rows have room for."""
    k = 8 * 2048
    fmt, weight, scale = weights("fp4", 16, k)
    x, w = mixed(20, k), cuda.matrix(fmt, weight, scale)
    y = cuda.linear(x, w, 8)
    assert rel_l2(y[:2], x[:2].astype(np.float64) @ decoded(fmt, weight, scale).T) <= 3e-7
    for t in (1, 9):
        same_bits(cuda.linear(x[:t], w, 8), y[:t], f"{t} rows")


@pytest.mark.parametrize("fmt", FORMATS)
def test_groups(cuda, fmt):
    groups, r, k = 3, 20, 256
    fmt, weight, *_ = weights(fmt, groups * r, k)
    scale = [np.full(s.shape, 120, np.uint8) for s in _]
    x = mixed(40, groups * k)
    for t in (1, 14, 40):
        y = cuda.grouped_linear(x[:t], cuda.matrix(fmt, weight, *scale), groups)
        for g in range(groups):
            rows = slice(g * r, (g + 1) * r)
            own = [s[rows] if fmt == "fp4" else s[:1] for s in scale]
            one = cuda.linear(np.ascontiguousarray(x[:t, g * k : (g + 1) * k]), cuda.matrix(fmt, weight[rows], *own))
            same_bits(np.ascontiguousarray(y[:, rows]), one, f"group {g}, {t} rows")


def test_groups_across_scale_blocks(cuda):
    """A tile of 16 outputs may lie under two scales."""
    fmt, weight, scale = weights("fp8", 3 * 72, 256)
    x = mixed(9, 3 * 256)
    expected = ReferenceOps().grouped_linear(x, ReferenceOps().matrix(fmt, weight, scale), 3)
    assert rel_l2(cuda.grouped_linear(x, cuda.matrix(fmt, weight, scale), 3), expected) <= 3e-7


def read_back(cuda, w, k):
    """Every decoded weight [N, K]: by 8 rows, 32 rows and more."""
    eye = np.eye(k, dtype=np.float32)
    return [np.concatenate([cuda.linear(eye[i : i + rows], w) for i in range(0, k, rows)]).T for rows in (8, 32, k)]


def test_every_nibble_pair_under_every_scale(cuda):
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scale = np.arange(255, dtype=np.uint8)[:, None].repeat(16, 1)
    exact = decoded("fp4", codes, scale)
    codes[~((np.abs(exact[:, 0::2]) < 2.0**128) & (np.abs(exact[:, 1::2]) < 2.0**128))] = 0  # what float32 cannot hold
    expected = decoded("fp4", codes, scale).astype(np.float32)
    for found in read_back(cuda, cuda.matrix("fp4", codes, scale), 512):
        assert np.array_equal(found, expected)


def test_every_e4m3_code(cuda):
    scale = np.array([0, 1, 100, 127, 240, 246, 247, 254], np.uint8)[:, None].repeat(2, 1)
    codes = np.tile(np.arange(256, dtype=np.uint8), (128 * len(scale) - 127, 1))
    codes[:, [0x7F, 0xFF]] = 0
    codes[np.abs(decoded("fp8", codes, scale)) >= 2.0**128] = 0
    expected = decoded("fp8", codes, scale).astype(np.float32)
    w, eye = cuda.matrix("fp8", codes, scale), np.eye(256, dtype=np.float32)
    assert np.array_equal(cuda.linear(eye, w).T, expected)
    assert np.array_equal(cuda.linear(eye[93:125], w).T, expected[:, 93:125])
    assert np.array_equal(cuda.linear(eye[120:128], w).T, expected[:, 120:128])


@pytest.mark.parametrize("k", (0, 515, 699))
def test_a_nan_weight_shows(cuda, k):
    for code in (0x7F, 0xFF):
        _, weight, scale = weights("fp8", 40, 700)
        weight[17, k] = code
        for t in (1, 9, 40):
            found = np.isnan(cuda.linear(inputs(t, 700), cuda.matrix("fp8", weight, scale)))
            assert found[:, 17].all() and not np.delete(found, 17, axis=1).any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_nan_or_infinite_input_is_its_rows_alone(cuda, fmt):
    w = cuda.matrix(*weights(fmt, 24, 256))
    for t, row in ((1, 0), (9, 4), (40, 33)):
        for value in (np.nan, -np.inf, np.inf):
            x = inputs(t, 256)
            x[row, 100] = value
            finite = np.isfinite(cuda.linear(x, w)).all(axis=1)
            assert not finite[row] and np.delete(finite, row).all(), (t, value)


def moved(array, offset):
    """The same values at an address `offset` beyond a multiple of 16, among bytes that have no say."""
    room = np.full(array.nbytes + 160, 0x7F, np.uint8)
    start = -room.ctypes.data % 16 + offset
    view = room[start : start + array.nbytes]
    view[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return view.view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("fmt", FORMATS)
def test_operands_at_odd_multiples_of_eight(cuda, fmt):
    fmt, *arrays = weights(fmt, 19, 544)
    for t in (1, 9, 40):
        x = mixed(t, 544)
        expected = cuda.linear(x, cuda.matrix(fmt, *arrays))
        for offset in (8, 24):
            there = [moved(a, offset + (a.itemsize == 1)) for a in arrays]  # bytes even at odd addresses
            same_bits(cuda.linear(moved(x, offset), cuda.matrix(fmt, *there)), expected, f"{offset} bytes")


GUARDED = """
from cpu_cases import FORMATS, inputs, weights
from cuda_ops import HostOps, emulated
from guard_page import at_the_end

cuda = HostOps(emulated())
for fmt in FORMATS:
    for n, k in [(3, 32), (17, 544), (20, 256)] + [(2, 7), (3, 513)] * (fmt != "fp4"):
        name, *arrays = weights(fmt, n, k)
        for t in (1, 9, 40):
            cuda.linear(at_the_end(inputs(t, k)), cuda.matrix(name, *map(at_the_end, arrays)))
print("done")
"""


@pytest.mark.emulated
@pytest.mark.skipif(sys.platform != "linux", reason="guard pages by mprotect")
def test_nothing_is_read_past_the_end():
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.stdout == "done\n", f"status {done.returncode}: {done.stderr}"


@only_emulated
def test_weights_on_the_device_are_kept(cuda):
    """Views of a larger array, as experts in slots are: no copy where rows are aligned."""
    fmt, *arrays = weights("fp4", 32, 256)
    codes, scale = (moved(a, 0) for a in arrays)
    w = cuda.matrix(fmt, codes, scale)
    assert w.weight.host.ctypes.data == codes.ctypes.data and w.scale.host.ctypes.data == scale.ctypes.data


def test_no_rows(cuda):
    for fmt in FORMATS:
        assert cuda.linear(inputs(0, 128), cuda.matrix(*weights(fmt, 8, 128))).shape == (0, 8)


def test_decoded_by_the_formats_module(cuda):
    """The reference decodes by tables; here the bits are moved into fp16: the same numbers."""
    fmt, weight, scale = weights("fp8", 20, 256)
    eye = np.eye(256, dtype=np.float32)
    same_bits(cuda.linear(eye, cuda.matrix(fmt, weight, scale)).T + 0.0, formats.decode_fp8(weight, scale) + 0.0)


def test_wrong_inputs_are_named(cuda):
    w = cuda.matrix(*weights("fp8", 40, 256))
    x = inputs(3, 256)
    for call, error, words in [
        (lambda: cuda.linear(x[:, :128].copy(), w), InputError, "256"),
        (lambda: cuda.linear(x.astype(np.float64), w), InputError, "float32"),
        (lambda: cuda.linear(x, w, 3), InputError, "slices"),
        (lambda: cuda.linear(x, w, 4), InputError, "128"),
        (lambda: cuda.grouped_linear(x, w, 3), InputError, "3 equal groups"),
        (lambda: cuda.matrix("fp8", np.zeros((40, 256), np.uint8)), CheckpointError, "scale"),
        (lambda: cuda.matrix("fp8", np.zeros((9, 256), np.uint8), np.zeros((1, 3), np.uint8)), CheckpointError, r"\(1, 2\)"),
        (lambda: cuda.matrix("fp4", np.zeros((4, 8), np.uint8), np.zeros((4, 1), np.uint8)), CheckpointError, "K = 16"),
        (lambda: cuda.matrix("bf16", np.zeros((4, 8), np.float32)), CheckpointError, "2-byte"),
        (lambda: cuda.matrix("int4", np.zeros((4, 8), np.uint8)), BackendError, "int4"),
    ]:
        with pytest.raises(error, match=words):
            call()

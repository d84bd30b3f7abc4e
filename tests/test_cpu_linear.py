"""Linears over packed weights on the CPU: exact decoding, accuracy, and the same bits however they are computed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from compare import rel_l2, same_bits
from cpu_cases import FORMATS, ISAS, decoded, inputs, poison, weights

from dsv4.errors import BackendError, CheckpointError, ConfigError, InputError
from dsv4.ops.cpu import CpuOps

# N and K: strips and chunks whole and cut, scale blocks cut, K below one vector
SHAPES = [(1, 32), (200, 384), (33, 1056), (16, 512), (130, 2080), (5, 4096)]
ODD_SHAPES = [(3, 7), (17, 100), (131, 129), (4, 1000), (9, 1041)]


def shapes(fmt):
    return SHAPES if fmt == "fp4" else SHAPES + ODD_SHAPES


@pytest.fixture(params=ISAS)
def cpu(request):
    return CpuOps(threads=1, isa=request.param)


@pytest.mark.parametrize("fmt", FORMATS)
def test_accuracy(cpu, fmt):
    for n, k in shapes(fmt):
        w = weights(fmt, n, k)
        for t in (1, 2, 3, 14):
            x = inputs(t, k)
            poison(t, n)
            y = cpu.linear(x, cpu.matrix(*w))
            assert y.dtype == np.float32 and rel_l2(y, x.astype(np.float64) @ decoded(*w).T) <= 1e-6, (n, k, t)


@pytest.mark.parametrize("n, k", ((21, 608), (20, 384)))  # two chunks and a cut strip; one chunk: sums without a stop
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_do_not_see_each_other(cpu, fmt, n, k):
    x, w = inputs(130, k), cpu.matrix(*weights(fmt, n, k))
    alone = np.concatenate([cpu.linear(row[None], w) for row in x])
    for t in range(131):
        poison(t, n)
        same_bits(cpu.linear(x[:t], w), alone[:t], f"{t} rows")


@pytest.mark.parametrize("fmt", FORMATS)
def test_instruction_sets_and_threads_do_not_show(fmt):
    for n, k in shapes(fmt):
        w, x = weights(fmt, n, k), inputs(70, k)
        if fmt == "fp8":
            w[1][n // 2, k // 2] = 0xFF  # NaN
            w[2][-1, -1] = 252  # beyond what decoding in registers can scale
        expected = {}
        for isa in ISAS:
            for threads in (1, 2, 5):
                ops = CpuOps(threads, isa)
                for t in (1, 2, 4, 7, 70):
                    poison(t, n)
                    y = ops.linear(x[:t], ops.matrix(*w))
                    y[np.isnan(y)] = np.nan  # which NaN it is says nothing
                    same_bits(y, expected.setdefault(t, y), f"{isa}, {threads} threads, {n}×{k}, {t} rows")


@pytest.mark.parametrize("slices", (2, 4, 8))
@pytest.mark.parametrize("fmt", FORMATS)
def test_slices(cpu, fmt, slices):
    n, width = 18, 640
    fmt, weight, *scale = weights(fmt, n, slices * width)
    x, whole = inputs(15, slices * width), cpu.matrix(fmt, weight, *scale)

    def part(array, i):
        each = array.shape[1] // slices
        return np.ascontiguousarray(array[:, i * each : (i + 1) * each])

    sums = [cpu.linear(part(x, i), cpu.matrix(fmt, *(part(a, i) for a in (weight, *scale)))) for i in range(slices)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
    for t in (1, 4, 15):
        same_bits(cpu.linear(x[:t], whole, slices), sums[0][:t], f"{t} rows")


@pytest.mark.parametrize("fmt", FORMATS)
def test_groups(cpu, fmt):
    groups, r, k = 3, 20, 256
    fmt, weight, *_ = weights(fmt, groups * r, k)
    scale = [np.full(s.shape, 120, np.uint8) for s in _]
    x = inputs(14, groups * k)
    for t in (1, 14):
        y = cpu.grouped_linear(x[:t], cpu.matrix(fmt, weight, *scale), groups)
        for g in range(groups):
            rows = slice(g * r, (g + 1) * r)
            own = [s[rows] if fmt == "fp4" else s[:1] for s in scale]
            one = cpu.linear(np.ascontiguousarray(x[:t, g * k : (g + 1) * k]), cpu.matrix(fmt, weight[rows], *own))
            same_bits(np.ascontiguousarray(y[:, rows]), one, f"group {g}, {t} rows")


def read_back(cpu, w, k):
    """Every decoded weight [N, K]: by single rows, and by so many rows that weights go through a tile."""
    eye = np.eye(k, dtype=np.float32)
    one = np.concatenate([cpu.linear(row[None], w) for row in eye])
    many = cpu.linear(eye, w)
    return one.T, many.T


def test_every_nibble_pair_under_every_scale(cpu):
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scale = np.arange(255, dtype=np.uint8)[:, None].repeat(16, 1)
    exact = decoded("fp4", codes, scale)
    low, high = np.abs(exact[:, 0::2]) < 2.0**128, np.abs(exact[:, 1::2]) < 2.0**128
    codes[~(low & high)] = 0  # what float32 cannot hold
    expected = decoded("fp4", codes, scale).astype(np.float32)
    for found in read_back(cpu, cpu.matrix("fp4", codes, scale), 512):
        assert np.array_equal(found, expected)


def test_every_e4m3_code_under_every_scale(cpu):
    scales = np.arange(255) if cpu.team.isa != "scalar" else np.array([0, 1, 100, 127, 240, 246, 247, 254])
    codes = np.tile(np.arange(256, dtype=np.uint8), (128 * len(scales), 1))
    codes[:, [0x7F, 0xFF]] = 0
    scale = scales.astype(np.uint8)[:, None].repeat(2, 1)
    codes[np.abs(decoded("fp8", codes, scale)) >= 2.0**128] = 0
    expected = decoded("fp8", codes, scale).astype(np.float32)
    for found in read_back(cpu, cpu.matrix("fp8", codes, scale), 256):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("code", (0x7F, 0xFF))
@pytest.mark.parametrize("k", (0, 515, 699))
def test_a_nan_weight_shows(cpu, code, k):
    _, weight, scale = weights("fp8", 40, 700)
    weight[17, k] = code
    for t in (1, 3, 60):
        found = np.isnan(cpu.linear(inputs(t, 700), cpu.matrix("fp8", weight, scale)))
        assert found[:, 17].all() and not np.delete(found, 17, axis=1).any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_at_odd_addresses(cpu, fmt):
    """Shards give no alignment; the bytes around a tensor, here NaNs, have no say."""
    n, k = 19, 544

    def moved(array):
        room = np.full(array.nbytes + 130, 0x7F, np.uint8)
        view = room[65 : 65 + array.nbytes]
        view[:] = array.reshape(-1).view(np.uint8)
        return view.view(array.dtype).reshape(array.shape)

    fmt, *arrays = weights(fmt, n, k)
    for t in (1, 20):
        x = inputs(t, k)
        same_bits(cpu.linear(x, cpu.matrix(fmt, *map(moved, arrays))), cpu.linear(x, cpu.matrix(fmt, *arrays)))


GUARDED = """
import sys
from cpu_cases import FORMATS, inputs, weights
from guard_page import at_the_end
from dsv4.ops.cpu import CpuOps

cpu = CpuOps(1, sys.argv[1])
for fmt in FORMATS:
    for n, k in [(3, 32), (5, 160), (17, 544)] + [(2, 7), (5, 100), (3, 513)] * (fmt != "fp4"):
        name, *arrays = weights(fmt, n, k)
        for t in (1, 2, 3, 40):
            cpu.linear(at_the_end(inputs(t, k)), cpu.matrix(name, *map(at_the_end, arrays)))
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages by mprotect")
@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_read_past_the_end(isa):
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, isa], capture_output=True, text=True, cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.stdout == "done\n", f"status {done.returncode}: {done.stderr}"


def test_calls_from_several_python_threads():
    cpu = CpuOps(threads=2)
    w, x = cpu.matrix(*weights("fp8", 256, 1024)), inputs(4, 1024)
    expected, found = cpu.linear(x, w), []

    def call():
        for _ in range(50):
            found.append(cpu.linear(x, w))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 200
    for y in found:
        same_bits(y, expected)


FORKED = """
import os
import numpy as np
from cpu_cases import inputs, weights
from dsv4.ops.cpu import CpuOps

cpu = CpuOps(threads=2)
w, x = cpu.matrix(*weights("fp8", 256, 1024)), inputs(4, 1024)
expected = cpu.linear(x, w)
child = os.fork()
if child == 0:
    os._exit(0 if cpu.linear(x, w).tobytes() == expected.tobytes() else 1)
assert os.waitpid(child, 0)[1] == 0
print("done")
"""


def test_a_forked_child_has_its_own_team():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.stdout == "done\n", f"status {done.returncode}: {done.stderr}"


def test_wrong_inputs_are_named():
    cpu = CpuOps()
    w = cpu.matrix(*weights("fp8", 40, 256))
    x = inputs(3, 256)
    for call, error, words in [
        (lambda: cpu.linear(x[:, :128].copy(), w), InputError, "256"),
        (lambda: cpu.linear(x.astype(np.float64), w), InputError, "float32"),
        (lambda: cpu.linear(x, w, 3), InputError, "slices"),
        (lambda: cpu.linear(x, w, 4), InputError, "128"),
        (lambda: cpu.grouped_linear(x, w, 3), InputError, "3 equal groups"),
        (lambda: cpu.matrix("fp8", np.zeros((40, 256), np.uint8)), CheckpointError, "scale"),
        (lambda: cpu.matrix("fp8", np.zeros((9, 256), np.uint8), np.zeros((1, 3), np.uint8)), CheckpointError, "(1, 2)"),
        (lambda: cpu.matrix("fp4", np.zeros((4, 8), np.uint8), np.zeros((4, 1), np.uint8)), CheckpointError, "K = 16"),
        (lambda: cpu.matrix("bf16", np.zeros((4, 8), np.float32)), CheckpointError, "2-byte"),
        (lambda: cpu.matrix("int4", np.zeros((4, 8), np.uint8)), BackendError, "int4"),
        (lambda: CpuOps(0), ConfigError, "1 to 256"),
        (lambda: CpuOps(1, "sse9"), BackendError, "sse9"),
    ]:
        with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
            call()

"""The arrays that compiled kernels return: at cache lines, made again from those that nobody has any more."""

import numpy as np
import pytest
from compare import same_bits
from cpu_cases import inputs, weights

from dsv4 import _cpu
from dsv4.ops.cpu import CpuOps
from dsv4.rows import Rows


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (48, 256), (2, 4, 100), (300, 1000)])
def test_arrays_begin_at_a_cache_line(shape):
    held = [_cpu.lines(shape) for _ in range(5)]
    for i, array in enumerate(held):
        assert array.shape == shape and array.dtype == np.float32 and array.flags.c_contiguous and array.flags.writeable
        assert array.ctypes.data % 64 == 0 and not any(np.shares_memory(array, other) for other in held[:i])
        array.fill(i)
    assert all((array == i).all() for i, array in enumerate(held))


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array, lambda array: array[1:], lambda array: array.reshape(-1)[3:], lambda array: array.T[0],
        memoryview, lambda array: memoryview(array[1]), lambda array: np.frombuffer(array, np.uint8)[5:],
        lambda array: np.asarray(array).view(np.uint32)[:, 2], lambda array: array.base,
        lambda array: array.__array_interface__ and np.lib.stride_tricks.as_strided(array, (2,), (4,)),
    ],
)  # fmt: skip
def test_an_array_is_given_out_again_only_when_nobody_has_it(hold):
    shape = (7, 13)
    array = _cpu.lines(shape)
    place, held = array.ctypes.data, hold(array)
    del array
    others = [_cpu.lines(shape) for _ in range(8)]
    assert place not in [other.ctypes.data for other in others]
    del others, held
    assert place in [other.ctypes.data for other in [_cpu.lines(shape) for _ in range(16)]]


def test_the_last_one_is_made_again_from_the_same_memory():
    place = _cpu.lines((7, 11)).ctypes.data
    assert all(_cpu.lines((7, 11)).ctypes.data == place for _ in range(20))


def test_what_is_kept_is_limited():
    held = [_cpu.lines((5, 17)) for _ in range(100)]
    assert len({array.ctypes.data for array in held}) == 100 and _cpu.kept_arrays()[5, 17] == 16
    _cpu.lines((1 << 16, 1))
    assert (1 << 16, 1) not in _cpu.kept_arrays()  # too large, with what it is cut from
    most = 0
    for n in range(1000):
        _cpu.lines((n, 60))
        most = max(most, sum(count * np.prod(shape) for shape, count in _cpu.kept_arrays().items()))
    assert 3 << 18 < most <= 1 << 20


def test_a_result_stays_what_it_was():
    ops = CpuOps(2)
    w, xs = ops.matrix(*weights("fp8", 64, 256)), [inputs(20, 256, seed) for seed in range(25)]
    results = [ops.rmsnorm(ops.linear(x, w), np.ones(64, np.float32), 1e-6) for x in xs]
    for x, result in zip(xs, results):
        same_bits(result, ops.rmsnorm(ops.linear(x, w), np.ones(64, np.float32), 1e-6))


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.setflags(write=False), lambda array: setattr(array, "shape", (9, 6)),
        lambda array: setattr(array, "dtype", np.int32),
    ],
)  # fmt: skip
def test_what_is_done_to_a_result_ends_with_it(change):
    ops = CpuOps(1)
    x, weight = inputs(6, 9), np.ones(9, np.float32)
    expected = ops.rmsnorm(x, weight, 1e-6).copy()
    change(ops.to_host(ops.rmsnorm(x, weight, 1e-6)))
    found = ops.rmsnorm(x, weight, 1e-6)
    same_bits(found, expected)
    assert found.flags.writeable


def test_read_only_logits_do_not_stay_so(engine):
    """An engine's, which the next draft's may be made from."""
    nano = engine("nano", threads=2, max_sessions=4, max_context=512)
    block = nano.config.dspark.block_size
    with nano.session() as session, nano.session() as other:
        session.forward([1, 2, 3])
        expected = session.draft(4).logits.copy()
        nano.pool.reserve(other.slot, block)
        nano.forward(Rows.of(other.slot, 0, range(block), "all")).logits.setflags(write=False)
        same_bits(session.draft(4).logits, expected)

"""The arrays that compiled kernels return: at cache lines, over memory that is used again when nobody has it any more."""

import numpy as np
import pytest
from compare import same_bits
from cpu_cases import inputs, weights

from dsv4 import _cpu
from dsv4.errors import InputError
from dsv4.ops.cpu import CpuOps


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


def test_the_memory_used_last_is_used_first():
    place = _cpu.lines((7, 11)).ctypes.data
    assert all(_cpu.lines((7, 11)).ctypes.data == place for _ in range(20))


def test_arrays_of_about_the_same_size_share_memory():
    place = _cpu.lines((100, 11)).ctypes.data
    places = [_cpu.lines(shape).ctypes.data for shape in ((2, 5, 109), (1, 1025), (1, 1280), (1, 1024), (1, 1281))]
    assert [other == place for other in places] == [True, True, True, False, False]


def test_spare_memory_is_limited():
    held = [_cpu.lines((1 << 18, 1)) for _ in range(30)]  # 31 MB
    assert len({array.ctypes.data for array in held}) == 30
    del held
    spare = _cpu.spare_memory()
    assert 15 << 20 < spare <= 16 << 20
    _cpu.lines(((4 << 20) + 1, 1))  # too large to keep
    assert _cpu.spare_memory() == spare


def test_spare_memory_goes_first_that_was_longest_not_asked_for():
    def from_spare(megabytes):
        before = _cpu.spare_memory()
        array = _cpu.lines((int(megabytes * (1 << 18)), 1))
        return (before - _cpu.spare_memory()) / (1 << 20), array

    held = [from_spare(4) for _ in range(4)]
    del held  # now nothing else is spare
    assert _cpu.spare_memory() == 16 << 20
    for megabytes in (1, 2, 2.5, 4, 3):  # 1 and 2.5 take the place of blocks of 4, then 3 that of the 1
        from_spare(megabytes)
    assert [from_spare(megabytes)[0] for megabytes in (2, 2.5, 4, 3, 1)] == [2, 2.5, 4, 3, 0]


def test_memory_that_is_not_there():
    with pytest.raises(MemoryError, match="expected 4503599627370496 bytes"):
        _cpu.lines((1 << 20, 1 << 30))
    for shape in ((1 << 61, 1), (1 << 31, 1 << 31), (-1, 1)):
        with pytest.raises(MemoryError, match="expected an array of at most 72057594037927936 floats, found "):
            _cpu.lines(shape)
    with pytest.raises(InputError, match="expected at most 4 dimensions, found 5"):
        _cpu.lines((1, 1, 1, 1, 1))
    assert _cpu.spare_memory() == 0  # given up for the first of them, in vain


def test_a_result_stays_what_it_was():
    ops = CpuOps(2)
    w, xs = ops.matrix(*weights("fp8", 64, 256)), [inputs(20, 256, seed) for seed in range(25)]
    results = [ops.rmsnorm(ops.linear(x, w), np.ones(64, np.float32), 1e-6) for x in xs]
    for x, result in zip(xs, results):
        same_bits(result, ops.rmsnorm(ops.linear(x, w), np.ones(64, np.float32), 1e-6))

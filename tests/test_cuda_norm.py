"""Norms, hyper-connections, the activation quantiser and embedding of the CUDA backend, run on the CPU."""

import numpy as np
import ops_cases as make
import pytest
from compare import same_bits
from cuda_ops import HostOps, emulated, only_emulated
from emulation.launcher import REVERSE
from test_ops_backends import mistakes

from dsv4 import formats
from dsv4.errors import InputError
from dsv4.ops.reference import ReferenceOps

CASES = [
    *(make.embed(t, *shape) for t in (1, 5, 130) for shape in ((37, 48, 4), (11, 256, 1), (7, 33, 3))),
    *(make.act_quant(t, k) for t in (1, 6, 130) for k in (1, 31, 100, 128, 136, 384, 4096 + 32)),
    *(make.rmsnorm(t, k) for t in (1, 6, 130) for k in (1, 32, 96, 100, 257, 1000, 4096)),
    *(make.connections(t, *shape) for t in (1, 3, 65) for shape in (
        (4, 48, 1e-6, 1e-6), (4, 300, 1e-2, 1e-4), (2, 33, 1e-4, 1e-2), (1, 16, 1e-6, 1e-6), (16, 70, 1e-6, 1e-6))),
]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def other_orders():
    return [HostOps(emulated(order=REVERSE, threads=1)), HostOps(emulated(order=5, threads=2))]


@each_case
def test_is_the_formula(case, cuda):
    assert not mistakes(case, case(cuda), case(ReferenceOps()))


@each_case
def test_rows_do_not_show(case, cuda):
    every, n = case(cuda), case.rows
    for start, stop in {(0, 1), (n // 2, min(n, n // 2 + 3)), (n - 1, n)}:
        for name, found in case(cuda, slice(start, stop)).items():
            same_bits(found, every[name][start:stop], f"{name}, rows {start}..{stop - 1} of {n}")


@only_emulated
@each_case
def test_threads_and_orders_do_not_show(case, cuda, other_orders):
    every = case(cuda)
    for other in other_orders:
        for name, found in case(other).items():
            same_bits(found, every[name], f"{name}, order {other.ops.launcher.order}")


@only_emulated
def test_no_rows_are_no_work(cuda):
    for case in (make.act_quant(0, 100), make.rmsnorm(0, 64)):
        before = cuda.ops.launcher.launches
        assert case(cuda)["y"].shape == case.inputs["x"].shape
        assert cuda.ops.launcher.launches == before


def test_a_nan_or_infinity_makes_its_block_nan(cuda):
    x = np.ones((2, 300), np.float32)
    x[0, 5], x[1, 299] = np.nan, np.inf
    found = cuda.act_quant(x)
    expected = formats.act_dequant(*formats.act_quant(x, 128), 128)
    assert np.isnan(found[0, :128]).all() and np.isnan(found[1, 256:]).all()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [1, 255, 256, 1023, 1025, 5000])
def test_nonfinite_values_are_found_at_any_place(cuda, size):
    x = np.zeros(size, np.float32)
    assert not cuda.has_nonfinite(x)
    for place in {0, size // 2, size - 1}:
        for value in (np.nan, np.inf, -np.inf):
            x[place] = value
            assert cuda.has_nonfinite(x), (place, value)
        x[place] = 3e38
    assert not cuda.has_nonfinite(x)


def test_more_rows_than_a_grid_has_room_for(cuda):
    with pytest.raises(InputError, match="act_quant: expected at most 65535 rows in one forward, found more; .*--chunk"):
        cuda.act_quant(np.zeros((65536, 1), np.float32))

"""cuda/compressor.cu, run on the CPU: rows into the ring, entries out of it."""

import numpy as np
import ops_cases as make
import pytest
from compare import rel_l2, rel_l2_rows, same_bits
from emulated_rows import same_otherwise, same_rows
from test_ops_backends import mistakes

from dsv4.errors import InputError
from dsv4.ops import Ring
from dsv4.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()

CASES = [
    make.compression(t, *shape) for t in (1, 9, 130) for shape in ((4, 128), (4, 33), (16, 128), (128, 64), (6, 33))
]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def i32(values):
    return np.array(values, np.int32)


@each_case
def test_the_formula(case, cuda):
    assert not mistakes(case, case(cuda), case(REFERENCE))


@each_case
def test_a_row_alone_has_the_same_bits(case, cuda):
    same_rows(case, cuda, counts=[*range(1, 8), 31, 32, 33, 64, 129])


@pytest.mark.emulated
@each_case
def test_order_of_threads_and_addresses_do_not_show(case):
    same_otherwise(case)


@pytest.mark.parametrize("ratio, capacity", [(4, 8), (4, 13), (16, 32), (16, 45), (5, 10)])
def test_rings_of_any_capacity(ratio, capacity, cuda):
    """The first entry, which with ratio 4 has no block before it, and ones that wrap around the ring."""
    rng = np.random.default_rng(capacity)
    width = 96 if ratio == 4 else 48
    ring = Ring(make.normal(rng, 2 * capacity, width), make.normal(rng, 2 * capacity, width, scale=30))
    slots, entries = i32([0, 1, 1, 0, 1, 1]), i32([0, 0, 1, 7, 1000, 260_000])
    found = cuda.compress_pool(ring, slots, entries, ratio, capacity)
    assert rel_l2_rows(found, REFERENCE.compress_pool(ring, slots, entries, ratio, capacity)).max() <= 1e-5


def test_nothing_before_the_first_entry_is_looked_at(cuda):
    """With ratio 4 entry 0 has four rows: what lies in the ring where four more would be, NaN here, does not matter."""
    rng = make.seeded("first entry")
    ring = Ring(make.normal(rng, 12, 64), make.normal(rng, 12, 64))
    expected = cuda.compress_pool(ring, i32([0]), i32([0]), 4, 12)
    for array in ring:
        array[4:] = np.nan
    same_bits(cuda.compress_pool(ring, i32([0]), i32([0]), 4, 12), expected)
    assert np.isfinite(expected).all()
    assert np.isnan(cuda.compress_pool(ring, i32([0]), i32([1]), 4, 12)).any()


def test_gates_far_apart(cuda):
    """One gate above all others takes everything; e^gate alone would overflow."""
    ring = Ring(np.arange(16, dtype=np.float32).reshape(16, 1), np.full((16, 1), -500, np.float32))
    ring.gate[5] = 300
    same_bits(cuda.compress_pool(ring, i32([0]), i32([0]), 16, 16), np.array([[5]], np.float32))
    ring.gate[5] = -500
    assert rel_l2(cuda.compress_pool(ring, i32([0]), i32([0]), 16, 16), [[7.5]]) <= 1e-6


def test_no_rows_and_other_rows_stay(cuda):
    rows, none = np.empty((0, 128), np.float32), i32([])
    ring = Ring(np.zeros((16, 128), np.float32), np.zeros((16, 128), np.float32))
    cuda.compress_store(rows, rows, np.zeros((4, 128), np.float32), none, ring, none)
    assert not ring.kv.any() and cuda.compress_pool(ring, none, none, 4, 16).shape == (0, 64)
    ones = np.ones((2, 128), np.float32)
    cuda.compress_store(ones, ones, np.ones((4, 128), np.float32), i32([6, 7]), ring, i32([9, 3]))
    for array, value in zip(ring, (1, 2)):
        assert np.flatnonzero(array.any(axis=1)).tolist() == [3, 9] and (array[[3, 9]] == value).all()


def test_a_ring_of_another_width_is_refused(cuda):
    x, ring = np.ones((2, 128), np.float32), Ring(*np.zeros((2, 8, 64), np.float32))
    with pytest.raises(InputError, match="expected rows of 128, found 128 in ape, 64 in the ring"):
        cuda.compress_store(x, x, np.zeros((4, 128), np.float32), i32([0, 1]), ring, i32([0, 1]))

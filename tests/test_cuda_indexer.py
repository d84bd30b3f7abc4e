"""cuda/indexer.cu, run on the CPU: quantised queries and keys, scores, the choice of entries."""

from dataclasses import replace

import numpy as np
import ops_cases as make
import pytest
from compare import rel_l2, same_bits
from emulated_rows import PLAIN, same_otherwise, same_rows
from test_ops_backends import mistakes

from dsv4 import formats
from dsv4.errors import InputError
from dsv4.ops import IndexCache, Rope, kernels
from dsv4.ops.cuda_places import INDEX_KERNELS
from dsv4.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()

CASES = [
    *(make.index_keys(t, *shape) for t in (1, 130) for shape in ((8, 128, 64), (3, 64, 64), (2, 32, 8))),
    *(make.index_select(t, *shape, kind) for kind in ("any", "ties", "dead") for t in (1, 40) for shape in (
        (8, 128, 30, 8, 8), (4, 64, 200, 16, 64), (3, 64, 100, 128, 64), (17, 128, 300, 5, 4))),
    make.index_select(130, 4, 64, 70, 16, 64, "any"),
    make.index_select(2, 64, 128, 700, 512, 64, "any"),
    *(make.entry_places(t, n, 8) for t in (1, 130) for n in (1, 17)),
    *(make.ring_places(t, span, 21) for t in (1, 130) for span in (1, 16)),
    *(make.visible_places(t, n, 8) for t in (1, 130) for n in (1, 8, 37)),
]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def i32(values):
    return np.array(values, np.int32)


@each_case
def test_the_formula(case, cuda):
    """Codes and choices are the reference's own."""
    exact = replace(case, limit=0.0, flips=0.0)
    assert not mistakes(exact, case(cuda), case(REFERENCE))


@each_case
def test_a_row_alone_has_the_same_bits(case, cuda):
    same_rows(case, cuda, counts=[*range(1, 6), 31, 33, 129])


@pytest.mark.emulated
@each_case
def test_order_of_threads_and_addresses_do_not_show(case):
    same_otherwise(case)


# ---------------------------------------------------------------------- rounding
@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_every_e2m1_boundary_rounds_to_even(exponent, cuda):
    """The Hadamard rotation of a Hadamard rotation is the identity, exact on numbers as short as these."""
    middle = np.concatenate([formats.E2M1[:8], (formats.E2M1[:7] + formats.E2M1[1:8]) / 2])
    x = np.concatenate([[6, -6], middle, np.clip(middle + 2.0**-10, 0, 6), -middle, [6, 0, 0.25]]).astype(np.float32)
    x = np.pad(x, (0, 64 - len(x)), constant_values=6)[None] * np.float32(2.0**exponent)
    rotated, still = formats.hadamard(x), Rope(np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32))
    expected = formats.fp4_act_dequant(*formats.fp4_act_quant(x))
    assert len(np.unique(expected)) >= 15
    np.testing.assert_array_equal(cuda.index_query(rotated[:, None], still)[:, 0], expected)
    cache = cuda.index_cache(1, 64)
    cuda.encode_index(rotated, cache, i32([0]))
    np.testing.assert_array_equal(cuda.decode_index(cache, i32([0])), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -0.0, 1e-45, 1e-40, 1e37])
def test_extreme_and_broken_keys(value, cuda):
    k = make.normal(make.seeded("extreme"), 2, 128)
    k[1] = 0
    k[1, 40] = value
    caches = [ops.index_cache(2, 128) for ops in (cuda, REFERENCE)]
    for ops, cache in zip((cuda, REFERENCE), caches):
        with np.errstate(invalid="ignore"):
            ops.encode_index(k, cache, i32([0, 1]))
    np.testing.assert_array_equal(cuda.decode_index(caches[0], i32([0, 1])), REFERENCE.decode_index(caches[1], i32([0, 1])))


# ---------------------------------------------------------------------- scores
def scores(q, w, cache, visible, pages, page_entries, k=0):
    """What index_scores leaves: float32 [T, entries of all pages], NaN where it wrote nothing."""
    made = []

    class Watching(type(PLAIN)):
        def empty(self, shape, dtype=np.float32):
            made.append(super().empty(shape, dtype))
            return made[-1]

    Watching().index_select(q, w, cache, np.zeros(len(q), np.int32), i32(visible), pages, page_entries, k)
    return made[1]


@pytest.mark.emulated
@pytest.mark.parametrize("heads, dim", [(1, 32), (8, 64), (64, 128), (21, 128)])
def test_scores(heads, dim):
    rng = make.seeded(f"scores {heads} {dim}")
    codes, scales = formats.fp4_act_quant(make.normal(rng, 300, dim) * np.ldexp(np.float32(1), rng.integers(-9, 9, (300, 1))))
    q = make.normal(rng, 3, heads, dim) * np.ldexp(np.float32(1), rng.integers(-9, 9, (3, heads, 1)))
    q, w = formats.fp4_act_dequant(*formats.fp4_act_quant(q)), make.normal(rng, 3, heads)
    pages, visible = rng.permutation(15).astype(np.int32)[None], [300, 1, 257]
    found = scores(q, w, IndexCache(codes, scales), visible, pages, 20)
    where = pages[0, np.arange(300) // 20] * 20 + np.arange(300) % 20
    keys = formats.fp4_act_dequant(codes[where], scales[where])
    for row, n in enumerate(visible):
        assert rel_l2(found[row, :n], REFERENCE.index_scores(q[row], w[row], keys[:n])) <= 1e-6
        assert np.isnan(found[row, n:]).all()  # nothing beyond what the row sees


@pytest.mark.parametrize("dead", [0, 2.0**-110])
def test_zeros_of_either_sign_are_equal(dead, cuda):
    """All scores are ±0: the first k win."""
    rng = make.seeded("zeros")
    cache = cuda.index_cache(64, 64)
    cuda.encode_index(make.normal(rng, 64, 64), cache, np.arange(64, dtype=np.int32))
    q = formats.fp4_act_dequant(*formats.fp4_act_quant(make.normal(rng, 5, 3, 64))) * np.float32(dead)
    w = make.normal(rng, 5, 3) * np.float32(2.0**-80)
    chosen = cuda.index_select(q, w, cache, i32([0] * 5), i32([64, 9, 8, 63, 0]), i32([[0, 1]]), 32, 9)
    same_bits(chosen, np.where(np.arange(9) < [[9], [9], [8], [9], [0]], np.arange(9), -1).astype(np.int32))


# ---------------------------------------------------------------------- choice
def choose(values, visible, k, threads=256):
    values = np.array(values, np.float32)
    chosen = np.full((len(values), k), -7, np.int32)
    kernel = PLAIN.launcher.compile("indexer.cu", {"GROUPS": 2}).kernel("index_choose")
    kernel((len(values),), (threads,), (values, i32(visible), chosen, np.int32(k), np.int64(values.shape[1])))
    return chosen


def best(values, n, k):
    ids = np.sort(np.argsort(-values[:n].astype(np.float64), kind="stable")[:k])
    return np.pad(ids, (0, k - len(ids)), constant_values=-1).astype(np.int32)


@pytest.mark.emulated
@pytest.mark.parametrize("threads", [32, 256, 1024])
@pytest.mark.parametrize("kind", ["normal", "few", "close", "infinite"])
def test_choice(kind, threads):
    """Few different values; values that differ in their last bits only; infinities of either sign."""
    rng = make.seeded(f"choice {kind}")
    values = rng.normal(size=(5, 5000)).astype(np.float32)
    if kind == "few":
        values = rng.integers(-2, 3, values.shape).astype(np.float32) * np.where(rng.random(values.shape) < 0.5, 1, -1)
    if kind == "close":
        values = (np.int32(0x3F800000) + rng.integers(0, 900, values.shape).astype(np.int32)).view(np.float32)
    if kind == "infinite":
        values[rng.random(values.shape) < 0.3] = -np.inf
        values[0, 17:40] = np.inf
    visible, values = [5000, 4097, 513, 512, 3], values.astype(np.float32)
    for k in (1, 5, 512):
        chosen = choose(values, visible, k, threads)
        for row, n in enumerate(visible):
            same_bits(chosen[row], best(values[row], n, k), f"row {row}, k {k}")


@pytest.mark.emulated
def test_choice_among_broken_scores():
    """Whatever a NaN counts as, the chosen are distinct entries in order."""
    values = np.full((2, 90), np.nan, np.float32)
    values[1, ::2] = 1
    values[1, 1::4] = -np.nan
    chosen = choose(values, [90, 90], 60)
    assert (np.diff(chosen, axis=1) > 0).all() and chosen.min() >= 0 and chosen.max() < 90


# ---------------------------------------------------------------------- places, work cut otherwise, nothing at all
@pytest.mark.emulated
def test_rows_over_several_launches(monkeypatch):
    case = make.index_select(6, 4, 64, 200, 16, 64, "any")
    expected = case(PLAIN)["chosen"]
    monkeypatch.setattr("dsv4.ops.cuda_rows.SCRATCH", 1)
    same_bits(case(PLAIN)["chosen"], expected)
    monkeypatch.setattr("dsv4.ops.cuda_rows.BLOCKS", 0)  # one block goes through all entries of a row
    same_bits(case(PLAIN)["chosen"], expected)


def test_places_of_entries(cuda):
    """Pages of 8 entries; slot 1 holds pages 5, 0, 3."""
    pages = i32([[7, 2, 4], [5, 0, 3]])
    found = cuda.entry_places(i32([[0, 7, 8, -1], [23, -1, 9, 16]]), i32([1, 0]), pages, 8)
    assert found.tolist() == [[40, 47, 0, -1], [39, -1, 17, 32]]


@pytest.mark.compile_gate
@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)])
def test_index_functions_compile_for_a_device(capability):
    """What runs in tests as plain Python, through numba-CUDA without a device."""
    from numba import cuda
    from numba.core.sigutils import normalize_signature

    for function, types in INDEX_KERNELS.items():
        arguments, _ = normalize_signature(f"void(int64, {types})")
        ptx, _ = cuda.compile_ptx(kernels.index_kernel(function, len(arguments) - 1), arguments, cc=capability)
        assert ".entry" in ptx and function.__name__ in ptx


def test_no_rows(cuda):
    none, cache = i32([]), cuda.index_cache(4, 64)
    q = cuda.index_query(np.empty((0, 2, 64), np.float32), cuda.rope_angles(none, np.ones(16, np.float32)))
    cuda.encode_index(np.empty((0, 64), np.float32), cache, none)
    assert cuda.decode_index(cache, none).shape == (0, 64) and not cache.codes.any()
    chosen = cuda.index_select(q, np.empty((0, 2), np.float32), cache, none, none, i32([[0, 1]]), 2, 5)
    assert chosen.shape == cuda.entry_places(chosen, none, i32([[0, 1]]), 2).shape == (0, 5)
    assert cuda.ring_places(none, none, 3, 7).shape == (0, 3)
    assert cuda.visible_places(none, 5, none, i32([[0, 1]]), 2).shape == (0, 5)
    assert cuda.visible_places(i32([0, 0]), 0, i32([0, 0]), i32([[0, 1]]), 2).shape == (2, 0)


@pytest.mark.emulated
def test_wrong_arrays_are_refused():
    cache, rope = PLAIN.index_cache(8, 64), PLAIN.rope_angles(i32([1, 2]), np.ones(16, np.float32))
    for call in (
        lambda: PLAIN.index_query(np.zeros((2, 1, 96), np.float32), rope),
        lambda: PLAIN.encode_index(np.zeros((2, 128), np.float32), cache, i32([0, 1])),
        lambda: PLAIN.encode_index(np.zeros((2, 64), np.float32), cache, i32([0])),
        lambda: PLAIN.index_select(np.zeros((1, 1, 128), np.float32), np.zeros((1, 1), np.float32), cache, i32([0]), i32([8]),
                                   i32([[0]]), 8, 2),
    ):  # fmt: skip
        with pytest.raises(InputError, match="expected .* found"):
            call()

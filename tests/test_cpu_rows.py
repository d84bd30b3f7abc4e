"""The compiled row kernels where they could go wrong by themselves: every rounding, extreme and broken numbers, odd
sizes, absent keys, work cut over threads, and memory that held something else before."""

import gc
from types import SimpleNamespace

import numpy as np
import ops_cases as make
import pytest
from compare import rel_l2, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import formats
from dsv4.errors import InputError
from dsv4.ops import IndexCache, Mix, Ring, Rope
from dsv4.ops.reference import ReferenceOps

_cpu = pytest.importorskip("dsv4._cpu")
from dsv4.ops.cpu import CpuOps  # noqa: E402

REFERENCE = ReferenceOps()
SETS = [CpuOps(1, isa) for isa in _cpu.instruction_sets()]
ALL = [*SETS, *(CpuOps(n) for n in (2, 3, 5))]
each_set = pytest.mark.parametrize("ops", SETS, ids=lambda ops: ops.team.isa)
some = settings(max_examples=40, deadline=None, derandomize=True)


def i32(values):
    return np.array(values, np.int32)


def rope_of(positions, r):
    return REFERENCE.rope_angles(i32(positions), (10000.0 ** -np.linspace(0, 1, r // 2)).astype(np.float32))


def connection(ops, rng, m, d, head=False):
    n = m if head else (2 + m) * m
    return SimpleNamespace(
        fn=ops.matrix("f32", make.normal(rng, n, m * d, scale=(m * d) ** -0.5)), base=make.normal(rng, n),
        scale=make.normal(rng, 1 if head else 3), streams=m, iterations=20, eps=1e-6, norm_eps=1e-6,
    )  # fmt: skip


def around(values):
    """values, what lies half-way between neighbours, and the floats next to each of those."""
    values = np.unique(np.asarray(values, np.float32))
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])


# ---------------------------------------------------------------------- rounding
@each_set
@pytest.mark.parametrize("exponent", [-22, -3, 0, 1, 60, 118])
def test_every_e4m3_boundary_rounds_to_even(ops, exponent):
    x = around(formats.E4M3[np.isfinite(formats.E4M3)])
    x = np.clip(np.pad(x, (0, -len(x) % 127)), -448, 448).reshape(-1, 127)
    x = np.concatenate([np.full((len(x), 1), 448, np.float32), x], axis=1) * np.float32(2.0**exponent)
    same_bits(ops.act_quant(x), REFERENCE.act_quant(x))
    keys = np.ascontiguousarray(np.concatenate([x, x], axis=1))
    found, expected = (o.key_cache(len(x), 256, 64) for o in (ops, REFERENCE))
    for o, cache in ((ops, found), (REFERENCE, expected)):
        o.encode_keys(keys, cache, np.arange(len(x), dtype=np.int32))
    for a, b in zip(found, expected):
        same_bits(a, b)


@each_set
def test_scales_at_powers_of_two(ops):
    """The scale steps up by the last bit of the product with 1/448: blocks whose largest value lies around there."""
    largest = np.float32(448) * np.ldexp(np.float32(1), np.arange(-20, 100))
    bits = largest.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)
    small = np.geomspace(1, 1e-6, 128, dtype=np.float32)  # down to where a step depends on the scale
    x = bits.view(np.float32).reshape(-1, 1) * small
    same_bits(ops.act_quant(x), REFERENCE.act_quant(x))
    at_floor = np.float32(1e-4) * np.linspace(0.2, 3, 100, dtype=np.float32)[:, None] * np.ones((1, 128), np.float32)
    same_bits(ops.act_quant(at_floor), REFERENCE.act_quant(at_floor))


@each_set
@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_every_e2m1_boundary_rounds_to_even(ops, exponent):
    """The Hadamard rotation of a Hadamard rotation is the identity, exact on numbers as short as these."""
    middle = np.concatenate([formats.E2M1[:8], (formats.E2M1[:7] + formats.E2M1[1:8]) / 2])
    x = np.concatenate([middle, middle + 2.0**-10, middle - 2.0**-10, -middle])
    x = np.concatenate([[6, -6], np.clip(x, -6, 6), [6, 0, 0.25]]).astype(np.float32)[None, :64]
    x = np.pad(x, ((0, 0), (0, 64 - x.shape[1])), constant_values=6) * np.float32(2.0**exponent)
    rotated = formats.hadamard(x)
    still = Rope(np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32))
    expected = formats.fp4_act_dequant(*formats.fp4_act_quant(x))
    assert (np.abs(expected) == 6 * np.float32(2.0**exponent)).any() and len(np.unique(expected)) >= 15
    np.testing.assert_array_equal(ops.index_query(rotated[:, None, :], still)[:, 0], expected)
    cache = ops.index_cache(1, 64)
    ops.encode_index(rotated, cache, i32([0]))
    np.testing.assert_array_equal(ops.decode_index(cache, i32([0])), expected)


@each_set
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 1e-7, 1e-4, 1e30, 1e37, 2.9e38])
def test_extreme_blocks(ops, value):
    x = np.full((2, 200), value, np.float32)
    x[1, ::3] *= np.float32(-0.3)
    same_bits(ops.act_quant(x), REFERENCE.act_quant(x))
    index = np.zeros((1, 64), np.float32)
    index[0, 5] = min(value, 1e37)
    caches = [o.index_cache(1, 64) for o in (ops, REFERENCE)]
    for o, cache in zip((ops, REFERENCE), caches):
        o.encode_index(index, cache, i32([0]))
    np.testing.assert_array_equal(ops.decode_index(caches[0], i32([0])), REFERENCE.decode_index(caches[1], i32([0])))


@each_set
def test_bf16_of_keys_rounds_to_even(ops):
    bits = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32)
    bits = np.concatenate([bits, (bits & 0xFFFF0000) | 0x8000, (bits & 0xFFFF0000) | 0x7FFF])
    k = np.zeros((len(bits) // 64, 128), np.float32)
    k[:, 64:] = bits[: k.shape[0] * 64].view(np.float32).reshape(-1, 64)
    cache = ops.key_cache(len(k), 128, 64)
    ops.encode_keys(k, cache, np.arange(len(k), dtype=np.int32))
    same_bits(cache.rope, formats.bf16_encode(k[:, 64:]))


@each_set
def test_angles_far_out(ops):
    positions = np.concatenate([np.arange(300), np.arange(1 << 20)[::-997]]).astype(np.int32)
    theta = (160000.0 ** -np.linspace(0, 1, 33)).astype(np.float32)
    found, expected = ops.rope_angles(positions, theta), REFERENCE.rope_angles(positions, theta)
    for a, b in zip(found, expected):
        assert np.abs(a - b).max() <= 6e-8 and np.mean(a != b) < 1e-4


@each_set
def test_scores_of_the_gate_over_the_whole_range(ops):
    """Two experts: the ratio of their weights is that of their scores. One logit is 0.5, the other runs."""
    logits = np.concatenate([np.linspace(-85, 60, 2001), np.linspace(19.9, 20.1, 101), [0.0, -1e-7, 1e-7]])
    x = np.stack([logits, np.ones_like(logits)], axis=1).astype(np.float32)
    w = ops.matrix("bf16", formats.bf16_encode(np.array([[1, 0], [0, 0.5]], np.float32)))
    _, weights = ops.gate(x, w, None, None, i32(np.zeros(len(x))), 2, 1.0)
    wide = x[:, 0].astype(np.float64)
    score = np.sqrt(np.where(wide > 20, wide, np.log1p(np.exp(wide))))
    expected = score / (score + np.sqrt(np.log1p(np.exp(0.5))))
    np.testing.assert_allclose(weights[:, 0], expected, rtol=5e-7)


# ---------------------------------------------------------------------- numbers that are not
BROKEN = [np.nan, np.inf, -np.inf, -np.nan]


@each_set
@pytest.mark.parametrize("value", BROKEN)
def test_a_broken_value_spoils_its_block_only(ops, value):
    rng = np.random.default_rng(1)
    x = make.normal(rng, 3, 384)
    good = ops.act_quant(x)
    x[1, 130] = value
    y = ops.act_quant(x)
    assert np.isnan(y[1, 128:256]).all()
    y[1, 128:256] = good[1, 128:256]
    same_bits(y, good)
    assert ops.has_nonfinite(x) and not ops.has_nonfinite(good)


@each_set
def test_has_nonfinite_sees_every_place(ops):
    for n in (1, 15, 4096, 4097, 9001):
        x = np.full(n, np.finfo(np.float32).max, np.float32)
        assert not ops.has_nonfinite(x)
        for i in {0, n // 2, n - 1}:
            x[i] = -np.inf
            assert ops.has_nonfinite(x.reshape(1, n))
            x[i] = 0


@each_set
@pytest.mark.parametrize("value", BROKEN)
def test_choices_stay_valid_on_broken_scores(ops, value):
    rng = np.random.default_rng(2)
    x = make.normal(rng, 4, 64)
    x[1], x[2, 3] = value, value
    w = ops.matrix("bf16", formats.bf16_encode(make.normal(rng, 11, 64)))
    ids, _ = ops.gate(x, w, None, None, i32(np.zeros(4)), 5, 1.0)
    assert (np.diff(ids, axis=1) > 0).all() and ids.min() >= 0 and ids.max() < 11
    biased, _ = ops.gate(x[:1], w, np.array([value] * 6 + [0] * 5, np.float32), None, i32([0]), 5, 1.0)
    if np.isnan(value):
        np.testing.assert_array_equal(biased, [[6, 7, 8, 9, 10]])
    cache = ops.index_cache(96, 64)
    ops.encode_index(make.normal(rng, 96, 64), cache, np.arange(96, dtype=np.int32))
    q, weight = make.normal(rng, 4, 3, 64), make.normal(rng, 4, 3)
    q[1], weight[2] = value, value
    chosen = ops.index_select(q, weight, cache, i32([0] * 4), i32([96] * 4), i32([[0, 1, 2]]), 32, 9)
    assert (np.diff(chosen, axis=1) > 0).all() and chosen.min() >= 0 and chosen.max() < 96


# ---------------------------------------------------------------------- attention
@some
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9),
       st.sampled_from([(96, 32), (102, 16), (128, 64), (134, 6), (576, 64)]),
       st.integers(0, 70), st.integers(0, 40))  # fmt: skip
def test_absent_places_and_parts_change_no_bits(seed, t, heads, dims, first, second):
    """The same keys in the same order, cut into parts in another way and with absent places strewn in."""
    rng = np.random.default_rng(seed)
    dim, rope_dim = dims
    ops = SETS[-1]
    cache = ops.key_cache(50, dim, rope_dim)
    ops.encode_keys(make.normal(rng, 50, dim), cache, np.arange(50, dtype=np.int32))
    q, sink = make.normal(rng, t, heads, dim), make.normal(rng, heads)
    places = rng.integers(0, 50, (t, first + second)).astype(np.int32)
    whole = ops.attend(q, sink, [(cache, places)])
    strewn = np.full((t, first + second + 29), -1, np.int32)
    for row, keys in zip(strewn, places):
        row[np.sort(rng.choice(row.size, keys.size, replace=False))] = keys
    cut = int(rng.integers(0, strewn.shape[1]))
    parts = [(cache, np.ascontiguousarray(part)) for part in (strewn[:, :cut], strewn[:, cut:])]
    for other in ALL:
        same_bits(other.attend(q, sink, parts), whole, f"{other.team.isa}, {other.team.threads} threads")
    expected = REFERENCE.attend(q, sink, [(cache, places)])
    assert rel_l2(whole, expected) <= 1e-6
    if not places.shape[1]:
        assert not whole.any()


@pytest.mark.parametrize("heads, entries, window", [(4, 16, 64), (3, 3, 20), (5, 70, 33), (1, 0, 1), (4, 270, 30), (3, 0, 64)])
def test_rows_that_see_nearly_the_same_keys_attend_as_each_alone(heads, entries, window):
    """Decoded keys are used again by the rows after: windows that move by one, entries that come and go, and after some
    rows another sequence, of which some keys are the same."""
    rng, rows, n = np.random.default_rng(5), 150, 120 + entries
    ops = SETS[-1]
    ring, cache = ops.key_cache(n, 96, 32), ops.key_cache(n, 96, 32)
    for keys in (ring, cache):
        ops.encode_keys(make.normal(rng, n, 96), keys, np.arange(n, dtype=np.int32))
    q, sink = make.normal(rng, rows, heads, 96), make.normal(rng, heads)
    first = [t + 37 * (t // 60) - window + 1 for t in range(rows)]
    moving = np.array([[(at + i) % n if at + i >= 0 else -1 for i in range(window)] for at in first])
    chosen = []
    for t in range(rows):
        some = np.sort(rng.permutation(entries + 4)[:entries]) if t % 9 < 3 else chosen[-1].copy()
        some[: entries // 2 : 5] = np.sort(rng.permutation(entries + 4)[: some[: entries // 2 : 5].size])
        chosen.append(some)
    chosen[20:25] = [np.full(entries, -1)] * 5
    parts = [(cache, np.array(chosen, np.int32).reshape(rows, entries)), (ring, moving.astype(np.int32))]
    alone = [ops.attend(q[t : t + 1], sink, [(c, np.ascontiguousarray(p[t : t + 1])) for c, p in parts]) for t in range(rows)]
    for other in ALL:
        for count in (2, 7, 48, rows):
            found = other.attend(q[:count], sink, [(c, p[:count]) for c, p in parts])
            same_bits(found, np.concatenate(alone[:count]), f"{other.team.isa}, {other.team.threads} threads, {count} rows")


# ---------------------------------------------------------------------- hyper-connections
@some
@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 16), st.sampled_from([5, 16, 48, 130]))
def test_hyper_connections_of_any_shape(seed, t, m, d):
    rng = np.random.default_rng(seed)
    h, norm = make.normal(rng, t, m, d), make.normal(rng, d)
    results = []
    for ops in [*ALL, REFERENCE]:
        weights = np.random.default_rng(seed)
        hc, head = connection(ops, weights, m, d), connection(ops, weights, m, d, head=True)
        u, mix = ops.hc_pre_norm(h, hc, norm, 1e-5)
        results.append((u, mix.post, mix.comb, ops.hc_head(h, head), ops.hc_post(u, h, Mix(*map(np.copy, mix)))))
    expected = results.pop()
    for result in results:
        for found, first, wanted in zip(result, results[0], expected):
            same_bits(found, first)
            assert rel_l2(found, wanted) <= 2e-6
    row = int(rng.integers(t))
    ops = SETS[-1]
    u, mix = ops.hc_pre_norm(h[row : row + 1], connection(ops, np.random.default_rng(seed), m, d), norm, 1e-5)
    for found, every in zip((u, mix.post, mix.comb), results[0]):
        same_bits(found, every[row : row + 1])


# ---------------------------------------------------------------------- indexer
@some
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 6), st.sampled_from([32, 64, 128]), st.integers(1, 500),
       st.integers(1, 40), st.sampled_from([None, 0, 2.0**-110]))  # fmt: skip
def test_selection_over_threads(seed, t, heads, dim, entries, k, dead):
    """dead: a factor that makes all scores zero, with 2^-110 of either sign: the first k win."""
    rng = np.random.default_rng(seed)
    ops, pages = SETS[-1], -(-entries // 8)
    cache = ops.index_cache(8 * pages, dim)
    ops.encode_index(make.normal(rng, 8 * pages, dim), cache, np.arange(8 * pages, dtype=np.int32))
    table = rng.permutation(pages).astype(np.int32)[None]
    visible = rng.integers(0, entries + 1, t).astype(np.int32)
    q = formats.fp4_act_dequant(*formats.fp4_act_quant(make.normal(rng, t, heads, dim)))
    w = make.normal(rng, t, heads)
    if dead is not None:
        q, w = q * np.float32(dead), w * np.float32(2.0**-80)
    args = (q, w, cache, i32([0] * t), visible, table, 8, k)
    expected = REFERENCE.index_select(*args)
    if dead is not None:
        same_bits(expected, np.where(np.arange(k) < visible[:, None], np.arange(k), -1).astype(np.int32))
    for other in ALL:
        same_bits(other.index_select(*args), expected, f"{other.team.isa}, {other.team.threads} threads")


@pytest.mark.parametrize("t", [1, 3, 40])
def test_selection_of_many_entries(t):
    """Large enough for the threads to share it, by entries or by rows."""
    rng = np.random.default_rng(t)
    ops, n = ALL[0], 6000
    cache = ops.index_cache(n, 64)
    ops.encode_index(make.normal(rng, n, 64), cache, np.arange(n, dtype=np.int32))
    pages = rng.permutation(n // 100).astype(np.int32)[None]
    visible = rng.integers(n // 2, n + 1, t).astype(np.int32)
    q, w = make.normal(rng, t, 4, 64), make.normal(rng, t, 4)
    chosen = [o.index_select(q, w, cache, i32([0] * t), visible, pages, 100, 33) for o in ALL]
    for found in chosen[1:]:
        same_bits(found, chosen[0])
    where = pages[0, np.arange(n) // 100] * 100 + np.arange(n) % 100
    keys = ops.decode_index(cache, where.astype(np.int32))
    for row, ids in enumerate(chosen[0]):
        scores = REFERENCE.index_scores(q[row], w[row], keys[: visible[row]])
        rest = np.delete(scores, ids)
        assert scores[ids].min() >= rest.max() - 1e-6 * np.abs(scores).max()


@some
@given(st.integers(0, 10**6), st.sampled_from([3, 8, 17]), st.integers(0, 5), st.integers(0, 5))
def test_selection_with_scales_apart(seed, heads, query_spread, key_spread):
    """Powers of two that a processor may take into the integers, and those that are too far from each other."""
    rng = np.random.default_rng(seed)
    n, dim = 200, 128
    cache = IndexCache(
        rng.integers(0, 256, (n, dim // 2), np.uint8), 124 + rng.integers(0, key_spread + 1, (n, dim // 32), np.uint8)
    )
    groups = rng.integers(0, query_spread + 1, (2, heads, dim // 32, 1))
    q = (formats.E2M1[rng.integers(0, 16, (2, heads, dim // 32, 32))] * 2.0**groups).astype(np.float32)
    args = (q.reshape(2, heads, dim), make.normal(rng, 2, heads), cache, i32([0, 0]), i32([n, n - 37]), i32([[0]]), n, 60)
    expected = REFERENCE.index_select(*args)
    for ops in ALL:
        same_bits(ops.index_select(*args), expected, f"{ops.team.isa}, {ops.team.threads} threads")


@pytest.mark.parametrize("k", [1, 20, 700])
@pytest.mark.parametrize("order", ["ascending", "descending", "any", "equal"])
@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_choice_of_scores_in_any_order(order, k, weight):
    """Scores are the keys' only number that is not zero: few distinct ones, so that the k-th best has equals."""
    rng, n = np.random.default_rng(k), 3000
    size = np.sort(rng.integers(0, 160, n))  # 2 or 3 times a power of two
    size = {"ascending": size, "descending": size[::-1], "any": rng.permutation(size), "equal": 0 * size + 9}[order]
    cache = IndexCache(np.zeros((n, 16), np.uint8), (60 + size // 2).astype(np.uint8)[:, None])
    cache.codes[:, 0] = 4 + size % 2
    q = np.eye(1, 32, dtype=np.float32)[None]
    args = (q, np.full((1, 1), weight, np.float32), cache, i32([0]), i32([n]), i32([[0]]), n, k)
    expected = REFERENCE.index_select(*args)
    for ops in ALL:
        same_bits(ops.index_select(*args), expected, ops.team.isa)


# ---------------------------------------------------------------------- compressor, gate
def test_fixed_experts_are_kept_with_repeats():
    rng = np.random.default_rng(5)
    fixed = np.array([[3, 3, 0], [2, 1, 2], [4, 0, 3]], np.int64)
    x, tokens = make.normal(rng, 4, 32), i32([2, 0, 1, 0])
    weight = formats.bf16_encode(make.normal(rng, 5, 32))
    expected = REFERENCE.gate(x, REFERENCE.matrix("bf16", weight), None, fixed, tokens, 3, 1.5)
    for ops in ALL:
        ids, weights = ops.gate(x, ops.matrix("bf16", weight), None, fixed, tokens, 3, 1.5)
        same_bits(ids, expected[0])
        assert rel_l2(weights, expected[1]) <= 1e-6


@pytest.mark.parametrize("ratio, capacity", [(4, 8), (4, 13), (16, 32), (16, 45), (5, 10)])
def test_pool_in_rings_of_any_capacity(ratio, capacity):
    """The first entry, which with ratio 4 has no block before it, and ones that wrap around the ring."""
    rng = np.random.default_rng(capacity)
    width = 96 if ratio == 4 else 48
    ring = Ring(make.normal(rng, 2 * capacity, width), make.normal(rng, 2 * capacity, width, scale=30))
    slots, entries = i32([0, 1, 1, 0, 1]), i32([0, 0, 1, 7, 1000])
    expected = REFERENCE.compress_pool(ring, slots, entries, ratio, capacity)
    for ops in ALL:
        assert rel_l2(ops.compress_pool(ring, slots, entries, ratio, capacity), expected) <= 1e-6
        same_bits(ops.compress_pool(ring, slots, entries, ratio, capacity), ALL[0].compress_pool(
            ring, slots, entries, ratio, capacity))  # fmt: skip


def test_weights_of_pooled_rows_down_to_nothing():
    """e^x where it is subnormal, and below: seen by a value that is large beside others that are none."""
    x = np.linspace(-110, -80, 4096, dtype=np.float32)
    kv, gate = np.zeros((16, len(x)), np.float32), np.full((16, len(x)), -200, np.float32)
    gate[0], gate[1], kv[1] = 0, x, 2.0**100
    found = [ops.compress_pool(Ring(kv, gate), i32([0]), i32([0]), 16, 16)[0] for ops in SETS]
    exact = np.exp(x.astype(np.float64))
    assert (abs(found[0].astype(np.float64) / 2.0**100 - exact) <= 2.0**-149 + exact * 2.0**-21).all()
    for each in found[1:]:
        same_bits(each, found[0])


# ---------------------------------------------------------------------- memory
def poison():
    """Free memory of many sizes, all NaN: what np.empty and lines hand out next."""
    sizes = (*range(1, 200), *np.geomspace(200, 3e6, 60).astype(int))
    blocks = [make(size) for size in sizes for make in (np.empty, lambda size: _cpu.lines((size,)))]
    for block in blocks:
        block.fill(np.nan)
    del blocks
    gc.collect()


CASES = [
    make.embed(5, 37, 48, 4), make.act_quant(6, 100), make.rmsnorm(6, 100), make.connections(3, 4, 48, 1e-6, 1e-6),
    make.connections(20, 2, 33, 1e-6, 1e-6), make.rotation(5, 3, 96, 64), make.keys(5, 128, 64),
    make.store_keys(5, 128, 64),
    make.attend(6, 4, 128, 64, (16, 20), 1), make.attend(3, 3, 96, 32, (300,), 1), make.compression(9, 4, 64),
    make.compression(70, 16, 128), make.index_keys(6, 4, 64, 64), make.index_select(6, 4, 64, 200, 16, 64, "ties"),
    make.entry_places(6, 17, 8), make.gate(6, 18, 64, 4, "bias"), make.gate(6, 18, 64, 4, "fixed"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_shines_through_from_freed_memory(case):
    for ops in (CpuOps(1), CpuOps(2)):
        first = case(ops)
        for _ in range(3):
            poison()
            for name, found in case(ops).items():
                same_bits(found, first[name], name)


# ---------------------------------------------------------------------- no rows, wrong arrays
@each_set
def test_no_rows(ops):
    none, rows = i32([]), np.empty((0, 128), np.float32)
    rng, m = np.random.default_rng(3), 4
    cache, index = ops.key_cache(4, 128, 64), ops.index_cache(4, 64)
    ring = Ring(np.zeros((16, 128), np.float32), np.zeros((16, 128), np.float32))
    rope = ops.rope_angles(none, np.ones(32, np.float32))
    h, pages = np.empty((0, m, 128), np.float32), np.zeros((1, 2), np.int32)
    u, mix = ops.hc_pre_norm(h, connection(ops, rng, m, 128), np.ones(128, np.float32), 1e-6)
    assert u.shape == (0, 128) and mix.comb.shape == (0, m, m) and rope.cos.shape == (0, 32)
    assert ops.hc_post(u, h, mix).shape == h.shape and ops.mean_streams(h).shape == (0, 128)
    assert ops.hc_head(h, connection(ops, rng, m, 128, head=True)).shape == (0, 128)
    assert ops.embed(np.zeros((3, 8), np.uint16), none, m).shape == (0, m, 8)
    assert ops.act_quant(rows).shape == ops.rmsnorm(rows, np.ones(128, np.float32), 1e-6).shape == (0, 128)
    assert ops.query(h, rope, 1e-6) is h and ops.rotate(h, rope) is h
    ops.encode_keys(rows, cache, none)
    ops.store_keys(rows, np.ones(128, np.float32), rope, cache, none, 1e-6)
    assert ops.decode_keys(cache, none).shape == (0, 128)
    ops.compress_store(rows, rows, np.zeros((4, 128), np.float32), none, ring, none)
    assert ops.compress_pool(ring, none, none, 4, 16).shape == (0, 64)
    ops.encode_index(np.empty((0, 64), np.float32), index, none)
    assert ops.decode_index(index, none).shape == (0, 64)
    q = ops.index_query(np.empty((0, 2, 64), np.float32), rope)
    chosen = ops.index_select(q, np.empty((0, 2), np.float32), index, none, none, pages, 2, 5)
    assert chosen.shape == ops.entry_places(chosen, none, pages, 2).shape == (0, 5)
    gate = ops.matrix("bf16", np.zeros((6, 128), np.uint16))
    assert ops.gate(rows, gate, None, None, none, 2, 1.0)[0].shape == (0, 2)
    assert not ops.has_nonfinite(rows)
    sink = np.zeros(m, np.float32)
    absent = [(cache, np.empty((3, 0), np.int32)), (cache, np.full((3, 7), -1, np.int32))]
    assert ops.attend(h, sink, [(cache, np.empty((0, 9), np.int32))]).shape == h.shape
    assert not ops.attend(np.ones((3, m, 128), np.float32), sink, absent).any()


WRONG = {
    "float64": lambda o, x: o.act_quant(x.astype(np.float64)),
    "one dimension": lambda o, x: o.act_quant(x[0]),
    "short norm": lambda o, x: o.rmsnorm(x, np.ones(127, np.float32), 1e-6),
    "int64 tokens": lambda o, x: o.embed(np.zeros((3, 8), np.uint16), np.zeros(3, np.int64), 4),
    "other angles": lambda o, x: o.rotate(x[:, None, :].copy(), rope_of([1], 64)),
    "too many angles": lambda o, x: o.rotate(x[:, None, :].copy(), rope_of([1, 2], 256)),
    "keys of another size": lambda o, x: o.encode_keys(x, o.key_cache(4, 192, 64), i32([0, 1])),
    "too few places": lambda o, x: o.encode_keys(x, o.key_cache(4, 128, 64), i32([0])),
    "attend another size": lambda o, x: o.attend(
        x[:, None, :].copy(), np.zeros(1, np.float32), [(o.key_cache(4, 192, 64), i32([[0], [0]]))]),
    "head size not a power of two": lambda o, x: o.index_query(np.zeros((2, 1, 96), np.float32), rope_of([1, 2], 64)),
    "entries beyond the pages": lambda o, x: o.index_select(
        x[:, None, :64].copy(), np.zeros((2, 1), np.float32), o.index_cache(8, 64), i32([0, 0]), i32([9, 1]),
        i32([[0, 1]]), 4, 2),
    "fixed experts of another number": lambda o, x: o.gate(
        x, o.matrix("bf16", np.zeros((6, 128), np.uint16)), None, np.zeros((3, 3), np.int64), i32([0, 1]), 2, 1.0),
    "more experts than there are": lambda o, x: o.gate(
        x, o.matrix("bf16", np.zeros((6, 128), np.uint16)), None, None, i32([0, 1]), 7, 1.0),
    "ring of another width": lambda o, x: o.compress_store(
        x, x, np.zeros((4, 128), np.float32), i32([0, 1]), Ring(*np.zeros((2, 8, 64), np.float32)), i32([0, 1])),
    "seventeen streams": lambda o, x: o.hc_pre(
        np.zeros((1, 17, 8), np.float32), connection(o, np.random.default_rng(0), 17, 8)),
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_wrong_arrays_are_refused(call):
    with pytest.raises(InputError, match="expected .* found"):
        call(ALL[0], np.ones((2, 128), np.float32))

"""The backends against each other, and each against itself: rows, runs, threads, instruction sets, inputs kept."""

from dataclasses import replace

import numpy as np
import ops_cases as make
import pytest
from compare import rel_l2, rel_l2_rows, same_bits

from dsv4.errors import ConfigError
from dsv4.ops import open_ops
from dsv4.ops.reference import ReferenceOps

FLIPPED = 0.1  # a row in which one value was rounded the other way is off by less than this

CASES = [
    *(make.embed(t, *shape) for t in (1, 5, 130) for shape in ((37, 48, 4), (11, 256, 1), (7, 33, 3))),
    *(make.linear("fp8", t, *shape) for t in (1, 3, 17, 130) for shape in (
        (200, 384, 1, True), (200, 384, 1, False), (1, 128, 1, True), (130, 136, 1, False), (64, 1024, 8, True),
        (96, 640, 1, True), (33, 1536, 4, False))),
    *(make.linear("fp4", t, *shape) for t in (1, 2, 6, 130) for shape in (
        (96, 256, 1, True), (33, 32, 1, False), (128, 1024, 8, True), (40, 2080, 1, True), (257, 512, 2, False))),
    *(make.linear("bf16", t, *shape, False) for t in (1, 5, 64) for shape in (
        (16, 64, 1), (7, 33, 1), (50, 16, 1), (640, 256, 1), (9, 1100, 1), (16, 1024, 4))),
    *(make.linear("f32", t, *shape, False) for t in (1, 8, 13) for shape in ((24, 192, 1), (4, 1024, 1), (3, 5, 1))),
    *(make.grouped_linear(t, *shape) for t in (1, 7, 130) for shape in (
        (3, 256, 64), (2, 128, 16), (8, 64, 128), (1, 384, 200))),
    *(make.act_quant(t, k) for t in (1, 6, 130) for k in (31, 100, 128, 136, 384)),
    *(make.rmsnorm(t, k) for t in (1, 6, 130) for k in (32, 96, 100, 1000, 4096)),
    *(make.connections(t, *shape) for t in (1, 3, 65) for shape in (
        (4, 48, 1e-6, 1e-6), (4, 256, 1e-2, 1e-4), (2, 33, 1e-4, 1e-2), (1, 16, 1e-6, 1e-6))),
    *(make.rotation(t, *shape) for t in (1, 5, 130) for shape in (
        (1, 64, 64), (3, 96, 64), (4, 128, 64), (2, 40, 8), (8, 512, 64), (3, 30, 6))),
    *(make.keys(t, *shape) for t in (1, 5, 130) for shape in ((128, 64), (192, 64), (512, 64), (72, 8))),
    *(make.store_keys(t, *shape) for t in (1, 5, 130) for shape in ((128, 64), (192, 64), (512, 64))),
    *(make.attend(t, *shape, 1) for t in (1, 6, 33) for shape in (
        (1, 128, 64, (40,)), (4, 128, 64, (16, 20)), (3, 128, 64, (1, 5)), (8, 512, 64, (128, 97)),
        (2, 96, 32, (300,)))),
    *(make.attend(t, 4, 128, 64, (30, 65), scale) for t in (1, 6) for scale in (10, 500)),  # scores that overflow e^s
    *(make.compression(t, *shape) for t in (1, 9, 70) for shape in ((4, 128), (4, 64), (16, 128), (128, 64), (6, 33))),
    *(make.index_keys(t, *shape) for t in (1, 6, 130) for shape in ((8, 128, 64), (4, 64, 64), (3, 32, 8))),
    *(make.index_select(t, *shape, kind) for kind in ("any", "ties", "dead") for t in (1, 6, 40) for shape in (
        (8, 128, 30, 8, 8), (4, 64, 200, 16, 64), (3, 64, 100, 128, 64), (1, 32, 50, 5, 4))),
    make.index_select(13, 64, 128, 700, 512, 64, "any"),
    *(make.entry_places(t, n, 8) for t in (1, 6, 130) for n in (1, 17)),
    *(make.ring_places(t, span, 21) for t in (1, 6, 130) for span in (1, 16)),
    *(make.visible_places(t, n, 8) for t in (1, 6, 130) for n in (1, 8, 37)),
    *(make.best(t, vocab, kind) for t, vocab in ((1, 1), (2, 2), (1, 31), (5, 1297), (130, 640)) for kind in ("any", "ties", "wide")),
    *(make.gate(t, *shape, kind) for kind in ("bias", "plain", "fixed", "ties") for t in (1, 6, 130) for shape in (
        (18, 64, 4), (8, 256, 2), (258, 512, 8))),
    *(make.swiglu(t, inter, limit, weighted) for t in (1, 6, 130) for inter in (100, 128)
      for limit in (0, 7.0) for weighted in (False, True)),
    *(make.moe(t, *shape) for t in (1, 6, 130) for shape in (
        (8, 256, 128, 2, 1, 10.0), (6, 128, 1024, 3, 8, 0), (4, 160, 96, 1, 1, 1.0), (16, 256, 256, 6, 2, 2.0))),
]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request):
    return open_ops(request.param, threads=2)


@pytest.fixture(scope="module")
def cpu():
    return open_ops("cpu", threads=2)


def mistakes(case, found, expected) -> list[str]:
    """What of `found` is not as close to `expected` as the case asks, with the numbers measured."""
    wrong = []
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        have = found[name]
        if have.dtype != want.dtype or have.shape != want.shape:
            wrong.append(f"{name}: {have.dtype} {have.shape} in place of {want.dtype} {want.shape}")
        elif want.dtype != np.float32 or not case.limit:
            if not np.array_equal(have, want):
                wrong.append(f"{name}: {np.mean(have != want):.2%} of {want.size} values differ")
        elif case.flips:
            errors = rel_l2_rows(have, want)
            flipped = int(np.sum(~(errors <= case.limit)))
            if flipped > max(1, case.flips * len(want)) or not errors.max() <= FLIPPED:
                wrong.append(f"{name}: {flipped} of {len(want)} rows beyond {case.limit}, the worst {errors.max():.3g}")
        elif not rel_l2(have, want) <= case.limit:
            wrong.append(f"{name}: rel_l2 {rel_l2(have, want):.3g} beyond {case.limit}")
    return wrong


@each_case
def test_cpu_computes_what_the_reference_does(case, cpu):
    assert not mistakes(case, case(cpu), case(ReferenceOps()))


@each_case
def test_a_row_alone_has_the_same_bits(case, ops):
    every, n = case(ops), case.rows
    for start, stop in {(0, 1), (n // 2, min(n, n // 2 + 3)), (n - 1, n)}:
        for name, found in case(ops, slice(start, stop)).items():
            same_bits(found, every[name][start:stop], f"{name}, rows {start}..{stop - 1} of {n}")


@each_case
def test_runs_repeat_and_inputs_stay(case, ops):
    before = {name: np.copy(a) for name, a in case.inputs.items() if a is not None}
    first, second = case(ops), case(ops)
    for name in first:
        same_bits(second[name], first[name], name)
    for name, a in before.items():
        same_bits(case.inputs[name], a, f"input {name}")


@pytest.fixture(scope="module")
def other_cpus():
    """The CPU backend on other numbers of threads, and on each instruction set that this machine has."""
    from dsv4._cpu import instruction_sets
    from dsv4.ops.cpu import CpuOps

    return [CpuOps(1), CpuOps(3), *(CpuOps(2, isa) for isa in instruction_sets())]


@each_case
def test_threads_and_instruction_sets_do_not_show(case, cpu, other_cpus):
    expected = case(cpu)
    for other in other_cpus:
        for name, found in case(other).items():
            same_bits(found, expected[name], f"{name}, {other.team.isa}, {other.team.threads} threads")


def tree(parts):
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "bf16"])
@pytest.mark.parametrize("slices", [1, 2, 8])
def test_slices_are_added_as_a_tree(ops, fmt, slices):
    """Each slice alone, as a rank computes it, and the tree over them: the same bits as the whole."""
    case = make.linear(fmt, 5, 100, 1024, slices, False)
    x, (weight, scale) = case.inputs["x"], (case.inputs["weight"], case.inputs["scale"])
    parts = []
    for i in range(slices):
        cut = [None if a is None else one_of(a, slices, i, axis=1) for a in (weight, scale)]
        parts.append(ops.linear(one_of(x, slices, i, axis=1), ops.matrix(fmt, *cut)))
    same_bits(case(ops)["y"], ops.to_host(tree(parts)))


def one_of(array, slices, i, axis):
    """Slice i of `slices` equal ones."""
    return np.ascontiguousarray(np.split(array, slices, axis)[i])


def random_experts(rng, d, inter):
    """Five experts' weights as (w1, w2, w3) of (weight, scale); the last is the shared one."""
    shapes = [(inter, d), (d, inter), (inter, d)]
    return [[make.weights(rng, fmt, *shape) for shape in shapes] for fmt in ("fp4",) * 4 + ("fp8",)]


def bank_of(ops, experts):
    made = [tuple(ops.matrix(fmt, *w) for w in e) for fmt, e in zip(("fp4",) * 4 + ("fp8",), experts)]
    return made, ops.bank(made[:4], made[4])


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_of_experts_are_added_as_a_tree(ops, slices):
    rng = make.seeded("slices of experts")
    experts = random_experts(rng, 256, 512)
    ids = np.sort([rng.permutation(4)[:3] for _ in range(6)], axis=1).astype(np.int32)
    x, weights = make.normal(rng, 6, 256), rng.random((6, 3)).astype(np.float32)
    whole = ops.moe(x, ids, weights, bank_of(ops, experts)[1], 2.0, slices)

    def cut(i):
        return [[tuple(one_of(a, slices, i, axis) for a in w) for w, axis in zip(e, (0, 1, 0))] for e in experts]

    parts = [ops.moe(x, ids, weights, bank_of(ops, cut(i))[1], 2.0, 1) for i in range(slices)]
    same_bits(ops.to_host(whole), ops.to_host(tree(parts)))


@pytest.mark.parametrize("limit", [0, 2.0])
def test_experts_are_the_sum_of_linears(ops, limit):
    rng = make.seeded("sum of linears")
    made, bank = bank_of(ops, random_experts(rng, 256, 128))
    x, ids = make.normal(rng, 4, 256), np.array([[0, 3], [1, 2], [0, 1], [2, 3]], np.int32)
    weights = rng.random((4, 2)).astype(np.float32)

    def expert(row, number, weight):
        w1, w2, w3 = made[number]
        xq = ops.act_quant(x[row : row + 1])
        g, u = ops.to_host(ops.linear(xq, w1)), ops.to_host(ops.linear(xq, w3))
        if limit:
            g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        a = (g / (1 + np.exp(-g.astype(np.float64))) * u * weight).astype(np.float32)
        return ops.to_host(ops.linear(ops.act_quant(a), w2))[0]

    expected = [
        expert(t, ids[t, 0], weights[t, 0]) + expert(t, ids[t, 1], weights[t, 1]) + expert(t, 4, 1) for t in range(4)
    ]
    assert rel_l2(ops.moe(x, ids, weights, bank, limit, 1), np.stack(expected)) <= 1e-6


def test_places_of_entries(ops):
    """Pages of 8 entries; slot 1 holds pages 5, 0, 3."""
    pages = ops.table(np.array([[7, 2, 4], [5, 0, 3]], np.int32))
    entries, slots = np.array([[0, 7, 8, -1], [23, -1, 9, 16]], np.int32), np.array([1, 0], np.int32)
    found = ops.entry_places(entries, slots, pages, 8)
    assert ops.to_host(found).tolist() == [[40, 47, 0, -1], [39, -1, 17, 32]]


def test_each_slot_has_its_own_entries(ops):
    """Two slots with the same entries in opposite orders choose opposite entries."""
    key = make.normal(make.seeded("slots"), 6, 64)
    cache = ops.index_cache(12, 64)
    ops.encode_index(np.concatenate([key, key[::-1]]), cache, np.arange(12, dtype=np.int32))
    fourth = ops.decode_index(cache, np.array([4], np.int32))  # entry 4 of slot 0, entry 1 of slot 1
    q = np.repeat(fourth[:, None], 2, axis=0)
    pages = ops.table(np.array([[0, 1], [2, 3]], np.int32))
    one, six = np.ones((2, 1), np.float32), np.full(2, 6, np.int32)
    found = ops.index_select(q, one, cache, np.array([0, 1], np.int32), six, pages, 3, 1)
    assert ops.to_host(found).tolist() == [[4], [1]]


def test_in_place(ops):
    case = make.rotation(5, 3, 96, 64)
    rope = ops.rope_angles(case.inputs["positions"], ops.vector(case.inputs["theta"]))
    for work in (ops.rotate, lambda x, rope: ops.query(x, rope, 1e-6)):
        x = case.inputs["x"].copy()
        result = work(x, rope)
        assert np.shares_memory(ops.to_host(result), x) and not np.array_equal(x, case.inputs["x"])


def test_no_rows(ops):
    """Entries that no row completes: all of the compressor's ops take nothing and return nothing."""
    for case in (
        make.rmsnorm(2, 64), make.rotation(2, 1, 128, 64), make.keys(2, 128, 64), make.compression(2, 4, 64),
        make.index_keys(2, 4, 64, 64), make.linear("bf16", 2, 7, 33, 1, False),
    ):  # fmt: skip
        assert all(len(result) == 0 for result in case(ops, slice(0, 0)).values())


def test_only_the_places_named_are_written(ops):
    k, where = np.ones((3, 128), np.float32), np.array([5, 0, 2], np.int32)
    cache, index = ops.key_cache(7, 128, 64), ops.index_cache(7, 128)
    ops.encode_keys(k, cache, where)
    ops.encode_index(k, index, where)
    for array in (*cache, *index):
        assert np.flatnonzero(ops.to_host(array).any(axis=1)).tolist() == [0, 2, 5]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_is_found(ops, bad):
    x = np.zeros((3, 50), np.float32)
    assert not ops.has_nonfinite(x)
    x[2, 49] = bad
    assert ops.has_nonfinite(x)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_quantisers_do_not_hide_nonfinite_values(ops, bad):
    x = np.ones((2, 192), np.float32)
    x[1, 70] = bad
    cache = ops.key_cache(2, 192, 64)
    ops.encode_keys(x, cache, np.arange(2, dtype=np.int32))
    for result in (ops.act_quant(x), ops.decode_keys(cache, np.arange(2, dtype=np.int32))):
        assert ops.has_nonfinite(result[1:]) and not ops.has_nonfinite(result[:1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 333, 899])
def test_a_lead_tells_of_logits_that_are_not_finite(ops, bad, at):
    logits = make.best(3, 900, "any").inputs["logits"].copy()
    expected = ops.best(logits)
    logits[1, at] = bad
    for found, clean in zip(ops.best(logits), expected):
        same_bits(found[[0, 2]], clean[[0, 2]])
    ids, lead = ops.best(logits)
    assert np.isnan(lead[1]) and 0 <= ids[1] < 900
    assert np.isnan(ops.best(np.full((1, 3), bad, np.float32))[1]).all()


def test_unknown_backend():
    with pytest.raises(ConfigError, match="expected one of cpu, cuda, reference; found 'gpu'"):
        open_ops("gpu")


# ---------------------------------------------------------------------------------------------- these tests can fail
class LastEntryHidden(ReferenceOps):
    def index_select(self, q, w, cache, slots, visible, *rest):
        return super().index_select(q, w, cache, slots, np.maximum(visible - 1, 0), *rest)


class PagesInOrder(ReferenceOps):
    def index_select(self, q, w, cache, slots, visible, pages, *rest):
        return super().index_select(q, w, cache, slots, visible, np.sort(pages, axis=None).reshape(pages.shape), *rest)


class FirstSlotOnly(ReferenceOps):
    def compress_pool(self, ring, slots, *rest):
        return super().compress_pool(ring, 0 * slots, *rest)


class PlaceOfNone(ReferenceOps):
    def entry_places(self, entries, *rest):
        return super().entry_places(np.maximum(entries, 0), *rest)


class NothingBeforeTheStart(ReferenceOps):
    def ring_places(self, slots, positions, span, capacity):
        return super().ring_places(slots, positions + capacity, span, capacity)


class AllEntriesVisible(ReferenceOps):
    def visible_places(self, visible, n, *rest):
        return super().visible_places(np.full_like(visible, n), n, *rest)


class LastOfEqual(ReferenceOps):
    def best(self, logits):
        ids, lead = super().best(logits[:, ::-1])
        return (logits.shape[1] - 1 - ids).astype(np.int32), lead


class StreamsSummed(ReferenceOps):
    def mean_streams(self, h):
        return h.sum(axis=1)


class NormWithoutEpsilon(ReferenceOps):
    def rmsnorm(self, x, w, eps):
        return super().rmsnorm(x, w, 1e-30)


class WindowLeftOut(ReferenceOps):
    def attend(self, q, sink, parts):
        return super().attend(q, sink, parts[:1])


class SharedExpertLeftOut(ReferenceOps):
    def moe(self, x, ids, weights, bank, *rest):
        w1, w2, w3 = bank.shared
        nothing = replace(w2, weight=np.zeros_like(w2.weight))
        return super().moe(x, ids, weights, bank._replace(shared=(w1, nothing, w3)), *rest)


class RopePartAsCode(ReferenceOps):
    """The rope dims rounded to e4m3 as well."""

    def encode_keys(self, k, cache, where):
        super().encode_keys(self.act_quant(k), cache, where)


MUTANTS = {
    LastEntryHidden: make.index_select(6, 4, 64, 200, 16, 64, "any"),
    PagesInOrder: make.index_select(6, 4, 64, 200, 16, 64, "any"),
    FirstSlotOnly: make.compression(9, 16, 128),
    PlaceOfNone: make.entry_places(6, 17, 8),
    NothingBeforeTheStart: make.ring_places(6, 16, 21),
    AllEntriesVisible: make.visible_places(6, 37, 8),
    LastOfEqual: make.best(5, 1297, "ties"),
    StreamsSummed: make.connections(3, 4, 48, 1e-6, 1e-6),
    NormWithoutEpsilon: make.rmsnorm(6, 96),
    WindowLeftOut: make.attend(6, 4, 128, 64, (16, 20), 1),
    SharedExpertLeftOut: make.moe(6, 8, 256, 128, 2, 1, 10.0),
    RopePartAsCode: make.store_keys(5, 128, 64),
}


@pytest.mark.parametrize("wrong", MUTANTS, ids=lambda wrong: wrong.__name__)
def test_a_wrong_backend_is_rejected(wrong):
    case = MUTANTS[wrong]
    assert mistakes(case, case(wrong()), case(ReferenceOps()))


class Together(ReferenceOps):
    """One product for all rows: what a row gets depends on the others."""

    def act_quant(self, x):
        return super().act_quant(x.reshape(1, -1)).reshape(x.shape)


def test_rows_that_depend_on_each_other_are_seen():
    with pytest.raises(AssertionError, match="differ"):
        test_a_row_alone_has_the_same_bits(make.act_quant(6, 100), Together())

"""What the tests of experts share, whatever computes them: layers, routing, and what must hold on any backend."""

import numpy as np
from compare import rel_l2, same_bits
from cpu_cases import inputs, weights
from ops_cases import moe_in_calls

from dsv4.ops.reference import ReferenceOps

# d, inner, experts, per row, slices, limit, format of the routed experts
CASES = [
    (256, 512, 6, 2, 4, 10.0, "fp4"),
    (384, 160, 3, 3, 1, 0.0, "fp4"),  # the last block of 128 is short
    (160, 1024, 9, 4, 8, 1.0, "fp4"),
    (256, 256, 4, 1, 2, 10.0, "fp8"),
]


def layer(d, inner, experts, fmt):
    """(w1, w2, w3) arguments of ops.matrix for every expert and the shared one."""

    def one(fmt, seed):
        return weights(fmt, inner, d, seed), weights(fmt, d, inner, seed + 1), weights(fmt, inner, d, seed + 2)

    return [one(fmt, 10 * e) for e in range(experts)], one("fp8", 10 * experts)


def bank_of(ops, layer):
    experts, shared = layer
    return ops.bank([tuple(ops.matrix(*w) for w in e) for e in experts], tuple(ops.matrix(*w) for w in shared))


def routing(t, experts, k):
    rng = np.random.default_rng([t, experts, k])
    ids = np.sort(np.argsort(rng.random((t, experts)), axis=1)[:, :k], axis=1).astype(np.int32)
    return ids, rng.random((t, k), np.float32)


def in_calls(ops, case, t, order):
    """A layer in one call and in several: with a lane for each choice in the given order of experts, and ascending with one."""
    d, inner, experts, k, slices, limit, fmt = case
    bank, given = bank_of(ops, layer(d, inner, experts, fmt)), (inputs(t, d), *routing(t, experts, k))
    calls = [order[i : i + 2] for i in range(0, experts, 2)]
    sizes = limit, slices
    yield "whole", ops.moe(*given, bank, *sizes)
    yield "any order", moe_in_calls(ops, given, bank, *sizes, k + 1, calls)
    yield "nobody at first", moe_in_calls(ops, given, bank, *sizes, k + 1, [[], *calls])
    yield "ascending", moe_in_calls(ops, given, bank, *sizes, 1, [range(i, i + 3) for i in range(0, experts, 3)])


def one_by_one(ops, arrays, x, ids, weight, limit, slices):
    """Ops.moe by the small ops: each slice sums its experts from the lowest id, then the tree of slices."""
    routed, shared = arrays

    def part(arrays, i):
        fmt, *arrays = arrays
        cut = [np.ascontiguousarray(np.split(a, slices, axis=1)[i]) if slices > 1 else a for a in arrays]
        return ops.matrix(fmt, *cut)

    def expert(row, w, factor):
        w1, w2, w3 = w
        row = ops.act_quant(row)
        act = ops.swiglu(ops.linear(row, ops.matrix(*w1)), ops.linear(row, ops.matrix(*w3)), factor, limit)
        pieces = np.split(ops.act_quant(act), slices, axis=1)
        return [ops.linear(np.ascontiguousarray(pieces[i]), part(w2, i)) for i in range(slices)]

    def one(row, ids, weight):
        sums = [np.zeros_like(row) for _ in range(slices)]
        for parts in [*(expert(row, routed[e], weight[j : j + 1]) for j, e in enumerate(ids)), expert(row, shared, None)]:
            sums = [s + p for s, p in zip(sums, parts)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        return sums[0]

    return np.concatenate([one(x[t : t + 1], ids[t], weight[t]) for t in range(len(x))])


def all_to_one_expert(ops):
    """Every row of many chooses the same expert, and gets what it gets alone."""
    bank, x = bank_of(ops, layer(128, 128, 5, "fp4")), inputs(150, 128)
    ids, weight = np.full((150, 1), 3, np.int32), np.ones((150, 1), np.float32)
    y = ops.moe(x, ids, weight, bank, 10.0, 1)
    for t in (0, 63, 64, 149):
        r = slice(t, t + 1)
        same_bits(y[r], ops.moe(x[r], ids[r], weight[r], bank, 10.0, 1))


def odd_ids(ops, bound):
    """Ids above 255, where a byte ends, and odd above 256, where bf16 rounds. bound: of the relative error."""
    arrays = layer(32, 32, 391, "fp4")
    x, ids = inputs(4, 32), np.int32([[0, 255, 257], [256, 383, 390], [1, 127, 383], [31, 32, 33]])
    weight = np.random.default_rng(1).random((4, 3), np.float32)
    reference = ReferenceOps()
    expected = reference.moe(x, ids, weight, bank_of(reference, arrays), 10.0, 1)
    assert rel_l2(ops.moe(x, ids, weight, bank_of(ops, arrays), 10.0, 1), expected) <= bound

"""The CUDA backend's experts and routing, run on the CPU: linears and activations in a fixed order, whatever the rows."""

import numpy as np
import pytest
from compare import rel_l2, same_bits
from cpu_cases import inputs, weights
from cuda_ops import HostOps, emulated, launch
from emulation.launcher import REVERSE
from moe_cases import CASES, all_to_one_expert, bank_of, in_calls, layer, odd_ids, one_by_one, routing

from dsv4.errors import CheckpointError, InputError
from dsv4.ops import cuda_dense
from dsv4.ops.reference import ReferenceOps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy(cuda, case):
    d, inner, experts, k, slices, limit, fmt = case
    reference, arrays = ReferenceOps(), layer(d, inner, experts, fmt)
    for t in (1, 9, 35):
        x, (ids, weight) = inputs(t, d), routing(t, experts, k)
        found = cuda.moe(x, ids, weight, bank_of(cuda, arrays), limit, slices)
        assert rel_l2(found, reference.moe(x, ids, weight, bank_of(reference, arrays), limit, slices)) <= 3e-7, t


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_are_linears_in_ascending_order(cuda, case):
    """Against the small ops, bit by bit: each slice sums its experts from the lowest id, then the tree."""
    d, inner, experts, k, slices, limit, fmt = case
    arrays, given = layer(d, inner, experts, fmt), (inputs(3, d), *routing(3, experts, k))
    same_bits(cuda.moe(*given, bank_of(cuda, arrays), limit, slices), one_by_one(cuda, arrays, *given, limit, slices))


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_rows_do_not_see_each_other(cuda, case):
    d, inner, experts, k, slices, limit, fmt = case
    bank, (ids, weight), x = bank_of(cuda, layer(d, inner, experts, fmt)), routing(130, experts, k), inputs(130, d)
    whole = cuda.moe(x, ids, weight, bank, limit, slices)
    for t in (1, 2, 5, 8, 9, 32, 33, 64, 65, 129):
        same_bits(cuda.moe(x[:t], ids[:t], weight[:t], bank, limit, slices), whole[:t], f"first {t} rows")
    for start, stop in ((129, 130), (70, 71), (60, 66), (101, 130)):
        r = slice(start, stop)
        same_bits(cuda.moe(x[r], ids[r], weight[r], bank, limit, slices), whole[r], f"rows {start} to {stop}")


@pytest.mark.emulated
def test_any_order_of_threads():
    d, inner, experts, k, slices, limit, fmt = CASES[0]
    arrays, x, (ids, weight) = layer(d, inner, experts, fmt), inputs(34, d), routing(34, experts, k)
    found = []
    for order in (0, REVERSE, 11):
        ops = HostOps(emulated(order=order))
        bank = bank_of(ops, arrays)
        found.append([ops.moe(x[:t], ids[:t], weight[:t], bank, limit, slices) for t in (2, 10, 34)])
    for other in found[1:]:
        for a, b in zip(found[0], other):
            same_bits(b, a)


def test_every_row_to_one_expert(cuda):
    all_to_one_expert(cuda)


def test_many_experts_by_odd_ids(cuda):
    odd_ids(cuda, 3e-7)


def test_outputs_in_several_goes(cuda, monkeypatch):
    """Where what the experts add has no room, outputs are computed so many at a time."""
    d, inner, experts, k, slices, limit, fmt = CASES[1]
    bank, x, (ids, weight) = bank_of(cuda, layer(d, inner, experts, fmt)), inputs(40, d), routing(40, experts, k)
    whole = cuda.moe(x, ids, weight, bank, limit, slices)
    monkeypatch.setattr(cuda_dense, "EXPERT_SCRATCH", 4 * 40 * (k + 1) * 256)
    same_bits(cuda.moe(x, ids, weight, bank, limit, slices), whole)


def test_an_id_of_no_expert_shows_in_its_row_alone(cuda):
    bank, x = bank_of(cuda, layer(128, 128, 4, "fp4")), inputs(12, 128)
    ids, weight = routing(12, 4, 2)
    whole = cuda.moe(x, ids, weight, bank, 10.0, 1)
    for wrong in (-1, 4, 2**30):
        broken = ids.copy()
        broken[5, 1] = wrong
        y = cuda.moe(x, broken, weight, bank, 10.0, 1)
        assert np.isnan(y[5]).all()
        same_bits(np.delete(y, 5, axis=0), np.delete(whole, 5, axis=0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_do_not_show(cuda, case, monkeypatch):
    """Experts as they come; also where outputs are computed in several goes."""
    for t, scratch in ((1, None), (3, None), (40, None), (40, 4 * 40 * (case[3] + 1) * case[4] * 128)):
        if scratch:
            monkeypatch.setattr(cuda_dense, "EXPERT_SCRATCH", scratch)
        (_, whole), *others = in_calls(cuda, case, t, np.random.default_rng(t).permutation(case[2]).tolist())
        for name, y in others:
            same_bits(y, whole, f"{name}, {t} rows")


def test_a_nan_in_a_row_is_its_own(cuda):
    bank, x = bank_of(cuda, layer(128, 128, 4, "fp4")), inputs(12, 128)
    ids, weight = routing(12, 4, 2)
    x[3, 77] = np.nan
    finite = np.isfinite(cuda.moe(x, ids, weight, bank, 10.0, 1)).all(axis=1)
    assert not finite[3] and np.delete(finite, 3).all()


def test_no_rows(cuda):
    bank = bank_of(cuda, layer(128, 128, 2, "fp4"))
    y = cuda.moe(inputs(0, 128), np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32), bank, 10.0, 1)
    assert y.shape == (0, 128)
    assert cuda.swiglu(inputs(0, 40), inputs(0, 40), None, 0.0).shape == (0, 40)
    w = cuda.matrix(*weights("bf16", 4, 128))
    ids, weight = cuda.gate(inputs(0, 128), w, None, None, np.zeros(0, np.int32), 2, 1.0)
    assert ids.shape == weight.shape == (0, 2)


@pytest.mark.parametrize("t, experts, k, height", [(1, 8, 2, 8), (9, 70, 6, 8), (40, 3, 2, 8), (130, 33, 5, 64), (5, 1, 1, 32)])
def test_plan(t, experts, k, height, device_ops):
    """Entries by expert, rows ascending; every output is written, whatever was there."""
    ids, weight = routing(t, experts, k)
    ids[t // 2, 0] = experts if t > 1 else -1
    n, most = t * k, min(experts, t * k) + t * k // height
    rows, place, count = np.full(n + t, 77, np.int32), np.full((t, k), 77, np.int32), np.full(1, 77, np.int32)
    factor, tiles = np.full(n + t, 77, np.float32), np.full((most, 3), 77, np.int32)
    launcher = device_ops.launcher
    kernel = launcher.compile("moe.cu").kernel("plan")
    sizes = map(np.int32, (t, k, experts, height))
    args = ids, weight, rows, factor, place, tiles, count, *sizes
    launch(launcher, kernel, (1,), (512,), args, shared=8 * experts)
    choices = [(e, i) for i, e in enumerate(ids.ravel()) if 0 <= e < experts]
    order = [i for _, i in sorted(choices)]
    expected = np.full(n, -1, np.int32)
    expected[order] = np.arange(len(order))
    same_bits(place.ravel(), expected)
    same_bits(rows[: len(order)], np.int32(order) // np.int32(k))
    same_bits(factor[: len(order)], weight.ravel()[order])
    same_bits(rows[n:], np.arange(t, dtype=np.int32))
    assert (factor[n:] == 1).all()
    found = []
    for e in range(experts):
        own = [expected[i] for other, i in choices if other == e]
        found += [(e, own[at], min(height, len(own) - at)) for at in range(0, len(own), height)]
    assert count[0] == len(found) <= most and np.array_equal(tiles[: len(found)], found)


# ---------------------------------------------------------------------------------------------- activation
@pytest.mark.parametrize("limit", (0.0, 2.0))
@pytest.mark.parametrize("n", (1, 37, 600))
def test_swiglu(cuda, n, limit):
    g, u = 8 * inputs(6, n, 1), 3 * inputs(6, n, 2)
    g[0], g[1] = -200, 200
    weight = np.linspace(0.1, 2, 6, dtype=np.float32)
    for w in (None, weight):
        y = cuda.swiglu(g, u, w, limit)
        assert rel_l2(y, ReferenceOps().swiglu(g, u, w, limit)) <= 3e-7
        for t in range(6):
            same_bits(cuda.swiglu(g[t : t + 1], u[t : t + 1], None if w is None else w[t : t + 1], limit), y[t : t + 1])


def test_swiglu_does_not_hide_a_nan(cuda):
    for which in range(2):
        g, u = inputs(1, 20), inputs(1, 20)
        (g, u)[which][0, 17] = np.nan
        assert np.isnan(cuda.swiglu(g, u, None, 1.0)[0, 17])


# ---------------------------------------------------------------------------------------------- routing
def gate_inputs(t, experts, d=64):
    return inputs(t, d), weights("bf16", experts, d), np.random.default_rng(experts).standard_normal(experts).astype(np.float32)


@pytest.mark.parametrize("t, experts, k", [(1, 8, 2), (7, 160, 6), (33, 257, 8), (3, 5, 5), (2, 40, 32)])
def test_gate(cuda, t, experts, k):
    reference = ReferenceOps()
    x, w, bias = gate_inputs(t, experts)
    tokens = np.arange(t, dtype=np.int32)
    fixed = np.argsort(np.random.default_rng(k).random((t, experts)), axis=1)[:, :k].astype(np.int64)
    for b, f in ((bias, None), (None, None), (None, fixed)):
        ids, weight = cuda.gate(x, cuda.matrix(*w), b, f, tokens, k, 1.5)
        expected = reference.gate(x, reference.matrix(*w), b, f, tokens, k, 1.5)
        assert np.array_equal(ids, expected[0]) and ids.dtype == np.int32
        assert rel_l2(weight, expected[1]) <= 1e-6
        for row in (0, t - 1):
            r = slice(row, row + 1)
            alone = cuda.gate(x[r], cuda.matrix(*w), b, f, tokens[r], k, 1.5)
            same_bits(alone[0], ids[r])
            same_bits(alone[1], weight[r])


def test_equal_scores_go_to_the_lower_id(cuda):
    fmt, w = weights("bf16", 64, 32)
    w[:] = w[7]
    ids, weight = cuda.gate(inputs(3, 32), cuda.matrix(fmt, w), None, None, np.zeros(3, np.int32), 6, 1.0)
    assert (ids == np.arange(6)).all() and np.allclose(weight, 1 / 6)
    bias = np.zeros(64, np.float32)
    bias[[50, 40, 61]] = 1
    bias[[0, 9]] = -0.0
    ids, _ = cuda.gate(inputs(3, 32), cuda.matrix(fmt, w), bias, None, np.zeros(3, np.int32), 5, 1.0)
    assert (ids == [0, 1, 40, 50, 61]).all()


def test_a_nan_score_is_chosen_last(cuda):
    x, (fmt, w), _ = gate_inputs(1, 9)
    w[4, 3] = 0x7FC0
    ids, _ = cuda.gate(x, cuda.matrix(fmt, w), None, None, np.zeros(1, np.int32), 8, 1.0)
    assert (ids == [0, 1, 2, 3, 5, 6, 7, 8]).all()
    ids, weight = cuda.gate(x, cuda.matrix(fmt, w), None, None, np.zeros(1, np.int32), 9, 1.0)
    assert (ids == np.arange(9)).all() and np.isnan(weight).all()


def test_wrong_inputs_are_named(cuda):
    routed, shared = layer(128, 128, 2, "fp4")
    bank = bank_of(cuda, (routed, shared))
    x, ids, weight = inputs(3, 128), np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)
    gate, where = cuda.matrix(*weights("bf16", 4, 128)), np.arange(3, dtype=np.int32)
    for call, error, words in [
        (lambda: cuda.moe(x, ids.astype(np.int64), weight, bank, 1.0, 1), InputError, "int32"),
        (lambda: cuda.moe(x, ids[:2], weight, bank, 1.0, 1), InputError, "int32"),
        (lambda: cuda.moe(x, ids, weight, bank, 1.0, 2), InputError, "slices"),
        (lambda: cuda.moe_add(np.zeros((3, 2, 1, 128), np.float32), where, x, ids, weight, bank, 1.0, True), InputError, "1 or 3, slices, 128"),
        (lambda: cuda.moe_add(np.zeros((3, 3, 1, 128), np.float32), where[:2], x, ids, weight, bank, 1.0, True), InputError, "where int32"),
        (lambda: cuda.gate(x, gate, None, None, ids[:, 0], 5, 1.0), InputError, "1 to 4"),
        (lambda: bank_of(cuda, (layer(128, 256, 1, "fp4")[0], shared)), CheckpointError, "expert 0, w1"),
        (lambda: bank_of(cuda, (layer(128, 128, 1, "bf16")[0], shared)), CheckpointError, "fp4 or fp8"),
        (lambda: bank_of(cuda, (routed + layer(128, 128, 1, "fp8")[0], shared)), CheckpointError, "expert 2"),
    ]:
        with pytest.raises(error, match=words):
            call()

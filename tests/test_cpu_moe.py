"""The experts on the CPU: linears and activations in a fixed order, whatever the rows, threads and instruction set."""

import numpy as np
import pytest
from compare import rel_l2, same_bits
from cpu_cases import ISAS, inputs, poison, weights
from moe_cases import CASES, all_to_one_expert, bank_of, in_calls, layer, odd_ids, one_by_one, routing
from ops_cases import moe_in_calls

from dsv4.errors import CheckpointError, InputError
from dsv4.ops.cpu import CpuOps
from dsv4.ops.reference import ReferenceOps


@pytest.fixture(params=ISAS)
def cpu(request):
    return CpuOps(threads=2, isa=request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_are_linears_in_ascending_order(cpu, case):
    """Against the small ops, bit by bit: each slice sums its experts from the lowest id, then the tree."""
    d, inner, experts, k, slices, limit, fmt = case
    arrays, given = layer(d, inner, experts, fmt), (inputs(5, d), *routing(5, experts, k))
    same_bits(cpu.moe(*given, bank_of(cpu, arrays), limit, slices), one_by_one(cpu, arrays, *given, limit, slices))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy(case):
    d, inner, experts, k, slices, limit, fmt = case
    cpu, reference, arrays = CpuOps(2), ReferenceOps(), layer(d, inner, experts, fmt)
    x, (ids, weight) = inputs(9, d), routing(9, experts, k)
    found = cpu.moe(x, ids, weight, bank_of(cpu, arrays), limit, slices)
    assert rel_l2(found, reference.moe(x, ids, weight, bank_of(reference, arrays), limit, slices)) <= 1e-6


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_rows_threads_and_instruction_sets_do_not_show(case):
    d, inner, experts, k, slices, limit, fmt = case
    arrays, (ids, weight) = layer(d, inner, experts, fmt), routing(70, experts, k)
    x, expected = inputs(70, d), None
    for isa in ISAS:
        for threads in (1, 3):
            ops = CpuOps(threads, isa)
            bank = bank_of(ops, arrays)
            if expected is None:
                rows = [slice(t, t + 1) for t in range(70)]
                expected = np.concatenate([ops.moe(x[r], ids[r], weight[r], bank, limit, slices) for r in rows])
            for t in (1, 2, 13, 64, 70):
                poison(t, d)
                y = ops.moe(x[:t], ids[:t], weight[:t], bank, limit, slices)
                same_bits(y, expected[:t], f"{isa}, {threads} threads, {t} rows")


def test_every_row_to_one_expert(cpu):
    all_to_one_expert(cpu)


def test_many_experts_by_odd_ids(cpu):
    odd_ids(cpu, 1e-6)


def test_rounded_inputs_from_the_least_to_the_most():
    """FP4 sums of four products are exact for every e4m3 value, subnormals too: no instruction set may round inside."""
    d, inner, experts = 192, 128, 4
    arrays, (ids, weight) = layer(d, inner, experts, "fp4"), routing(70, experts, 2)
    rng = np.random.default_rng(3)
    x = rng.choice([-1, 1], (70, d)) * np.exp2(rng.integers(-9, 9, (70, d))) * rng.choice([1, 1.125, 1.75], (70, d))
    x[:, ::64] = 448
    x[:, 1::64] = 2.0**-9 * np.arange(70)[:, None] % 8
    x[7], x[8, 128:], x[9] = 0, 0, x[9] * 2.0**90
    x = np.minimum(x, 448 * 2.0**90).astype(np.float32)
    x[9] = np.clip(x[9], -448 * 2.0**90, 448 * 2.0**90)
    expected = None
    for isa in ISAS:
        ops = CpuOps(2, isa)
        bank = bank_of(ops, arrays)
        for t in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 70):
            for start in (0, 70 - t):
                r = slice(start, start + t)
                y = ops.moe(x[r], ids[r], weight[r], bank, 10.0, 1)
                if expected is None:
                    rows = [slice(i, i + 1) for i in range(70)]
                    expected = np.concatenate([ops.moe(x[i], ids[i], weight[i], bank, 10.0, 1) for i in rows])
                    assert np.isfinite(expected).all()
                same_bits(y, expected[r], f"{isa}, rows {start} to {start + t}")


def test_scales_from_the_least_to_the_most():
    d, inner = 128, 128
    routed, shared = layer(d, inner, 2, "fp4")
    for w in routed[0]:
        w[2][...] = np.arange(w[2].size).reshape(w[2].shape) % 255
    expected, x = None, inputs(9, d)
    for isa in ISAS:
        ops = CpuOps(1, isa)
        bank = bank_of(ops, (routed, shared))
        for t in (1, 9):
            y = ops.moe(x[:t], np.zeros((t, 1), np.int32), np.ones((t, 1), np.float32), bank, 10.0, 1)
            y[np.isnan(y)] = np.nan
            expected = y if expected is None else expected
            same_bits(y[:1], expected, f"{isa}, {t} rows")


def test_products_beyond_float32():
    """Where four products overflow, their order shows: every instruction set must have the same."""
    d, inner = 128, 128
    routed, shared = layer(d, inner, 1, "fp4")
    routed[0][0][1][...] = routed[0][2][1][...] = 0x77
    shared[0][1][...] = shared[2][1][...] = 0
    ids, weight, found = np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32), []
    x = np.zeros((2, d), np.float32)
    x[0, :4] = 4e37, 4e37, -4e37, -4e37
    x[1] = inputs(1, d)
    for isa in ISAS:
        ops = CpuOps(1, isa)
        found.append(ops.moe(x, ids, weight, bank_of(ops, (routed, shared)), 10.0, 1))
    assert np.isfinite(found[0]).all() and (found[0][0] != 0).all()
    for isa, y in zip(ISAS, found):
        same_bits(y, found[0], isa)


def test_no_rows(cpu):
    bank = bank_of(cpu, layer(128, 128, 2, "fp4"))
    y = cpu.moe(inputs(0, 128), np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32), bank, 10.0, 1)
    assert y.shape == (0, 128)
    assert cpu.swiglu(inputs(0, 40), inputs(0, 40), None, 0.0).shape == (0, 40)
    assert cpu.linear(inputs(0, 128), cpu.matrix(*weights("fp4", 8, 128))).shape == (0, 8)


@pytest.mark.parametrize("limit", (0.0, 2.0))
@pytest.mark.parametrize("n", (1, 16, 37, 4000))
def test_swiglu(cpu, n, limit):
    g, u = 8 * inputs(6, n, 1), 3 * inputs(6, n, 2)
    g[0], g[1] = -200, 200
    weight = np.linspace(0.1, 2, 6, dtype=np.float32)
    a, b = g.astype(np.float64), u.astype(np.float64)
    if limit:
        a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
    with np.errstate(over="ignore"):
        expected = a / (1 + np.exp(-a)) * b
    for w in (None, weight):
        poison(6, n)
        y = cpu.swiglu(g, u, w, limit)
        assert rel_l2(y, expected if w is None else expected * w[:, None].astype(np.float64)) <= 3e-7
        for t in range(6):
            same_bits(cpu.swiglu(g[t : t + 1], u[t : t + 1], None if w is None else w[t : t + 1], limit), y[t : t + 1])
        same_bits(CpuOps(1, "scalar").swiglu(g, u, w, limit), y)


def test_swiglu_does_not_hide_a_nan(cpu):
    for which in range(2):
        g, u = inputs(1, 20), inputs(1, 20)
        (g, u)[which][0, 17] = np.nan
        assert np.isnan(cpu.swiglu(g, u, None, 1.0)[0, 17])


def test_wrong_inputs_are_named(cpu):
    routed, shared = layer(128, 128, 2, "fp4")
    bank = bank_of(cpu, (routed, shared))
    x, ids, weight = inputs(3, 128), np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)
    for call, error, words in [
        (lambda: cpu.moe(x, ids + 2, weight, bank, 1.0, 1), InputError, "0 to 1, found 2 to 2"),
        (lambda: cpu.moe(x, ids - 1, weight, bank, 1.0, 1), InputError, "found -1"),
        (lambda: cpu.moe(x, ids.astype(np.int64), weight, bank, 1.0, 1), InputError, "int32"),
        (lambda: cpu.moe(x, ids[:2], weight, bank, 1.0, 1), InputError, "int32"),
        (lambda: cpu.moe(x, ids, weight, bank, 1.0, 2), InputError, "slices"),
        (lambda: bank_of(cpu, (layer(128, 256, 1, "fp4")[0], shared)), CheckpointError, "expert 0, w1"),
        (lambda: bank_of(cpu, (layer(128, 128, 1, "bf16")[0], shared)), CheckpointError, "fp4 or fp8"),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_an_expert_chosen_twice_counts_twice():
    """As a hash layer's table may say; also in the reference."""
    arrays, x = layer(128, 128, 5, "fp4"), inputs(2, 128)
    ids, weight = np.int32([[1, 3, 3], [0, 0, 4]]), np.random.default_rng(0).random((2, 3), np.float32)
    reference, cpu = ReferenceOps(), CpuOps(threads=1)
    expected = cpu.moe(x, ids, weight, bank_of(cpu, arrays), 10.0, 1)
    assert rel_l2(reference.moe(x, ids, weight, bank_of(reference, arrays), 10.0, 1), expected) <= 3e-7


# ---------------------------------------------------------------------- in several calls
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_do_not_show(cpu, case):
    for t in (1, 3, 70):
        for seed in range(2):
            (_, whole), *others = in_calls(cpu, case, t, np.random.default_rng(seed).permutation(case[2]).tolist())
            for name, y in others:
                same_bits(y, whole, f"{name}, {t} rows")


def test_an_order_that_is_not_ascending_shows(cpu):
    """The control: with one lane the sums are other ones."""
    d, inner, experts, k, slices, limit, fmt = CASES[2]
    bank, given = bank_of(cpu, layer(d, inner, experts, fmt)), (inputs(3, d), *routing(3, experts, k))
    calls = [[e] for e in reversed(range(experts))]
    with pytest.raises(AssertionError, match="differ"):
        same_bits(moe_in_calls(cpu, given, bank, limit, slices, 1, calls), cpu.moe(*given, bank, limit, slices))


def test_products_beyond_float32_are_added_once():
    """Where one instruction set leaves a call to another."""
    d, inner = 128, 128
    routed, shared = layer(d, inner, 2, "fp4")
    routed[0][0][1][...] = routed[0][2][1][...] = 0x77
    for other in (routed[1], shared):
        other[0][1][...] = other[2][1][...] = 0
    ids, weight, x = np.int32([[0, 1]]), np.ones((1, 2), np.float32), inputs(1, d)
    x[0, :4] = 4e30  # large enough for that, not for other sums
    for isa in ISAS:
        ops = CpuOps(2, isa)
        bank = bank_of(ops, (routed, shared))
        whole = ops.moe(x, ids, weight, bank, 10.0, 1)
        assert np.isfinite(whole).all() and whole.any()
        same_bits(moe_in_calls(ops, (x, ids, weight), bank, 10.0, 1, 1, [[0], [1]]), whole, isa)


def test_wrong_sums_are_named(cpu):
    bank = bank_of(cpu, layer(128, 256, 2, "fp4"))
    x, ids, weight = inputs(3, 128), np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)
    sums, where = np.zeros((5, 3, 2, 128), np.float32), np.arange(3, dtype=np.int32)
    for wrong, words in [
        ((sums[:, :2].copy(), where, x, ids), "sums float32 .rows, 1 or 3, slices, 128."),
        ((sums[:, :, :, :96].copy(), where, x, ids), "slices, 128"),
        ((sums.astype(np.float64), where, x, ids), "found float64"),
        ((np.zeros((5, 3, 4, 128), np.float32), where, x, ids), "slices: expected"),
        ((sums, where[:2], x, ids), r"where int32 \[3\]"),
        ((sums, where + 3, x, ids), "rows 0 to 4, found 3 to 5"),
        ((sums, where - 1, x, ids), "found -1 to 1"),
        ((sums, where, x, ids + 2), "ids -1 to 1, found 2 to 2"),
        ((sums, where, x, ids - 2), "found -2"),
    ]:
        with pytest.raises(InputError, match=words):
            cpu.moe_add(*wrong, weight, bank, 1.0, False)
    assert not sums.any()
    with pytest.raises(InputError, match="moe_end: expected"):
        cpu.moe_end(sums[0])


@pytest.mark.parametrize("fmt", ["fp4", "fp8"])
def test_a_row_that_chooses_one_expert_again(fmt):
    """Three rows, nine of them for the expert: as a checkpoint's fixed table may have it."""
    x, ids, weight = inputs(3, 256), np.full((3, 3), 2, np.int32), np.ones((3, 3), np.float32)
    arrays = layer(256, 256, 4, fmt)
    scalar = CpuOps(1, "scalar")
    expected = scalar.moe(x, ids, weight, bank_of(scalar, arrays), 10.0, 2)
    for isa in ISAS:
        for threads in (1, 2):
            ops = CpuOps(threads, isa)
            same_bits(ops.moe(x, ids, weight, bank_of(ops, arrays), 10.0, 2), expected, f"{isa}, {threads} threads")

"""Experts of many rows on the CPU: weights decoded once for all of them give the bits of one row by itself."""

import numpy as np
import pytest
from compare import same_bits
from cpu_cases import ISAS, inputs, weights

from dsv4.ops.cpu import CpuOps

# d, inner, slices, format: inputs and outputs that end within a step of 64, a strip of 16, a chunk of 512 or 1,024
CASES = [
    (160, 96, 1, "fp4"),
    (1120, 160, 1, "fp4"),
    (256, 512, 4, "fp4"),
    (256, 72, 1, "fp8"),
    (201, 128, 1, "fp8"),
    (640, 1280, 2, "fp8"),
]


def layer(d, inner, fmt, scales=None):
    """(w1, w2, w3) arguments of ops.matrix for one routed expert of the format and the shared one, which is fp8."""

    def one(fmt, seed):
        w = weights(fmt, inner, d, seed), weights(fmt, d, inner, seed + 1), weights(fmt, inner, d, seed + 2)
        for i, (_, _, scale) in enumerate(w):
            if scales is not None:
                scale[...] = np.resize(np.roll(scales, i), scale.shape)
        return w

    return [one(fmt, 0)], one("fp8", 3)


def result(isa, arrays, x, slices, threads=1, weight=1.0):
    """Every row by the routed expert, too."""
    ops, (routed, shared) = CpuOps(threads, isa), arrays
    bank = ops.bank([tuple(ops.matrix(*w) for w in e) for e in routed], tuple(ops.matrix(*w) for w in shared))
    ids, factors = np.zeros((len(x), 1), np.int32), np.linspace(0.5, 1.5, len(x), dtype=np.float32)[:, None]
    weight = np.float32(weight) * factors
    return lambda r: ops.moe(x[r], ids[r], weight[r], bank, 10.0, slices)


def one_by_one(arrays, x, slices):
    moe = result("scalar", arrays, x, slices)
    return np.concatenate([moe(slice(t, t + 1)) for t in range(len(x))])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_rows(case):
    d, inner, slices, fmt = case
    arrays, x = layer(d, inner, fmt), inputs(66, d)
    expected = one_by_one(arrays, x, slices)
    assert np.isfinite(expected).all()
    for isa in ISAS:
        moe = result(isa, arrays, x, slices, threads=2)
        for t in range(1, 67) if d * inner < 40_000 else (5, 6, 7, 8, 13, 66):
            same_bits(moe(slice(66 - t, 66)), expected[66 - t :], f"{isa}, {t} rows")


@pytest.mark.parametrize("fmt", ("fp4", "fp8"))
@pytest.mark.parametrize(
    "scales", ([12], [46], [47, 48, 60], [47, 120, 147], [148, 147], [0, 120], [110, 120, 180, 254]), ids=str
)
def test_scales_near_one_and_far_from_it(fmt, scales):
    """Up to a bound scales are part of the tile; sums of the least activations there are then are still normal numbers."""
    arrays = layer(256, 128, fmt, np.array(scales, np.uint8))
    x = inputs(9, 256) * np.float32(2) ** np.array([-40, -30, -20, -12, -4, 0, 4, 20, 90], np.float32)[:, None]
    expected = one_by_one(arrays, x, 1)
    assert expected.any() or len(scales) == 1
    for isa in ISAS:
        y = result(isa, arrays, x, 1)(slice(0, 9))
        same_bits(np.where(np.isnan(y), np.nan, y), np.where(np.isnan(expected), np.nan, expected), isa)


def test_products_that_cancel_before_they_are_scaled():
    """Of w2, whose scales are large, with activations by twos of opposite sign: scaled each of them would be infinite."""
    routed, shared = layer(256, 128, "fp4")
    (_, gate, gate_scale), (_, out, out_scale), (_, up, up_scale) = routed[0]
    for codes, scale, other in (gate, gate_scale, 0), (up, up_scale, 0x88):
        codes[1::2], scale[1::2] = codes[::2] ^ other, scale[::2]
    out[...], out_scale[...] = (out & 15) * 17, 200
    for _, codes, _ in shared:
        codes[...] = 0
    for isa in ISAS:
        y = result(isa, (routed, shared), inputs(9, 256), 1, weight=2.0**60)
        assert not y(slice(0, 9)).any() and not y(slice(0, 1)).any(), isa


def test_every_code():
    """Each code of both formats in both halves of a pair, NaN included: where one is, the row's result is NaN."""
    for fmt in ("fp4", "fp8"):
        (w,), shared = layer(256, 128, fmt)
        for _, codes, _ in (*w, *shared):
            codes[...] = np.arange(codes.size, dtype=np.uint8).reshape(codes.shape)
            codes[..., 1::2] = codes[..., ::2] * 17 + 3
        for _, codes, _ in shared:
            codes[codes & 0x7F == 0x7F] = 1
        arrays, x = ([w], shared), inputs(16, 256)
        expected = one_by_one(arrays, x, 1)
        assert np.isnan(expected).any() == (fmt == "fp8")
        for isa in ISAS:
            y = result(isa, arrays, x, 1)(slice(0, 16))
            same_bits(np.where(np.isnan(y), np.nan, y), np.where(np.isnan(expected), np.nan, expected), isa)

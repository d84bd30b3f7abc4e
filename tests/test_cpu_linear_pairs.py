"""FP8 linears of rounded inputs on the CPU: multiply-adds of pairs give the bits of one row by itself, in floats."""

import numpy as np
import pytest
from compare import same_bits
from cpu_cases import ISAS, inputs, poison, weights

from dsv4.ops.cpu import CpuOps

# N, K, slices, groups: strips, scale blocks and chunks of 512 whole and cut; K in whole 128s and not
CASES = [
    (40, 128, 1, 1),
    (256, 256, 2, 1),
    (21, 1152, 1, 1),
    (136, 1280, 2, 1),
    (20, 1024, 8, 1),
    (64, 256, 1, 2),
    (264, 128, 1, 2),  # strips that cross from one block's scale to the next
    (24, 200, 1, 1),
]
UNFIT = {
    "unrounded": np.float32(1 + 2.0**-8),
    "huge": np.float32(2.0**127),
    "infinite": np.float32(np.inf),
    "nan": np.float32(np.nan),
}


def rounded(t, k):
    return CpuOps(1, "scalar").act_quant(inputs(t, k))


def linear(isa, w, slices=1, groups=1, threads=1):
    ops = CpuOps(threads, isa)
    m = ops.matrix(*w)

    def run(x):
        poison(len(x), len(w[1]))
        y = ops.linear(x, m, slices) if groups == 1 else ops.grouped_linear(x, m, groups)
        return np.where(np.isnan(y), np.float32(np.nan), y)  # which NaN it is says nothing

    return run


def one_by_one(w, x, *how):
    run = linear("scalar", w, *how)
    return np.concatenate([run(row[None]) for row in x])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_rows(case):
    n, k, slices, groups = case
    w, x = weights("fp8", n, k), rounded(130, k * groups)
    expected = one_by_one(w, x, slices, groups)
    for isa in ISAS:
        for threads in (1, 2):
            run = linear(isa, w, slices, groups, threads)
            for t in [*range(1, 65), 70, 130] if n * k < 30_000 else (1, 4, 5, 6, 7, 9, 13, 16, 64, 67, 130):
                same_bits(run(x[130 - t :]), expected[130 - t :], f"{isa}, {threads} threads, {t} rows")


@pytest.mark.parametrize("kind", UNFIT)
def test_a_row_that_does_not_fit(kind):
    """Wherever it stands: its neighbours' bits do not change, nor do its own."""
    w, plain = weights("fp8", 40, 640), rounded(70, 640)
    for at, k in (0, 0), (3, 639), (8, 300), (66, 17):
        x = plain.copy()
        x[at, k] = UNFIT[kind]
        expected = one_by_one(w, x)
        for isa in ISAS:
            for t in (4, 5, 9, 40, 70):
                same_bits(linear(isa, w)(x[:t]), expected[:t], f"{isa}, {t} rows, [{at}, {k}]")


@pytest.mark.parametrize("scales", ([46], [47], [48], [147], [148], [48, 147], [0, 120, 254]), ids=str)
def test_scales_near_one_and_far_from_it(scales):
    """With the least and the largest inputs; every other weight takes back what the one before it brought."""
    _, codes, scale = w = weights("fp8", 150, 384)
    codes[::2, 1::2] = codes[::2, ::2] ^ 0x80
    codes[::4] = codes[::4] & 0x80 | 1
    scale[...] = np.resize(np.array(scales, np.uint8), scale.shape)
    x = rounded(13, 384)
    x[:6] = 1 + 2.0**-7 * (np.arange(384) % 3 == 0)
    x *= np.float32(2) ** np.array([-31] * 6 + [-8, 0, 20, 60, 80, 90, 0], np.float32)[:, None]
    x[12] = x[0] / 4  # below what fits
    expected = one_by_one(w, x)
    for isa in ISAS:
        for t in (6, 12, 13):
            same_bits(linear(isa, w)(x[:t]), expected[:t], f"{isa}, {t} rows")


def test_a_row_of_subnormals():
    """The multiply-add of pairs would take them for zeros."""
    w, x = weights("fp8", 40, 256), rounded(9, 256)
    x[3] = (2.0**-133 * np.arange(256)).astype(np.float32)
    expected = one_by_one(w, x)
    assert expected[3].any()
    for isa in ISAS:
        same_bits(linear(isa, w)(x), expected, isa)


def test_every_code_under_every_scale_of_pairs():
    """Of NaN codes a row's result is NaN, of all others the weight itself."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (12, 1))
    eye = np.eye(256, dtype=np.float32)
    for byte in (48, 49, 100, 126, 127, 128, 146, 147):
        w = "fp8", codes, np.full((1, 2), byte, np.uint8)
        for isa in ISAS:
            found = linear(isa, w)(eye)
            assert np.isnan(found).all()
        w[1][:, [0x7F, 0xFF]] = 0
        expected = one_by_one(w, eye)
        for isa in ISAS:
            same_bits(linear(isa, w)(eye), expected, f"{isa}, scale {byte}")
        w[1][:, [0x7F, 0xFF]] = 0x7F, 0xFF


def test_a_nan_weight_shows():
    for code in (0x7F, 0xFF):
        for k in (0, 16, 300, 511):
            _, codes, scale = weights("fp8", 40, 512)
            codes[17, k] = code
            for isa in ISAS:
                found = np.isnan(linear(isa, ("fp8", codes, scale))(rounded(9, 512)))
                assert found[:, 17].all() and not np.delete(found, 17, axis=1).any()

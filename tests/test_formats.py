"""Formats: every code, every scale, every midpoint; against the golden file, ml_dtypes and exact arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from compare import rel_l2, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import read_tensors

from dsv4 import formats
from dsv4.errors import InputError

FORMATS = {
    "e4m3": (formats.e4m3_encode, formats.E4M3, 448, ml_dtypes.float8_e4m3fn),
    "e2m1": (formats.e2m1_encode, formats.E2M1, 6, ml_dtypes.float4_e2m1fn),
}
small = pytest.mark.parametrize("encode, table, largest, peer", FORMATS.values(), ids=FORMATS)


@pytest.fixture(scope="module")
def golden(golden_dir):
    return read_tensors(golden_dir / "ops.safetensors")


def positive(table):
    """(codes, values) of a format's numbers from 0 up; code + 1 is the next larger value."""
    values = table[: len(table) // 2]
    return np.flatnonzero(np.isfinite(values)), values[np.isfinite(values)]


# ---------------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize("name", ["e4m3", "e8m0", "e2m1"])
def test_tables(golden, name):
    table = getattr(formats, name.upper())
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, golden[f"table.{name}"])  # NaN where it has NaN
    np.testing.assert_array_equal(np.signbit(table[:-1]), np.signbit(golden[f"table.{name}"][:-1]))


def test_tables_against_ml_dtypes():
    bytes_ = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(formats.e4m3_decode(bytes_), bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(formats.e8m0_decode(bytes_), bytes_.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(formats.E2M1, bytes_[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32))


@small
def test_every_code_survives(encode, table, largest, peer):
    codes = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
    same_bits(encode(table[codes]), codes)  # with the sign of −0


# ---------------------------------------------------------------------------------------------- rounding
@small
def test_midpoints_go_to_the_even_code(encode, table, largest, peer):
    codes, values = positive(table)
    middle = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)  # exact: one more bit
    even = np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    sign = len(table) // 2
    np.testing.assert_array_equal(encode(middle), even)
    np.testing.assert_array_equal(encode(-middle), even | sign)
    np.testing.assert_array_equal(encode(np.nextafter(middle, np.float32(0))), codes[:-1])
    np.testing.assert_array_equal(encode(np.nextafter(middle, np.float32(np.inf))), codes[1:])


@small
def test_beyond_the_largest_clamps(encode, table, largest, peer):
    x = np.array([largest, largest * 1.01, largest * 2, 3e38, np.inf], np.float32)
    assert (table[encode(x)] == largest).all()
    assert (table[encode(-x)] == -largest).all()


@small
def test_zeros_and_tiny(encode, table, largest, peer):
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-20, -1e-20], np.float32)
    sign = len(table) // 2
    np.testing.assert_array_equal(encode(x), [0, sign] * 3)


@small
def test_against_ml_dtypes(encode, table, largest, peer):
    upper_halves = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)  # every sign, exponent, 7 mantissa bits
    x = np.concatenate([upper_halves, np.random.default_rng(0).normal(0, largest / 4, 100000).astype(np.float32)])
    x = x[np.isfinite(x)]
    expected = np.clip(x, -largest, largest).astype(peer).view(np.uint8)
    np.testing.assert_array_equal(encode(x), expected)


def test_nan():
    nan = np.array([np.nan, -np.nan], np.float32)
    assert np.isnan(formats.E4M3[formats.e4m3_encode(nan)]).all()
    assert (formats.e2m1_encode(nan) == 0).all()  # e2m1 has no NaN; the block's scale carries it
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)  # all NaN
    assert np.isnan(formats.bf16_decode(formats.bf16_encode(bits.view(np.float32)))).all()


def test_bf16_golden(golden):
    same_bits(formats.bf16_encode(golden["bf16.x"]), golden["bf16.y"])


def test_every_bf16():
    bits = np.arange(65536, dtype=np.uint16)
    value = formats.bf16_decode(bits)
    np.testing.assert_array_equal(value, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    finite = ~np.isnan(value)
    same_bits(formats.bf16_encode(value)[finite], bits[finite])


def test_bf16_midpoints():
    bits = np.arange(0x7F7F, dtype=np.uint32)  # all finite below the largest
    middle = (bits << 16 | 0x8000).view(np.float32)
    np.testing.assert_array_equal(formats.bf16_encode(middle), bits + bits % 2)
    np.testing.assert_array_equal(formats.bf16_encode(np.nextafter(middle, np.float32(0))), bits)
    np.testing.assert_array_equal(formats.bf16_encode(np.nextafter(middle, np.float32(np.inf))), bits + 1)


def test_nibbles():
    codes = np.array([[0x1, 0x2, 0xF, 0x0]], np.uint8)
    same_bits(formats.e2m1_pack(codes), np.array([[0x21, 0x0F]], np.uint8))
    every = np.arange(256, dtype=np.uint8)[:, None]
    same_bits(formats.e2m1_pack(formats.e2m1_unpack(every)), every)
    np.testing.assert_array_equal(formats.E2M1_PAIR, formats.E2M1[formats.e2m1_unpack(every)])


# ---------------------------------------------------------------------------------------------- scales, quantisers
@settings(deadline=None)
@given(st.floats(2.0**-100, 2.0**120, width=32), st.sampled_from([1 / 448, 1 / 6]))
def test_scale_exponent_is_the_ceiling_of_the_logarithm(amax, c):
    product = Fraction(float(np.float32(amax) * np.float32(c)))
    exponent = int(formats.scale_exponent(np.float32(amax), np.float32(c)))
    assert Fraction(2) ** (exponent - 1) < product <= Fraction(2) ** exponent


@pytest.mark.parametrize("largest", [448, 6])
def test_scale_exponent_at_powers_of_two(largest):
    exact = np.ldexp(np.float32(largest), np.arange(-10, 100))
    c = np.float32(1 / largest)
    np.testing.assert_array_equal(formats.scale_exponent(exact, c), np.arange(-10, 100))
    above = np.nextafter(exact, np.float32(np.inf))
    np.testing.assert_array_equal(formats.scale_exponent(above, c), np.arange(-9, 101))


def test_scale_exponent_of_what_is_not_finite():
    assert (formats.scale_exponent(np.array([np.nan, np.inf], np.float32), np.float32(1 / 448)) == 128).all()


@pytest.mark.parametrize("block", [64, 128])
def test_act_quant_golden(golden, block):
    part = {key: golden[f"actq{block}.{key}"] for key in ("x", "codes", "scale_e8m0", "scale", "deq")}
    codes, scale = formats.act_quant(part["x"], block)
    same_bits(codes, part["codes"])
    same_bits(scale, part["scale_e8m0"])
    same_bits(formats.E8M0[scale], part["scale"])
    same_bits(formats.act_dequant(codes, scale, block), part["deq"])


def test_fp4_act_quant_golden(golden):
    part = {key: golden[f"fp4q.{key}"] for key in ("x", "packed", "scale_e8m0", "scale", "deq")}
    packed, scale = formats.fp4_act_quant(part["x"])
    same_bits(packed, part["packed"])
    same_bits(scale, part["scale_e8m0"])
    same_bits(formats.E8M0[scale], part["scale"])
    same_bits(formats.fp4_act_dequant(packed, scale), part["deq"])


@pytest.mark.parametrize("k", [1, 127, 129, 300])
def test_a_short_last_block_is_a_block(k):
    x = np.random.default_rng(k).normal(0, 3, (5, k)).astype(np.float32)
    codes, scale = formats.act_quant(x, 128)
    assert codes.shape == x.shape and scale.shape == (5, -(-k // 128))
    for i in range(scale.shape[1]):
        part = slice(128 * i, 128 * (i + 1))
        padded = np.zeros((5, 128), np.float32)
        padded[:, : x[:, part].shape[1]] = x[:, part]
        one, s = formats.act_quant(padded, 128)
        same_bits(codes[:, part], one[:, : x[:, part].shape[1]])
        same_bits(scale[:, i : i + 1], s)
    decoded = formats.act_dequant(codes, scale, 128)
    assert decoded.shape == x.shape and np.abs(decoded - x).max() <= np.abs(x).max() / 16


def test_no_rows():
    none = np.zeros((0, 128), np.float32)
    assert formats.act_dequant(*formats.act_quant(none, 64), 64).shape == none.shape
    assert formats.fp4_act_dequant(*formats.fp4_act_quant(none)).shape == none.shape
    assert formats.hadamard(none).shape == none.shape


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible(bad):
    x = np.ones((2, 256), np.float32)
    x[1, 200] = bad
    decoded = formats.act_dequant(*formats.act_quant(x, 128), 128)
    assert np.isnan(decoded[1, 128:]).all() and np.isfinite(decoded[0]).all() and np.isfinite(decoded[1, :128]).all()
    decoded = formats.fp4_act_dequant(*formats.fp4_act_quant(x))
    assert np.isnan(decoded[1, 192:224]).all() and np.isfinite(decoded[0]).all()


def test_fp4_needs_whole_blocks():
    with pytest.raises(InputError, match="multiple of 32"):
        formats.fp4_act_quant(np.zeros((1, 48), np.float32))


# ---------------------------------------------------------------------------------------------- weights
def exact(values, scale):
    """values · 2^(byte − 127) in float64, which holds it, rounded to float32: infinite past its range."""
    with np.errstate(over="ignore"):
        power = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(np.int32) - 127))
        return (values.astype(np.float64) * power).astype(np.float32)


@pytest.mark.parametrize("half", [0, 128])
def test_fp8_every_code_by_every_scale(half):
    codes = np.tile(np.arange(half, half + 128, dtype=np.uint8), 256)[None]
    scale = np.arange(256, dtype=np.uint8)[None]
    with np.errstate(over="ignore"):
        found = formats.decode_fp8(codes, scale)
    np.testing.assert_array_equal(found, exact(formats.E4M3[codes], np.repeat(scale, 128, axis=1)))


def test_fp4_every_pair_by_every_scale():
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    values = np.stack([formats.E2M1[packed & 15], formats.E2M1[packed >> 4]], axis=2).reshape(256, 512)
    with np.errstate(over="ignore"):
        found = formats.decode_fp4(packed, scale)
    np.testing.assert_array_equal(found, exact(values, np.repeat(scale, 32, axis=1)))


def test_weights_golden(golden):
    for name, decode in (("fp8lin", formats.decode_fp8), ("fp4lin", formats.decode_fp4)):
        found = decode(golden[f"{name}.w"], golden[f"{name}.w_scale"])
        np.testing.assert_array_equal(found, golden[f"{name}.w_deq"])


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (200, 384), (3, 300)])
def test_fp8_scale_of_each_block(shape):
    n, k = shape
    rng = np.random.default_rng(n)
    weight = rng.integers(0, 127, shape).astype(np.uint8)
    scale = rng.integers(120, 134, (-(-n // 128), -(-k // 128))).astype(np.uint8)
    i, j = np.indices(shape)
    expected = formats.E4M3[weight] * formats.E8M0[scale[i // 128, j // 128]]
    same_bits(formats.decode_fp8(weight, scale), expected)


def test_scales_must_fit():
    with pytest.raises(InputError, match=r"expected scales \(2, 1\)"):
        formats.decode_fp8(np.zeros((129, 128), np.uint8), np.zeros((1, 1), np.uint8))
    with pytest.raises(InputError, match=r"expected scales \(4, 2\)"):
        formats.decode_fp4(np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8))


# ---------------------------------------------------------------------------------------------- Hadamard rotation
@pytest.mark.parametrize("n", [64, 128])
def test_hadamard_golden(golden, n):
    assert rel_l2(formats.hadamard(golden[f"hadamard{n}.x"]), golden[f"hadamard{n}.y"]) <= 1e-6


@pytest.mark.parametrize("n", [1, 2, 4, 32, 256])
def test_hadamard_is_sylvesters(n):
    sylvester = np.ones((1, 1))
    while len(sylvester) < n:
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    same_bits(formats.hadamard(np.eye(n, dtype=np.float32)), (sylvester * n**-0.5).astype(np.float32))


def test_hadamard_needs_a_power_of_two():
    with pytest.raises(InputError, match="power of two"):
        formats.hadamard(np.zeros((1, 48), np.float32))

"""Number formats and activation quantisers in plain NumPy: the definition every kernel is tested against.

e4m3  sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, largest 448, NaN 0x7F / 0xFF
e8m0  byte b means 2^(b - 127); 255 is NaN
e2m1  sign, 2 exponent bits (bias 1), 1 mantissa bit: ±0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes a byte, low nibble = even k
bf16  the upper 16 bits of a float32

Every rounding is to nearest, ties to even. Scales are powers of two, so scaling by one never rounds.
"""

from __future__ import annotations

import numpy as np

from .errors import InputError

KEY_BLOCK = 64  # e4m3 codes per scale: keys
ACT_BLOCK = 128  # e4m3 codes per scale: inputs of quantised linears
FP4_BLOCK = 32  # e2m1 codes per scale: FP4 weights, index queries and keys
WEIGHT_BLOCK = 128  # FP8 weights: one scale per 128 x 128

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E4M3_NAN = 0x7F


def _e4m3_table() -> np.ndarray:
    exponent, mantissa = np.divmod(np.arange(128), 8)
    value = np.where(exponent == 0, np.ldexp(1.0, -9) * mantissa, np.ldexp(8.0 + mantissa, exponent - 10))
    value[_E4M3_NAN] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


def _e8m0_table() -> np.ndarray:
    value = np.ldexp(np.float32(1), np.arange(-127, 129))
    value[255] = np.nan
    return value


def _e2m1_table() -> np.ndarray:
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([value, -value])


with np.errstate(over="ignore"):
    E4M3 = _e4m3_table()  # value by code, [256]
    E8M0 = _e8m0_table()  # [256]
    E2M1 = _e2m1_table()  # [16]
E2M1_PAIR = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)  # [256, 2]: both values of a byte


# ---------------------------------------------------------------------------------------------- single values
def bf16_encode(x: np.ndarray) -> np.ndarray:
    """float32 → bf16 bits (uint16), same shape. NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def bf16_decode(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) → float32, exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _minifloat(x: np.ndarray, mantissa_bits: int, min_exponent: int, largest: float) -> np.ndarray:
    """Magnitude codes of |x| clamped to `largest`. Codes count the representable values upwards from 0.

    In the binade [2^e, 2^(e+1)) values are 2^(e - mantissa_bits) apart, and below 2^min_exponent as in that binade;
    rint counts those steps, ties to even. A count that reaches the next binade is that binade's first code.
    """
    y = np.minimum(np.abs(x), np.float32(largest))
    exponent = np.frexp(np.maximum(y, np.float32(2.0**min_exponent)))[1] - 1
    steps = np.rint(np.ldexp(y, mantissa_bits - exponent)).astype(np.int32)
    return ((exponent - min_exponent) << mantissa_bits) + steps


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """float32 → e4m3 codes (uint8); beyond ±448 clamps; NaN gives 0x7F."""
    x = np.asarray(x, np.float32)
    nan = np.isnan(x)
    code = _minifloat(np.where(nan, np.float32(0), x), 3, -6, E4M3_MAX)
    return np.where(nan, _E4M3_NAN, code | np.signbit(x) * 0x80).astype(np.uint8)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """e4m3 codes (uint8) → float32."""
    return E4M3[codes]


def e8m0_decode(codes: np.ndarray) -> np.ndarray:
    """e8m0 bytes (uint8) → float32 powers of two (255: NaN)."""
    return E8M0[codes]


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    """float32 → e2m1 codes 0..15 (uint8), one a byte; beyond ±6 clamps; NaN, which e2m1 lacks, gives 0."""
    x = np.asarray(x, np.float32)
    nan = np.isnan(x)
    code = _minifloat(np.where(nan, np.float32(0), x), 1, 0, E2M1_MAX)
    return np.where(nan, 0, code | np.signbit(x) * 8).astype(np.uint8)


def e2m1_pack(codes: np.ndarray) -> np.ndarray:
    """Codes [..., K] → bytes [..., K/2], the even k in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def e2m1_unpack(packed: np.ndarray) -> np.ndarray:
    """Bytes [..., K/2] → codes [..., K]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


# ---------------------------------------------------------------------------------------------- quantisers
def scale_exponent(amax: np.ndarray, c: np.float32) -> np.ndarray:
    """ceil(log2(fl32(amax · c))) as int32, read from the float's exponent and mantissa bits; NaN and infinity: 128.

    amax float32, large enough for the product to be a normal number.
    """
    bits = np.asarray(amax * c, np.float32).view(np.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)
    return np.minimum(exponent, 128)


def _quantise(x: np.ndarray, block: int, floor: float, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """x [..., K] → x / s [..., K] and the e8m0 bytes of s [..., ceil(K / block)]."""
    x = np.asarray(x, np.float32)
    k = x.shape[-1]
    count = -(-k // block)
    if k % block:
        x = np.concatenate([x, np.zeros((*x.shape[:-1], count * block - k), np.float32)], axis=-1)
    blocks = x.reshape(*x.shape[:-1], count, block)
    amax = np.maximum(np.abs(blocks).max(axis=-1), np.float32(floor))
    scale = (scale_exponent(amax, np.float32(1 / largest)) + 127).astype(np.uint8)
    scaled = (blocks / E8M0[scale][..., None]).reshape(x.shape)
    return scaled[..., :k], scale


def _apply_scale(values: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """values [..., K] times the scale of their block, scale e8m0 [..., ceil(K / block)]."""
    k = values.shape[-1]
    if k % block == 0:
        blocks = values.reshape(*values.shape[:-1], k // block, block)
        return (blocks * E8M0[scale][..., None]).reshape(values.shape)
    return values * np.repeat(E8M0[scale], block, axis=-1)[..., :k]


def act_quant(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """x [..., K] → e4m3 codes [..., K] and e8m0 scale bytes [..., ceil(K / block)]; the last block may be short.

    s = 2^ceil(log2(max(amax, 1e-4) · fl(1/448))), code = e4m3(x / s). A block with a NaN or an infinity gets the
    NaN scale 255.
    """
    scaled, scale = _quantise(x, block, 1e-4, E4M3_MAX)
    return e4m3_encode(scaled), scale


def act_dequant(codes: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """What act_quant's codes [..., K] and scale bytes stand for: float32 [..., K]."""
    return _apply_scale(E4M3[codes], scale, block)


def fp4_act_quant(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., K] → packed e2m1 [..., K/2] and e8m0 scale bytes [..., K/32]; K a multiple of 32.

    s = 2^ceil(log2(max(amax, 6 · 2^-126) · fl(1/6))), code = e2m1(x / s). Raises InputError for another K.
    """
    if x.shape[-1] % FP4_BLOCK:
        raise InputError(f"fp4_act_quant: expected a multiple of {FP4_BLOCK} values, found {x.shape[-1]}; pad the input")
    scaled, scale = _quantise(x, FP4_BLOCK, 6 * 2.0**-126, E2M1_MAX)
    return e2m1_pack(e2m1_encode(scaled)), scale


def fp4_act_dequant(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What fp4_act_quant's bytes [..., K/2] and scale bytes stand for: float32 [..., K]."""
    return _apply_scale(E2M1_PAIR[packed].reshape(*packed.shape[:-1], 2 * packed.shape[-1]), scale, FP4_BLOCK)


# ---------------------------------------------------------------------------------------------- weights
def decode_fp8(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """weight e4m3 [N, K], scale e8m0 [ceil(N/128), ceil(K/128)] → float32 [N, K], exact. Raises InputError for others."""
    n, k = weight.shape
    expected = (-(-n // WEIGHT_BLOCK), -(-k // WEIGHT_BLOCK))
    if scale.shape != expected:
        raise InputError(f"decode_fp8: expected scales {expected} for a weight {weight.shape}, found {scale.shape}")
    rows = np.repeat(scale, WEIGHT_BLOCK, axis=0)[:n]
    return _apply_scale(E4M3[weight], rows, WEIGHT_BLOCK)


def decode_fp4(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """weight packed e2m1 [N, K/2], scale e8m0 [N, K/32] → float32 [N, K], exact. Raises InputError for others."""
    n, half = weight.shape
    expected = (n, 2 * half // FP4_BLOCK)
    if scale.shape != expected or 2 * half % FP4_BLOCK:
        raise InputError(f"decode_fp4: expected scales {expected} for a weight {weight.shape}, found {scale.shape}")
    return fp4_act_dequant(weight, scale)


# ---------------------------------------------------------------------------------------------- Hadamard rotation
def hadamard(x: np.ndarray) -> np.ndarray:
    """x [..., n] · H · n^-½ in float64, rounded to float32; H the n x n Hadamard matrix in Sylvester order, n = 2^i.

    Raises InputError for another n.
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise InputError(f"hadamard: expected a power of two, found {n} dimensions")
    y = np.asarray(x, np.float64)
    half = n // 2
    while half:
        pairs = y.reshape(*x.shape[:-1], n // (2 * half), 2, half)
        y = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        half //= 2
    return (y.reshape(x.shape) * n**-0.5).astype(np.float32)

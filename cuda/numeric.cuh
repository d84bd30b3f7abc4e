// Number formats, the quantisers' arithmetic and elementary functions: the definitions of dsv4/formats.py, bit by bit.
// Everything here is integer operations and single IEEE operations in a written order (compiled without contraction),
// so a device and the tests' emulation give the same bits.
//
//   e4m3   s eeee mmm, bias 7, no infinity, NaN 0x7F / 0xFF, largest 448
//   e2m1   s ee m, bias 1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; two a byte, low nibble = even k
//   e8m0   byte b = 2^(b − 127), 255 = NaN
//   bf16   the upper half of a float32
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 as_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

// ---------------------------------------------------------------------- decoding, exact
__device__ __forceinline__ float bf16_value(u32 bits) { return as_float(bits << 16); }

__device__ __forceinline__ float e8m0_value(u32 byte) {
    return as_float(byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : byte << 23);
}

__device__ __forceinline__ float e4m3_value(u32 code) {
    const u32 magnitude = code & 0x7f;
    const float value = magnitude == 0x7f ? as_float(0x7fc00000u) : as_float(magnitude << 20) * 0x1p120f;
    return as_float(as_bits(value) | (code & 0x80) << 24);
}

__device__ __forceinline__ float e2m1_value(u32 code) {
    return as_float(as_bits(as_float((code & 7) << 22) * 0x1p126f) | (code & 8) << 28);
}

// Packed codes as pairs of fp16 (low half first) for tensor cores. The codes' bits are moved into fp16's place, which
// leaves the exponent bias of fp16 in the value: E4M3_RAISE or E2M1_RAISE times it is the code's value. Of 8 codes in k
// order pair i holds codes i and i + 4: the order in which packed rows hold their values (product.cuh).
#define E4M3_RAISE 0x1p8f
#define E2M1_RAISE 0x1p14f

// 8 e4m3 codes (`low` holds k = 0..3) → 4 pairs; NaN codes give NaN.
__device__ __forceinline__ void e4m3_pairs(u32 low, u32 high, u32 pair[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 at = __byte_perm(low, high, i << 4 | (4 + i) << 12); // bytes 1 and 3: the codes; 0 and 2: not used
        const u32 magnitude = at & 0x7f007f00u;
        const u32 nan = magnitude + 0x01000100u; // bits 15 and 31 where the magnitude is 0x7f
        pair[i] = (magnitude | (nan & 0x80008000u)) >> 1 | (at & 0x80008000u);
    }
}

// 8 e2m1 codes, k = 0 in the lowest nibble → 4 pairs. First the upper bytes of the fp16 values, four to a word.
__device__ __forceinline__ void e2m1_pairs(u32 codes, u32 pair[4]) {
    const u32 even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
    const u32 odd = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
    pair[0] = __byte_perm(even, 0, 0x2404);
    pair[1] = __byte_perm(odd, 0, 0x2404);
    pair[2] = even & 0xff00ff00u;
    pair[3] = odd & 0xff00ff00u;
}

// e8m0_value of byte i of four for weights, whose loader has refused 255: that gives infinity here.
__device__ __forceinline__ float weight_scale(u32 bytes, int i) {
    const u32 exponent = (i < 3 ? bytes << (23 - 8 * i) : bytes >> 1) & 0x7f800000u;
    return as_float(exponent > 0x00400000u ? exponent : 0x00400000u);
}

// ---------------------------------------------------------------------- rounding, to nearest even
__device__ __forceinline__ u32 bf16_bits(float x) {
    const u32 bits = as_bits(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// fp16 bits of |x| < 65520 (no overflow handled), subnormals too; NaN stays NaN.
__device__ __forceinline__ u32 fp16_bits(float x) {
    const u32 bits = as_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00;
    if (magnitude < 0x38800000u) // below 2^-14: count steps of 2^-24
        return sign | (as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f));
    return sign | ((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

__device__ __forceinline__ float fp16_value(u32 bits) {
    const u32 magnitude = bits & 0x7fff;
    const float value = magnitude >= 0x7c00 ? as_float(0x7f800000u | magnitude << 13) : as_float(magnitude << 13) * 0x1p112f;
    return as_float(as_bits(value) | (bits & 0x8000) << 16);
}

// x clamped to ±largest and rounded to MANTISSA bits, down to steps of 2^(MIN_EXPONENT − MANTISSA) → what it is then.
// *code: its magnitude's code. Adding 2^(23 − MANTISSA) times a value's binade leaves its count of steps in the lowest
// bits. NaN becomes `largest`: its block's scale is NaN.
template <int MANTISSA, int MIN_EXPONENT> __device__ __forceinline__ float round_small(float x, float largest, u32* code) {
    const float magnitude = fminf(fabsf(x), largest);
    const u32 least = (127 + MIN_EXPONENT) << 23, own = as_bits(magnitude) & 0x7f800000u;
    const u32 exponent = own > least ? own : least;
    const float magic = as_float(exponent + ((23 - MANTISSA) << 23)), sum = magnitude + magic;
    *code = (((exponent - least) >> 23) << MANTISSA) + (as_bits(sum) & ((4u << MANTISSA) - 1));
    return as_float(as_bits(sum - magic) | (as_bits(x) & 0x80000000u));
}

// x (its block's scale divided out) → the nearest e4m3 or e2m1 value; *code: its code with the sign.
__device__ __forceinline__ float round_e4m3(float x, u32* code) {
    const float value = round_small<3, -6>(x, 448.0f, code);
    *code |= as_bits(x) >> 24 & 0x80;
    return value;
}
__device__ __forceinline__ float round_e2m1(float x, u32* code) {
    const float value = round_small<1, 0>(x, 6.0f, code);
    *code |= as_bits(x) >> 28 & 8;
    return value;
}

// ---------------------------------------------------------------------- scales of quantised blocks
// |x| as an integer: the order of magnitudes, NaN above all. Block maxima are taken of these, so that a NaN shows.
__device__ __forceinline__ u32 magnitude_bits(float x) { return as_bits(x) & 0x7fffffffu; }

__device__ __forceinline__ u32 warp_max_bits(u32 x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const u32 other = __shfl_xor_sync(FULL_MASK, x, d);
        x = other > x ? other : x;
    }
    return x;
}

// The e8m0 byte of 2^ceil(log2(max(amax, smallest) · c)); 255 where amax is not finite. amax: magnitude_bits.
__device__ __forceinline__ u32 scale_byte(u32 amax, float smallest, float c) {
    const u32 bits = as_bits(as_float(amax > as_bits(smallest) ? amax : as_bits(smallest)) * c) & 0x7fffffffu;
    const u32 byte = (bits >> 23) + ((bits & 0x7fffff) != 0);
    return byte < 255 ? byte : 255;
}
__device__ __forceinline__ u32 e4m3_scale(u32 amax) { return scale_byte(amax, 1e-4f, 1.0f / 448.0f); }
__device__ __forceinline__ u32 e2m1_scale(u32 amax) { return scale_byte(amax, 0x1.8p-124f, 1.0f / 6.0f); }

// 1 / e8m0_value(byte) for the bytes that scale_byte gives (1 to 253, 255).
__device__ __forceinline__ float e8m0_inverse(u32 byte) { return as_float(byte == 255 ? 0x7fc00000u : (254 - byte) << 23); }

// ---------------------------------------------------------------------- elementary functions
// e^x to 1 ulp: e^r by its Taylor polynomial on [−ln 2 / 2, ln 2 / 2], times 2^n in two steps (subnormal results).
__device__ __forceinline__ float exp_value(float x) {
    if (x != x) return x;
    x = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
    const float n = rintf(x * 0x1.715476p+0f);
    const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, x));
    float e = 1.0f / 5040;
    e = fmaf(e, r, 1.0f / 720);
    e = fmaf(e, r, 1.0f / 120);
    e = fmaf(e, r, 1.0f / 24);
    e = fmaf(e, r, 1.0f / 6);
    e = fmaf(e, r, 0.5f);
    e = fmaf(e, r, 1.0f);
    e = fmaf(e, r, 1.0f);
    const int power = (int)n, half = power / 2;
    return e * as_float((u32)(half + 127) << 23) * as_float((u32)(power - half + 127) << 23);
}

// 1 / (1 + e^-x), from the exponential that cannot overflow.
__device__ __forceinline__ float sigmoid(float x) {
    const float e = exp_value(-fabsf(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

// log(1 + e^x), linear above 20, in double: t = e^-|x| as above, then log(1 + t) = 2 atanh(t / (2 + t)) by its series.
// Errors below 1e-12 before the one rounding to float32.
__device__ __forceinline__ float softplus(float logit) {
    const double x = (double)logit, a = x < -150 ? 150 : x < 0 ? -x : x > 150 ? 150 : x;
    const double shifted = -a * 0x1.71547652b82fep+0 + 0x1.8p52, n = shifted - 0x1.8p52; // rounds to an integer
    const double r = -a - n * 0x1.62e42feep-1 - n * 0x1.a39ef35793c76p-33;
    double e = 1.0 / 3628800, factor = 3628800;
#pragma unroll
    for (int i = 10; i >= 1; i--) {
        factor /= i; // (i − 1)!, exact
        e = e * r + 1.0 / factor;
    }
    const int power = (int)n, half = power / 2; // at least −217: the least beyond which float32 has only 0
    const double t = e * as_float((u32)(half + 127) << 23) * as_float((u32)(power - half + 127) << 23);
    const double z = t / (2 + t), square = z * z;
    double series = 1.0 / 25;
#pragma unroll
    for (int i = 23; i >= 1; i -= 2) series = series * square + 1.0 / i;
    const double sum = 2 * z * series + (x < 0 ? 0 : x);
    return (float)(x > 20 ? x : sum);
}

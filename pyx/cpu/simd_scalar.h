/* Sixteen float lanes in plain C: the meaning of the v16 operations. simd_avx2.h and simd_avx512.h give the same bits.
 *
 * v16_min / v16_max return their second argument when either is NaN (as the x86 instructions do).
 * v16_sum adds lanes as a tree: l + (l+8), then l + (l+4), l + (l+2), l + (l+1).
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define V16_ROWS 2    /* rows and outputs whose sums a linear keeps in registers */
#define V16_COLUMNS 2
#define V16_MANY 2
#define TILE_ROWS 2    /* the same, of weights that are floats already */
#define FEW 6          /* up to so many rows, weights are decoded in registers (TILE_ROWS 6 wants 7 or more), */
#define FEW_NEAR 6     /* up to so many where the matrix stays in a thread's own cache */
#define V16_KEY_STEPS 3 /* powers of two that keys' bytes may be multiplied by; 0: v16i_dot has 16 bits */

typedef struct { float f[16]; } v16;
typedef struct { int32_t i[16]; } v16i;

#define EACH for (int l = 0; l < 16; l++)
#define UNARY(name, type, from, expr) \
    static inline type name(from a) { type r; EACH { expr; } return r; }
#define BINARY(name, type, from, expr) \
    static inline type name(from a, from b) { type r; EACH { expr; } return r; }

static inline v16 v16_set1(float x) { v16 r; EACH r.f[l] = x; return r; }
static inline v16 v16_zero(void) { return v16_set1(0.0f); }
static inline v16 v16_load(const float *p) { v16 r; memcpy(&r, p, 64); return r; }
static inline v16 v16_load_n(const float *p, int n) { v16 r = v16_zero(); memcpy(&r, p, 4 * (size_t)n); return r; }
static inline void v16_store(float *p, v16 a) { memcpy(p, &a, 64); }
static inline void v16_store_n(float *p, v16 a, int n) { memcpy(p, &a, 4 * (size_t)n); }

BINARY(v16_add, v16, v16, r.f[l] = a.f[l] + b.f[l])
BINARY(v16_sub, v16, v16, r.f[l] = a.f[l] - b.f[l])
BINARY(v16_mul, v16, v16, r.f[l] = a.f[l] * b.f[l])
BINARY(v16_div, v16, v16, r.f[l] = a.f[l] / b.f[l])
BINARY(v16_min, v16, v16, r.f[l] = a.f[l] < b.f[l] ? a.f[l] : b.f[l])
BINARY(v16_max, v16, v16, r.f[l] = a.f[l] > b.f[l] ? a.f[l] : b.f[l])
UNARY(v16_sqrt, v16, v16, r.f[l] = sqrtf(a.f[l]))
UNARY(v16_abs, v16, v16, r.f[l] = fabsf(a.f[l]))
UNARY(v16_round, v16, v16, r.f[l] = nearbyintf(a.f[l])) /* to nearest, ties to even */

/* a * b + c, rounded once */
static inline v16 v16_fma(v16 a, v16 b, v16 c) { v16 r; EACH r.f[l] = fmaf(a.f[l], b.f[l], c.f[l]); return r; }

/* a < b ? x : y */
static inline v16 v16_select_lt(v16 a, v16 b, v16 x, v16 y)
{
    v16 r;
    EACH r.f[l] = a.f[l] < b.f[l] ? x.f[l] : y.f[l];
    return r;
}

static inline float v16_sum(v16 a)
{
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) a.f[l] += a.f[l + half];
    return a.f[0];
}

/* the sums of four */
static inline void v16_sum4(v16 a, v16 b, v16 c, v16 d, float *sums)
{
    sums[0] = v16_sum(a);
    sums[1] = v16_sum(b);
    sums[2] = v16_sum(c);
    sums[3] = v16_sum(d);
}

static inline float v16_hmax(v16 a)
{
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) a.f[l] = a.f[l] > a.f[l + half] ? a.f[l] : a.f[l + half];
    return a.f[0];
}

/* integers: 32-bit lanes, wrapping */
UNARY(v16_bits, v16i, v16, memcpy(&r.i[l], &a.f[l], 4))
UNARY(v16i_float, v16, v16i, memcpy(&r.f[l], &a.i[l], 4)) /* the bits as a float */
UNARY(v16i_to_float, v16, v16i, r.f[l] = (float)a.i[l])   /* the value as a float */
UNARY(v16_to_int, v16i, v16, r.i[l] = (int32_t)nearbyintf(a.f[l])) /* |a| < 2^31 */
static inline v16i v16i_set1(int32_t x) { v16i r; EACH r.i[l] = x; return r; }
BINARY(v16i_add, v16i, v16i, r.i[l] = (int32_t)((uint32_t)a.i[l] + (uint32_t)b.i[l]))
BINARY(v16i_sub, v16i, v16i, r.i[l] = (int32_t)((uint32_t)a.i[l] - (uint32_t)b.i[l]))
BINARY(v16i_and, v16i, v16i, r.i[l] = a.i[l] & b.i[l])
BINARY(v16i_or, v16i, v16i, r.i[l] = a.i[l] | b.i[l])
BINARY(v16i_max, v16i, v16i, r.i[l] = a.i[l] > b.i[l] ? a.i[l] : b.i[l])
BINARY(v16i_min, v16i, v16i, r.i[l] = a.i[l] < b.i[l] ? a.i[l] : b.i[l])
static inline v16i v16i_shl(v16i a, int n) { EACH a.i[l] = (int32_t)((uint32_t)a.i[l] << n); return a; }
static inline v16i v16i_shr(v16i a, int n) { EACH a.i[l] = (int32_t)((uint32_t)a.i[l] >> n); return a; }
static inline v16i v16i_load_u8(const uint8_t *p) { v16i r; EACH r.i[l] = p[l]; return r; }
static inline void v16i_store_u8(uint8_t *p, v16i a) { EACH p[l] = (uint8_t)a.i[l]; } /* low bytes */
static inline void v16i_store_u16(uint16_t *p, v16i a)                                /* low halves */
{
    uint16_t r[16];
    EACH r[l] = (uint16_t)a.i[l];
    memcpy(p, r, 32);
}

/* bit l: a > b in lane l */
static inline uint32_t v16i_above(v16i a, v16i b)
{
    uint32_t r = 0;
    EACH r |= (uint32_t)(a.i[l] > b.i[l]) << l;
    return r;
}
/* the lanes whose bits are set, one after another; what follows them up to p[15] is anything */
static inline void v16i_pack(int32_t *p, v16i a, uint32_t lanes) { EACH if (lanes >> l & 1) *p++ = a.i[l]; }

/* formats */
static inline v16 v16_bf16(const uint16_t *p)
{
    uint16_t h[16];
    v16i r;
    memcpy(h, p, 32);
    EACH r.i[l] = (int32_t)((uint32_t)h[l] << 16);
    return v16i_float(r);
}

/* e4m3 codes / 256; the NaN codes read as ±480/256 */
static inline v16 v16_e4m3_raw(const uint8_t *p)
{
    v16 r;
    EACH {
        int mag = p[l] & 0x7f, exponent = mag >> 3, fraction = mag & 7;
        /* a normal value is its bits moved to float32's place; below that, multiples of 2^-9 */
        uint32_t bits = (uint32_t)mag << 20;
        float value;
        if (exponent) {
            bits += (uint32_t)(127 - 7 - 8) << 23;
            memcpy(&value, &bits, 4);
        } else {
            value = (float)fraction * 0x1p-17f;
        }
        r.f[l] = p[l] & 0x80 ? -value : value;
    }
    return r;
}

static inline v16 v16_e4m3(const uint8_t *p)
{
    v16 r = v16_e4m3_raw(p);
    EACH r.f[l] = (p[l] & 0x7f) == 0x7f ? NAN : r.f[l] * 256.0f;
    return r;
}

/* sixteen bytes of two e2m1 codes each: the low nibbles to *even, the high ones to *odd, times scale */
static inline void v16_e2m1(const uint8_t *p, float scale, v16 *even, v16 *odd)
{
    static const float value[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    EACH {
        even->f[l] = value[p[l] & 15] * scale;
        odd->f[l] = value[p[l] >> 4] * scale;
    }
}

/* 32 bytes of two e2m1 codes each: lane l of q[i] is code 4l + i */
static inline void v16_e2m1_quads(const uint8_t *p, v16 *q)
{
    static const float value[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    for (int i = 0; i < 4; i++) EACH q[i].f[l] = value[p[2 * l + i / 2] >> i % 2 * 4 & 15];
}

/* Sums of products of bytes. v16i_four: p[0 .. 3] in every lane; v16i_dot adds to each lane the products of a's four
 * bytes (without sign) and b's (with), from v16i_dot_start on; v16i_dot_sum: the sums. Where V16_KEY_STEPS is 0, up to
 * 8 times, of bytes at most 24 and 15, a start of at most 5760. */
static inline v16i v16i_load(const void *p) { v16i r; memcpy(&r, p, 64); return r; }
static inline v16i v16i_four(const uint8_t *p) { int32_t x; memcpy(&x, p, 4); return v16i_set1(x); }
static inline v16i v16i_dot(v16i acc, v16i a, v16i b)
{
    uint8_t x[64];
    int8_t y[64];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    EACH for (int i = 0; i < 4; i++) acc.i[l] += x[4 * l + i] * y[4 * l + i];
    return acc;
}
static inline v16i v16i_dot_start(int32_t x) { return v16i_set1(x); }
static inline v16i v16i_dot_sum(v16i acc) { return acc; }

/* *a is no longer known to the compiler: what is computed from it is computed again */
static inline void v16i_hide(v16i *a) { __asm__("" : "+m"(*a)); }

/* Of 16 rows of e2m1 codes, `stride` bytes from one to the next, 16 bytes from p on: every value · 2 · 2^(the row's
 * steps, 0 where V16_KEY_STEPS is 0) + (12 << V16_KEY_STEPS) as a byte. Low codes to out [4, 16] four bytes, (bytes of a
 * row, row), high codes to out + high. */
static inline void v16i_key_bytes(const uint8_t *p, int64_t stride, v16i steps, uint8_t *out, int high)
{
    static const int8_t value[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    EACH for (int i = 0; i < 16; i++) {
        uint8_t *to = out + (i / 4 * 16 + l) * 4 + i % 4, code = p[l * stride + i];
        to[0] = (uint8_t)(value[code & 15] * (1 << steps.i[l]) + (12 << V16_KEY_STEPS));
        to[high] = (uint8_t)(value[code >> 4] * (1 << steps.i[l]) + (12 << V16_KEY_STEPS));
    }
}

/* eight lanes of p[0], eight of p[1] */
static inline v16 v16_halves(const float *p) { v16 r; EACH r.f[l] = p[l / 8]; return r; }

/* p[0], p[2], .. and p[1], p[3], .. of 32 floats */
static inline void v16_deinterleave(const float *p, v16 *even, v16 *odd)
{
    EACH {
        even->f[l] = p[2 * l];
        odd->f[l] = p[2 * l + 1];
    }
}
/* p[2l] = even[l], p[2l + 1] = odd[l] */
static inline void v16_interleave(v16 even, v16 odd, float *p)
{
    EACH {
        p[2 * l] = even.f[l];
        p[2 * l + 1] = odd.f[l];
    }
}

#undef EACH
#undef UNARY
#undef BINARY

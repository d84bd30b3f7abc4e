/* The v16 operations on AVX-512 (F, BW, DQ, VL): one register. Meanings: simd_scalar.h. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define V16_ROWS 4
#define V16_COLUMNS 4
#define V16_MANY 8 /* rows whose sums fit with two outputs */
#define TILE_ROWS 6
#define FEW 8
#define FEW_NEAR 7
#ifdef V16_BF16
#define V16_KEY_STEPS 3
#else
#define V16_KEY_STEPS 0
#endif

typedef __m512 v16;
typedef __m512i v16i;

static inline v16 v16_set1(float x) { return _mm512_set1_ps(x); }
static inline v16 v16_zero(void) { return _mm512_setzero_ps(); }
static inline v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v16_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
static inline v16 v16_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
static inline void v16_store_n(float *p, v16 x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }

static inline v16 v16_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
static inline v16 v16_sub(v16 x, v16 y) { return _mm512_sub_ps(x, y); }
static inline v16 v16_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
static inline v16 v16_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
static inline v16 v16_min(v16 x, v16 y) { return _mm512_min_ps(x, y); }
static inline v16 v16_max(v16 x, v16 y) { return _mm512_max_ps(x, y); }
static inline v16 v16_sqrt(v16 x) { return _mm512_sqrt_ps(x); }
static inline v16 v16_abs(v16 x) { return _mm512_abs_ps(x); }
static inline v16 v16_round(v16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline v16 v16_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
#define V16_POWER
static inline v16 v16_power(v16 x, v16 n) { return _mm512_scalef_ps(x, n); } /* simd_math.h: eleven steps as one */
static inline v16 v16_select_lt(v16 x, v16 y, v16 s, v16 t)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), t, s);
}

static inline float v16_sum(v16 x)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline void v16_sum4(v16 a, v16 b, v16 c, v16 d, float *sums)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    /* now four lanes of each, in order a, b, c, d */
    __m512 t = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    t = _mm512_add_ps(t, _mm512_permute_ps(t, 0x4e));
    t = _mm512_add_ps(t, _mm512_permute_ps(t, 0xb1));
    _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, t)));
}
#define V16_SUM16
/* Of a and b: lanes l and l + 8 added, eight sums of each. A blend and one shuffle: shuffles share the units of fma. */
static inline v16 v16_fold(v16 a, v16 b)
{
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
/* Of a, b, c and d: four sums of each, in their order */
static inline v16 v16_fold4(v16 a, v16 b, v16 c, v16 d)
{
    const v16 ab = v16_fold(a, b), cd = v16_fold(c, d);
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}
/* The same within each four lanes: two sums of each of a's and b's */
static inline v16 v16_fold_fours(v16 a, v16 b)
{
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}
/* v16_sum of each of sixteen, in their order: fewer steps than four times v16_sum4 */
static inline v16 v16_sum16(const v16 *x)
{
    v16 t[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) t[j] = v16_fold4(x[j], x[4 + j], x[8 + j], x[12 + j]);
    const v16 a = v16_fold_fours(t[0], t[1]), b = v16_fold_fours(t[2], t[3]);
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
static inline void v16_sum8(const v16 *x, float *sums)
{
    v16 t = v16_fold_fours(v16_fold4(x[0], x[2], x[4], x[6]), v16_fold4(x[1], x[3], x[5], x[7]));
    t = _mm512_add_ps(t, _mm512_permute_ps(t, 0xb1));
    _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, t)));
}
/* x[i] = quarter i of x[0], x[1], .. */
static inline void v16_quarters(v16 *x)
{
    const v16 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const v16 c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    x[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    x[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}
static inline float v16_hmax(v16 x)
{
    __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

static inline v16i v16_bits(v16 x) { return _mm512_castps_si512(x); }
static inline v16 v16i_float(v16i x) { return _mm512_castsi512_ps(x); }
static inline v16 v16i_to_float(v16i x) { return _mm512_cvtepi32_ps(x); }
static inline v16i v16_to_int(v16 x) { return _mm512_cvtps_epi32(x); }
static inline v16i v16i_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline v16i v16i_add(v16i x, v16i y) { return _mm512_add_epi32(x, y); }
static inline v16i v16i_sub(v16i x, v16i y) { return _mm512_sub_epi32(x, y); }
static inline v16i v16i_and(v16i x, v16i y) { return _mm512_and_si512(x, y); }
static inline v16i v16i_or(v16i x, v16i y) { return _mm512_or_si512(x, y); }
static inline v16i v16i_max(v16i x, v16i y) { return _mm512_max_epi32(x, y); }
static inline v16i v16i_min(v16i x, v16i y) { return _mm512_min_epi32(x, y); }
static inline v16i v16i_shl(v16i x, int n) { return _mm512_slli_epi32(x, (unsigned)n); }
static inline v16i v16i_shr(v16i x, int n) { return _mm512_srli_epi32(x, (unsigned)n); }
static inline v16i v16i_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline void v16i_store_u8(uint8_t *p, v16i x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x)); }
static inline void v16i_store_u16(uint16_t *p, v16i x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x)); }

static inline uint32_t v16i_above(v16i x, v16i y) { return _mm512_cmpgt_epi32_mask(x, y); }
static inline void v16i_pack(int32_t *p, v16i x, uint32_t lanes)
{
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32((__mmask16)lanes, x));
}

static inline v16i v16i_load(const void *p) { return _mm512_loadu_si512(p); }
static inline v16i v16i_four(const uint8_t *p)
{
    int32_t x;
    memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}
static inline void v16i_hide(v16i *x) { __asm__("" : "+v"(*x)); }

/* key_bytes: codes in the low halves of bytes, a lane four of one row's, and key_steps of the rows → a key's bytes */
#ifdef V16_BF16
static inline v16i v16i_dot(v16i acc, v16i a, v16i b) { return _mm512_dpbusd_epi32(acc, a, b); }
static inline v16i v16i_dot_start(int32_t x) { return v16i_set1(x); }
static inline v16i v16i_dot_sum(v16i acc) { return acc; }

static inline __m512i key_table(void) /* [steps, code] */
{
    return _mm512_loadu_si512((const uint8_t[64]){
        96, 97, 98, 99, 100, 102, 104, 108, 96, 95, 94, 93, 92, 90, 88, 84,
        96, 98, 100, 102, 104, 108, 112, 120, 96, 94, 92, 90, 88, 84, 80, 72,
        96, 100, 104, 108, 112, 120, 128, 144, 96, 92, 88, 84, 80, 72, 64, 48,
        96, 104, 112, 120, 128, 144, 160, 192, 96, 88, 80, 72, 64, 48, 32, 0});
}
static inline __m512i key_steps(v16i steps) /* in all four bytes of a lane */
{
    const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    return _mm512_slli_epi16(_mm512_shuffle_epi8(steps, first), 4);
}
static inline __m512i key_bytes(__m512i codes, __m512i table, __m512i steps)
{
    const __m512i index = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(15), steps, 0xea); /* codes & 15 | steps */
    return _mm512_permutexvar_epi8(index, table);
}
#else
/* sums of 16 bits, of pairs; hidden, or the compiler adds in trees that need more registers than there are */
static inline v16i v16i_dot(v16i acc, v16i a, v16i b)
{
    acc = _mm512_add_epi16(acc, _mm512_maddubs_epi16(a, b));
    v16i_hide(&acc);
    return acc;
}
static inline v16i v16i_dot_start(int32_t x) { return v16i_set1(x & 0xffff); }
static inline v16i v16i_dot_sum(v16i acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }

static inline __m512i key_table(void)
{
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}
static inline __m512i key_steps(v16i steps) { return steps; }
static inline __m512i key_bytes(__m512i codes, __m512i table, __m512i steps)
{
    (void)steps;
    return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
}
#endif

static inline void v16i_key_bytes(const uint8_t *p, int64_t stride, v16i steps, uint8_t *out, int high)
{
    __m512i r[4]; /* row 4m + i in quarter m */
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(p + i * stride)));
        r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(p + (4 + i) * stride)), 1);
        r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(p + (8 + i) * stride)), 2);
        r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(p + (12 + i) * stride)), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpacklo_epi32(r[2], r[3]);
    const __m512i c = _mm512_unpackhi_epi32(r[0], r[1]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    const __m512i four[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d),
                             _mm512_unpackhi_epi64(c, d)};
    const __m512i table = key_table(), up = key_steps(steps);
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out + 64 * i, key_bytes(four[i], table, up));
        _mm512_storeu_si512(out + 64 * i + high, key_bytes(_mm512_srli_epi16(four[i], 4), table, up));
    }
}

static inline v16 v16_bf16(const uint16_t *p)
{
    __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
}

/* e4m3's bits moved to the place of a half's are the value / 256, subnormals included */
static inline v16 v16_e4m3_raw(const uint8_t *p)
{
    __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16((short)0xbf80)));
}
static inline v16 v16_e4m3(const uint8_t *p)
{
    v16 r = _mm512_mul_ps(v16_e4m3_raw(p), _mm512_set1_ps(256.0f));
    /* only the NaN codes decode to ±480: |r| < 480 is kept */
    return v16_select_lt(v16_abs(r), v16_set1(480.0f), r, v16_set1(NAN));
}

static inline void v16_e2m1(const uint8_t *p, float scale, v16 *even, v16 *odd)
{
    /* the permutation looks at the low four bits of an index only */
    const __m512 value = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512 table = _mm512_mul_ps(value, _mm512_set1_ps(scale));
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    *even = _mm512_permutexvar_ps(bytes, table);
    *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
}

static inline void v16_e2m1_quads(const uint8_t *p, v16 *q)
{
    const __m512 value = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512i codes = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    q[0] = _mm512_permutexvar_ps(codes, value);
    q[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), value);
    q[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 8), value);
    q[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 12), value);
}

static inline v16 v16_halves(const float *p)
{
    return _mm512_insertf32x8(_mm512_set1_ps(p[0]), _mm256_set1_ps(p[1]), 1);
}

static inline void v16_deinterleave(const float *p, v16 *even, v16 *odd)
{
    const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512 x = _mm512_loadu_ps(p), y = _mm512_loadu_ps(p + 16);
    *even = _mm512_permutex2var_ps(x, index, y);
    *odd = _mm512_permutex2var_ps(x, _mm512_add_epi32(index, _mm512_set1_epi32(1)), y);
}
static inline void v16_interleave(v16 even, v16 odd, float *p)
{
    const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(even, index, odd));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(index, _mm512_set1_epi32(8)), odd));
}

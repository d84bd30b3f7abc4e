/* The v16 operations on AVX2 + FMA + F16C: two registers of eight lanes. Meanings: simd_scalar.h. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define V16_ROWS 2
#define V16_COLUMNS 2
#define V16_MANY 2
#define TILE_ROWS 2
#define FEW 6
#define FEW_NEAR 6
#define V16_KEY_STEPS 0

typedef struct { __m256 a, b; } v16;
typedef struct { __m256i a, b; } v16i;

#define BINARY(name, op) static inline v16 name(v16 x, v16 y) { return (v16){op(x.a, y.a), op(x.b, y.b)}; }
#define BINARYI(name, op) static inline v16i name(v16i x, v16i y) { return (v16i){op(x.a, y.a), op(x.b, y.b)}; }

static inline v16 v16_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline v16 v16_zero(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void v16_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }

static inline __m256i v16_mask8(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline v16 v16_load_n(const float *p, int n)
{
    return (v16){_mm256_maskload_ps(p, v16_mask8(n)), _mm256_maskload_ps(p + 8, v16_mask8(n - 8))};
}
static inline void v16_store_n(float *p, v16 x, int n)
{
    _mm256_maskstore_ps(p, v16_mask8(n), x.a);
    _mm256_maskstore_ps(p + 8, v16_mask8(n - 8), x.b);
}

BINARY(v16_add, _mm256_add_ps)
BINARY(v16_sub, _mm256_sub_ps)
BINARY(v16_mul, _mm256_mul_ps)
BINARY(v16_div, _mm256_div_ps)
BINARY(v16_min, _mm256_min_ps)
BINARY(v16_max, _mm256_max_ps)
static inline v16 v16_sqrt(v16 x) { return (v16){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
static inline v16 v16_abs(v16 x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline v16 v16_round(v16 x)
{
    return (v16){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline v16 v16_fma(v16 x, v16 y, v16 z)
{
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline v16 v16_select_lt(v16 x, v16 y, v16 s, v16 t)
{
    return (v16){_mm256_blendv_ps(t.a, s.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                 _mm256_blendv_ps(t.b, s.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

static inline float v16_sum(v16 x)
{
    __m256 a = _mm256_add_ps(x.a, x.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
static inline void v16_sum4(v16 x, v16 y, v16 z, v16 w, float *sums)
{
    __m256 a = _mm256_add_ps(x.a, x.b), b = _mm256_add_ps(y.a, y.b);
    __m256 c = _mm256_add_ps(z.a, z.b), d = _mm256_add_ps(w.a, w.b);
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    /* now four lanes of each: a, c in the low half, b, d in the high one */
    __m256 t = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    t = _mm256_add_ps(t, _mm256_permute_ps(t, 0xb1));
    _mm_storeu_ps(sums, _mm_blend_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1), 0xa));
}
static inline float v16_hmax(v16 x)
{
    __m256 a = _mm256_max_ps(x.a, x.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

static inline v16i v16_bits(v16 x) { return (v16i){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline v16 v16i_float(v16i x) { return (v16){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline v16 v16i_to_float(v16i x) { return (v16){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline v16i v16_to_int(v16 x) { return (v16i){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline v16i v16i_set1(int32_t x) { return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
BINARYI(v16i_add, _mm256_add_epi32)
BINARYI(v16i_sub, _mm256_sub_epi32)
BINARYI(v16i_and, _mm256_and_si256)
BINARYI(v16i_or, _mm256_or_si256)
BINARYI(v16i_max, _mm256_max_epi32)
BINARYI(v16i_min, _mm256_min_epi32)
static inline v16i v16i_shl(v16i x, int n) { return (v16i){_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
static inline v16i v16i_shr(v16i x, int n) { return (v16i){_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
static inline v16i v16i_load_u8(const uint8_t *p)
{
    __m128i b = _mm_loadu_si128((const __m128i *)p);
    return (v16i){_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(b, b))};
}
/* the low halves of the lanes, in order */
static inline __m256i v16i_narrow(v16i x)
{
    const __m256i low = _mm256_set1_epi32(0xffff);
    __m256i h = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    return _mm256_permute4x64_epi64(h, 0xd8);
}
static inline void v16i_store_u16(uint16_t *p, v16i x) { _mm256_storeu_si256((__m256i *)p, v16i_narrow(x)); }
static inline void v16i_store_u8(uint8_t *p, v16i x)
{
    __m256i h = _mm256_and_si256(v16i_narrow(x), _mm256_set1_epi16(0xff));
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}

static inline uint32_t v16i_above(v16i x, v16i y)
{
    const __m256i a = _mm256_cmpgt_epi32(x.a, y.a), b = _mm256_cmpgt_epi32(x.b, y.b);
    return (uint32_t)(_mm256_movemask_ps(_mm256_castsi256_ps(a)) | _mm256_movemask_ps(_mm256_castsi256_ps(b)) << 8);
}
static inline void v16i_pack(int32_t *p, v16i x, uint32_t lanes)
{
    int32_t all[16];
    memcpy(all, &x, 64);
    for (; lanes; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
}

static inline v16i v16i_load(const void *p)
{
    return (v16i){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
static inline v16i v16i_four(const uint8_t *p)
{
    int32_t x;
    memcpy(&x, p, 4);
    return v16i_set1(x);
}
static inline void v16i_hide(v16i *x) { __asm__("" : "+x"(x->a), "+x"(x->b)); }
/* sums of 16 bits, of pairs; hidden, or the compiler adds in trees that need more registers than there are */
static inline v16i v16i_dot(v16i acc, v16i a, v16i b)
{
    acc.a = _mm256_add_epi16(acc.a, _mm256_maddubs_epi16(a.a, b.a));
    acc.b = _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(a.b, b.b));
    v16i_hide(&acc);
    return acc;
}
static inline v16i v16i_dot_start(int32_t x) { return v16i_set1(x & 0xffff); }
static inline v16i v16i_dot_sum(v16i acc)
{
    const __m256i one = _mm256_set1_epi16(1);
    return (v16i){_mm256_madd_epi16(acc.a, one), _mm256_madd_epi16(acc.b, one)};
}

static inline void v16i_key_bytes(const uint8_t *p, int64_t stride, v16i steps, uint8_t *out, int high)
{
    const __m128i value = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const __m128i nibble = _mm_set1_epi8(15);
    (void)steps;
    for (int l = 0; l < 16; l += 4) {
        __m128i r[4];
        for (int i = 0; i < 4; i++) r[i] = _mm_loadu_si128((const __m128i *)(p + (l + i) * stride));
        const __m128i a = _mm_unpacklo_epi32(r[0], r[1]), b = _mm_unpacklo_epi32(r[2], r[3]);
        const __m128i c = _mm_unpackhi_epi32(r[0], r[1]), d = _mm_unpackhi_epi32(r[2], r[3]);
        const __m128i four[4] = {_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b), _mm_unpacklo_epi64(c, d),
                                 _mm_unpackhi_epi64(c, d)};
        for (int i = 0; i < 4; i++) {
            __m128i *to = (__m128i *)(out + i * 64 + l * 4);
            _mm_storeu_si128(to, _mm_shuffle_epi8(value, _mm_and_si128(four[i], nibble)));
            _mm_storeu_si128((__m128i *)((uint8_t *)to + high),
                             _mm_shuffle_epi8(value, _mm_and_si128(_mm_srli_epi16(four[i], 4), nibble)));
        }
    }
}

static inline v16 v16_bf16(const uint16_t *p)
{
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    __m256i a = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(h));
    __m256i b = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1));
    return (v16){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}

/* e4m3's bits moved to the place of a half's are the value / 256, subnormals included */
static inline v16 v16_e4m3_raw(const uint8_t *p)
{
    __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    h = _mm256_and_si256(h, _mm256_set1_epi16((short)0xbf80));
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
static inline v16 v16_e4m3(const uint8_t *p)
{
    v16 r = v16_mul(v16_e4m3_raw(p), v16_set1(256.0f));
    /* only the NaN codes decode to ±480: |r| < 480 is kept */
    return v16_select_lt(v16_abs(r), v16_set1(480.0f), r, v16_set1(NAN));
}

static inline void v16_e2m1(const uint8_t *p, float scale, v16 *even, v16 *odd)
{
    /* the high byte of each value as a half; the low byte is zero */
    const __m128i table = _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, (char)0x80, (char)0xb8, (char)0xbc,
                                        (char)0xbe, (char)0xc0, (char)0xc2, (char)0xc4, (char)0xc6);
    const __m128i nibble = _mm_set1_epi8(15), zero = _mm_setzero_si128();
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(bytes, nibble));
    __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
    const v16 s = v16_set1(scale);
    even->a = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, low)), s.a);
    even->b = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, low)), s.b);
    odd->a = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, high)), s.a);
    odd->b = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, high)), s.b);
}

static inline v16 v16_halfs(__m256i h) /* sixteen half-precision numbers */
{
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
static inline void v16_e2m1_quads(const uint8_t *p, v16 *q)
{
    /* as in v16_e2m1 */
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, (char)0x80, (char)0xb8, (char)0xbc, (char)0xbe,
                      (char)0xc0, (char)0xc2, (char)0xc4, (char)0xc6));
    const __m256i nibble = _mm256_set1_epi8(15), upper = _mm256_set1_epi16((short)0xff00);
    __m256i bytes = _mm256_loadu_si256((const __m256i *)p);
    __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, nibble));
    __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble));
    q[0] = v16_halfs(_mm256_slli_epi16(low, 8));
    q[1] = v16_halfs(_mm256_slli_epi16(high, 8));
    q[2] = v16_halfs(_mm256_and_si256(low, upper));
    q[3] = v16_halfs(_mm256_and_si256(high, upper));
}

static inline v16 v16_halves(const float *p) { return (v16){_mm256_set1_ps(p[0]), _mm256_set1_ps(p[1])}; }

static inline __m256 v16_pick(__m256 x, __m256 y, const int odd)
{
    __m256 r = odd ? _mm256_shuffle_ps(x, y, 0xdd) : _mm256_shuffle_ps(x, y, 0x88);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(r), 0xd8));
}
static inline void v16_deinterleave(const float *p, v16 *even, v16 *odd)
{
    v16 x = v16_load(p), y = v16_load(p + 16);
    *even = (v16){v16_pick(x.a, x.b, 0), v16_pick(y.a, y.b, 0)};
    *odd = (v16){v16_pick(x.a, x.b, 1), v16_pick(y.a, y.b, 1)};
}
static inline void v16_interleave(v16 even, v16 odd, float *p)
{
    const __m256 e[2] = {even.a, even.b}, o[2] = {odd.a, odd.b};
    for (int i = 0; i < 2; i++) {
        const __m256 low = _mm256_unpacklo_ps(e[i], o[i]), high = _mm256_unpackhi_ps(e[i], o[i]);
        _mm256_storeu_ps(p + 16 * i, _mm256_permute2f128_ps(low, high, 0x20));
        _mm256_storeu_ps(p + 16 * i + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
}

#undef BINARY
#undef BINARYI

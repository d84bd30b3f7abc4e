/* Linears and experts of rounded activations for more than FEW_PAIRS rows, by the bf16 multiply-add of pairs (V16_BF16
 * sets): weights are decoded once for all rows, with their scales, which are powers of two.
 *
 * FP4: as in gemm_pairs.h; the products have the scale already, so they are only added.
 * FP8: the instruction adds the product of the upper halves, then that of the lower ones, each rounded (dispatch.c sees
 * to that): two fused multiply-adds. Of every 32 inputs, pair l is input l above input l+16: the sums of gemm.h.
 *
 * All is exact or rounded as there, while scales are so near to one that no sum is subnormal: rounded activations are
 * bf16 numbers of at least 2^-31 (quant.h), so products are multiples of 2^-126.
 */

#define LEAST_SCALE (127 - 79)
#define MOST_SCALE (127 + 20) /* four products of FP4 then fit, too (moe.h: activations up to 2^100) */
#define PAIRS_STEP 64         /* inputs of a step: two vectors of pairs */

/* FP8 inputs as pairs; len a multiple of 32. Whether they are bf16 numbers, none of them but zero below 2^-31. */
INLINE int FN(fp8_pairs)(const float *x, uint16_t *y, int64_t len)
{
    const v16i upper = v16i_set1((int)0xffff0000), one = v16i_set1(1), most = v16i_set1(INT32_MAX);
    v16i bits = v16i_set1(0), least = v16i_set1(-1);
    for (int64_t k = 0; k < len; k += 32) {
        const v16i above = v16_bits(v16_load(x + k)), below = v16_bits(v16_load(x + k + 16));
        _mm512_storeu_si512(y + k, v16i_or(v16i_and(above, upper), v16i_shr(below, 16)));
        bits = v16i_or(bits, v16i_or(above, below));
        least = _mm512_min_epu32(least, v16i_sub(v16i_and(above, most), one)); /* of zero the largest there is */
        least = _mm512_min_epu32(least, v16i_sub(v16i_and(below, most), one));
    }
    return !_mm512_test_epi32_mask(bits, v16i_set1(0xffff)) && _mm512_reduce_min_epu32(least) >= ((127 - 31) << 23) - 1;
}

/* 64 inputs of four outputs lie together: [len / 64][4 outputs][64]; sixteen outputs as four such. */
#define TILE_AT(tile, len, c) ((tile) + (int64_t)((c) / 4) * 4 * (len) + (c) % 4 * PAIRS_STEP)

/* Of FP4: 64 inputs, or the first 32 (`half`), as two vectors; `which`: where the exponents of their two groups are. */
INLINE void FN(fp4_step)(const uint8_t *codes, const int half, __m512i which, __m512i exponents, uint16_t *out)
{
    const __m512i values = _mm512_loadu_si512(FN(e2m1_bf16)), nibble = _mm512_set1_epi16(15);
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1); /* half of the table */
    const __m256i *p = (const __m256i *)codes;
    const __m512i words = _mm512_cvtepu8_epi16(half ? _mm256_maskz_loadu_epi8(0xffff, p) : _mm256_loadu_si256(p));
    const __m512i scale = _mm512_permutexvar_epi16(which, exponents);
    const __m512i table = _mm512_mask_add_epi16(values, 0xfefefefe, values, scale); /* zeros stay */
    const __m512i low = _mm512_ternarylogic_epi32(words, nibble, second, 0xea);     /* words & nibble | second */
    const __m512i high = _mm512_or_si512(_mm512_srli_epi16(words, 4), second);
    _mm512_store_si512(out, _mm512_permutexvar_epi16(low, table));
    _mm512_store_si512(out + 32, _mm512_permutexvar_epi16(high, table));
}

/* Outputs n0 .. n0+nn−1 (up to a multiple of four, the last one again) of FP4, inputs k .. k+len−1, the last 64 filled up
 * with zeros. Whether no scale is too far from one. */
static int FN(fp4_tile)(const struct matrix *w, struct ahead to, int64_t n0, int nn, int64_t k, int64_t len,
                        uint16_t *tile)
{
    const __mmask32 groups = (__mmask32)((1ull << len / GROUP) - 1);
    const __m512i two = _mm512_set1_epi16(2), apart = _mm512_set1_epi16(MOST_SCALE - LEAST_SCALE);
    const int64_t end = len / 64 * 64, filled = (len + 63) / 64 * 64;
    const uint8_t *codes = w->weight + n0 * w->weight_stride + k / 2, *fetch = FN(byte_ahead)(to, k / 2);
    const uint8_t *scale = w->scale + n0 * w->scale_stride + k / GROUP, *next = FN(scales_ahead)(to, 0) + k / GROUP;
    const int64_t next_stride = to.w->format == FORMAT_FP4 ? to.w->scale_stride : 0;
    __mmask32 far = 0;
    for (int c = 0; c < (nn + 3) / 4 * 4; c++) {
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(groups, scale));
        const __m512i exponents = _mm512_slli_epi16(_mm512_sub_epi16(bytes, _mm512_set1_epi16(127)), 7);
        uint16_t *out = TILE_AT(tile, filled, c);
        __m512i which = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
        far |= _mm512_mask_cmpgt_epu16_mask(groups, _mm512_sub_epi16(bytes, _mm512_set1_epi16(LEAST_SCALE)), apart);
        __builtin_prefetch(next);
        for (int64_t i = 0; i < end; i += 64, which = _mm512_add_epi16(which, two)) {
            __builtin_prefetch(fetch + i / 2, 0, 2);
            FN(fp4_step)(codes + i / 2, 0, which, exponents, out + 4 * i);
        }
        if (end < len) FN(fp4_step)(codes + end / 2, 1, which, exponents, out + 4 * end);
        fetch += to.w->weight_stride;
        next += next_stride;
        if (c < nn - 1) {
            codes += w->weight_stride;
            scale += w->scale_stride;
        }
    }
    return !far;
}

/* As fp4_tile, of FP8: len a multiple of 128, all outputs within 128 of one scale. */
static void FN(fp8_tile)(const struct matrix *w, struct ahead to, int64_t n0, int nn, int64_t k, int64_t len,
                         uint16_t *tile)
{
    const uint8_t *scale = w->scale + n0 / 128 * w->scale_stride + k / 128, *fetch = FN(byte_ahead)(to, k);
    for (int64_t i = 0; i < len; i += 128, scale++) {
        const struct FN(tables) t = FN(tables_of)(scale[0] - 127);
        for (int c = 0; c < (nn + 3) / 4 * 4; c++) {
            const uint8_t *codes = w->weight + (n0 + (c < nn ? c : nn - 1)) * w->weight_stride + k + i;
            uint16_t *out = TILE_AT(tile, len, c) + 4 * i;
            for (int half = 0; half < 2; half++, out += 4 * PAIRS_STEP) {
                __m512i first, second;
                __builtin_prefetch(fetch + c * to.w->weight_stride + i + 64 * half, 0, 2);
                FN(codes_words)(&t, FN(e4m3_pairs), codes + 64 * half, &first, &second);
                _mm512_store_si512(out, first);
                _mm512_store_si512(out + 32, second);
            }
        }
    }
}

/* `len` inputs (a multiple of 64) of four FP4 outputs for R rows: added to sums [row][STRIP], or begun. */
INLINE void FN(fp4_block)(const int R, const uint16_t *tile, const uint16_t *const *x, int64_t k, int64_t len, int first,
                          float *sums)
{
    __m512 acc[16];
    float sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < 4 * R; i++) acc[i] = _mm512_setzero_ps();
    for (const int64_t end = k + len; k < end; k += 64, tile += 4 * PAIRS_STEP) {
        __m512i w[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            w[i] = _mm512_load_si512(tile + 32 * i);
            v16i_hide(&w[i]); /* loaded once, not by each multiply-add again */
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m512bh a = (__m512bh)_mm512_loadu_si512(x[r] + k), b = (__m512bh)_mm512_loadu_si512(x[r] + k + 32);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                const __m512 p = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)w[2 * c], a);
                acc[4 * r + c] = _mm512_add_ps(acc[4 * r + c], _mm512_dpbf16_ps(p, (__m512bh)w[2 * c + 1], b));
            }
        }
    }
    FN(sums)(acc, 4 * R, sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) FN(add_sums)(sums + r * STRIP, sum + 4 * r, 4, first);
}

/* As fp4_block, of FP8; sums [row][width]. */
INLINE void FN(fp8_block)(const int R, const uint16_t *tile, const uint16_t *const *x, int64_t k, int64_t len, int first,
                          float *sums, int64_t width)
{
    __m512 acc[4 * TILE_ROWS];
    float sum[4 * TILE_ROWS];
#pragma GCC unroll 24
    for (int i = 0; i < 4 * R; i++) acc[i] = _mm512_setzero_ps();
    for (const int64_t end = k + len; k < end; k += 64, tile += 4 * PAIRS_STEP)
#pragma GCC unroll 2
        for (int half = 0; half < 64; half += 32) {
            __m512i w[4];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                w[c] = _mm512_load_si512(tile + c * PAIRS_STEP + half);
                v16i_hide(&w[c]);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m512bh v = (__m512bh)_mm512_loadu_si512(x[r] + k + half);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) acc[4 * r + c] = _mm512_dpbf16_ps(acc[4 * r + c], (__m512bh)w[c], v);
            }
        }
    FN(sums)(acc, 4 * R, sum);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) FN(add_sums)(sums + r * width, sum + 4 * r, 4, first);
}

#define FP4_ROWS(R) \
    case R: FN(fp4_block)(R, TILE_AT(tile, len, c), x + r, k, len, first, sums + r * STRIP + c); break;
#define FP8_ROWS(R) \
    case R: FN(fp8_block)(R, TILE_AT(tile, len, c), x + r, k, len, first, sums + r * width + c, width); break;

/* All rows with a tile of nn outputs: added to sums [row][STRIP], or begun, up to a multiple of four. */
INLINE void FN(fp4_sums)(const uint16_t *tile, int nn, const uint16_t *const *x, int rows, int64_t k, int64_t len,
                         int first, float *sums)
{
    for (int r = 0; r < rows; r += 4)
        for (int c = 0; c < nn; c += 4) switch (rows - r < 4 ? rows - r : 4) {
                FP4_ROWS(1)
                FP4_ROWS(2)
                FP4_ROWS(3)
                FP4_ROWS(4)
            }
}

/* The same of FP8, of rows > FEW_PAIRS; sums [row][width]. */
INLINE void FN(fp8_sums)(const uint16_t *tile, int nn, const uint16_t *const *x, int rows, int64_t k, int64_t len,
                         int first, float *sums, int64_t width)
{
    const int blocks = (rows + TILE_ROWS - 1) / TILE_ROWS; /* of equal size, or one row less */
    for (int b = 0; b < blocks; b++) {
        const int r = rows * b / blocks, live = rows * (b + 1) / blocks - r;
        for (int c = 0; c < nn; c += 4) switch (live) {
                FP8_ROWS(3)
                FP8_ROWS(4)
                FP8_ROWS(5)
                FP8_ROWS(6)
            }
    }
}

/* Up to eight rows wait for weights that come from memory: decoding on the fly keeps them coming. */
static int FN(tile_pays)(const struct matrix *w, int rows)
{
    return rows > (w->format == FORMAT_FP8 || w->n * w->weight_stride <= NEAR ? FEW_PAIRS : 8);
}

/* Whether FP8 weights can be such a tile, in slices of whole 128s. */
static int FN(fp8_fits)(const struct matrix *w, int slices)
{
    int far = 0;
    if (w->format != FORMAT_FP8 || w->k / slices % 128) return 0;
    for (int64_t n = 0; n < w->n; n += 128)
        for (int64_t b = 0; b < w->k / 128; b++)
            far |= (uint8_t)(w->scale[n / 128 * w->scale_stride + b] - LEAST_SCALE) > MOST_SCALE - LEAST_SCALE;
    return !far;
}

/* As strip, for x as pairs, to sums [slice][row][width], `apart` floats from slice to slice; 0: slices, of one chunk each,
 * are added up. Outputs within 128 of one scale. Sums beyond nn, up to a multiple of four, are written too. Whether it
 * could: false where a scale of FP4 is too far from one. */
static int FN(strip_tiles)(const struct matrix *w, const struct route *route, int64_t n0, int nn,
                           const uint16_t *const *x, int rows, int slices, float *sums, int64_t width, int64_t apart)
{
    uint16_t tile[STRIP * CHUNK_FP4] __attribute__((aligned(64)));
    const int fp4 = w->format == FORMAT_FP4;
    const int64_t inputs = w->k / slices, most = fp4 ? CHUNK_FP4 : CHUNK;
    const struct ahead to = FN(ahead)(w, route, n0, STRIP);
    for (int s = 0; s < slices; s++, sums += apart)
        for (int64_t k = 0; k < inputs; k += most) {
            const int64_t len = inputs - k < most ? inputs - k : most, at = s * inputs + k;
            const int first = k == 0 && (s == 0 || apart);
            if (fp4) {
                if (!FN(fp4_tile)(w, to, n0, nn, at, len, tile)) return 0;
                FN(fp4_sums)(tile, nn, x, rows, at, (len + 63) / 64 * 64, first, sums);
            } else {
                FN(fp8_tile)(w, to, n0, nn, at, len, tile);
                FN(fp8_sums)(tile, nn, x, rows, at, len, first, sums, width);
            }
        }
    return 1;
}

/* Linears of rounded activations for more than FEW_PAIRS rows, by the bf16 multiply-add of pairs (V16_BF16 sets): weights
 * are decoded once for all rows, with their scales, which are powers of two.
 *
 * FP4: as in gemm_pairs.h; the products have the scale already, so they are only added.
 * FP8: the instruction adds the product of the upper halves, then that of the lower ones, each rounded (dispatch.c sees
 * to that): two fused multiply-adds. Of every 32 inputs, pair l is input l above input l+16: the sums of gemm.h.
 *
 * All is exact or rounded as there, while scales are so near to one that no sum is subnormal: rounded activations are
 * multiples of 2^-31 (quant.h).
 */

#define LEAST_SCALE (127 - 80)
#define MOST_SCALE (127 + 20) /* four products of FP4 then fit, too (moe.h: activations up to 2^100) */
#define PAIRS_STEP 64         /* inputs of a step: two vectors of pairs */

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
    const __m512i two = _mm512_set1_epi16(2);
    const uint8_t *fetch = FN(byte_ahead)(to, k / 2);
    __mmask32 far = 0;
    for (int c = 0; c < (nn + 3) / 4 * 4; c++, fetch += to.w->weight_stride) {
        const int64_t n = n0 + (c < nn ? c : nn - 1), end = len / 64 * 64;
        const uint8_t *codes = w->weight + n * w->weight_stride + k / 2;
        const uint8_t *scale = w->scale + n * w->scale_stride + k / GROUP;
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(groups, scale));
        const __m512i above = _mm512_sub_epi16(bytes, _mm512_set1_epi16(LEAST_SCALE));
        far |= _mm512_mask_cmpgt_epu16_mask(groups, above, _mm512_set1_epi16(MOST_SCALE - LEAST_SCALE));
        const __m512i exponents = _mm512_slli_epi16(_mm512_sub_epi16(bytes, _mm512_set1_epi16(127)), 7);
        uint16_t *out = TILE_AT(tile, (len + 63) / 64 * 64, c);
        __m512i which = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
        __builtin_prefetch(FN(scales_ahead)(to, c) + k / GROUP);
        for (int64_t i = 0; i < end; i += 64, which = _mm512_add_epi16(which, two)) {
            __builtin_prefetch(fetch + i / 2, 0, 2);
            FN(fp4_step)(codes + i / 2, 0, which, exponents, out + 4 * i);
        }
        if (end < len) FN(fp4_step)(codes + end / 2, 1, which, exponents, out + 4 * end);
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

/* `len` inputs (a multiple of 64) of four outputs for R rows: added to sums [row][STRIP], or begun. */
INLINE void FN(pairs_block)(const int fp4, const int R, const uint16_t *tile, const uint16_t *const *x, int64_t k,
                            int64_t len, int first, float *sums)
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
                const int i = 4 * r + c;
                __m512 p = fp4 ? _mm512_setzero_ps() : acc[i];
                p = _mm512_dpbf16_ps(p, (__m512bh)w[2 * c], a);
                p = _mm512_dpbf16_ps(p, (__m512bh)w[2 * c + 1], b);
                acc[i] = fp4 ? _mm512_add_ps(acc[i], p) : p;
            }
        }
    }
    FN(sums)(acc, 4 * R, sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) FN(add_sums)(sums + r * STRIP, sum + 4 * r, 4, first);
}

#define PAIRS_ROWS(R) \
    case R: FN(pairs_block)(fp4, R, tile, x, k, len, first, sums); break;

/* pairs_block of up to four rows. */
INLINE void FN(pairs_rows)(const int fp4, int rows, const uint16_t *tile, const uint16_t *const *x, int64_t k,
                           int64_t len, int first, float *sums)
{
    switch (rows) {
        PAIRS_ROWS(1)
        PAIRS_ROWS(2)
        PAIRS_ROWS(3)
        PAIRS_ROWS(4)
    }
}

/* All rows with a tile of nn outputs: added to sums [row][STRIP], or begun, up to a multiple of four. */
INLINE void FN(pairs_tile)(const int fp4, const uint16_t *tile, int nn, const uint16_t *const *x, int rows, int64_t k,
                           int64_t len, int first, float *sums)
{
    for (int r = 0; r < rows; r += 4)
        for (int c = 0; c < nn; c += 4)
            FN(pairs_rows)(fp4, rows - r < 4 ? rows - r : 4, TILE_AT(tile, len, c), x + r, k, len, first,
                           sums + r * STRIP + c);
}

/* Up to eight rows wait for weights that come from memory: decoding by the way keeps them coming. */
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

/* As strip, for x as pairs; outputs within 128 of one scale. Sums beyond nn, up to a multiple of four, are written too.
 * Whether it could: false where a scale of FP4 is too far from one. */
static int FN(strip_tiles)(const struct matrix *w, const struct route *route, int64_t n0, int nn,
                           const uint16_t *const *x, int rows, int slices, float *sums)
{
    uint16_t tile[STRIP * CHUNK_FP4] __attribute__((aligned(64)));
    const int fp4 = w->format == FORMAT_FP4;
    const int64_t width = w->k / slices, most = fp4 ? CHUNK_FP4 : CHUNK;
    const struct ahead to = FN(ahead)(w, route, n0, STRIP);
    for (int s = 0; s < slices; s++, sums += (int64_t)rows * STRIP)
        for (int64_t k = 0; k < width; k += most) {
            const int64_t len = width - k < most ? width - k : most, at = s * width + k;
            if (fp4) {
                if (!FN(fp4_tile)(w, to, n0, nn, at, len, tile)) return 0;
                FN(pairs_tile)(1, tile, nn, x, rows, at, (len + 63) / 64 * 64, k == 0, sums);
            } else {
                FN(fp8_tile)(w, to, n0, nn, at, len, tile);
                FN(pairs_tile)(0, tile, nn, x, rows, at, len, k == 0, sums);
            }
        }
    return 1;
}

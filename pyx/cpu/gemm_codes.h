/* FP8 linears by looking bytes up in tables of 128 (V16_BF16 sets).
 *
 * The sums are those of gemm.h. e4m3 times a power of two is a bf16 number, whose two bytes two tables give: any code,
 * NaN too. The tables hold a block's scale: its exponent is added to theirs.
 */

/* Of the codes without sign, times 1 and times 2: the high byte (7 bits of the exponent), the low one (1 and the
 * fraction). */
#define EIGHT(b) b, b, b, b, b, b, b, b
#define SIXTEEN(b) EIGHT(b), EIGHT(b)
#define EVEN 0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70
#define ODD 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0
static const uint8_t FN(e4m3_high)[2][128] __attribute__((aligned(64))) = {
    {0, 59, 59, 59, 60, 60, 60, 60, EIGHT(60), SIXTEEN(61), SIXTEEN(62), SIXTEEN(63), SIXTEEN(64), SIXTEEN(65),
     SIXTEEN(66), EIGHT(67), 67, 67, 67, 67, 67, 67, 67, 0x7f},
    {0, 59, 60, 60, 60, 60, 60, 60, SIXTEEN(61), SIXTEEN(62), SIXTEEN(63), SIXTEEN(64), SIXTEEN(65), SIXTEEN(66),
     SIXTEEN(67), 68, 68, 68, 68, 68, 68, 68, 0x7f}};
static const uint8_t FN(e4m3_low)[2][128] __attribute__((aligned(64))) = {
    {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD,
     EVEN, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xc0},
    {0, 0x80, 0, 0x40, 0x80, 0xa0, 0xc0, 0xe0, EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN, ODD, EVEN,
     ODD, 0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0xc0}};
/* Where the 64 codes go, so that widening them leaves 16 neighbours in every vector. */
#define FOUR(m) m, m + 16, m + 1, m + 17, m + 2, m + 18, m + 3, m + 19
static const uint8_t FN(e4m3_place)[64] __attribute__((aligned(64))) = {
    FOUR(0), FOUR(32), FOUR(4), FOUR(36), FOUR(8), FOUR(40), FOUR(12), FOUR(44)};
/* The same with every two exchanged: of each 32 in a vector, number l above number l + 16. */
#define FOUR_PAIRS(m) m + 16, m, m + 17, m + 1, m + 18, m + 2, m + 19, m + 3
static const uint8_t FN(e4m3_pairs)[64] __attribute__((aligned(64))) = {
    FOUR_PAIRS(0), FOUR_PAIRS(32), FOUR_PAIRS(4),  FOUR_PAIRS(36),
    FOUR_PAIRS(8), FOUR_PAIRS(40), FOUR_PAIRS(12), FOUR_PAIRS(44)};

struct FN(tables) {
    __m512i low[2], high[2];
};

/* The tables times 2^exponent, −117 to 119, where all of them are normal numbers. */
INLINE struct FN(tables) FN(tables_of)(int exponent)
{
    const __mmask64 but_zero = ~1ull, but_nan = ~0ull >> 1;
    const uint8_t *low = FN(e4m3_low)[exponent & 1], *high = FN(e4m3_high)[exponent & 1];
    const __m512i more = _mm512_set1_epi8((char)(exponent >> 1));
    const __m512i first = _mm512_load_si512(high), second = _mm512_load_si512(high + 64);
    return (struct FN(tables)){{_mm512_load_si512(low), _mm512_load_si512(low + 64)},
                               {_mm512_mask_add_epi8(first, but_zero, first, more),
                                _mm512_mask_add_epi8(second, but_nan, second, more)}};
}

/* The weights of 64 codes as bf16 numbers, in the order of `order`. */
INLINE void FN(codes_words)(const struct FN(tables) *t, const uint8_t *order, const uint8_t *p, __m512i *first,
                            __m512i *second)
{
    const __m512i place = _mm512_load_si512(order), sign = _mm512_set1_epi8((char)0x80);
    const __m512i codes = _mm512_permutexvar_epi8(place, _mm512_loadu_si512(p));
    const __m512i low = _mm512_permutex2var_epi8(t->low[0], codes, t->low[1]);
    __m512i high = _mm512_permutex2var_epi8(t->high[0], codes, t->high[1]);
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8); /* high | (codes & sign) */
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* The weights of 64 codes, 16 neighbours in a vector. */
INLINE void FN(codes_decode)(const struct FN(tables) *t, const uint8_t *p, __m512 *q)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __m512i first, second;
    FN(codes_words)(t, FN(e4m3_place), p, &first, &second);
    q[0] = _mm512_castsi512_ps(_mm512_slli_epi32(first, 16));
    q[1] = _mm512_castsi512_ps(_mm512_and_si512(first, upper));
    q[2] = _mm512_castsi512_ps(_mm512_slli_epi32(second, 16));
    q[3] = _mm512_castsi512_ps(_mm512_and_si512(second, upper));
}

/* 64 inputs of C outputs for R rows, from byte or input `at` on: added to acc[r · C + c]. */
INLINE void FN(codes_step)(const int R, const int C, const struct FN(tables) *t, const uint8_t *const *weight,
                           const float *const *x, int64_t at, __m512 *acc)
{
    __m512 q[4][4];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) FN(codes_decode)(t, weight[c] + at, q[c]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            __m512 v = _mm512_loadu_ps(x[r] + at + 16 * i);
            __asm__("" : "+v"(v)); /* loaded once, not by each multiply-add again */
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r * C + c] = _mm512_fmadd_ps(q[c][i], v, acc[r * C + c]);
        }
}

/* A chunk: `len` inputs of C outputs from byte or input k on, added to sums [row][STRIP], or begun. fetch[c]: what to
 * fetch for each output meanwhile, `pace` bytes a cache line of codes. */
INLINE void FN(codes_dot)(const int R, const int C, const uint8_t *const *weight, const uint8_t *scale,
                          const uint8_t *const *fetch, int64_t pace, const float *const *x, int64_t k, int64_t len,
                          int first, float *sums)
{
    __m512 acc[16];
    float sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; i++) acc[i] = _mm512_setzero_ps();
    for (int64_t i = 0; i < len; i += 128) {
        const struct FN(tables) t = FN(tables_of)(scale[(k + i) / 128] - 127);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) FN(prefetch_codes)(fetch[c] + (i / 64 + half) * pace, C == 4);
            FN(codes_step)(R, C, &t, weight, x, k + i + 64 * half, acc);
        }
    }
    FN(sums)(acc, R * C, sum);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) FN(add_sums)(sums + r * STRIP, sum + r * C, C, first);
}

#define CODES_CASE(R, C) \
    case R: \
        for (int c = 0; c < 4; c += C) \
            FN(codes_dot)(R, C, weight + c, scale, fetch + c, pace, x, k, len, first, sums + c); \
        break;

/* As codes_dot, for four outputs. rows: 1 to 4, 6 or 8. */
static void FN(codes_any)(int rows, const uint8_t *const *weight, const uint8_t *scale, const uint8_t *const *fetch,
                          int64_t pace, const float *const *x, int64_t k, int64_t len, int first, float *sums)
{
    switch (rows) {
        CODES_CASE(1, 4)
        CODES_CASE(2, 4)
        CODES_CASE(3, 4)
        CODES_CASE(4, 4)
        CODES_CASE(6, 2)
        CODES_CASE(8, 2)
    }
}

/* Outputs n0 .. n0+3 (`last` the last there is), inputs k .. k+len−1. x, sums: of `rows` rows, up to 8. */
static void FN(codes_four)(const struct matrix *w, struct ahead to, int along, int64_t n0, int64_t last,
                           const float *const *x, int rows, int64_t k, int64_t len, int first, float *sums)
{
    const uint8_t *weight[4], *fetch[4], *from = FN(byte_ahead)(to, along ? 4 * k : k);
    for (int c = 0; c < 4; c++) {
        weight[c] = w->weight + (n0 + c < last ? n0 + c : last) * w->weight_stride;
        fetch[c] = from + c * (along ? 64 : to.w->weight_stride);
    }
    const uint8_t *scale = w->scale + n0 / 128 * w->scale_stride;
    FN(codes_any)(rows, weight, scale, fetch, along ? 256 : 64, x, k, len, first, sums);
}

/* Inputs k .. k+len−1 of outputs n0 .. n0+nn−1 into a tile [STRIP][TILE_STRIDE(len)]. */
static void FN(codes_tile)(const struct matrix *w, struct ahead to, int64_t n0, int nn, int64_t k, int64_t len,
                           float *tile)
{
    const uint8_t *fetch = FN(byte_ahead)(to, k), *scale = w->scale + n0 / 128 * w->scale_stride;
    for (int64_t i = 0; i < len; i += 128) {
        const struct FN(tables) t = FN(tables_of)(scale[(k + i) / 128] - 127);
        for (int c = 0; c < nn; c++)
            for (int64_t j = i; j < i + 128; j += 64) {
                __m512 q[4];
                __builtin_prefetch(fetch + c * to.w->weight_stride + j, 0, 2);
                FN(codes_decode)(&t, w->weight + (n0 + c) * w->weight_stride + k + j, q);
                for (int v = 0; v < 4; v++) _mm512_store_ps(tile + c * TILE_STRIDE(len) + j + 16 * v, q[v]);
            }
    }
}

/* Whether strip_codes can do outputs n0 .. n0+nn−1. */
static int FN(codes_fit)(const struct matrix *w, int64_t n0, int nn, int slices)
{
    if (w->format != FORMAT_FP8 || w->k / slices % 128 || n0 % 128 + nn > 128) return 0;
    const uint8_t *scale = w->scale + n0 / 128 * w->scale_stride;
    for (int64_t b = 0; b < w->k / 128; b++)
        if (scale[b] < 127 - 117 || scale[b] > 127 + 119) return 0;
    return 1;
}

/* As strip, of up to FEW rows. Sums beyond nn, up to a multiple of four, are written too. */
static void FN(strip_codes)(const struct matrix *w, const struct route *route, int64_t n0, int nn,
                            const float *const *x, int rows, int slices, float *sums)
{
    const int64_t width = w->k / slices, last = n0 + nn - 1;
    const int along = rows <= V16_ROWS; /* whole rows of weights, as they lie; of more rows' inputs, a chunk is near */
    const int columns = along ? 4 : STRIP;
    const int64_t more = along ? FN(outputs_ahead)(w) : STRIP;
    const float *padded[BLOCK + 1];
    for (int r = 0; r <= rows; r++) padded[r] = x[r < rows ? r : rows - 1];
    for (int c0 = 0; c0 < nn; c0 += columns)
        for (int s = 0; s < slices; s++)
            for (int64_t k = 0; k < width; k += CHUNK) {
                for (int r = 0, live; r < rows; r += live) {
                    live = rows - r > 8 ? 8 : rows - r;
                    const int done = live > 4 ? (live + 1) / 2 * 2 : live;
                    for (int c = c0; c < c0 + columns && c < nn; c += 4)
                        FN(codes_four)(w, FN(ahead)(w, route, n0 + c, more), along, n0 + c, last, padded + r, done,
                                       s * width + k, width - k < CHUNK ? width - k : CHUNK, k == 0,
                                       sums + ((int64_t)s * rows + r) * STRIP + c);
                }
            }
}

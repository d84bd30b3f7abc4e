/* FP4 linears by the bf16 multiply-add of pairs (V16_BF16 sets).
 *
 * e2m1 and rounded activations are bf16 numbers, and a sum of four of their products is exact in float32, so its inner
 * order and rounding do not matter: the bits are those of the float kernels in gemm.h. Exactness fails only where
 * activations are so large that four products overflow; moe.h looks for those (moe_args.wide).
 *
 * x of every 64 inputs: the 32 even ones, then the 32 odd ones.
 */

/* e2m1 as bf16, twice: of a word's index five bits count, and the fifth may be anything */
#define E2M1_BF16 \
    0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, \
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0
static const uint16_t FN(e2m1_bf16)[32] = {E2M1_BF16, E2M1_BF16};

/* 64 (`half`: 32) inputs of C outputs for R rows, the codes `at` bytes from weight[c] on: added to acc[r · C + c]. */
INLINE void FN(pairs_step)(const int R, const int C, const uint8_t *const *weight, int64_t at, const int half,
                           const __m512 *scale, __m512i which, const uint16_t *const *x, int64_t k, __m512 *acc)
{
    const __m512i table = _mm512_loadu_si512(FN(e2m1_bf16));
    __m512bh low[4], high[4];
    __m512 own[4];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const __m256i *p = (const __m256i *)(weight[c] + at);
        const __m512i words = _mm512_cvtepu8_epi16(half ? _mm256_maskz_loadu_epi8(0xffff, p) : _mm256_loadu_si256(p));
        low[c] = (__m512bh)_mm512_permutexvar_epi16(words, table);
        high[c] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
        own[c] = _mm512_permutexvar_ps(which, scale[c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            __m512 p = _mm512_setzero_ps();
            p = _mm512_dpbf16_ps(p, low[c], (__m512bh)_mm512_loadu_si512(x[r] + k));
            p = _mm512_dpbf16_ps(p, high[c], (__m512bh)_mm512_loadu_si512(x[r] + k + 32));
            acc[r * C + c] = _mm512_fmadd_ps(p, own[c], acc[r * C + c]);
        }
}

/* The scales of up to sixteen groups as floats; e8m0: the byte is the exponent. */
INLINE __m512 FN(pairs_scales)(const uint8_t *p, __mmask16 groups)
{
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(groups, p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x00400000)));
}

/* Four outputs' weights, and what to fetch meanwhile: from fetch[c] on, `pace` bytes for a cache line of codes. */
struct FN(four) {
    const uint8_t *weight[4], *scale[4], *fetch[4], *fetch_scale[4];
    int64_t pace;
};

/* Up to 512 inputs of C outputs from c0 on, from input k0 + k on: added to acc[r · C + c]. */
INLINE void FN(pairs_some)(const int R, const int C, const struct FN(four) *f, const int c0, const uint16_t *const *x,
                           int64_t k0, int64_t k, int len, __m512 *acc)
{
    const __mmask16 groups = (__mmask16)((1u << len / GROUP) - 1);
    __m512 scale[4];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const uint8_t *p = f->scale[c0 + c] + (k0 + k) / GROUP;
        scale[c] = FN(pairs_scales)(p, groups);
        __builtin_prefetch(f->fetch_scale[c0 + c] + (k0 + k) / GROUP);
    }
    __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i two = _mm512_set1_epi32(2);
    const uint8_t *const *weight = f->weight + c0;
    int64_t at = (k0 + k) / 2, fetched = k / 128 * f->pace;
    int left = len;
    k += k0;
    for (; left >= 128; left -= 128, k += 128, at += 64, fetched += f->pace) { /* a cache line of codes */
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) FN(prefetch_codes)(f->fetch[c0 + c] + fetched, C == 4);
        FN(pairs_step)(R, C, weight, at, 0, scale, which, x, k, acc);
        which = _mm512_add_epi32(which, two);
        FN(pairs_step)(R, C, weight, at + 32, 0, scale, which, x, k + 64, acc);
        which = _mm512_add_epi32(which, two);
    }
    if (left >= 64) {
        FN(pairs_step)(R, C, weight, at, 0, scale, which, x, k, acc);
        which = _mm512_add_epi32(which, two);
        left -= 64, k += 64, at += 32;
    }
    if (left) FN(pairs_step)(R, C, weight, at, 1, scale, which, x, k, acc);
}

/* C (2 or 4) outputs from c0 on for R rows, inputs k0 .. k0+len−1: added to sums [row][STRIP], or begun. */
INLINE void FN(pairs_dot)(const int R, const int C, const struct FN(four) *f, const int c0, const uint16_t *const *x,
                          int64_t k0, int64_t len, int first, float *sums)
{
    __m512 acc[16];
    float sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; i++) acc[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < len; k += 512)
        FN(pairs_some)(R, C, f, c0, x, k0, k, (int)(len - k < 512 ? len - k : 512), acc);
    FN(sums)(acc, R * C, sum);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) FN(add_sums)(sums + r * STRIP, sum + r * C, C, first);
}

/* Outputs n .. n+3 (`last` the last there is) for R rows, and k0 .. k1−1 of every slice; `more` outputs after them is
 * what to fetch. */
INLINE void FN(pairs_four)(const int R, const int C, const struct matrix *w, const struct route *route, int64_t more,
                           int64_t n, int64_t last, int rows, const uint16_t *const *x, int slices, int64_t k0,
                           int64_t k1, float *sums)
{
    const struct ahead to = FN(ahead)(w, route, n, more);
    struct FN(four) f = {.pace = C == 4 ? 256 : 64};
    for (int c = 0; c < 4; c++) {
        const int64_t j = n + c < last ? n + c : last;
        f.weight[c] = w->weight + j * w->weight_stride;
        f.scale[c] = w->scale + j * w->scale_stride;
        f.fetch_scale[c] = FN(scales_ahead)(to, c);
    }
    const int64_t width = w->k / slices;
    for (int s = 0; s < slices; s++, sums += (int64_t)rows * STRIP)
        for (int64_t k = k0; k < k1; k += CHUNK_FP4) {
            const int64_t at = (s * width + k) / 2;
            const uint8_t *along = FN(byte_ahead)(to, C == 4 ? 4 * at : at);
            for (int c = 0; c < 4; c++) f.fetch[c] = along + c * (C == 4 ? 64 : to.w->weight_stride);
            for (int c = 0; c < 4; c += C)
                FN(pairs_dot)(R, C, &f, c, x, s * width + k, k1 - k < CHUNK_FP4 ? k1 - k : CHUNK_FP4, k == 0, sums + c);
        }
}

/* As pairs_four, for slices of whole cache lines, at most 512 inputs each: a slice is one short sum, so nothing but its
 * products and the sum itself may cost anything. */
INLINE void FN(pairs_slices)(const int R, const struct matrix *w, const struct route *route, int64_t more, int64_t n,
                             int64_t last, int rows, const uint16_t *const *x, int slices, float *sums)
{
    const struct ahead to = FN(ahead)(w, route, n, more);
    const uint8_t *weight[4], *scale[4], *fetch = FN(byte_ahead)(to, 0), *fetch_scale[4];
    /* rows that lie one after another: lines in their order; otherwise those of four rows in turn */
    const int apart = to.w->weight_stride != w->k / 2;
    const int64_t line = apart ? to.w->weight_stride : 64, pace = apart ? 64 : 256;
    for (int c = 0; c < 4; c++) {
        const int64_t j = n + c < last ? n + c : last;
        weight[c] = w->weight + j * w->weight_stride;
        scale[c] = w->scale + j * w->scale_stride;
        fetch_scale[c] = FN(scales_ahead)(to, c);
    }
    const int64_t width = w->k / slices;
    const __mmask16 groups = (__mmask16)((1u << width / GROUP) - 1);
    const __m512i two = _mm512_set1_epi32(2);
    for (int64_t k = 0; k < w->k; sums += (int64_t)rows * STRIP) {
        __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        __m512 acc[16], own[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            own[c] = FN(pairs_scales)(scale[c] + k / GROUP, groups);
            __builtin_prefetch(fetch_scale[c] + k / GROUP);
        }
#pragma GCC unroll 16
        for (int i = 0; i < R * 4; i++) acc[i] = _mm512_setzero_ps();
        for (const int64_t end = k + width; k < end; k += 128, fetch += pace) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) __builtin_prefetch(fetch + line * c);
            FN(pairs_step)(R, 4, weight, k / 2, 0, own, which, x, k, acc);
            which = _mm512_add_epi32(which, two);
            FN(pairs_step)(R, 4, weight, k / 2 + 32, 0, own, which, x, k + 64, acc);
            which = _mm512_add_epi32(which, two);
        }
        float sum[16];
        FN(sums)(acc, R * 4, sum);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) FN(add_sums)(sums + r * STRIP, sum + r * 4, 4, 1);
    }
}

#define PAIRS_CASE(R, C) \
    case R: FN(pairs_four)(R, C, w, route, more, n, last, rows, x, slices, k0, k1, sums); break;

static void FN(pairs_any)(int live, const struct matrix *w, const struct route *route, int64_t more, int64_t n,
                          int64_t last, int rows, const uint16_t *const *x, int slices, int64_t k0, int64_t k1,
                          float *sums)
{
    switch (live) {
        PAIRS_CASE(1, 4)
        PAIRS_CASE(2, 4)
        PAIRS_CASE(3, 4)
        PAIRS_CASE(4, 4)
        PAIRS_CASE(5, 2)
        PAIRS_CASE(6, 2)
        PAIRS_CASE(7, 2)
        PAIRS_CASE(8, 2)
    }
}

/* pairs_slices for rows <= FEW_PAIRS. */
static void FN(slices_any)(int rows, const struct matrix *w, const struct route *route, int64_t more, int64_t n,
                           int64_t last, const uint16_t *const *x, int slices, float *sums)
{
    switch (rows) {
    case 1: FN(pairs_slices)(1, w, route, more, n, last, rows, x, slices, sums); break;
    case 2: FN(pairs_slices)(2, w, route, more, n, last, rows, x, slices, sums); break;
    case 3: FN(pairs_slices)(3, w, route, more, n, last, rows, x, slices, sums); break;
    default: FN(pairs_slices)(4, w, route, more, n, last, rows, x, slices, sums); break;
    }
}

/* As strip, for FP4 and x as pairs. Sums beyond nn, up to a multiple of four, are written too. */
static void FN(strip_pairs)(const struct matrix *w, const struct route *route, int64_t n0, int nn,
                            const uint16_t *const *x, int rows, int slices, float *sums)
{
    const int64_t width = w->k / slices, last = n0 + nn - 1;
    if (rows <= FEW_PAIRS) { /* along whole rows of weights, as they lie */
        const int64_t more = FN(outputs_ahead)(w);
        const int short_sums = width <= 512 && width % 128 == 0;
        for (int c = 0; c < nn && short_sums; c += 4)
            FN(slices_any)(rows, w, route, more, n0 + c, last, x, slices, sums + c);
        for (int c = 0; c < nn && !short_sums; c += 4)
            FN(pairs_any)(rows, w, route, more, n0 + c, last, rows, x, slices, 0, width, sums + c);
        return;
    }
    for (int64_t k = 0; k < width; k += CHUNK_FP4) /* the rows' inputs of one chunk stay in the nearest cache */
        for (int r = 0; r < rows; r += 8)
            for (int c = 0; c < nn; c += 4)
                FN(pairs_any)(rows - r < 8 ? rows - r : 8, w, route, STRIP, n0 + c, last, rows, x + r, slices, k,
                              width - k < CHUNK_FP4 ? width : k + CHUNK_FP4, sums + r * STRIP + c);
}

/* Dot products of rows, in the one order that all sums over a row take: chunks of 512, inside a chunk lane l adds
 * elements l, l + 16, .. by fma, then the lanes as v16_sum does, then the chunks in ascending order. */
#pragma once

enum { DOT_A = V16_ROWS, DOT_B = V16_ROWS }; /* CHUNK, INLINE: gemm.h */

static inline float sum_squares(const float *x, int n)
{
    float total = 0;
    for (int start = 0; start < n; start += CHUNK) {
        int end = n - start < CHUNK ? n : start + CHUNK;
        v16 acc = v16_zero();
        for (int i = start; i < end; i += 16) {
            v16 v = load_some(x + i, end - i);
            acc = v16_fma(v, v, acc);
        }
        total += v16_sum(acc);
    }
    return total;
}

INLINE void dot_step(const float *a, int64_t lda, const float *const *b, int k, int left, v16 *acc, const int na,
                     const int nb)
{
    v16 y[DOT_B];
#pragma GCC unroll 4
    for (int j = 0; j < nb; j++) y[j] = left ? v16_load_n(b[j] + k, left) : v16_load(b[j] + k);
#pragma GCC unroll 4
    for (int i = 0; i < na; i++) {
        v16 x = left ? v16_load_n(a + i * lda, left) : v16_load(a + i * lda);
#pragma GCC unroll 4
        for (int j = 0; j < nb; j++) acc[i * nb + j] = v16_fma(x, y[j], acc[i * nb + j]);
    }
}

INLINE void dot_block(const float *a, int64_t lda, const float *const *b, int n, float *out, int64_t ldo, const int na,
                      const int nb)
{
    for (int start = 0; start < n; start += CHUNK) {
        int end = n - start < CHUNK ? n : start + CHUNK, k = start;
        v16 acc[DOT_A * DOT_B];
        float sum[DOT_A * DOT_B];
#pragma GCC unroll 16
        for (int i = 0; i < na * nb; i++) acc[i] = v16_zero();
        for (; k + 16 <= end; k += 16) dot_step(a + k, lda, b, k, 0, acc, na, nb);
        if (k < end) dot_step(a + k, lda, b, k, end - k, acc, na, nb);
        FN(sums)(acc, na * nb, sum);
        for (int i = 0; i < na; i++)
            for (int j = 0; j < nb; j++) {
                float *to = out + i * ldo + j;
                *to = start ? *to + sum[i * nb + j] : sum[i * nb + j];
            }
    }
}

/* out[i, j] = a_i · b_j for na rows of a and nb rows of b, n elements each; lda, ldo: floats from row to row. */
static void dots_of(const float *a, int64_t lda, int na, const float *const *b, int nb, int n, float *out, int64_t ldo)
{
    for (int i = 0; i < na;) {
        int rows = na - i >= DOT_A ? DOT_A : 1;
        for (int j = 0; j < nb;) {
            int cols = nb - j >= DOT_B ? DOT_B : 1;
            const float *x = a + i * lda;
            float *to = out + i * ldo + j;
            if (rows == 1 && cols == 1) dot_block(x, lda, b + j, n, to, ldo, 1, 1);
            else if (rows == 1) dot_block(x, lda, b + j, n, to, ldo, 1, DOT_B);
            else if (cols == 1) dot_block(x, lda, b + j, n, to, ldo, DOT_A, 1);
            else dot_block(x, lda, b + j, n, to, ldo, DOT_A, DOT_B);
            j += cols;
        }
        i += rows;
    }
}

/* As dots_of, nb <= TILE rows of b that lie ldb floats apart. */
static void dots(const float *a, int64_t lda, int na, const float *b, int64_t ldb, int nb, int n, float *out,
                 int64_t ldo)
{
    const float *rows[TILE];
    for (int j = 0; j < nb; j++) rows[j] = b + j * ldb;
    dots_of(a, lda, na, rows, nb, n, out, ldo);
}

/* Dot products of rows, in the one order that all sums over a row take: chunks of 512, inside a chunk lane l adds
 * elements l, l + 16, .. by fma, then the lanes as v16_sum does, then the chunks in ascending order. */
#pragma once

enum { DOT_A = V16_ROWS, DOT_B = V16_ROWS }; /* CHUNK, INLINE: gemm.h */
enum { DOT_ROWS = V16_ROWS == 4 ? 6 : 2 }; /* rows whose sums with DOT_B others stay in registers, at the most */

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

/* The same of rows <= DOT_ROWS rows of n floats, one after the other, side by side. */
static void sums_of_squares(const float *x, int n, int rows, float *sum)
{
    const float *row[DOT_ROWS];
    float total[DOT_ROWS] = {0}, some[DOT_ROWS];
    for (int i = 0; i < DOT_ROWS; i++) row[i] = x + (int64_t)(i < rows ? i : 0) * n;
    for (int start = 0; start < n; start += CHUNK) {
        int end = n - start < CHUNK ? n : start + CHUNK;
        v16 acc[DOT_ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < DOT_ROWS; i++) acc[i] = v16_zero();
        for (int k = start; k < end; k += 16)
#pragma GCC unroll 8
            for (int i = 0; i < DOT_ROWS; i++) {
                v16 v = load_some(row[i] + k, end - k);
                acc[i] = v16_fma(v, v, acc[i]);
            }
        FN(sums)(acc, DOT_ROWS, some);
        for (int i = 0; i < DOT_ROWS; i++) total[i] += some[i];
    }
    for (int i = 0; i < rows; i++) sum[i] = total[i];
}

INLINE void dot_step(const float *a, int64_t lda, const float *const *b, int k, int left, v16 *acc, const int na,
                     const int nb)
{
    v16 y[DOT_B];
#pragma GCC unroll 4
    for (int j = 0; j < nb; j++) y[j] = left ? v16_load_n(b[j] + k, left) : v16_load(b[j] + k);
#pragma GCC unroll 8
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
        v16 acc[DOT_ROWS * DOT_B];
        float sum[DOT_ROWS * DOT_B];
#pragma GCC unroll 32
        for (int i = 0; i < na * nb; i++) acc[i] = v16_zero();
        for (; k + 16 <= end; k += 16) dot_step(a + k, lda, b, k, 0, acc, na, nb);
        if (k < end) dot_step(a + k, lda, b, k, end - k, acc, na, nb);
        FN(sums)(acc, na * nb < 16 ? na * nb : 16, sum);
        if (na * nb > 16) FN(sums)(acc + 16, na * nb - 16, sum + 16);
        for (int i = 0; i < na; i++)
            for (int j = 0; j < nb; j++) {
                float *to = out + i * ldo + j;
                *to = start ? *to + sum[i * nb + j] : sum[i * nb + j];
            }
    }
}

#ifdef V16_SUM16
/* out[i, j] = a_i · b_j for DOT_A rows of a and sixteen of b, n <= CHUNK: stored sixteen at a time, as they are read
 * again. */
static void dots_sixteen(const float *a, int64_t lda, const float *const *b, int n, float *out, int64_t ldo)
{
    v16 sum[4], acc[16];
    for (int j = 0; j < 4; j++) {
        int k = 0;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) acc[i] = v16_zero();
        for (; k + 16 <= n; k += 16) dot_step(a + k, lda, b + 4 * j, k, 0, acc, 4, 4);
        if (k < n) dot_step(a + k, lda, b + 4 * j, k, n - k, acc, 4, 4);
        sum[j] = v16_sum16(acc);
    }
    v16_quarters(sum);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v16_store(out + i * ldo, sum[i]);
}
#endif

/* out[i, j] = a_i · b_j for na rows of a and nb rows of b, n elements each; lda, ldo: floats from row to row. */
static void dots_of(const float *a, int64_t lda, int na, const float *const *b, int nb, int n, float *out, int64_t ldo)
{
    for (int i = 0; i < na;) {
        int rows = na - i >= DOT_A ? DOT_A : 1;
        for (int j = 0; j < nb;) {
            int cols = nb - j >= DOT_B ? DOT_B : 1;
            const float *x = a + i * lda;
            float *to = out + i * ldo + j;
#ifdef V16_SUM16
            if (rows == 4 && nb - j >= 16 && n <= CHUNK) {
                dots_sixteen(x, lda, b + j, n, to, ldo);
                j += 16;
                continue;
            }
#endif
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

/* Products with weights that are floats already: those of many rows, decoded once for all of them. */

/* `len` (a multiple of 16) inputs of C outputs for R rows: added to sums [row][STRIP], or begun. */
INLINE void FN(tile_block)(const int R, const int C, const uint8_t *const *weight, const float *const *x, int64_t at,
                           int64_t len, int first, float *sums)
{
    v16 acc[16];
    float sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; i++) acc[i] = v16_zero();
    for (int64_t k = 0; k < len; k += 16) {
        v16 q[4];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) q[c] = v16_load((const float *)(const void *)weight[c] + k);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const v16 v = v16_load(x[r] + at + k);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r * C + c] = v16_fma(q[c], v, acc[r * C + c]);
        }
    }
    FN(sums)(acc, R * C, sum);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) FN(add_sums)(sums + r * STRIP, sum + r * C, C, first);
}

/* Of nn outputs, up to a multiple of V16_COLUMNS; x[row] + at are their inputs. */
static void FN(tile_sums)(const uint8_t *const *weight, int nn, const float *const *x, int64_t at, int rows,
                          int64_t len, int first, float *sums)
{
    for (int r = 0; r < rows; r += V16_ROWS) /* four rows stay in the nearest cache, as the tile does */
        for (int c = 0; c < nn; c += V16_COLUMNS) {
            float *to = sums + r * STRIP + c;
            switch (rows - r) {
            case 1: FN(tile_block)(1, V16_COLUMNS, weight + c, x + r, at, len, first, to); break;
#if V16_ROWS > 2
            case 2: FN(tile_block)(2, V16_COLUMNS, weight + c, x + r, at, len, first, to); break;
            case 3: FN(tile_block)(3, V16_COLUMNS, weight + c, x + r, at, len, first, to); break;
#endif
            default: FN(tile_block)(V16_ROWS, V16_COLUMNS, weight + c, x + r, at, len, first, to);
            }
        }
}

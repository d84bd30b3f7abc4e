/* Products of many rows: weights are decoded into a tile of floats once for all of them. */

/* `len` (a multiple of 16) inputs of C outputs, `apart` floats from one to the next, for R rows: added to sums
 * [row][width], or begun. */
INLINE void FN(tile_block)(const int R, const int C, const float *weight, int64_t apart, const float *const *x,
                           int64_t at, int64_t len, int first, float *sums, int64_t width)
{
    v16 acc[TILE_ROWS * V16_COLUMNS];
    float sum[TILE_ROWS * V16_COLUMNS];
    const float *in[TILE_ROWS];
#pragma GCC unroll 24
    for (int i = 0; i < R * C; i++) acc[i] = v16_zero();
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) in[r] = x[r] + at;
    for (int64_t k = 0; k < len; k += 16) {
        v16 q[V16_COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) q[c] = v16_load(weight + c * apart + k);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const v16 v = v16_load(in[r] + k);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r * C + c] = v16_fma(q[c], v, acc[r * C + c]);
        }
    }
    FN(sums)(acc, R * C, sum);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) FN(add_sums)(sums + r * width, sum + r * C, C, first);
}

/* Of `rows` > FEW_NEAR rows and nn outputs, up to a multiple of V16_COLUMNS; x[row] + at are their inputs. */
static void FN(tile_sums)(const float *tile, int64_t apart, int nn, const float *const *x, int64_t at, int rows,
                          int64_t len, int first, float *sums, int64_t width)
{
    const int blocks = (rows + TILE_ROWS - 1) / TILE_ROWS; /* of equal size, or one row less */
    for (int b = 0; b < blocks; b++) { /* a block's inputs stay in the nearest cache, as the tile does */
        const int r = rows * b / blocks, live = rows * (b + 1) / blocks - r;
        for (int c = 0; c < nn; c += V16_COLUMNS) {
            const float *weight = tile + c * apart;
            float *to = sums + r * width + c;
            switch (live) {
#if TILE_ROWS == 6
            case 4: FN(tile_block)(4, V16_COLUMNS, weight, apart, x + r, at, len, first, to, width); break;
            case 5: FN(tile_block)(5, V16_COLUMNS, weight, apart, x + r, at, len, first, to, width); break;
#else
            case 1: FN(tile_block)(1, V16_COLUMNS, weight, apart, x + r, at, len, first, to, width); break;
#endif
            default: FN(tile_block)(TILE_ROWS, V16_COLUMNS, weight, apart, x + r, at, len, first, to, width);
            }
        }
    }
}

/* Whether strip_tile can do it. */
static inline int FN(tile_fits)(const struct matrix *w, int rows, int slices)
{
    const int few = w->n * w->weight_stride <= NEAR ? FEW_NEAR : FEW;
    return rows > few && w->format != FORMAT_FP4 && w->k / slices % 16 == 0;
}

/* As strip, to sums [slice][row][width], `apart` floats from slice to slice; 0: slices, of one chunk each, are added up.
 * Sums beyond nn, up to a multiple of four, are written too. */
static void FN(strip_tile)(const struct matrix *w, const struct route *route, int64_t n0, int nn, const float *const *x,
                           int rows, int slices, float *sums, int64_t width, int64_t apart)
{
    float tile[STRIP * TILE_STRIDE(CHUNK)] __attribute__((aligned(64)));
    struct FN(chunk) chunk;
    const int64_t inputs = w->k / slices;
#ifdef V16_BF16
    const int codes = FN(codes_fit)(w, n0, nn, slices);
#endif
    for (int s = 0; s < slices; s++)
        for (int64_t k = 0; k < inputs; k += CHUNK) {
            const int64_t len = inputs - k < CHUNK ? inputs - k : CHUNK, at = s * inputs + k;
#ifdef V16_BF16
            if (codes) {
                FN(codes_tile)(w, FN(ahead)(w, route, n0, STRIP), n0, nn, at, len, tile);
            } else
#endif
            {
                FN(look)(&chunk, w, route, STRIP, n0, nn, at, len);
                FN(decode_chunk)(&chunk, nn, len, tile);
            }
            for (int c = nn; c % V16_COLUMNS; c++) memset(tile + c * TILE_STRIDE(len), 0, sizeof(float) * (size_t)len);
            FN(tile_sums)(tile, TILE_STRIDE(len), nn, x, at, rows, len, k == 0 && (s == 0 || apart),
                          sums + s * apart, width);
        }
}

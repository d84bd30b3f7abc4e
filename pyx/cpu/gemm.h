/* Linears over packed weights: y = x · wᵀ.
 *
 * Order of every sum, whatever the number of rows: k in chunks of 512; inside a chunk lane l of 16 takes
 * k = l, l+16, .. (FP4: of each group of 32, k = 2l then 2l+1) by fused multiply-add; the lanes are added by v16_sum;
 * chunk sums are added in ascending order. A slice of k starts its own chunks; slices are added as a binary tree.
 * Weights are decoded exactly (scales are powers of two), so decoding into registers (few rows) or into a tile that
 * many rows share gives the same bits.
 *
 * K is walked in groups of 32, two vectors a group; what is missing of the last group counts as zeros.
 */
#define CHUNK 512                  /* k of one partial sum */
#define GROUP 32                   /* k of one step */
#define GROUPS (CHUNK / GROUP)
#define BLOCK 64                   /* rows computed together */
#define MAX_SLICES 8
#define FEW (3 * V16_ROWS)         /* up to so many rows, weights are decoded in registers */
#define INLINE static inline __attribute__((always_inline))

static const int FN(group_bytes)[] = {[FORMAT_FP8] = 32, [FORMAT_FP4] = 16, [FORMAT_BF16] = 64, [FORMAT_F32] = 128};

static void FN(deinterleave)(const float *x, float *y, int64_t n)
{
    for (int64_t k = 0; k < n; k += 32) {
        v16 even, odd;
        v16_deinterleave(x + k, &even, &odd);
        v16_store(y + k, even);
        v16_store(y + k + 16, odd);
    }
}

/* One group of weights; for FP8 `scale` holds a factor 256 that v16_e4m3_raw leaves out. */
INLINE void FN(decode)(const int format, const uint8_t *p, float scale, v16 *a, v16 *b)
{
    if (format == FORMAT_FP8) {
        *a = v16_mul(v16_e4m3_raw(p), v16_set1(scale));
        *b = v16_mul(v16_e4m3_raw(p + 16), v16_set1(scale));
    } else if (format == FORMAT_FP4) {
        v16_e2m1(p, scale, a, b);
    } else if (format == FORMAT_BF16) {
        *a = v16_bf16((const uint16_t *)p);
        *b = v16_bf16((const uint16_t *)(p + 32));
    } else {
        *a = v16_load((const float *)p);
        *b = v16_load((const float *)(p + 64));
    }
}

/* Sums over one chunk of R rows and C outputs: sum[r · C + c]. scale[c]: one float a group. */
INLINE void FN(dot)(const int format, const int R, const int C, const uint8_t *const *weight,
                    const float *const *scale, const float *const *x, int64_t len, float *sum)
{
    const int bytes = FN(group_bytes)[format];
    const int scaled = format == FORMAT_FP8 || format == FORMAT_FP4;
    v16 acc[16];
    for (int i = 0; i < R * C; i++) acc[i] = v16_zero();
    int64_t g = 0;
    for (; g < len / GROUP; g++)
        for (int c = 0; c < C; c++) {
            v16 a, b;
            FN(decode)(format, weight[c] + g * bytes, scaled ? scale[c][g] : 0, &a, &b);
            for (int r = 0; r < R; r++) {
                acc[r * C + c] = v16_fma(a, v16_load(x[r] + g * GROUP), acc[r * C + c]);
                acc[r * C + c] = v16_fma(b, v16_load(x[r] + g * GROUP + 16), acc[r * C + c]);
            }
        }
    int rest = (int)(len % GROUP);
    if (rest) {
        float tail[4][GROUP] = {{0}};
        for (int r = 0; r < R; r++) memcpy(tail[r], x[r] + g * GROUP, sizeof(float) * (size_t)rest);
        for (int c = 0; c < C; c++) {
            uint8_t codes[4 * GROUP] = {0};
            v16 a, b;
            memcpy(codes, weight[c] + g * bytes, (size_t)(rest * bytes / GROUP));
            FN(decode)(format, codes, scaled ? scale[c][g] : 0, &a, &b);
            for (int r = 0; r < R; r++) {
                acc[r * C + c] = v16_fma(a, v16_load(tail[r]), acc[r * C + c]);
                acc[r * C + c] = v16_fma(b, v16_load(tail[r] + 16), acc[r * C + c]);
            }
        }
    }
    for (int i = 0; i < R * C; i += 4) v16_sum4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], sum + i);
}

/* Sums over one chunk; rows is 1, 2 or V16_ROWS. Returns how many outputs it did. */
#define DOT(format) \
    (rows == 1   ? (FN(dot)(format, 1, 4, weight, scale, x, len, sum), 4) \
     : rows == 2 ? (FN(dot)(format, 2, V16_COLUMNS, weight, scale, x, len, sum), V16_COLUMNS) \
                 : (FN(dot)(format, V16_ROWS, V16_COLUMNS, weight, scale, x, len, sum), V16_COLUMNS))

static int FN(dot_any)(enum format format, int rows, const uint8_t *const *weight, const float *const *scale,
                       const float *const *x, int64_t len, float *sum)
{
    switch (format) {
    case FORMAT_FP8: return DOT(FORMAT_FP8);
    case FORMAT_FP4: return DOT(FORMAT_FP4);
    case FORMAT_BF16: return DOT(FORMAT_BF16);
    default: return DOT(FORMAT_F32);
    }
}

/* Where the weights of one chunk of a strip are, as dot wants them. */
struct FN(chunk) {
    enum format format;
    const uint8_t *weight[STRIP];
    const float *scale[STRIP];
    float scales[STRIP][GROUPS];
};

/* The scales of output n for the groups of one chunk. */
INLINE v16 FN(scales)(const struct matrix *w, int64_t n, int64_t k, int64_t len)
{
    const int groups = (int)((len + GROUP - 1) / GROUP);
    uint8_t some[GROUPS] = {0};
    const uint8_t *bytes = some;
    if (w->format == FORMAT_FP8) {
        const uint8_t *p = w->scale + n / 128 * w->scale_stride;
        for (int g = 0; g < groups; g++) some[g] = p[(k + g * GROUP) / 128];
    } else if (groups == GROUPS) {
        bytes = w->scale + n * w->scale_stride + k / GROUP;
    } else {
        memcpy(some, w->scale + n * w->scale_stride + k / GROUP, (size_t)groups);
    }
    /* e8m0: the byte is the exponent; 2^-127, byte 0, is a subnormal */
    return v16i_float(v16i_max(v16i_shl(v16i_load_u8(bytes), 23), v16i_set1(0x00400000)));
}

/* Whether an e4m3 code is a NaN. */
static int FN(any_nan)(const uint8_t *codes, int64_t len)
{
    uint64_t seen = 0; /* eight at a time: 0x7f + 1 carries into the top bit */
    int64_t i = 0;
    for (; i + 8 <= len; i += 8) {
        uint64_t eight;
        memcpy(&eight, codes + i, 8);
        seen |= (eight & 0x7f7f7f7f7f7f7f7f) + 0x0101010101010101;
    }
    for (; i < len; i++) seen |= (codes[i] & 0x7fu) + 1;
    return (seen & 0x8080808080808080) != 0;
}

/* Outputs n0 .. n0+nn−1, inputs k .. k+len−1. raw: for decoding in registers, FP8 scales get the 256 that v16_e4m3_raw
 * leaves out; 0 where that is not exact or a code is a NaN. */
static int FN(look)(struct FN(chunk) *chunk, const struct matrix *w, int64_t n0, int nn, int64_t k, int64_t len,
                    int raw)
{
    const int bytes = FN(group_bytes)[w->format], fp8 = w->format == FORMAT_FP8;
    int ok = 1;
    chunk->format = w->format;
    for (int c = 0; c < (nn + 3) / 4 * 4; c++) {
        const int64_t n = n0 + (c < nn ? c : nn - 1); /* dot takes four: the last one again fills up */
        chunk->weight[c] = w->weight + n * w->weight_stride + k * bytes / GROUP;
        if (fp8 && raw && FN(any_nan)(chunk->weight[c], len)) ok = 0;
        if (c && (c >= nn || (fp8 && n % 128))) {
            chunk->scale[c] = chunk->scale[c - 1];
        } else if (fp8 || w->format == FORMAT_FP4) {
            v16 scale = FN(scales)(w, n, k, len);
            if (fp8 && raw) {
                if (v16_hmax(scale) > 0x1p119f) ok = 0;
                scale = v16_mul(scale, v16_set1(256.0f));
            }
            v16_store(chunk->scales[c], scale);
            chunk->scale[c] = chunk->scales[c];
        }
    }
    return ok;
}

/* len weights of one output as floats, the last group filled up with zeros. Unlike decode it knows every scale and NaN. */
INLINE void FN(decode_row)(const int format, const uint8_t *p, const float *scale, int64_t len, float *out)
{
    const int bytes = FN(group_bytes)[format], scaled = format == FORMAT_FP8 || format == FORMAT_FP4;
    uint8_t padded[4 * GROUP];
    for (int64_t g = 0; g * GROUP < len; g++, p += bytes, out += GROUP) {
        if (len - g * GROUP < GROUP) {
            memset(padded, 0, sizeof padded);
            p = memcpy(padded, p, (size_t)((len - g * GROUP) * bytes / GROUP));
        }
        v16 a, b;
        if (format == FORMAT_FP8) {
            a = v16_mul(v16_e4m3(p), v16_set1(scale[g]));
            b = v16_mul(v16_e4m3(p + 16), v16_set1(scale[g]));
        } else {
            FN(decode)(format, p, scaled ? scale[g] : 0, &a, &b);
        }
        v16_store(out, a);
        v16_store(out + 16, b);
    }
}

/* Decodes a chunk into a float tile [STRIP][CHUNK] and points there. */
static void FN(decode_chunk)(struct FN(chunk) *chunk, int nn, int64_t len, float *tile)
{
    for (int c = 0; c < nn; c++) {
        const uint8_t *p = chunk->weight[c];
        float *out = tile + c * CHUNK;
        switch (chunk->format) {
        case FORMAT_FP8: FN(decode_row)(FORMAT_FP8, p, chunk->scale[c], len, out); break;
        case FORMAT_FP4: FN(decode_row)(FORMAT_FP4, p, chunk->scale[c], len, out); break;
        case FORMAT_BF16: FN(decode_row)(FORMAT_BF16, p, NULL, len, out); break;
        default: FN(decode_row)(FORMAT_F32, p, NULL, len, out); break;
        }
    }
    chunk->format = FORMAT_F32;
    for (int c = 0; c < (nn + 3) / 4 * 4; c++)
        chunk->weight[c] = (const uint8_t *)(tile + (c < nn ? c : nn - 1) * CHUNK);
}

/* Adds one chunk of a strip to sums [row][STRIP], or begins them; x[row] + at are its inputs. */
static void FN(add_chunk)(const struct FN(chunk) *chunk, int nn, const float *const *x, int64_t at, int rows,
                          int64_t len, int first, float *sums)
{
    for (int r = 0; r < rows; r += V16_ROWS) {
        const int live = rows - r < V16_ROWS ? rows - r : V16_ROWS;
        const float *xs[V16_ROWS];
        for (int i = 0; i < V16_ROWS; i++) xs[i] = x[r + (i < live ? i : live - 1)] + at;
        for (int c = 0, done; c < nn; c += done) {
            float sum[V16_ROWS * 4];
            done = FN(dot_any)(chunk->format, live, chunk->weight + c, chunk->scale + c, xs, len, sum);
            for (int i = 0; i < live; i++)
                for (int j = 0; j < done && c + j < nn; j++) {
                    float *to = sums + (r + i) * STRIP + c + j;
                    *to = first ? sum[i * done + j] : *to + sum[i * done + j];
                }
        }
    }
}

/* sums[slice][row][STRIP] of outputs n0 .. n0+nn−1 (nn <= STRIP) for rows <= BLOCK rows x[row], each [w->k]. */
static void FN(strip)(const struct matrix *w, int64_t n0, int nn, const float *const *x, int rows, int slices,
                      float *sums)
{
    float tile[STRIP * CHUNK];
    struct FN(chunk) chunk;
    const int64_t width = w->k / slices;
    for (int s = 0; s < slices; s++)
        for (int64_t k = 0; k < width; k += CHUNK) {
            const int64_t len = width - k < CHUNK ? width - k : CHUNK, at = s * width + k;
            if (rows > FEW || !FN(look)(&chunk, w, n0, nn, at, len, 1)) {
                FN(look)(&chunk, w, n0, nn, at, len, 0);
                FN(decode_chunk)(&chunk, nn, len, tile);
            }
            FN(add_chunk)(&chunk, nn, x, at, rows, len, k == 0, sums + (int64_t)s * rows * STRIP);
        }
}

/* The binary tree over slices that lie `stride` floats apart: ((0 + 1) + (2 + 3)) + .. */
static inline float FN(tree)(const float *p, int64_t stride, int slices)
{
    float v[MAX_SLICES];
    for (int s = 0; s < slices; s++) v[s] = p[s * stride];
    for (; slices > 1; slices /= 2)
        for (int s = 0; s < slices / 2; s++) v[s] = v[2 * s] + v[2 * s + 1];
    return v[0];
}

static void FN(linear)(void *args, int tid, int n)
{
    const struct linear_args *a = args;
    const struct matrix *w = a->w;
    const int64_t width = w->n / a->groups, strips = (width + STRIP - 1) / STRIP;
    const int64_t blocks = (a->rows + BLOCK - 1) / BLOCK;
    float sums[MAX_SLICES * BLOCK * STRIP];
    int64_t first, last;
    team_share(a->groups * strips * blocks, tid, n, &first, &last);
    for (int64_t job = first; job < last; job++) {
        /* all strips of a block of rows in turn: its inputs stay in the cache */
        const int64_t block = job / strips / a->groups, group = job / strips % a->groups, strip = job % strips;
        const int64_t t0 = block * BLOCK, n0 = group * width + strip * STRIP;
        const int rows = (int)(a->rows - t0 < BLOCK ? a->rows - t0 : BLOCK);
        const int nn = (int)(width - strip * STRIP < STRIP ? width - strip * STRIP : STRIP);
        const float *x[BLOCK];
        for (int r = 0; r < rows; r++) x[r] = a->x + ((t0 + r) * a->groups + group) * w->k;
        FN(strip)(w, n0, nn, x, rows, a->slices, sums);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < nn; c++)
                a->y[(t0 + r) * w->n + n0 + c] = FN(tree)(sums + r * STRIP + c, rows * STRIP, a->slices);
    }
}

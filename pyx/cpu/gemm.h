/* Linears over packed weights: y = x · wᵀ.
 *
 * Order of every sum, whatever the number of rows: k in chunks of 512 (FP4: 1024); inside a chunk lane l of 16 takes
 *   FP8, bf16, f32: k = l, l+16, .. by fused multiply-add;
 *   FP4: of each 64 inputs k = 4l .. 4l+3, codes as they are; the sum of the four products (exact for rounded
 *        activations) times the scale of their group of 32 is added, rounded once.
 * The lanes are added by v16_sum; chunk sums are added in ascending order. A slice of k starts its own chunks; slices
 * are added as a binary tree. Decoding into registers (few rows) and into a tile that many rows share are the same
 * numbers, so they give the same bits.
 *
 * K is walked in steps; what is missing of the last one counts as zeros.
 */
#define CHUNK 512                  /* k of one partial sum */
#define CHUNK_FP4 1024
#define TILE_MOST (CHUNK_FP4 + 16)                 /* floats of a tile's output, and what lies between two: */
#define TILE_STRIDE(len) (((len) + 127) / 128 * 128 + 16) /* close together, but not in the same cache sets */
#define GROUP 32                   /* k of one FP4 scale */
#define MAX_SLICES 8
#define NEAR (512 << 10) /* bytes of weights that every thread's own cache holds: threads then share the rows, as all */
#define ROWS_EACH 8      /* kernels of rows do, so that a row stays with its thread; of fewer rows they share outputs */
#define INLINE static inline __attribute__((always_inline))

INLINE void FN(prefetch_codes)(const uint8_t *line, int near) /* clang wants the place in caches as a plain number */
{
    if (near) __builtin_prefetch(line, 0, 3);
    else __builtin_prefetch(line, 0, 2);
}

/* n a multiple of 32: of each 32 the even ones, then the odd ones */
static void FN(deinterleave)(const float *x, float *y, int64_t n)
{
    for (int64_t k = 0; k < n; k += 32) {
        v16 even, odd;
        v16_deinterleave(x + k, &even, &odd);
        v16_store(y + k, even);
        v16_store(y + k + 16, odd);
    }
}

/* FP4 inputs: 64 floats as those of k = 4l, 4l+1, 4l+2, 4l+3; k ends with zeros at a multiple of 64. */
static void FN(quads)(const float *x, float *y, int64_t rows, int64_t k)
{
    for (int64_t t = 0; t < rows; t++, x += k)
        for (int64_t at = 0; at < k; at += 64, y += 64) {
            float some[64] = {0}, even[32], odd[32];
            const float *p = x + at;
            if (k - at < 64) p = memcpy(some, p, sizeof(float) * (size_t)(k - at));
            for (int half = 0; half < 2; half++) {
                v16 a, b;
                v16_deinterleave(p + 32 * half, &a, &b);
                v16_store(even + 16 * half, a);
                v16_store(odd + 16 * half, b);
            }
            v16 q[4];
            v16_deinterleave(even, &q[0], &q[2]);
            v16_deinterleave(odd, &q[1], &q[3]);
            for (int i = 0; i < 4; i++) v16_store(y + 16 * i, q[i]);
        }
}

/* The sums of n accumulators. */
INLINE void FN(sums)(const v16 *acc, const int n, float *sum)
{
    int i = 0;
#ifdef V16_SUM16
    for (; i + 16 <= n; i += 16) v16_store(sum + i, v16_sum16(acc + i));
    for (; i + 8 <= n; i += 8) v16_sum8(acc + i, sum + i);
#endif
#pragma GCC unroll 4
    for (; i + 4 <= n; i += 4) v16_sum4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], sum + i);
#pragma GCC unroll 4
    for (; i < n; i++) sum[i] = v16_sum(acc[i]);
}

/* to [count] += sum, or begun with it. */
INLINE void FN(add_sums)(float *to, const float *sum, const int count, int first)
{
    if (first) {
        memcpy(to, sum, sizeof(float) * (size_t)count);
        return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) to[j] += sum[j];
}

/* Forms of weights: as stored, or floats of an FP4 tile, still without scales. */
enum { TILE_FP4 = FORMAT_F32 + 1, FORMS };
static const int FN(step)[FORMS] = {128, 64, 32, 32, 64};
static const int FN(step_bytes)[FORMS] = {128, 32, 64, 128, 256};
#define IS_FP4(form) ((form) == FORMAT_FP4 || (form) == TILE_FP4)

#define FETCH 8192 /* bytes that weights are fetched ahead of their use, at least: so many must be on their way */

/* What a thread reads after an output of a matrix: the next ones below `end`, then those of `next` (NULL: nothing
 * known) from n on. */
struct route {
    int64_t end, n;
    const struct matrix *next;
};

/* What is read some outputs later: output n of w, and on. Memory is fast only along its addresses: four outputs are
 * read side by side, but fetched one after another. */
struct ahead {
    const struct matrix *w;
    int64_t n;
};

/* Groups of four outputs are read side by side: so many outputs ahead is FETCH bytes at least. */
static inline int64_t FN(outputs_ahead)(const struct matrix *w)
{
    const int64_t fours = (FETCH / 4 + w->weight_stride - 1) / w->weight_stride;
    return fours > 1 ? 4 * fours : 4;
}

/* `more` outputs after output n of w; where the route ends, those of n. */
static inline struct ahead FN(ahead)(const struct matrix *w, const struct route *route, int64_t n, int64_t more)
{
    if (n + more < route->end) return (struct ahead){w, n + more};
    if (!route->next) return (struct ahead){w, n};
    return (struct ahead){route->next, route->n + n + more - route->end};
}

/* Byte `at` of the outputs ahead, their codes counted one after another. */
static inline const uint8_t *FN(byte_ahead)(struct ahead to, int64_t at)
{
    const int64_t row = to.w->k * FN(step_bytes)[to.w->format] / FN(step)[to.w->format], stride = to.w->weight_stride;
    return to.w->weight + to.n * stride + (row == stride ? at : at / row * stride + at % row);
}

/* The FP4 scales of output c of those ahead; of other formats anything. */
static inline const uint8_t *FN(scales_ahead)(struct ahead to, int c)
{
    return to.w->scale + (to.w->format == FORMAT_FP4 ? (to.n + c) * to.w->scale_stride : 0);
}

#ifdef V16_BF16
#include "gemm_pairs.h"
#include "gemm_codes.h"
#include "gemm_pair_tiles.h"
#endif

/* Vector i of a step of 32. */
INLINE v16 FN(decode)(const int form, const uint8_t *p, int i)
{
    if (form == FORMAT_BF16) return v16_bf16((const uint16_t *)(p + 32 * i));
    return v16_load((const float *)(p + 64 * i));
}

/* One step: adds to acc[r · C + c]. */
INLINE void FN(advance)(const int form, const int R, const int C, const uint8_t *const *w, const float *const *scale,
                        const float *const *x, v16 *acc)
{
    if (form == FORMAT_FP8) {
        v16 s[4];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) s[c] = v16_set1(scale[c][0] * 256.0f); /* v16_e4m3_raw leaves the 256 out */
        for (int i = 0; i < 8; i++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const v16 a = v16_mul(v16_e4m3_raw(w[c] + 16 * i), s[c]);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    acc[r * C + c] = v16_fma(a, v16_load(x[r] + 16 * i), acc[r * C + c]);
            }
        return;
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        v16 q[4];
        if (IS_FP4(form)) {
            if (form == FORMAT_FP4) v16_e2m1_quads(w[c], q);
            else
                for (int i = 0; i < 4; i++) q[i] = v16_load((const float *)w[c] + 16 * i);
            const v16 s = v16_halves(scale[c]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                v16 sum = v16_mul(q[0], v16_load(x[r]));
                for (int i = 1; i < 4; i++) sum = v16_fma(q[i], v16_load(x[r] + 16 * i), sum);
                acc[r * C + c] = v16_fma(sum, s, acc[r * C + c]);
            }
        } else {
            for (int i = 0; i < 2; i++) {
                q[i] = FN(decode)(form, w[c], i);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    acc[r * C + c] = v16_fma(q[i], v16_load(x[r] + 16 * i), acc[r * C + c]);
            }
        }
    }
}

/* Sums over one chunk of R rows and C outputs: sum[r · C + c]. scale[c]: one float a block of 128, or a group of 32.
 * Weights as stored are fetched from fetch[c] on, `pace` bytes a step. */
INLINE void FN(dot)(const int form, const int R, const int C, const uint8_t *const *weight,
                    const float *const *scale, const uint8_t *const *fetch, int64_t pace, const float *const *x,
                    int64_t len, float *sum)
{
    const int step = FN(step)[form], bytes = FN(step_bytes)[form], scales = IS_FP4(form) ? 2 : form == FORMAT_FP8;
    v16 acc[16];
    const uint8_t *w[4];
    const float *s[4] = {NULL}, *v[V16_MANY];
#pragma GCC unroll 16
    for (int i = 0; i < R * C; i++) acc[i] = v16_zero();
    int64_t g = 0;
    for (; g < len / step; g++) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            w[c] = weight[c] + g * bytes;
            if (scales) s[c] = scale[c] + g * scales;
            if (form == FORMAT_FP8 || form == FORMAT_FP4 || form == FORMAT_BF16)
                for (int i = 0; i < bytes; i += 64) __builtin_prefetch(fetch[c] + g * pace + i);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) v[r] = x[r] + g * step;
        FN(advance)(form, R, C, w, s, v, acc);
    }
    const int rest = (int)(len % step);
    if (rest) {
        float tail[V16_MANY][128] = {{0}};
        uint8_t codes[4][256] = {{0}};
        for (int r = 0; r < R; r++) {
            v[r] = x[r] + g * step;
            if (!IS_FP4(form)) v[r] = memcpy(tail[r], v[r], sizeof(float) * (size_t)rest);
        }
        for (int c = 0; c < C; c++) {
            const int part = form == TILE_FP4 ? bytes : rest * bytes / step;
            w[c] = memcpy(codes[c], weight[c] + g * bytes, (size_t)part);
            if (scales) s[c] = scale[c] + g * scales;
        }
        FN(advance)(form, R, C, w, s, v, acc);
    }
    FN(sums)(acc, R * C, sum);
}

/* Sums over one chunk of up to V16_MANY rows; x of the rows beyond is there. Returns how many outputs it did. */
#define DOT_CASE(form, R, C) (FN(dot)(form, R, C, weight, scale, fetch, pace, x, len, sum), C)
#if V16_MANY == 2
#define DOT(form) (rows == 1 ? DOT_CASE(form, 1, 4) : DOT_CASE(form, 2, 2))
#else
#define DOT(form) \
    (rows == 1   ? DOT_CASE(form, 1, 4) \
     : rows == 2 ? DOT_CASE(form, 2, 4) \
     : rows <= 4 ? DOT_CASE(form, 4, 4) \
     : rows <= 6 ? DOT_CASE(form, 6, 2) \
                 : DOT_CASE(form, 8, 2))
#endif

static int FN(dot_any)(int form, int rows, const uint8_t *const *weight, const float *const *scale,
                       const uint8_t *const *fetch, int64_t pace, const float *const *x, int64_t len, float *sum)
{
    switch (form) {
    case FORMAT_FP8: return DOT(FORMAT_FP8);
    case FORMAT_FP4: return DOT(FORMAT_FP4);
    case FORMAT_BF16: return DOT(FORMAT_BF16);
    case TILE_FP4: return DOT(TILE_FP4);
    default: return DOT(FORMAT_F32);
    }
}

/* Where the weights of one chunk of a strip are, as dot wants them. */
struct FN(chunk) {
    int form;
    const uint8_t *weight[STRIP], *fetch[STRIP];
    int64_t pace; /* bytes to fetch from fetch[c] on while a step of weight[c] is read */
    const float *scale[STRIP];
    float scales[STRIP][CHUNK_FP4 / GROUP];
};

/* e8m0: the byte is the exponent; 2^-127, byte 0, is a subnormal */
INLINE v16 FN(scales)(const uint8_t *p, int count)
{
    uint8_t some[16] = {0};
    if (count < 16) p = memcpy(some, p, (size_t)count);
    return v16i_float(v16i_max(v16i_shl(v16i_load_u8(p), 23), v16i_set1(0x00400000)));
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

/* Outputs n0 .. n0+nn−1, inputs k .. k+len−1; `more` outputs after them is what to fetch. Whether it can be decoded in
 * registers: no FP8 code is a NaN, no scale times 256 too large. */
static int FN(look)(struct FN(chunk) *chunk, const struct matrix *w, const struct route *route, int64_t more,
                    int64_t n0, int nn, int64_t k, int64_t len)
{
    const int step = FN(step)[w->format], bytes = FN(step_bytes)[w->format], fp8 = w->format == FORMAT_FP8;
    const int unit = fp8 ? 128 : GROUP, count = (int)((len + unit - 1) / unit);
    int ok = 1;
    const struct ahead to = FN(ahead)(w, route, n0, more);
    const uint8_t *along = FN(byte_ahead)(to, (nn <= 4 ? 4 : 1) * k * bytes / step);
    chunk->form = w->format;
    chunk->pace = nn <= 4 ? 4 * bytes : bytes;
    for (int c = 0; c < (nn + 3) / 4 * 4; c++) {
        const int64_t n = n0 + (c < nn ? c : nn - 1); /* dot takes four: the last one again fills up */
        chunk->weight[c] = w->weight + n * w->weight_stride + k * bytes / step;
        chunk->fetch[c] = along + c * (nn <= 4 ? bytes : to.w->weight_stride);
        if (w->format == FORMAT_FP4) __builtin_prefetch(FN(scales_ahead)(to, c) + k / GROUP);
        if (fp8 && FN(any_nan)(chunk->weight[c], len)) ok = 0;
        if (c && (c >= nn || (fp8 && n % 128))) {
            chunk->scale[c] = chunk->scale[c - 1];
        } else if (fp8 || w->format == FORMAT_FP4) {
            const uint8_t *p = w->scale + (fp8 ? n / 128 : n) * w->scale_stride + k / unit;
            for (int i = 0; i < count; i += 16) {
                const v16 scale = FN(scales)(p + i, count - i);
                if (fp8 && v16_hmax(scale) > 0x1p119f) ok = 0;
                v16_store(chunk->scales[c] + i, scale);
            }
            chunk->scale[c] = chunk->scales[c];
        }
    }
    return ok;
}

/* One step of an output as floats (FP4: without their scales). Any scale, any code. */
INLINE void FN(decode_step)(const int form, const uint8_t *p, float scale, const uint8_t *fetch, float *out)
{
    for (int i = 0; i < FN(step_bytes)[form]; i += 64) __builtin_prefetch(fetch + i);
    if (form == FORMAT_FP4) {
        v16 q[4];
        v16_e2m1_quads(p, q);
        for (int i = 0; i < 4; i++) v16_store(out + 16 * i, q[i]);
    } else if (form == FORMAT_FP8) {
        for (int i = 0; i < 8; i++) v16_store(out + 16 * i, v16_mul(v16_e4m3(p + 16 * i), v16_set1(scale)));
    } else {
        for (int i = 0; i < 2; i++) v16_store(out + 16 * i, FN(decode)(form, p, i));
    }
}

/* len weights of one output, the last step filled up with zeros. */
INLINE void FN(decode_row)(const int form, const uint8_t *p, const float *scale, const uint8_t *fetch, int64_t len,
                           float *out)
{
    const int step = FN(step)[form], bytes = FN(step_bytes)[form];
    int64_t k = 0;
    for (; k + step <= len; k += step, p += bytes, fetch += bytes)
        FN(decode_step)(form, p, form == FORMAT_FP8 ? scale[k / 128] : 1, fetch, out + k);
    if (k < len) {
        uint8_t padded[128] = {0};
        memcpy(padded, p, (size_t)((len - k) * bytes / step));
        FN(decode_step)(form, padded, form == FORMAT_FP8 ? scale[k / 128] : 1, fetch, out + k);
    }
}

/* Decodes a chunk into a float tile [STRIP][TILE_STRIDE(len)] and points there. */
static void FN(decode_chunk)(struct FN(chunk) *chunk, int nn, int64_t len, float *tile)
{
    for (int c = 0; c < nn; c++) {
        const uint8_t *p = chunk->weight[c];
        float *out = tile + c * TILE_STRIDE(len);
        switch (chunk->form) {
        case FORMAT_FP8: FN(decode_row)(FORMAT_FP8, p, chunk->scale[c], chunk->fetch[c], len, out); break;
        case FORMAT_FP4: FN(decode_row)(FORMAT_FP4, p, NULL, chunk->fetch[c], len, out); break;
        case FORMAT_BF16: FN(decode_row)(FORMAT_BF16, p, NULL, chunk->fetch[c], len, out); break;
        default: FN(decode_row)(FORMAT_F32, p, NULL, chunk->fetch[c], len, out); break;
        }
    }
    chunk->form = chunk->form == FORMAT_FP4 ? TILE_FP4 : FORMAT_F32;
    for (int c = 0; c < (nn + 3) / 4 * 4; c++)
        chunk->weight[c] = (const uint8_t *)(tile + (c < nn ? c : nn - 1) * TILE_STRIDE(len));
}

#include "gemm_tile.h"

/* Adds one chunk of a strip to sums [row][STRIP], or begins them, up to a multiple of four; x[row] + at are its inputs. */
static void FN(add_chunk)(const struct FN(chunk) *chunk, int nn, const float *const *x, int64_t at, int rows,
                          int64_t len, int first, float *sums)
{
    /* of weights that are decoded on the fly, as many rows as there can be */
    const int most = chunk->form == TILE_FP4 || chunk->form == FORMAT_F32 ? V16_ROWS : V16_MANY;
    for (int r = 0; r < rows; r += most) {
        const int live = rows - r < most ? rows - r : most;
        const float *xs[V16_MANY];
        for (int i = 0; i < V16_MANY; i++) xs[i] = x[r + (i < live ? i : live - 1)] + at;
        for (int c = 0, done; c < nn; c += done) {
            float sum[16] = {0};
            done = FN(dot_any)(chunk->form, live, chunk->weight + c, chunk->scale + c, chunk->fetch + c, chunk->pace, xs,
                               len, sum);
            for (int i = 0; i < live; i++)
                if (done == 4) FN(add_sums)(sums + (r + i) * STRIP + c, sum + 4 * i, 4, first);
                else FN(add_sums)(sums + (r + i) * STRIP + c, sum + 2 * i, 2, first);
        }
    }
}

/* sums[slice][row][STRIP] of outputs n0 .. n0+nn−1 (nn <= STRIP) for rows <= BLOCK rows x[row], each [w->k]; for FP4
 * as quads makes them. */
static void FN(strip)(const struct matrix *w, const struct route *route, int64_t n0, int nn, const float *const *x,
                      int rows, int slices, float *sums)
{
    if (FN(tile_fits)(w, rows, slices)) {
        FN(strip_tile)(w, route, n0, nn, x, rows, slices, sums, STRIP, rows * STRIP);
        return;
    }
#ifdef V16_BF16
    if (FN(codes_fit)(w, n0, nn, slices)) {
        FN(strip_codes)(w, route, n0, nn, x, rows, slices, sums);
        return;
    }
#endif
    float tile[STRIP * TILE_MOST] __attribute__((aligned(64)));
    struct FN(chunk) chunk;
    const int64_t width = w->k / slices, most = w->format == FORMAT_FP4 ? CHUNK_FP4 : CHUNK;
    /* few rows: along whole rows of weights, as they lie; more: inputs of one chunk stay in the nearest cache */
    const int columns = rows <= V16_ROWS ? 4 : STRIP;
    const int64_t more = rows <= V16_ROWS ? FN(outputs_ahead)(w) : STRIP;
    for (int c = 0; c < nn; c += columns)
        for (int s = 0; s < slices; s++)
            for (int64_t k = 0; k < width; k += most) {
                const int64_t len = width - k < most ? width - k : most, at = s * width + k;
                const int live = nn - c < columns ? nn - c : columns;
                if (!FN(look)(&chunk, w, route, more, n0 + c, live, at, len) || rows > FEW)
                    FN(decode_chunk)(&chunk, live, len, tile);
                FN(add_chunk)(&chunk, live, x, at, rows, len, k == 0, sums + (int64_t)s * rows * STRIP + c);
            }
}

/* The binary tree over slices that lie `stride` floats apart, for sixteen outputs: ((0 + 1) + (2 + 3)) + .. */
static inline v16 FN(tree)(const float *p, int64_t stride, int slices)
{
    if (slices == 1) return v16_load(p);
    v16 v[MAX_SLICES];
    for (int s = 0; s < slices; s++) v[s] = v16_load(p + s * stride);
    for (; slices > 1; slices /= 2)
        for (int s = 0; s < slices / 2; s++) v[s] = v16_add(v[2 * s], v[2 * s + 1]);
    return v[0];
}

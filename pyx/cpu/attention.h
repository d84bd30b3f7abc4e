/* Sparse attention with a sink over stored keys; the value is the key.
 *
 * A row's present keys are visited in order, in tiles of TILE; per tile the running maximum and sum of each head are
 * brought up to date, and the weighted sum goes on by fma in key order. Absent places are left out before tiles are
 * cut, so they change no bits.
 */
#pragma once

/* A thread's scratch; heads [first, last) of one row are in work. */
struct attention {
    const struct attend_args *args;
    int64_t row;
    int first, last, stride, keys; /* keys: in the tile so far; stride: floats of a key or an output */
    float *tile, *score, *out, *top, *sum; /* [TILE, stride], [DOT_A, TILE], [heads, stride], [heads], [heads] */
};

/* p and the running top and sum of one head, from its scores in place; returns what older sums are scaled by. */
static inline float softmax_step(float *s, int count, float scale, float *top, float *sum)
{
    const v16 factor = v16_set1(scale), none = v16_set1(-INFINITY);
    v16 v[TILE / 16];
    for (int i = count; i < TILE; i++) s[i] = 0;
    float best = *top;
    for (int i = 0; i < TILE / 16; i++) {
        v[i] = v16_mul(v16_load(s + 16 * i), factor);
        if (count < 16 * i + 16) { /* lanes without a key */
            float lane[16];
            v16_store(lane, none);
            if (count > 16 * i) v16_store_n(lane, v[i], count - 16 * i);
            v[i] = v16_load(lane);
        }
        float most = v16_hmax(v[i]);
        best = most > best ? most : best;
    }
    float old[16];
    v16_store(old, v16_exp(v16_set1(*top - best)));
    float total = 0;
    for (int i = 0; i < TILE / 16; i++) {
        v[i] = v16_exp(v16_sub(v[i], v16_set1(best)));
        v16_store(s + 16 * i, v[i]);
        total += v16_sum(v[i]);
    }
    *top = best;
    *sum = *sum * old[0] + total;
    return old[0];
}

/* out_h = out_h · factor_h + Σ_i p_hi k_i for `heads` heads and `width` · 16 dims */
INLINE void weigh_block(const float *p, const float *k, int64_t stride, int count, const float *factor, float *out,
                        const int heads, const int width)
{
    v16 acc[DOT_A][DOT_B];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++)
            acc[h][j] = v16_mul(v16_load(out + h * stride + 16 * j), v16_set1(factor[h]));
    for (int i = 0; i < count; i++) {
        v16 x[DOT_B];
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) x[j] = v16_load(k + i * stride + 16 * j);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            v16 weight = v16_set1(p[h * TILE + i]);
#pragma GCC unroll 4
            for (int j = 0; j < width; j++) acc[h][j] = v16_fma(weight, x[j], acc[h][j]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) v16_store(out + h * stride + 16 * j, acc[h][j]);
}

static void weigh(const float *p, const float *k, int stride, int count, const float *factor, float *out, int heads)
{
    for (int i = 0; i < stride;) {
        int wide = stride - i >= 16 * DOT_B;
        if (heads == DOT_A && wide) weigh_block(p, k + i, stride, count, factor, out + i, DOT_A, DOT_B);
        else
            for (int h = 0; h < heads; h++) {
                const float *ph = p + h * TILE;
                float *to = out + h * stride + i;
                if (wide) weigh_block(ph, k + i, stride, count, factor + h, to, 1, DOT_B);
                else weigh_block(ph, k + i, stride, count, factor + h, to, 1, 1);
            }
        i += wide ? 16 * DOT_B : 16;
    }
}

/* The tile's keys into every head in work. */
static void attend_tile(struct attention *w)
{
    const struct attend_args *a = w->args;
    const float *q = a->q + w->row * a->heads * a->dim;
    float scale = (float)(1.0 / sqrt((double)a->dim));
    for (int h = w->first; h < w->last; h += DOT_A) {
        int heads = w->last - h < DOT_A ? w->last - h : DOT_A;
        float factor[DOT_A];
        dots(q + (int64_t)h * a->dim, a->dim, heads, w->tile, w->stride, w->keys, a->dim, w->score, TILE);
        for (int i = 0; i < heads; i++)
            factor[i] = softmax_step(w->score + i * TILE, w->keys, scale, w->top + h + i, w->sum + h + i);
        weigh(w->score, w->tile, w->stride, w->keys, factor, w->out + (int64_t)h * w->stride, heads);
    }
    w->keys = 0;
}

static void attend_row(struct attention *w)
{
    const struct attend_args *a = w->args;
    for (int h = w->first; h < w->last; h++) {
        w->top[h] = -INFINITY;
        w->sum[h] = 0;
        memset(w->out + (int64_t)h * w->stride, 0, 4 * (size_t)w->stride);
    }
    w->keys = 0;
    for (int p = 0; p < a->part_count; p++) {
        const struct attend_part *part = &a->parts[p];
        const int32_t *places = part->places + w->row * part->count;
        for (int i = 0; i < part->count; i++) {
            if (places[i] < 0) continue;
            decode_key(&part->cache, places[i], w->tile + (int64_t)w->keys * w->stride);
            if (++w->keys == TILE) attend_tile(w);
        }
    }
    if (w->keys) attend_tile(w);
    for (int h = w->first; h < w->last; h++) { /* without a key: top −inf, so the factor is 0 */
        float top = a->sink[h] > w->top[h] ? a->sink[h] : w->top[h], e[16];
        v16_store(e, v16_exp(v16_load((float[16]){w->top[h] - top, a->sink[h] - top})));
        float *out = a->out + (w->row * a->heads + h) * a->dim;
        scale_row(w->out + (int64_t)h * w->stride, e[0] / (w->sum[h] * e[0] + e[1]), NULL, out, a->dim);
    }
}

static void FN(attend)(void *args, int tid, int n)
{
    const struct attend_args *a = args;
    int64_t from, to;
    float *scratch = a->scratch + tid * attend_scratch(a->heads, a->dim);
    struct attention w = {.args = a, .stride = key_stride(a->dim)};
    w.tile = scratch;
    w.score = w.tile + TILE * w.stride;
    w.out = w.score + DOT_A * TILE;
    w.top = w.out + (int64_t)a->heads * w.stride;
    w.sum = w.top + a->heads;
    team_share((int64_t)a->rows * a->heads, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit += w.last - w.first) {
        w.row = unit / a->heads;
        w.first = (int)(unit % a->heads);
        w.last = to - unit < a->heads - w.first ? w.first + (int)(to - unit) : a->heads;
        attend_row(&w);
    }
}

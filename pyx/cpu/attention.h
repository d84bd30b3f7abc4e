/* Sparse attention with a sink over stored keys; the value is the key.
 *
 * A row's present keys are visited in order, in tiles of TILE; per tile the running maximum and sum of each head are
 * brought up to date, and the weighted sum goes on by fma in key order. Absent places are left out before tiles are
 * cut, so they change no bits.
 */
#pragma once

/* A thread's scratch; heads [first, last) of one row are in work.
 *
 * Decoded keys lie in a ring of `slots`, counted as they come: key number i is there until number i + slots. Rows of a
 * sequence see nearly the same keys: those of the row before are looked for by their places and used again. */
struct attention {
    const struct attend_args *args;
    int64_t row, before; /* before: the row whose keys `numbers[1]` has, −1 none */
    int first, last, stride, keys, count; /* keys in the tile so far; stride: floats of a key or an output */
    const float *key[TILE];
    float *ring, *score, *out, *top, *sum; /* [slots, stride], [DOT_A, TILE], [heads, stride], [heads], [heads] */
    int32_t *numbers[2]; /* [all places of a row] of this row's keys and of those of the row before */
};

/* p and the running tops and sums of some heads, from scores [heads, TILE] in place; factor: what older sums are
 * scaled by. */
INLINE void softmax_step(float *s, int count, float scale, float *top, float *sum, float *factor, const int heads)
{
    enum { PARTS = TILE / 16 };
    v16 v[DOT_A * PARTS];
    float fall[16] = {0}, best[DOT_A], total[DOT_A * PARTS];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        for (int i = count; i < TILE; i++) s[h * TILE + i] = -INFINITY;
        v16 most = v16_set1(-INFINITY);
        for (int i = 0; i < PARTS; i++) {
            v[h * PARTS + i] = v16_mul(v16_load(s + h * TILE + 16 * i), v16_set1(scale));
            most = v16_max(most, v[h * PARTS + i]);
        }
        const float here = v16_hmax(most);
        best[h] = here > top[h] ? here : top[h];
        fall[h] = top[h] - best[h];
    }
    v16_store(fall, v16_exp(v16_load(fall)));
#pragma GCC unroll 8
    for (int i = 0; i < heads * PARTS; i++) {
        v[i] = v16_exp(v16_sub(v[i], v16_set1(best[i / PARTS])));
        v16_store(s + 16 * i, v[i]);
    }
    FN(sums)(v, heads * PARTS, total);
    for (int h = 0; h < heads; h++) {
        float here = total[h * PARTS];
        for (int i = 1; i < PARTS; i++) here += total[h * PARTS + i];
        top[h] = best[h];
        sum[h] = sum[h] * fall[h] + here;
        factor[h] = fall[h];
    }
}

/* out_h = out_h · factor_h + Σ_i p_hi k_i for `heads` heads and `width` · 16 dims, of keys those from `from` on */
INLINE void weigh_block(const float *p, const float *const *k, int from, int64_t stride, int count,
                        const float *factor, float *out, const int heads, const int width)
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
        for (int j = 0; j < width; j++) x[j] = v16_load(k[i] + from + 16 * j);
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

static void weigh(const float *p, const float *const *k, int stride, int count, const float *factor, float *out,
                  int heads)
{
    for (int i = 0; i < stride;) {
        int wide = stride - i >= 16 * DOT_B;
        if (heads == DOT_A && wide) weigh_block(p, k, i, stride, count, factor, out + i, DOT_A, DOT_B);
        else
            for (int h = 0; h < heads; h++) {
                const float *ph = p + h * TILE;
                float *to = out + h * stride + i;
                if (wide) weigh_block(ph, k, i, stride, count, factor + h, to, 1, DOT_B);
                else weigh_block(ph, k, i, stride, count, factor + h, to, 1, 1);
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
    for (int h = w->first, heads; h < w->last; h += heads) {
        float factor[DOT_A];
        heads = w->last - h < DOT_A ? 1 : DOT_A;
        dots_of(q + (int64_t)h * a->dim, a->dim, heads, w->key, w->keys, a->dim, w->score, TILE);
        if (heads == 1) softmax_step(w->score, w->keys, scale, w->top + h, w->sum + h, factor, 1);
        else softmax_step(w->score, w->keys, scale, w->top + h, w->sum + h, factor, DOT_A);
        weigh(w->score, w->key, w->stride, w->keys, factor, w->out + (int64_t)h * w->stride, heads);
    }
    w->keys = 0;
}

/* Whether key number `number` will still be there when a tile from here on is done. */
static inline int key_stays(const struct attention *w, int32_t number)
{
    return w->count - number + TILE <= w->args->slots;
}

/* The row's keys of one part, whose numbers begin at `at`. */
static void attend_part(struct attention *w, const struct attend_part *part, int at)
{
    const int slots = w->args->slots, reuse = w->before >= 0 && slots > TILE;
    const int32_t *places = part->places + w->row * part->count;
    const int32_t *earlier = part->places + (reuse ? w->before : 0) * part->count, *known = w->numbers[1] + at;
    int32_t *numbers = w->numbers[0] + at;
    for (int i = 0, j = 0; i < part->count; i++, j++) { /* earlier[j] or the next one is where places[i] may be again */
        if (places[i] < 0) continue;
        if (reuse && j + 1 < part->count && earlier[j] != places[i] && earlier[j + 1] == places[i]) j++;
        const int again = reuse && j < part->count && earlier[j] == places[i];
        int32_t number = again ? known[j] : w->count;
        if (!again) j--;
        if (!again || !key_stays(w, number)) {
            number = w->count++;
            decode_key(&part->cache, places[i], w->ring + (int64_t)(number % slots) * w->stride);
        }
        if (slots > TILE) numbers[i] = number;
        w->key[w->keys] = w->ring + (int64_t)(number % slots) * w->stride;
        if (++w->keys == TILE) attend_tile(w);
    }
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
    for (int p = 0, at = 0; p < a->part_count; at += a->parts[p++].count) attend_part(w, &a->parts[p], at);
    if (w->keys) attend_tile(w);
    int32_t *swap = w->numbers[0];
    w->numbers[0] = w->numbers[1];
    w->numbers[1] = swap;
    w->before = w->row;
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
    float *scratch = a->scratch + tid * attend_scratch(a);
    struct attention w = {.args = a, .before = -1, .stride = key_stride(a->dim)};
    w.ring = scratch;
    w.score = w.ring + (int64_t)a->slots * w.stride;
    w.out = w.score + DOT_A * TILE;
    w.top = w.out + (int64_t)a->heads * w.stride;
    w.sum = w.top + a->heads;
    w.numbers[0] = (int32_t *)(w.sum + a->heads);
    w.numbers[1] = w.numbers[0] + a->places;
    team_share((int64_t)a->rows * a->heads, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit += w.last - w.first) {
        w.row = unit / a->heads;
        w.first = (int)(unit % a->heads);
        w.last = to - unit < a->heads - w.first ? w.first + (int)(to - unit) : a->heads;
        attend_row(&w);
    }
}

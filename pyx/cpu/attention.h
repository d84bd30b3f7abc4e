/* Sparse attention with a sink over stored keys; the value is the key.
 *
 * A row's present keys are visited in order, in tiles of TILE; per tile the running maximum and sum of each head are
 * brought up to date, and the weighted sum goes on by fma in key order. Absent places are left out before tiles are
 * cut, so they change no bits.
 */
#pragma once

/* The present places of a row, part after part, and where their decoded keys are. */
struct row_keys {
    int32_t *place;
    const float **key;
    int count[MAX_PARTS];
};

/* A thread's scratch; heads [first, last) of one row are in work.
 *
 * Rows of a sequence see nearly the same keys: where a row's keys stay near, those of the row before are looked for by
 * their places and used again, until there is no room for the new ones. */
struct attention {
    const struct attend_args *args;
    int64_t row;
    int first, last, stride, held; /* stride: floats of a key or an output; held: decoded keys */
    float *decoded, *score, *out, *top, *sum; /* [slots, stride], [DOT_A, MANY_KEYS], [heads, stride], [heads], [heads] */
    int32_t *missing; /* of the row's keys, those still to be decoded */
    struct row_keys now, before;
};

/* p, the running tops and sums of some heads, from scores [heads, MANY_KEYS] in place; factor [tiles, heads]: what a
 * tile scales older sums by. */
INLINE void softmax(float *s, int count, float scale, float *top, float *sum, float *factor, const int heads)
{
    enum { PARTS = TILE / 16 };
    const int tiles = (count + TILE - 1) / TILE;
    float best[MANY_KEYS / TILE * DOT_A];
    for (int h = 0; h < heads; h++)
        for (int i = count; i < tiles * TILE; i++) s[h * MANY_KEYS + i] = -INFINITY;
    for (int t = 0; t < tiles; t++)
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            v16 most = v16_set1(-INFINITY);
            for (int i = 0; i < PARTS; i++)
                most = v16_max(most, v16_mul(v16_load(s + h * MANY_KEYS + t * TILE + 16 * i), v16_set1(scale)));
            const float here = v16_hmax(most), next = here > top[h] ? here : top[h];
            factor[t * heads + h] = top[h] - next;
            top[h] = best[t * heads + h] = next;
        }
    for (int i = 0; i < tiles * heads; i += 16) v16_store(factor + i, v16_exp(v16_load(factor + i)));
    for (int t = 0; t < tiles; t++) {
        v16 v[DOT_A * PARTS];
        float total[DOT_A * PARTS];
#pragma GCC unroll 8
        for (int i = 0; i < heads * PARTS; i++) {
            float *at = s + i / PARTS * MANY_KEYS + t * TILE + i % PARTS * 16;
            v[i] = v16_exp(v16_sub(v16_mul(v16_load(at), v16_set1(scale)), v16_set1(best[t * heads + i / PARTS])));
            v16_store(at, v[i]);
        }
        FN(sums)(v, heads * PARTS, total);
        for (int h = 0; h < heads; h++) {
            float here = total[h * PARTS];
            for (int i = 1; i < PARTS; i++) here += total[h * PARTS + i];
            sum[h] = sum[h] * factor[t * heads + h] + here;
        }
    }
}

/* Per tile out_h = out_h · factor_h + Σ_i p_hi k_i, for `heads` heads and `width` · 16 dims, of keys those from `from` on */
INLINE void weigh_block(const float *p, const float *const *k, int from, int64_t stride, int count,
                        const float *factor, int factors, float *out, const int heads, const int width)
{
    v16 acc[DOT_A][DOT_B];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) acc[h][j] = v16_load(out + h * stride + 16 * j);
    for (int start = 0; start < count; start += TILE, factor += factors) {
        const int end = count - start < TILE ? count : start + TILE;
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
            for (int j = 0; j < width; j++) acc[h][j] = v16_mul(acc[h][j], v16_set1(factor[h]));
        for (int i = start; i < end; i++) {
            v16 x[DOT_B];
#pragma GCC unroll 4
            for (int j = 0; j < width; j++) x[j] = v16_load(k[i] + from + 16 * j);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                v16 weight = v16_set1(p[h * MANY_KEYS + i]);
#pragma GCC unroll 4
                for (int j = 0; j < width; j++) acc[h][j] = v16_fma(weight, x[j], acc[h][j]);
            }
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
        if (heads == DOT_A && wide) weigh_block(p, k, i, stride, count, factor, heads, out + i, DOT_A, DOT_B);
        else
            for (int h = 0; h < heads; h++) {
                const float *ph = p + h * MANY_KEYS;
                float *to = out + h * stride + i;
                if (wide) weigh_block(ph, k, i, stride, count, factor + h, heads, to, 1, DOT_B);
                else weigh_block(ph, k, i, stride, count, factor + h, heads, to, 1, 1);
            }
        i += wide ? 16 * DOT_B : 16;
    }
}

/* count <= MANY_KEYS keys, whole tiles but at the end, into every head in work. */
static void attend_keys(struct attention *w, const float *const *key, int count)
{
    const struct attend_args *a = w->args;
    const float *q = a->q + w->row * a->heads * a->dim;
    float scale = (float)(1.0 / sqrt((double)a->dim)), factor[MANY_KEYS / TILE * DOT_A + 16] = {0};
    for (int h = w->first, heads; h < w->last; h += heads) {
        heads = w->last - h < DOT_A ? 1 : DOT_A;
        dots_of(q + (int64_t)h * a->dim, a->dim, heads, key, count, a->dim, w->score, MANY_KEYS);
        if (heads == 1) softmax(w->score, count, scale, w->top + h, w->sum + h, factor, 1);
        else softmax(w->score, count, scale, w->top + h, w->sum + h, factor, DOT_A);
        weigh(w->score, key, w->stride, count, factor, w->out + (int64_t)h * w->stride, heads);
    }
}

/* Bit l: places a[l] and b[l] are the same. */
static inline uint32_t same_places(v16i a, v16i b) { return ~(v16i_above(a, b) | v16i_above(b, a)) & 0xffff; }

/* The present places of the row → place; how many. */
static int present_places(const struct attend_part *part, int64_t row, int32_t *place)
{
    const int32_t *places = part->places + row * part->count;
    int count = 0, i = 0;
    for (; i + 16 <= part->count; i += 16) {
        const v16i some = v16i_load(places + i);
        const uint32_t present = v16i_above(some, v16i_set1(-1));
        v16i_pack(place + count, some, present);
        count += __builtin_popcount(present);
    }
    for (; i < part->count; i++) {
        place[count] = places[i];
        count += places[i] >= 0;
    }
    return count;
}

/* Keys of `count` places, from those of `olds` other ones; both ascend in position. Which are not there → missing; how
 * many. */
static int known_keys(const int32_t *place, int count, const float **key, const int32_t *old, int olds,
                      const float *const *known, int32_t *missing)
{
    int lacking = 0;
    for (int i = 0, j = 0; i < count;) {
        const v16i next = v16i_load(old + j);
        const int left = olds - j < count - i ? olds - j : count - i;
        int run = __builtin_ctz(~same_places(v16i_load(place + i), next));
        run = run < left ? run : left;
        if (run) {
            memcpy(key + i, known + j, 16 * sizeof *key);
            i += run;
            j += run;
            continue;
        }
        const uint32_t there = same_places(v16i_set1(place[i]), next) & (olds - j < 16 ? (1u << (olds - j)) - 1 : 0xffff);
        if (there) j += __builtin_ctz(there);
        else missing[lacking++] = i++;
    }
    return lacking;
}

/* Keys of the next row on their way to this core, where they are not nearly this row's: another sequence's. */
static void fetch_keys(const struct attend_part *part, int64_t row)
{
    const struct key_cache *c = &part->cache;
    const int32_t *here = part->places + row * part->count, *next = here + part->count;
    const int plain = c->dim - c->rope_dim;
    if (part->count < 2 || next[0] == here[0] || next[0] == here[1]) return;
    for (int i = 0; i < part->count; i++) {
        if (next[i] < 0) continue;
        const char *codes = (const char *)(c->codes + (int64_t)next[i] * plain);
        const char *tail = (const char *)(c->rope + (int64_t)next[i] * c->rope_dim);
        for (int at = 0; at < plain; at += 64) __builtin_prefetch(codes + at, 0, 2);
        for (int at = 0; at < 2 * c->rope_dim; at += 64) __builtin_prefetch(tail + at, 0, 2);
    }
}

/* The row's keys, all held at once. */
static void attend_near(struct attention *w)
{
    const struct attend_args *a = w->args;
    int count = 0, lacking[MAX_PARTS], more = 0;
    for (int p = 0, olds = 0; p < a->part_count; p++) {
        const int n = w->now.count[p] = present_places(&a->parts[p], w->row, w->now.place + count);
        lacking[p] = known_keys(w->now.place + count, n, w->now.key + count, w->before.place + olds, w->before.count[p],
                                w->before.key + olds, w->missing + more);
        count += n;
        more += lacking[p];
        olds += w->before.count[p];
    }
    const int none = w->held + more > a->slots; /* nothing is kept */
    if (none) w->held = 0;
    const int32_t *missing = w->missing;
    for (int p = 0, at = 0; p < a->part_count; at += w->now.count[p++]) {
        const int n = none ? w->now.count[p] : lacking[p];
        for (int i = 0; i < n; i++) {
            const int number = at + (none ? i : missing[i]);
            float *k = w->decoded + (int64_t)w->held++ * w->stride;
            decode_key(&a->parts[p].cache, w->now.place[number], k);
            w->now.key[number] = k;
        }
        missing += lacking[p];
    }
    for (int p = 0; p < a->part_count && w->row + 1 < a->rows; p++) fetch_keys(&a->parts[p], w->row);
    for (int i = 0; i < count; i += MANY_KEYS)
        attend_keys(w, w->now.key + i, count - i < MANY_KEYS ? count - i : MANY_KEYS);
    const struct row_keys swap = w->before;
    w->before = w->now;
    w->now = swap;
}

/* The row's keys, a tile at a time. */
static void attend_far(struct attention *w)
{
    const struct attend_args *a = w->args;
    int count = 0;
    for (int p = 0; p < a->part_count; p++) {
        const struct attend_part *part = &a->parts[p];
        for (int i = 0; i < part->count; i++) {
            const int32_t place = part->places[w->row * part->count + i];
            if (place < 0) continue;
            float *k = w->decoded + (int64_t)count * w->stride;
            decode_key(&part->cache, place, k);
            w->now.key[count++] = k;
            if (count == TILE) attend_keys(w, w->now.key, count);
            count %= TILE;
        }
    }
    if (count) attend_keys(w, w->now.key, count);
}

static void attend_row(struct attention *w)
{
    const struct attend_args *a = w->args;
    for (int h = w->first; h < w->last; h++) {
        w->top[h] = -INFINITY;
        w->sum[h] = 0;
        memset(w->out + (int64_t)h * w->stride, 0, 4 * (size_t)w->stride);
    }
    if (a->slots > TILE) attend_near(w);
    else attend_far(w);
    for (int h = w->first; h < w->last; h += 16) { /* without a key: top −inf, so the factor is 0 */
        const int heads = w->last - h < 16 ? w->last - h : 16;
        const v16 top = load_some(w->top + h, heads), sink = load_some(a->sink + h, heads);
        const v16 most = v16_select_lt(top, sink, sink, top);
        const v16 fall = v16_exp(v16_sub(top, most)), rest = v16_exp(v16_sub(sink, most));
        float factor[16];
        v16_store(factor, v16_div(fall, v16_add(v16_mul(load_some(w->sum + h, heads), fall), rest)));
        for (int i = 0; i < heads; i++)
            scale_row(w->out + (int64_t)(h + i) * w->stride, factor[i], NULL,
                      a->out + (w->row * a->heads + h + i) * a->dim, a->dim);
    }
}

static void FN(attend)(void *args, int tid, int n)
{
    const struct attend_args *a = args;
    int64_t from, to;
    struct attention w = {.args = a, .stride = key_stride(a->dim)};
    w.decoded = a->scratch + tid * attend_scratch(a);
    w.score = w.decoded + (int64_t)a->slots * w.stride;
    w.out = w.score + DOT_A * MANY_KEYS;
    w.now.key = (const float **)(w.out + (int64_t)a->heads * w.stride);
    w.before.key = w.now.key + row_places(a);
    w.now.place = (int32_t *)(w.before.key + row_places(a));
    w.before.place = w.now.place + row_places(a);
    w.missing = w.before.place + row_places(a);
    w.top = (float *)(w.missing + row_places(a));
    w.sum = w.top + a->heads;
    team_share((int64_t)a->rows * a->heads, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit += w.last - w.first) {
        w.row = unit / a->heads;
        w.first = (int)(unit % a->heads);
        w.last = to - unit < a->heads - w.first ? w.first + (int)(to - unit) : a->heads;
        attend_row(&w);
    }
}

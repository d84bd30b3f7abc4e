/* Scores of compressed entries: Σ_h w_h · Di^-½ · Hi^-½ · max(0, q_h · k_j), h ascending by fma.
 *
 * Queries as index_query makes them, and keys, are small integers times a power of two per 32 dims. A group's sum of
 * products is an exact integer, however it is added; times its scales it is added to that of the groups before. Other
 * queries are multiplied as floats, in the order of dot.h.
 *
 * Powers of two that are near each other go into the integers, where no rounding can tell:
 *   folded keys: a tile's entries have one scale each, which multiplies their scores at the end;
 *   folded queries besides, INDEX_HEADS heads at a time: q · k is one integer, below 2^24, and so exact as a float too.
 *
 * TILE entries are scored together. Dims lie as the codes' bytes do: the even ones of all groups, then the odd ones.
 */
#pragma once

/* A key's value · 2 · 2^step + ZERO is a byte without sign. Queries have as many steps. */
enum { INDEX_LANES = 16, INDEX_HEADS = 8, INDEX_STEPS = V16_KEY_STEPS, INDEX_ZERO = 12 << INDEX_STEPS };
/* Folded: scales within 2^±NEAR, weights of 2^-60 to 2^NEAR and at most 1024 dims, so that the products of all these
 * neither overflow nor fall below 2^-149. */
enum { INDEX_NEAR = 24, INDEX_FOLD_DIM = 1024 };

/* A thread's scratch of one row's queries, and of a tile's keys. groups = dim / 32. */
struct index_work {
    int dim, heads, groups;
    int near;          /* scales and weights are such that keys may be folded */
    uint8_t *q;        /* [heads, dim] integers of −15 to 15, in two's complement */
    int32_t *start;    /* [heads, groups] less what the keys' ZERO adds to a sum */
    float *scale;      /* [heads, groups] of an integer sum, less the key's */
    float *weight;     /* [heads] */
    uint8_t *folded;   /* [heads / HEADS, dim / 4, HEADS] four bytes: q · 2^step */
    int32_t *fold_start; /* [heads] */
    float *fold_weight;  /* [heads] weight · the scale of all groups */
    uint8_t *is_folded;  /* [heads / HEADS] */
};

/* A tile of keys. */
struct index_keys {
    const uint8_t *codes; /* [TILE, dim / 2] */
    uint8_t *key;         /* [TILE / LANES, dim / 4, LANES] four bytes */
    float *scale;         /* [groups, TILE]; folded [TILE] */
    float *steps;         /* [groups, TILE] integers: above an entry's least scale; 0 where not folded */
    uint8_t *copy;        /* [TILE, dim / 2], [TILE, groups] of entries that do not lie one after another */
    int folded;
    int unpacked;         /* parts of key that are there, LANES entries of a group each */
};

/* scratch: select_scratch() floats */
static struct index_work index_work_at(float *scratch, int heads, int dim, struct index_keys *keys)
{
    struct index_work w = {.dim = dim, .heads = heads, .groups = dim / E2M1_BLOCK};
    uint8_t *at = (uint8_t *)scratch;
    for (int i = 0; i < 2; i++) {
        keys[i].key = at;
        keys[i].scale = (float *)(void *)(at + TILE * dim);
        keys[i].steps = keys[i].scale + TILE * w.groups;
        keys[i].copy = (uint8_t *)(keys[i].steps + TILE * w.groups);
        at = keys[i].copy + TILE * (dim / 2 + w.groups);
    }
    w.folded = at;
    w.q = w.folded + heads * dim;
    w.start = (int32_t *)(void *)(w.q + heads * dim);
    w.scale = (float *)(w.start + heads * w.groups);
    w.weight = w.scale + heads * w.groups;
    w.fold_weight = w.weight + heads;
    w.fold_start = (int32_t *)(w.fold_weight + heads);
    w.is_folded = (uint8_t *)(w.fold_start + heads);
    return w;
}

/* ------------------------------------------------------------------ queries */
/* A group of 32 dims of one query → the 16 bytes of the even ones, those of the odd ones, minus what the keys' ZERO
 * adds, and the scale. rest: at least what separates them from integers times it. Whether there is such a scale. */
static int index_group(const float *x, uint8_t *even, uint8_t *odd, int32_t *start, float *scale, v16 *rest)
{
    float most = largest_of(x, E2M1_BLOCK);
    if (most == 0) most = 1;
    if (!(most > 0x1p-100f && most < 0x1p100f)) return 0;
    const uint32_t exponent = as_bits(most) >> 23; /* most · 2^(3 + 127 − exponent): 8 to less than 16 */
    const v16 up = v16_set1(as_float((257 - exponent) << 23));
    v16 part[2];
    v16i sum = v16i_set1(0);
    v16_deinterleave(x, &part[0], &part[1]);
    for (int i = 0; i < 2; i++) {
        const v16 y = v16_mul(part[i], up), whole = v16_round(y);
        const v16i codes = v16_to_int(whole);
        *rest = v16_max(*rest, v16_abs(v16_sub(y, whole)));
        v16i_store_u8(i ? odd : even, codes);
        sum = v16i_add(sum, codes);
    }
    *start = -(int32_t)v16_sum(v16i_to_float(sum)) * INDEX_ZERO;
    *scale = as_float((exponent - 4) << 23); /* the integers' 2^(exponent − 130), half of it for the keys' factor 2 */
    return 1;
}

static inline int index_near(float x, int least) /* 2^least <= |x| <= 2^NEAR */
{
    const int exponent = (int)(as_bits(x) >> 23 & 255) - 127;
    return exponent >= least && exponent < INDEX_NEAR;
}

/* Head h with one scale for all groups. Whether their scales are so near. */
static int index_fold(struct index_work *w, int h)
{
    const float *scale = w->scale + h * w->groups;
    int steps[INDEX_FOLD_DIM / E2M1_BLOCK], sum = 0, least = INT32_MAX;
    for (int g = 0; g < w->groups; g++) {
        steps[g] = (int)(as_bits(scale[g]) >> 23);
        least = steps[g] < least ? steps[g] : least;
    }
    for (int g = 0; g < w->groups; g++) {
        steps[g] -= least;
        if (steps[g] > INDEX_STEPS) return 0;
        sum += w->start[h * w->groups + g] * (1 << steps[g]);
    }
    uint8_t *to = w->folded + h / INDEX_HEADS * INDEX_HEADS * w->dim + h % INDEX_HEADS * 4;
    for (int i = 0; i < w->dim / 4; i++) {
        const int step = steps[i / 4 % w->groups];
        uint32_t x;
        memcpy(&x, w->q + h * w->dim + 4 * i, 4);
        x = (x & (0xffu >> step) * 0x01010101u) << step;
        memcpy(to + i * INDEX_HEADS * 4, &x, 4);
    }
    w->fold_start[h] = sum;
    w->fold_weight[h] = w->weight[h] * as_float((uint32_t)least << 23);
    return 1;
}

/* The queries of one row [heads, dim] and its heads' weights, times `scale`. Whether all queries are such integers. */
static int index_queries(struct index_work *w, const float *q, const float *weight, float scale)
{
    v16 rest = v16_zero();
    w->near = INDEX_STEPS > 0 && w->dim <= INDEX_FOLD_DIM;
    for (int i = 0; i < w->heads * w->groups; i++) {
        uint8_t *even = w->q + i / w->groups * w->dim + i % w->groups * (E2M1_BLOCK / 2);
        if (!index_group(q + i * E2M1_BLOCK, even, even + w->dim / 2, w->start + i, w->scale + i, &rest))
            return 0;
        w->near &= index_near(w->scale[i], -INDEX_NEAR);
    }
    if (v16_hmax(rest) > 0) return 0;
    for (int h = 0; h < w->heads; h++) {
        w->weight[h] = weight[h] * scale;
        w->near &= w->weight[h] == 0 || index_near(w->weight[h], -60);
    }
    for (int b = 0; b < w->heads / INDEX_HEADS; b++) {
        w->is_folded[b] = w->near;
        for (int h = b * INDEX_HEADS; w->is_folded[b] && h < (b + 1) * INDEX_HEADS; h++)
            w->is_folded[b] = (uint8_t)index_fold(w, h);
    }
    return 1;
}

/* ------------------------------------------------------------------ keys */
/* The bytes of group g of LANES entries from t · LANES on; scales: [TILE, groups] */
static inline v16i index_scales(const uint8_t *scales, int groups, int t, int g)
{
    const uint8_t *rows = scales + t * INDEX_LANES * groups;
    if (groups == 4) return v16i_and(v16i_shr(v16i_load(rows), 8 * g), v16i_set1(255));
    uint8_t bytes[INDEX_LANES];
    for (int i = 0; i < INDEX_LANES; i++) bytes[i] = rows[i * groups + g];
    return v16i_load_u8(bytes);
}

/* scales: bytes [TILE, groups] → scale and steps of a folded tile. Whether it can be; otherwise nothing is changed. */
static int index_fold_keys(struct index_keys *keys, const uint8_t *scales, int groups)
{
    v16i least[TILE / INDEX_LANES], over = v16i_set1(0);
    for (int t = 0; t < TILE / INDEX_LANES; t++) {
        v16i low = index_scales(scales, groups, t, 0), high = low;
        for (int g = 1; g < groups; g++) {
            const v16i b = index_scales(scales, groups, t, g);
            low = v16i_min(low, b);
            high = v16i_max(high, b);
        }
        over = v16i_max(over, v16i_sub(v16i_sub(high, low), v16i_set1(INDEX_STEPS)));
        over = v16i_max(over, v16i_sub(v16i_set1(127 - INDEX_NEAR), low));
        over = v16i_max(over, v16i_sub(low, v16i_set1(127 + INDEX_NEAR)));
        least[t] = low;
    }
    if (v16_hmax(v16i_to_float(over)) > 0) return 0;
    for (int t = 0; t < TILE / INDEX_LANES; t++) {
        v16_store(keys->scale + t * INDEX_LANES, v16i_float(v16i_shl(least[t], 23)));
        for (int g = 0; g < groups; g++) {
            const v16i steps = v16i_sub(index_scales(scales, groups, t, g), least[t]);
            v16_store(keys->steps + g * TILE + t * INDEX_LANES, v16i_float(steps));
        }
    }
    return 1;
}

/* The entries at places [TILE], all but key; in_turn: places ascend by one. */
static void index_keys_at(const struct index_work *w, const struct index_cache *cache, const int64_t *places,
                          int in_turn, struct index_keys *keys)
{
    const int half = w->dim / 2, groups = w->groups;
    const uint8_t *scales = cache->scales + places[0] * groups;
    keys->codes = cache->codes + places[0] * half;
    if (!in_turn) {
        uint8_t *rest = keys->copy + TILE * half;
        for (int i = 0; i < TILE; i++) {
            for (int k = 0; k < half; k += 16) memcpy(keys->copy + i * half + k, cache->codes + places[i] * half + k, 16);
            for (int g = 0; g < groups; g++) rest[i * groups + g] = cache->scales[places[i] * groups + g];
        }
        keys->codes = keys->copy;
        scales = rest;
    }
    /* mostly the next tile's */
    for (int i = 0; i < TILE * half; i += 64) __builtin_prefetch(keys->codes + TILE * half + i);
    keys->unpacked = 0;
    keys->folded = w->near && index_fold_keys(keys, scales, groups);
    if (keys->folded) return;
    for (int t = 0; t < TILE / INDEX_LANES; t++)
        for (int g = 0; g < groups; g++) {
            const v16i b = index_scales(scales, groups, t, g);
            const v16i nan = v16i_shl(v16i_shr(v16i_add(b, v16i_set1(1)), 8), 22);
            const v16i scale = v16i_max(v16i_shl(b, 23), v16i_set1(0x00400000));
            v16_store(keys->scale + g * TILE + t * INDEX_LANES, v16i_float(v16i_or(scale, nan)));
            v16_store(keys->steps + g * TILE + t * INDEX_LANES, v16_zero());
        }
}

/* The next part of key. Whether there was one. */
static inline int index_unpack(const struct index_work *w, struct index_keys *keys)
{
    if (keys->unpacked == TILE / INDEX_LANES * w->groups) return 0;
    const int t = keys->unpacked / w->groups, g = keys->unpacked % w->groups, half = w->dim / 2;
    v16i_key_bytes(keys->codes + t * INDEX_LANES * half + g * 16, half,
                   v16_bits(v16_load(keys->steps + g * TILE + t * INDEX_LANES)),
                   keys->key + (t * w->dim + g * 16) * INDEX_LANES, half * INDEX_LANES);
    keys->unpacked++;
    return 1;
}

/* ------------------------------------------------------------------ products */
/* score [2] of two times LANES entries, with one more head's products. */
INLINE void index_add(v16 *score, float weight, v16 a, v16 b)
{
    score[0] = v16_fma(v16_set1(weight), v16_max(v16_zero(), a), score[0]);
    score[1] = v16_fma(v16_set1(weight), v16_max(v16_zero(), b), score[1]);
}

/* H heads from h on, added to score [2]. */
INLINE void index_products(const struct index_work *w, const struct index_keys *keys, int h, const int H,
                           const int folded, v16 *score)
{
    v16 sum[2 * DOT_A];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * H; i++) sum[i] = v16_zero();
    const int half = w->dim / 2;
    for (int g = 0; g < w->groups; g++) {
        v16i acc[2 * DOT_A];
#pragma GCC unroll 8
        for (int i = 0; i < 2 * H; i++) acc[i] = v16i_dot_start(w->start[(h + i / 2) * w->groups + g]);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const int at = side * half + g * 16 + 4 * j;
                const v16i a = v16i_load(keys->key + at * INDEX_LANES);
                const v16i b = v16i_load(keys->key + (w->dim + at) * INDEX_LANES);
#pragma GCC unroll 4
                for (int i = 0; i < H; i++) {
                    const v16i q = v16i_four(w->q + (h + i) * w->dim + at);
                    acc[2 * i] = v16i_dot(acc[2 * i], a, q);
                    acc[2 * i + 1] = v16i_dot(acc[2 * i + 1], b, q);
                }
            }
#pragma GCC unroll 8
        for (int i = 0; i < 2 * H; i++) {
            v16 value = v16i_to_float(v16i_dot_sum(acc[i]));
            if (!folded) value = v16_mul(value, v16_load(keys->scale + g * TILE + i % 2 * INDEX_LANES));
            sum[i] = v16_fma(value, v16_set1(w->scale[(h + i / 2) * w->groups + g]), sum[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < H; i++) index_add(score, w->weight[h + i], sum[2 * i], sum[2 * i + 1]);
}

/* H is 1 or DOT_A. */
INLINE void index_some_products(const struct index_work *w, const struct index_keys *keys, int h, int H, v16 *score)
{
    const int folded = INDEX_STEPS > 0 && keys->folded;
    if (folded && H > 1) index_products(w, keys, h, DOT_A, 1, score);
    else if (folded) index_products(w, keys, h, 1, 1, score);
    else if (H > 1) index_products(w, keys, h, DOT_A, 0, score);
    else index_products(w, keys, h, 1, 0, score);
}

/* The same of HEADS folded heads, keys folded too. A function of its own: its sums are to stay in registers. */
static __attribute__((noinline)) void index_folded_products(const struct index_work *w, const struct index_keys *keys,
                                                            int h, v16 *score)
{
    v16i acc[2 * INDEX_HEADS];
    const uint8_t *q = w->folded + h * w->dim;
#pragma GCC unroll 8
    for (int i = 0; i < INDEX_HEADS; i++) acc[2 * i] = acc[2 * i + 1] = v16i_dot_start(w->fold_start[h + i]);
    for (int at = 0; at < w->dim; at += 16)
#pragma GCC unroll 4
        for (int j = at; j < at + 16; j += 4) {
            const v16i a = v16i_load(keys->key + j * INDEX_LANES);
            const v16i b = v16i_load(keys->key + (w->dim + j) * INDEX_LANES);
#pragma GCC unroll 8
            for (int i = 0; i < INDEX_HEADS; i++) {
                const v16i x = v16i_four(q + j * INDEX_HEADS + 4 * i);
                acc[2 * i] = v16i_dot(acc[2 * i], a, x);
                acc[2 * i + 1] = v16i_dot(acc[2 * i + 1], b, x);
            }
        }
#pragma GCC unroll 8
    for (int i = 0; i < INDEX_HEADS; i++)
        for (int k = 0; k < 2; k++)
            score[k] = v16_fma(v16_set1(w->fold_weight[h + i]),
                               v16i_to_float(v16i_max(acc[2 * i + k], v16i_set1(0))), score[k]);
}

/* score [2]: the sums over heads of a tile. Between the heads `next` is unpacked: a processor does both at once. */
static void index_tile(const struct index_work *w, const struct index_keys *keys, struct index_keys *next, v16 *score)
{
    v16 sum[2] = {v16_zero(), v16_zero()};
    for (int h = 0, some; h < w->heads; h += some) {
        const int block = h % INDEX_HEADS == 0 && w->heads - h >= INDEX_HEADS && w->is_folded[h / INDEX_HEADS];
        if (INDEX_STEPS > 0 && keys->folded && block) {
            some = INDEX_HEADS;
            index_folded_products(w, keys, h, sum);
        } else {
            some = w->heads - h < DOT_A ? 1 : DOT_A;
            index_some_products(w, keys, h, some, sum);
        }
        index_unpack(w, next);
    }
    while (index_unpack(w, next)) {}
    for (int i = 0; i < 2; i++)
        score[i] = keys->folded ? v16_mul(sum[i], v16_load(keys->scale + i * INDEX_LANES)) : sum[i];
}

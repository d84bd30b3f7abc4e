/* Scores of compressed entries: Σ_h w_h · Di^-½ · Hi^-½ · max(0, q_h · k_j), h ascending by fma.
 *
 * Queries as index_query makes them, and keys, are small integers times a power of two per 32 dims. A group's sum of
 * products is an exact integer, however it is added; times its scales it is added to that of the groups before. Other
 * queries are multiplied as floats, in the order of dot.h.
 *
 * TILE entries are scored together. Dims lie as the codes' bytes do: the even ones of all groups, then the odd ones.
 */
#pragma once

enum { INDEX_LANES = 16, INDEX_SHIFT = 12 }; /* a key's value · 2 + SHIFT is a byte without sign */

/* A thread's scratch of one row's queries, and of a tile's keys. groups = dim / 32. */
struct index_work {
    int dim, heads, groups;
    uint8_t *q;      /* [heads, dim] integers of −15 to 15, in two's complement */
    int32_t *less;   /* [heads, groups] what the keys' SHIFT adds to a sum */
    float *scale;    /* [heads, groups] of an integer sum, less the key's */
    uint8_t *key;    /* [TILE / LANES, dim / 4, LANES] four bytes */
    float *key_scale; /* [groups, TILE] */
};

static struct index_work index_work_at(float *scratch, int heads, int dim)
{
    struct index_work w = {.dim = dim, .heads = heads, .groups = dim / E2M1_BLOCK};
    w.key_scale = scratch;
    w.scale = w.key_scale + w.groups * TILE;
    w.less = (int32_t *)(void *)(w.scale + heads * w.groups);
    w.key = (uint8_t *)(w.less + heads * w.groups);
    w.q = w.key + TILE * dim;
    return w;
}

/* A group of 32 dims of one query → the 16 bytes of the even ones, those of the odd ones, their sum and the scale.
 * Whether they are integers of at most 15 times a power of two. */
static int index_group(const float *x, uint8_t *even, uint8_t *odd, int32_t *less, float *scale)
{
    float most = largest_of(x, E2M1_BLOCK);
    if (most == 0) most = 1;
    if (!(most > 0x1p-100f && most < 0x1p100f)) return 0;
    const uint32_t exponent = as_bits(most) >> 23; /* most · 2^(3 + 127 − exponent): 8 to less than 16 */
    const v16 up = v16_set1(as_float((257 - exponent) << 23));
    v16 part[2];
    v16i sum = v16i_set1(0);
    float rest = 0;
    v16_deinterleave(x, &part[0], &part[1]);
    for (int i = 0; i < 2; i++) {
        const v16 y = v16_mul(part[i], up), whole = v16_round(y);
        const v16i codes = v16_to_int(whole);
        rest += v16_hmax(v16_abs(v16_sub(y, whole)));
        v16i_store_u8(i ? odd : even, codes);
        sum = v16i_add(sum, codes);
    }
    *less = (int32_t)v16_sum(v16i_to_float(sum)) * INDEX_SHIFT;
    *scale = as_float((exponent - 4) << 23); /* the integers' 2^(exponent − 130), half of it for the keys' factor 2 */
    return rest == 0;
}

/* The queries of one row [heads, dim]. Whether all are such integers. */
static int index_queries(struct index_work *w, const float *q)
{
    for (int i = 0; i < w->heads * w->groups; i++) {
        uint8_t *even = w->q + i / w->groups * w->dim + i % w->groups * (E2M1_BLOCK / 2);
        if (!index_group(q + i * E2M1_BLOCK, even, even + w->dim / 2, w->less + i, w->scale + i)) return 0;
    }
    return 1;
}

/* Keys of the entries at places [TILE] into key and key_scale. */
static void index_keys(struct index_work *w, const struct index_cache *cache, const int64_t *places)
{
    const int half = w->dim / 2;
    for (int t = 0; t < TILE / INDEX_LANES; t++) {
        const uint8_t *codes[INDEX_LANES];
        for (int i = 0; i < INDEX_LANES; i++) {
            codes[i] = cache->codes + places[t * INDEX_LANES + i] * half;
            __builtin_prefetch(codes[i] + TILE * half); /* mostly the next tile's */
        }
        uint8_t *key = w->key + t * INDEX_LANES * w->dim;
        for (int at = 0; at < half; at += 16) v16i_key_bytes(codes, at, key + at * INDEX_LANES, half * INDEX_LANES);
    }
    for (int g = 0; g < w->groups; g++) {
        uint8_t bytes[TILE];
        for (int i = 0; i < TILE; i++) bytes[i] = cache->scales[places[i] * w->groups + g];
        for (int i = 0; i < TILE; i += 16) {
            const v16i b = v16i_load_u8(bytes + i);
            const v16i nan = v16i_shl(v16i_shr(v16i_add(b, v16i_set1(1)), 8), 22);
            const v16i scale = v16i_max(v16i_shl(b, 23), v16i_set1(0x00400000));
            v16_store(w->key_scale + g * TILE + i, v16i_float(v16i_or(scale, nan)));
        }
    }
}

/* q_h · k_j of H heads from h on and two times LANES entries → part [H, TILE]. */
INLINE void index_products(const struct index_work *w, int h, const int H, float *part)
{
    v16 sum[2 * DOT_A];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * H; i++) sum[i] = v16_zero();
    const int half = w->dim / 2;
    for (int g = 0; g < w->groups; g++) {
        v16i acc[2 * DOT_A];
#pragma GCC unroll 8
        for (int i = 0; i < 2 * H; i++) acc[i] = v16i_set1(0);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const int at = side * half + g * 16 + 4 * j;
                const v16i a = v16i_load(w->key + at * INDEX_LANES);
                const v16i b = v16i_load(w->key + (w->dim + at) * INDEX_LANES);
#pragma GCC unroll 4
                for (int i = 0; i < H; i++) {
                    const v16i q = v16i_four(w->q + (h + i) * w->dim + at);
                    acc[2 * i] = v16i_dot(acc[2 * i], a, q);
                    acc[2 * i + 1] = v16i_dot(acc[2 * i + 1], b, q);
                }
            }
#pragma GCC unroll 8
        for (int i = 0; i < 2 * H; i++) {
            const int place = (h + i / 2) * w->groups + g;
            const v16i whole = v16i_sub(v16i_dot_sum(acc[i]), v16i_set1(w->less[place]));
            const v16 value = v16_mul(v16i_to_float(whole), v16_load(w->key_scale + g * TILE + i % 2 * INDEX_LANES));
            const v16 scale = v16_set1(w->scale[place]);
            sum[i] = v16_fma(value, scale, sum[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * H; i++) v16_store(part + i / 2 * TILE + i % 2 * INDEX_LANES, sum[i]);
}

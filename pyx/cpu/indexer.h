/* Indexer: Hadamard-rotated e2m1 queries and keys, scores, and the choice of the best entries. */
#pragma once
#include "choice.h"
#include "index_scores.h"

/* x [n] · H in Sylvester order, n = 2^i >= 32. Each of the i rounds turns pairs (2j, 2j+1) into their sum, at j, and
 * their difference, at j + n/2: index bits turn once around, so the order is the usual one. Returns x or spare. */
static float *hadamard(float *x, float *spare, int n)
{
    for (int round = 1; round < n; round *= 2) {
        for (int j = 0; j < n / 2; j += 16) {
            v16 even, odd;
            v16_deinterleave(x + 2 * j, &even, &odd);
            v16_store(spare + j, v16_add(even, odd));
            v16_store(spare + j + n / 2, v16_sub(even, odd));
        }
        float *swap = x;
        x = spare;
        spare = swap;
    }
    return x;
}

static void FN(index_quant)(void *args, int tid, int n)
{
    const struct index_quant_args *a = args;
    int64_t from, to;
    int dim = a->dim, pairs = a->rope.pairs;
    float *x = a->scratch + (int64_t)tid * 2 * dim;
    team_share((int64_t)a->rows * a->heads, tid, n, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int64_t t = unit / a->heads;
        memcpy(x, a->x + unit * dim, 4 * (size_t)dim);
        if (pairs) rotate_pairs(x + dim - 2 * pairs, a->rope.cos + t * pairs, a->rope.sin + t * pairs, pairs, 1.0f);
        float *y = hadamard(x, x + dim, dim);
        scale_row(y, (float)(1.0 / sqrt((double)dim)), NULL, y, dim);
        for (int i = 0; i < dim; i += E2M1_BLOCK) {
            if (a->out) {
                quant_block_e2m1(y + i, a->out + unit * dim + i, NULL);
            } else {
                int64_t place = a->where[t];
                uint8_t *codes = a->cache.codes + place * dim / 2 + i / 2;
                a->cache.scales[place * dim / E2M1_BLOCK + i / E2M1_BLOCK] = quant_block_e2m1(y + i, y + i, codes);
            }
        }
    }
}

static void FN(decode_index)(void *args, int tid, int n)
{
    static const float value[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    const struct decode_index_args *a = args;
    int64_t from, to;
    int dim = a->cache.dim;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const uint8_t *codes = a->cache.codes + (int64_t)a->where[t] * dim / 2;
        const uint8_t *scales = a->cache.scales + (int64_t)a->where[t] * dim / E2M1_BLOCK;
        for (int i = 0; i < dim; i++)
            a->out[t * dim + i] = value[codes[i / 2] >> 4 * (i & 1) & 15] * scale_of(scales[i / E2M1_BLOCK]);
    }
}

/* ------------------------------------------------------------------ selection */
static inline int64_t entry_place(const int32_t *pages, int32_t page_entries, int32_t j)
{
    return (int64_t)pages[j / page_entries] * page_entries + j % page_entries;
}

/* Entries j .. j+count−1 (count <= TILE) of the row as floats [count, dim] → tile. Dims lie as 16 even then 16 odd in
 * every 32, as v16_e2m1 decodes them: a lane adds dims 2l, 2l + 1 of each group. */
static void float_keys(const struct index_cache *cache, const int64_t *places, int count, float *tile)
{
    const int groups = cache->dim / E2M1_BLOCK;
    for (int i = 0; i < count * groups; i++) {
        v16 even, odd;
        const int64_t at = places[i / groups] * groups + i % groups;
        v16_e2m1(cache->codes + at * (E2M1_BLOCK / 2), scale_of(cache->scales[at]), &even, &odd);
        v16_store(tile + i * E2M1_BLOCK, even);
        v16_store(tile + i * E2M1_BLOCK + 16, odd);
    }
}

/* Places [TILE] of entries j .. last−1 of row t; where those end, of the next ones in their page, or the last one's
 * again. Whether they ascend by 1. */
static int tile_places(const struct index_select_args *a, int64_t t, int64_t j, int64_t last, int64_t *places)
{
    const int32_t *pages = a->pages + (int64_t)a->slots[t] * a->slot_pages;
    const int count = last - j < TILE ? (int)(last - j) : TILE;
    if (j % a->page_entries + TILE <= a->page_entries) {
        const int64_t first = entry_place(pages, a->page_entries, (int32_t)j);
        for (int i = 0; i < TILE; i++) places[i] = first + i;
        return 1;
    }
    int64_t page = j / a->page_entries, in_page = j % a->page_entries;
    for (int i = 0; i < TILE; i++) {
        if (i < count && in_page == a->page_entries) page++, in_page = 0;
        places[i] = i < count ? pages[page] * (int64_t)a->page_entries + in_page++ : places[count - 1];
    }
    return 0;
}

/* Sums over heads of a tile of floats, in the order of dot.h. */
static void float_tile(const float *q, const float *weight, float scale, int heads, int dim, const float *tile,
                       int count, v16 *score)
{
    float part[DOT_A * TILE];
    for (int i = 0; i < TILE / 16; i++) score[i] = v16_zero();
    for (int h = 0, some; h < heads; h += some) {
        some = heads - h < DOT_A ? 1 : DOT_A;
        dots(q + (int64_t)h * dim, dim, some, tile, dim, count, dim, part, TILE);
        for (int b = 0; b < some; b++)
            index_add(score, weight[h + b] * scale, v16_load(part + b * TILE), v16_load(part + b * TILE + 16));
    }
}

/* score_entries of queries in integers. */
static void score_integers(const struct index_select_args *a, int64_t t, const struct index_work *work,
                           struct index_keys *keys, int64_t first, int64_t last, float *score)
{
    int64_t places[TILE];
    int in_turn = tile_places(a, t, first, last, places);
    index_keys_at(work, &a->cache, places, in_turn, &keys[0]);
    while (index_unpack(work, &keys[0])) {}
    keys[1].unpacked = keys[0].unpacked; /* nothing to do where there is no next tile */
    for (int64_t j = first, turn = 0; j < last; j += TILE, turn ^= 1) {
        v16 sum[2];
        if (j + TILE < last) {
            in_turn = tile_places(a, t, j + TILE, last, places);
            index_keys_at(work, &a->cache, places, in_turn, &keys[turn ^ 1]);
        }
        index_tile(work, &keys[turn], &keys[turn ^ 1], sum);
        for (int i = 0; i < 2 && j + 16 * i < last; i++)
            store_some(score + j + 16 * i, sum[i], last - j - 16 * i < 16 ? (int)(last - j - 16 * i) : 16);
    }
}

/* Scores of entries [first, last) of row t → score[first ..]. */
static void score_entries(const struct index_select_args *a, int64_t t, float *scratch, int64_t first, int64_t last,
                          float *score)
{
    const int dim = a->cache.dim, heads = a->heads;
    float *tile = scratch, *q = tile + TILE * dim;
    const float *weight = a->w + t * heads, scale = (float)(1.0 / sqrt((double)dim * heads));
    struct index_keys keys[2];
    struct index_work work = index_work_at(scratch, heads, dim, keys);
    if (first >= last) return;
    if (index_queries(&work, a->q + t * heads * dim, weight, scale)) {
        score_integers(a, t, &work, keys, first, last, score);
        return;
    }
    FN(deinterleave)(a->q + t * heads * dim, q, (int64_t)heads * dim);
    for (int64_t j = first; j < last; j += TILE) {
        const int count = last - j < TILE ? (int)(last - j) : TILE;
        int64_t places[TILE];
        v16 sum[2];
        tile_places(a, t, j, last, places);
        float_keys(&a->cache, places, count, tile);
        float_tile(q, weight, scale, heads, dim, tile, count, sum);
        for (int i = 0; i < count; i += 16) store_some(score + j + i, sum[i / 16], count - i);
    }
}

static void select_row(const struct index_select_args *a, int64_t t, float *scratch, const float *score)
{
    int32_t *out = a->out + t * a->k;
    if (a->visible[t] > a->k) {
        choose(score, a->visible[t], a->k, (int32_t *)(void *)scratch, out);
        return;
    }
    for (int j = 0; j < a->k; j++) out[j] = j < a->visible[t] ? j : -1;
}

/* index_select's first phase: scores of rows whose entries are cut over the threads. */
static void FN(index_scores)(void *args, int tid, int n)
{
    const struct index_select_args *a = args;
    float *scratch = a->scratch + tid * select_scratch(a->heads, a->cache.dim, a->k);
    for (int64_t t = 0; a->by_entries && t < a->rows; t++) {
        int64_t first, last;
        team_share((a->visible[t] + TILE - 1) / TILE, tid, n, &first, &last);
        last = last * TILE < a->visible[t] ? last * TILE : a->visible[t];
        if (a->visible[t] > a->k) score_entries(a, t, scratch, first * TILE, last, a->scores + t * a->score_stride);
    }
}

static void FN(index_select)(void *args, int tid, int n)
{
    const struct index_select_args *a = args;
    float *scratch = a->scratch + tid * select_scratch(a->heads, a->cache.dim, a->k);
    for (int64_t t = tid; t < a->rows; t += n) { /* in turn: later rows see more */
        float *score = a->scores + (a->by_entries ? t : tid) * (int64_t)a->score_stride;
        if (!a->by_entries && a->visible[t] > a->k) score_entries(a, t, scratch, 0, a->visible[t], score);
        select_row(a, t, scratch, score);
    }
}

static void FN(entry_places)(void *args, int tid, int n)
{
    const struct entry_places_args *a = args;
    int64_t from, to;
    team_share(a->rows, tid, n, &from, &to);
    for (int64_t t = from; t < to; t++) {
        const int32_t *pages = a->pages + (int64_t)a->slots[t] * a->slot_pages, *entries = a->entries + t * a->count;
        for (int i = 0; i < a->count; i++)
            a->out[t * a->count + i] = entries[i] < 0 ? -1 : (int32_t)entry_place(pages, a->page_entries, entries[i]);
    }
}

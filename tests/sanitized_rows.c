/* Every row kernel under the address and undefined-behaviour sanitizers: see sanitized.h. */
#include "sanitized.h"

static struct rope angles(int64_t rows, int pairs)
{
    return (struct rope){numbers(rows * pairs), numbers(rows * pairs), pairs};
}

/* ------------------------------------------------------------------ rows in, rows out */
static int embed_case(int rows, int dim, int streams)
{
    float *out = block(4LL * rows * streams * dim, 4);
    uint16_t *table = block(2LL * 7 * dim, 2);
    for (int i = 0; i < 7 * dim; i++) table[i] = (uint16_t)(draw() % 0x7f80 | (draw() & 0x8000));
    struct embed_args a = {table, integers(rows, 0, 7), out, rows, dim, streams};
    return EVERYWHERE(embed, a, {out, 4LL * rows * streams * dim});
}

static int act_quant_case(int rows, int dim)
{
    float *out = block(4LL * rows * dim, 4);
    struct act_quant_args a = {numbers((int64_t)rows * dim), out, rows, dim};
    return EVERYWHERE(act_quant, a, {out, 4LL * rows * dim});
}

static int rmsnorm_case(int rows, int dim)
{
    float *out = block(4LL * rows * dim, 4);
    struct rmsnorm_args a = {numbers((int64_t)rows * dim), numbers(dim), out, rows, dim, 1e-6f};
    return EVERYWHERE(rmsnorm, a, {out, 4LL * rows * dim});
}

static int swiglu_case(int rows, int dim, int weighted)
{
    const int64_t count = (int64_t)rows * dim;
    float *out = block(4 * count, 4);
    struct swiglu_args a = {numbers(count), numbers(count), weighted ? numbers(rows) : NULL, out, rows, dim,
                            weighted ? 2.5f : 0};
    return EVERYWHERE(swiglu, a, {out, 4 * count});
}

static int nonfinite_case(int64_t count, int broken)
{
    float *x = numbers(count);
    if (broken) memcpy(x + count - 1, &(uint32_t){0x7f800000}, 4);
    struct nonfinite_args a = {x, count, 0};
    const int good = everywhere("nonfinite", offsetof(struct kernels, nonfinite), &a, 1,
                                RESULTS({&a.found, sizeof a.found, &(int){0}}));
    return a.found == broken ? good : (fprintf(stderr, "nonfinite: found %d of %d\n", a.found, broken), -1);
}

/* ------------------------------------------------------------------ hyper-connections */
static int hc_pre_case(int rows, int streams, int dim, int head, int normed)
{
    const int outputs = head ? streams : (2 + streams) * streams;
    struct hc_pre_args a = {.rows = rows, .streams = streams, .dim = dim, .iterations = 3, .eps = 1e-6f,
                            .mix_eps = 1e-6f, .norm_eps = 1e-5f};
    a.h = numbers((int64_t)rows * streams * dim), a.fn = numbers((int64_t)outputs * streams * dim);
    a.base = numbers(outputs), a.scale = numbers(head ? 1 : 3), a.norm = normed ? numbers(dim) : NULL;
    a.u = block(4LL * rows * dim, 4), a.scratch = block(4LL * rows * (outputs + 1), 4);
    if (head) return EVERYWHERE(hc_pre, a, {a.u, 4LL * rows * dim});
    a.post = block(4LL * rows * streams, 4), a.comb = block(4LL * rows * streams * streams, 4);
    return EVERYWHERE(hc_pre, a, {a.u, 4LL * rows * dim}, {a.post, 4LL * rows * streams},
                      {a.comb, 4LL * rows * streams * streams});
}

static int hc_post_case(int rows, int streams, int dim)
{
    const int64_t count = (int64_t)rows * streams * dim;
    float *out = block(4 * count, 4);
    struct hc_post_args a = {numbers((int64_t)rows * dim), numbers(count), numbers((int64_t)rows * streams),
                             numbers((int64_t)rows * streams * streams), out, rows, streams, dim};
    return EVERYWHERE(hc_post, a, {out, 4 * count});
}

static int mean_case(int rows, int streams, int dim)
{
    float *out = block(4LL * rows * dim, 4);
    struct mean_args a = {numbers((int64_t)rows * streams * dim), out, rows, streams, dim};
    return EVERYWHERE(mean_streams, a, {out, 4LL * rows * dim});
}

/* ------------------------------------------------------------------ rotations and keys */
static int rope_case(int rows, int pairs)
{
    float *cos = block(4LL * rows * pairs, 4), *sin = block(4LL * rows * pairs, 4);
    struct angles_args a = {integers(rows, 0, 100000), numbers(pairs), cos, sin, rows, pairs};
    return EVERYWHERE(rope_angles, a, {cos, 4LL * rows * pairs}, {sin, 4LL * rows * pairs});
}

static int rotate_case(int rows, int heads, int dim, int pairs, int inverse, int normed)
{
    const int64_t count = (int64_t)rows * heads * dim;
    float *x = block(4 * count, 4);
    struct rotate_args a = {x, angles(rows, pairs), rows, heads, dim, inverse, normed, 1e-6f};
    return EVERYWHERE(rotate, a, {x, 4 * count, numbers(count)});
}

static struct key_cache key_cache(int64_t entries, int dim, int rope_dim)
{
    const int plain = dim - rope_dim;
    struct key_cache c = {.dim = dim, .rope_dim = rope_dim};
    c.codes = bytes(entries * plain, 0, 0x7f), c.scales = bytes(entries * ((plain + 63) / 64), 118, 8);
    c.rope = block(2 * entries * rope_dim, 2);
    for (int64_t i = 0; i < entries * rope_dim; i++) c.rope[i] = (uint16_t)(0x3e80 + draw() % 0x180);
    return c;
}

/* Every other entry of a cache, from the last back. */
static int32_t *others(int rows)
{
    int32_t *where = block(4LL * rows, 4);
    for (int t = 0; t < rows; t++) where[t] = 2 * (rows - t) - 1;
    return where;
}

/* Whether the entries that `others` leaves out are as before. */
static int untouched(const void *now, const void *before, int rows, int64_t size)
{
    int same = 1;
    for (int t = 0; t <= rows; t++)
        same = same && !memcmp((const char *)now + 2 * t * size, (const char *)before + 2 * t * size, (size_t)size);
    return same;
}

static int encode_keys_case(int rows, int dim, int rope_dim, int stored)
{
    const int entries = 2 * rows + 1, plain = dim - rope_dim, scales = (plain + 63) / 64;
    const struct key_cache to = key_cache(entries, dim, rope_dim), before = key_cache(entries, dim, rope_dim);
    struct encode_keys_args a = {.k = numbers((int64_t)rows * dim), .cache = to, .where = others(rows), .rows = rows,
                                 .eps = 1e-6f};
    if (stored) {
        a.norm = numbers(dim), a.rope = angles(rows, rope_dim / 2);
        a.scratch = block(4LL * rows * dim, 4);
    }
    const int good = EVERYWHERE(encode_keys, a, {to.codes, (int64_t)entries * plain, before.codes},
                                {to.scales, (int64_t)entries * scales, before.scales},
                                {to.rope, 2LL * entries * rope_dim, before.rope});
    const int kept = untouched(to.codes, before.codes, rows, plain) && untouched(to.scales, before.scales, rows, scales) &&
                     untouched(to.rope, before.rope, rows, 2 * rope_dim);
    return kept ? good : (fprintf(stderr, "encode_keys: others' places are written\n"), -1);
}

static int decode_keys_case(int rows, int dim, int rope_dim)
{
    float *out = block(4LL * rows * dim, 4);
    struct decode_keys_args a = {key_cache(5, dim, rope_dim), integers(rows, 0, 5), out, rows};
    return EVERYWHERE(decode_keys, a, {out, 4LL * rows * dim});
}

/* ------------------------------------------------------------------ attention */
/* Parts of 0, of some and of more keys than a tile; a third of the places absent, and all of row 0's. */
static int attend_case(int rows, int heads, int dim, int rope_dim, int parts)
{
    static const int counts[] = {5, 0, 41};
    const int64_t count = (int64_t)rows * heads * dim;
    struct attend_args a = {.q = numbers(count), .sink = numbers(heads), .out = block(4 * count, 4),
                            .part_count = parts, .rows = rows, .heads = heads, .dim = dim};
    for (int p = 0; p < parts; p++) {
        a.places += counts[p];
        int32_t *places = integers((int64_t)rows * counts[p], -4, 13);
        for (int i = 0; rows && i < counts[p]; i++) places[i] = -1;
        a.parts[p] = (struct attend_part){key_cache(9, dim, rope_dim), places, counts[p]};
    }
    a.slots = attend_slots(rows, a.places, dim);
    a.scratch = block(3 * 4 * attend_scratch(&a), sizeof(float *));
    return EVERYWHERE(attend, a, {a.out, 4 * count});
}

/* ------------------------------------------------------------------ compressor */
static int compress_store_case(int rows, int width, int ratio)
{
    const int64_t count = (int64_t)rows * width, ring = (2LL * rows + 1) * width;
    float *kv = block(4 * ring, 4), *gate = block(4 * ring, 4), *before = numbers(ring);
    struct compress_store_args a = {numbers(count), numbers(count), numbers((int64_t)ratio * width),
                                    integers(rows, 0, 1000), others(rows), kv, gate, rows, width, ratio};
    const int good = EVERYWHERE(compress_store, a, {kv, 4 * ring, before}, {gate, 4 * ring, before});
    const int kept = untouched(kv, before, rows, 4LL * width) && untouched(gate, before, rows, 4LL * width);
    return kept ? good : (fprintf(stderr, "compress_store: others' places are written\n"), -1);
}

static int compress_pool_case(int rows, int dim, int ratio)
{
    const int capacity = 3 * ratio;
    const int blocks = ratio == 4 ? 2 : 1;
    const int64_t ring = 2LL * capacity * dim * blocks;
    float *out = block(4LL * rows * dim, 4);
    struct compress_pool_args a = {numbers(ring), numbers(ring), integers(rows, 0, 2), integers(rows, 0, 6), out, rows,
                                   dim, ratio, capacity, blocks};
    return EVERYWHERE(compress_pool, a, {out, 4LL * rows * dim});
}

/* ------------------------------------------------------------------ indexer */
static struct index_cache index_cache(int64_t entries, int dim)
{
    return (struct index_cache){bytes(entries * dim / 2, 0, 256), bytes(entries * dim / 32, 124, 6), dim};
}

static int index_query_case(int rows, int heads, int dim, int pairs)
{
    const int64_t count = (int64_t)rows * heads * dim;
    struct index_quant_args a = {.x = numbers(count), .rope = angles(rows, pairs), .out = block(4 * count, 4),
                                 .scratch = block(3 * 4 * 2 * dim, 4), .rows = rows, .heads = heads, .dim = dim};
    return EVERYWHERE(index_quant, a, {a.out, 4 * count});
}

static int encode_index_case(int rows, int dim)
{
    const int entries = 2 * rows + 1;
    const struct index_cache to = index_cache(entries, dim), before = index_cache(entries, dim);
    struct index_quant_args a = {.x = numbers((int64_t)rows * dim), .scratch = block(3 * 4 * 2 * dim, 4), .cache = to,
                                 .where = others(rows), .rows = rows, .heads = 1, .dim = dim};
    const int good = EVERYWHERE(index_quant, a, {to.codes, (int64_t)entries * dim / 2, before.codes},
                                {to.scales, (int64_t)entries * dim / 32, before.scales});
    const int kept = untouched(to.codes, before.codes, rows, dim / 2) &&
                     untouched(to.scales, before.scales, rows, dim / 32);
    return kept ? good : (fprintf(stderr, "encode_index: others' places are written\n"), -1);
}

static int decode_index_case(int rows, int dim)
{
    float *out = block(4LL * rows * dim, 4);
    struct decode_index_args a = {index_cache(5, dim), integers(rows, 0, 5), out, rows};
    return EVERYWHERE(decode_index, a, {out, 4LL * rows * dim});
}

/* Rows that see none, fewer than k, k and more entries. */
static int index_select_case(int rows, int heads, int dim, int by_entries)
{
    enum { PAGES = 4, PAGE = 16, K = 9, STRIDE = PAGES * PAGE };
    int32_t *visible = integers(rows, 0, PAGES * PAGE + 1), *out = block(4LL * rows * K, 4);
    if (rows > 1) visible[1] = K;
    struct index_select_args a = {.q = numbers((int64_t)rows * heads * dim), .w = numbers((int64_t)rows * heads),
                                  .cache = index_cache(6 * PAGE, dim), .slots = integers(rows, 0, 2),
                                  .visible = visible, .pages = integers(2 * PAGES, 0, 6), .slot_pages = PAGES,
                                  .page_entries = PAGE, .rows = rows, .heads = heads, .k = K, .out = out,
                                  .score_stride = STRIDE, .by_entries = by_entries};
    a.scratch = block(3 * 4 * select_scratch(heads, dim, K), 4);
    a.scores = block(4LL * STRIDE * (by_entries ? rows : 3), 4);
    return EVERYWHERE(index_select, a, {out, 4LL * rows * K});
}

static int entry_places_case(int rows, int count)
{
    int32_t *out = block(4LL * rows * count, 4);
    struct entry_places_args a = {integers((int64_t)rows * count, -1, 25), integers(rows, 0, 2), integers(2 * 3, 0, 9),
                                  out, rows, count, 3, 8};
    return EVERYWHERE(entry_places, a, {out, 4LL * rows * count});
}

static int ring_places_case(int rows, int span)
{
    int32_t *out = block(4LL * rows * span, 4);
    struct ring_places_args a = {integers(rows, 0, 3), integers(rows, 0, 40), out, rows, span, 13};
    return EVERYWHERE(ring_places, a, {out, 4LL * rows * span});
}

static int visible_places_case(int rows, int count)
{
    int32_t *out = block(4LL * rows * count, 4);
    struct visible_places_args a = {integers(rows, 0, count + 1), integers(rows, 0, 2), integers(2 * 3, 0, 9), out,
                                    rows, count, 3, 8};
    return EVERYWHERE(visible_places, a, {out, 4LL * rows * count});
}

/* ------------------------------------------------------------------ routing */
static int best_case(int rows, int vocab)
{
    int32_t *ids = block(4LL * rows, 4);
    float *lead = block(4LL * rows, 4);
    struct best_args a = {numbers((int64_t)rows * vocab), ids, lead, rows, vocab};
    return EVERYWHERE(best, a, {ids, 4LL * rows}, {lead, 4LL * rows});
}

/* By scores, with a bias or without, or fixed by the token. */
static int gate_case(int rows, int experts, int k, int biased, int fixed)
{
    int32_t *ids = block(4LL * rows * k, 4);
    float *weights = block(4LL * rows * k, 4);
    struct gate_args a = {.logits = numbers((int64_t)rows * experts), .ids = ids, .weights = weights, .rows = rows,
                          .scratch = block(4LL * rows * (experts + k), 4), .experts = experts, .k = k, .scale = 1.5f};
    if (biased) a.bias = numbers(experts);
    if (fixed) {
        int64_t *table = block(8LL * 3 * k, 8);
        for (int i = 0; i < 3 * k; i++) table[i] = draw() % (uint32_t)experts;
        a.fixed = table, a.tokens = integers(rows, 0, 3);
    }
    return EVERYWHERE(gate, a, {ids, 4LL * rows * k}, {weights, 4LL * rows * k});
}

/* ------------------------------------------------------------------ all of them */
static int rows_in_rows_out(int rows, int dim, int streams)
{
    int total = 0;
    TRY(embed_case(rows, dim, streams));
    TRY(act_quant_case(rows, dim));
    TRY(rmsnorm_case(rows, dim));
    for (int weighted = 0; weighted < 2; weighted++) TRY(swiglu_case(rows, dim, weighted));
    TRY(nonfinite_case((int64_t)rows * dim, 0));
    TRY(nonfinite_case((int64_t)rows * dim + 4097, 1));
    for (int head = 0; head < 2; head++)
        for (int normed = 0; normed < 2; normed++) TRY(hc_pre_case(rows, streams, dim % 96 + 1, head, normed));
    TRY(hc_pre_case(rows, 4, 20, 0, 1));
    TRY(hc_post_case(rows, streams, dim));
    TRY(hc_post_case(rows, 4, 515));
    TRY(mean_case(rows, streams, dim));
    return total;
}

static int keys_and_queries(int rows, int turn)
{
    static const int dims[][2] = {{24, 8}, {81, 2}, {144, 16}, {64, 64}, {67, 0}};
    const int dim = dims[turn % 5][0], rope_dim = dims[turn % 5][1], heads = 1 + turn % 9;
    int total = 0;
    TRY(rope_case(rows, 1 + turn % 19));
    for (int way = 0; way < 4; way++) TRY(rotate_case(rows, 1 + turn % 3, dim, rope_dim / 2, way & 1, way >> 1));
    for (int stored = 0; stored < 2; stored++) TRY(encode_keys_case(rows, dim, rope_dim, stored));
    TRY(decode_keys_case(rows, dim, rope_dim));
    for (int parts = 0; parts < 4; parts++) TRY(attend_case(rows, heads, dim, rope_dim, parts));
    TRY(compress_store_case(rows, dim, 4));
    TRY(compress_pool_case(rows, dim, 4));
    TRY(compress_pool_case(rows, dim, 8));
    return total;
}

static int choices(int rows, int turn)
{
    const int dim = 32 << turn % 3, experts = 3 + turn % 31;
    int total = 0;
    TRY(index_query_case(rows, 1 + turn % 3, dim, turn % 2 ? 16 : 0));
    TRY(encode_index_case(rows, dim));
    TRY(decode_index_case(rows, dim));
    for (int by_entries = 0; by_entries < 2; by_entries++) TRY(index_select_case(rows, 1 + turn % 6, dim, by_entries));
    TRY(entry_places_case(rows, turn % 7));
    TRY(ring_places_case(rows, 1 + turn % 20));
    TRY(visible_places_case(rows, turn % 24));
    TRY(best_case(rows, 1 + turn % 50));
    TRY(best_case(rows, 1020 + turn % 50));
    for (int way = 0; way < 3; way++) TRY(gate_case(rows, experts, 1 + turn % experts, way == 1, way == 2));
    return total;
}

int row_kernels(void)
{
    static const int dims[] = {1, 17, 128, 200, 303}, streams[] = {1, 2, 3, 4, 5, 16};
    int total = 0;
    for (int i = 0; i < ROW_COUNTS; i++) {
        TRY(rows_in_rows_out(row_counts[i], dims[i % 5], streams[i % 6]));
        TRY(keys_and_queries(row_counts[i], i));
        TRY(choices(row_counts[i], i));
    }
    return total;
}

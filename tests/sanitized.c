/* Linears, experts and the indexer under the address and undefined-behaviour sanitizers; sanitized_rows.c calls the row
 * kernels. Prints how many results agreed. */
#include "sanitized.h"

enum { THREADS = 3 };

static struct matrix weights(enum format format, int64_t n, int64_t k)
{
    static const int bits[] = {8, 4, 16, 32};
    static const size_t element[] = {1, 1, 2, 4};
    struct matrix w = {.format = format, .n = n, .k = k, .weight_stride = k * bits[format] / 8};
    uint8_t *codes = block(n * w.weight_stride, element[format]);
    for (int64_t i = 0; i < n * w.weight_stride; i++) codes[i] = (uint8_t)draw();
    for (int64_t i = 0; format == FORMAT_FP8 && i < n * k; i++) codes[i] = (codes[i] & 127) == 127 ? 0 : codes[i];
    for (int64_t i = 0; format == FORMAT_BF16 && i < n * k; i++) codes[2 * i + 1] = (codes[2 * i + 1] & 0x80) | 0x3f;
    for (int64_t i = 0; format == FORMAT_F32 && i < n * k; i++) memcpy(codes + 4 * i, &(float){number()}, 4);
    w.weight = codes;
    w.scale_stride = format == FORMAT_FP4 ? k / 32 : (k + 127) / 128;
    w.scale = bytes((format == FORMAT_FP4 ? n : (n + 127) / 128) * w.scale_stride, 118, 8);
    return w;
}

/* FP4 inputs as every instruction set orders them; NULL where they differ. */
static float *quads(const float *x, int64_t rows, int64_t k)
{
    const int64_t size = 4 * rows * ((k + 63) / 64 * 64);
    float *kept = NULL;
    for (int i = 0; i < SETS; i++) {
        const struct kernels *kernels = kernels_find(sets[i]);
        if (!kernels) continue;
        float *y = block(size, 4);
        memset(y, kept ? 0x55 : 0xff, (size_t)size);
        kernels->quads(x, y, rows, k);
        if (kept && memcmp(kept, y, (size_t)size)) return NULL;
        kept = y;
    }
    return kept;
}

static int linear_case(enum format format, int64_t n, int64_t k, int64_t rows, int slices)
{
    struct matrix w = weights(format, n, k);
    float *x = numbers(rows * k), *y = block(4 * rows * n, 4);
    struct linear_args a = {&w, x, k, y, rows, 1, slices, NULL};
    if (format == FORMAT_FP8 && rows % 2) {
        for (int64_t i = 0; i < rows * k; i++) memset(x + i, 0, 2); /* bf16 numbers */
        a.pairs = block(2 * THREADS * (rows < BLOCK ? rows : BLOCK) * k, 2);
    }
    if (format == FORMAT_FP4) {
        a.stride = (k + 63) / 64 * 64;
        a.x = quads(x, rows, k);
        if (!a.x) return fprintf(stderr, "quads differ\n"), -1;
    }
    return EVERYWHERE(linear, a, {y, 4 * rows * n});
}

#define TO_64(n) (((n) + 63) / 64 * 64)

/* In one call (lanes 0), or each expert by itself with sums in between. */
static void moe_calls(const struct kernels *kernels, struct moe_args a, int n, int64_t lanes)
{
    const int64_t size = 4 * a.rows * lanes * a.slices * a.d;
    int64_t *place = block(8 * a.rows, 8);
    float *sums = memset(block(size, 4), 0, (size_t)size);
    struct moe_end_args end = {sums, a.y, a.rows, lanes, a.d, a.slices};
    if (lanes) a.sums = sums, a.place = place, a.y = NULL, a.uses = 1, a.order++; /* its second is 0 */
    for (int use = 0; use < (lanes ? 2 : 1); use++, a.expert++, a.first++) {
        for (int64_t t = 0; t < a.rows; t++) place[t] = t * lanes + (lanes > 1 ? use : 0);
        a.next_inner = a.next_output = a.wide = 0;
        if (team_run(n, kernels->moe, &a)) abort();
    }
    if (lanes && team_run(n, kernels->moe_end, &end)) abort();
}

/* One routed FP4 expert and the FP8 one that all share, each of them for every row. */
static int moe_case(int64_t d, int64_t inner, int64_t rows, int slices)
{
    struct matrix m[6];
    for (int i = 0; i < 6; i++)
        m[i] = weights(i < 3 ? FORMAT_FP4 : FORMAT_FP8, i % 3 == 1 ? d : inner, i % 3 == 1 ? inner : d);
    int32_t *expert = integers(2, 0, 1), *order = block(8, 4), *row = block(8 * rows, 4);
    int64_t *first = block(24, 8);
    for (int64_t i = 0; i < 2 * rows; i++) row[i] = (int32_t)(i % rows);
    for (int64_t i = 0; i < 3; i++) first[i] = i * rows;
    expert[1] = order[0] = 1;
    order[1] = 0;
    const int64_t size = 4 * rows * d;
    float *kept = NULL;
    struct moe_args a = {.matrices = m, .x = numbers(rows * d), .rows = rows, .parts = rows, .d = d, .inner = inner, .uses = 2,
                         .expert = expert, .first = first, .order = order, .row = row, .part = row, .weight = numbers(2 * rows),
                         .limit = 10, .slices = slices, .plain = block(size, 4), .packed = block(4 * rows * TO_64(d), 4),
                         .pairs = block(2 * rows * TO_64(d), 2), .act = block(8 * rows * TO_64(inner), 4),
                         .totals = block(4 * THREADS * slices * rows * MOE_WIDTH, 4)};
    int good = 0;
    for (int i = 0; i < SETS; i++) {
        const struct kernels *kernels = kernels_find(sets[i]);
        if (!kernels) continue;
        for (int run = 0; run < 6; run++) {
            const int n = run % 2 ? THREADS : 1;
            a.y = block(size, 4);
            memset(a.y, n > 1 ? 0x55 : 0xff, (size_t)size);
            moe_calls(kernels, a, n, run / 2);
            if (kept && memcmp(kept, a.y, (size_t)size)) return fprintf(stderr, "experts: %s differs\n", sets[i]), -1;
            kept = a.y;
        }
        good++;
    }
    return good;
}

/* Scores and the choice. Key scales: so many powers of two from byte `low` on; queries: integers times one of so many
 * powers of two per 32 dims, or floats where that is 0. query, weight: of all of them. */
static int index_case(int heads, int dim, int low, int key_scales, int query_scales, float query, float weight)
{
    enum { N = 77, STRIDE = 80, K = 9 };
    const struct index_cache cache = {bytes(N * dim / 2, 0, 256), bytes(N * dim / 32, low, key_scales), dim};
    float *q = numbers(heads * dim), *w = numbers(heads);
    for (int i = 0, by = 0; query_scales && i < heads * dim; i++) {
        if (i % 32 == 0) by = 1 << draw() % (unsigned)query_scales;
        q[i] = (float)(((int)(draw() % 7) - 3) * by) * query;
    }
    for (int h = 0; h < heads; h++) w[h] *= h % 5 == 4 ? 0 : weight;
    int32_t slot = 0, visible = N, page = 0, *out = block(4 * K, 4);
    struct index_select_args a = {.cache = cache, .q = q, .w = w, .slots = &slot, .visible = &visible, .pages = &page,
                                  .slot_pages = 1, .page_entries = N, .rows = 1, .heads = heads, .k = K, .out = out,
                                  .score_stride = STRIDE};
    a.scratch = block(3 * 4 * select_scratch(heads, dim, K), 4), a.scores = block(3 * 4 * STRIDE, 4);
    return EVERYWHERE(index_select, a, {out, 4 * K}, {a.scores, 4 * N});
}

/* Powers of two that fit into the integers, and those that do not. */
static int indexer(void)
{
    int total = 0;
    for (int heads = 1; heads <= 19; heads += heads < 8 ? 1 : 5) {
        const int dim = 32 << heads % 4;
        for (int queries = 0; queries <= 5; queries++)
            for (int keys = 3; keys <= 5; keys++) TRY(index_case(heads, dim, 124, keys, queries, 1, 1));
        for (int low = 0; low <= 252; low += 28) TRY(index_case(heads, dim, low, 4, 1, 1, 1)); /* at last NaN */
        TRY(index_case(heads, dim, 124, 4, 25, 1, 1));
        TRY(index_case(heads, dim, 103, 4, 1, 1, 0x1p125f));
        TRY(index_case(heads, dim, 103, 4, 1, 0x1p-95f, 0x1p-28f));
    }
    return total;
}

static int linears(void)
{
    static const int64_t shapes[][2] = {{5, 32}, {19, 160}, {33, 544}, {130, 256}, {7, 1152}};
    int total = 0;
    for (int r = 0; r < ROW_COUNTS; r++)
        for (int s = 0; s < 5; s++)
            for (int f = 0; f < 4; f++) {
                const int64_t rows = row_counts[r], n = shapes[s][0], k = shapes[s][1];
                if (rows > 16 && n * k > 8192) continue;
                TRY(linear_case((enum format)f, n + (f ? 0 : rows % 3), k + (f && f != FORMAT_FP4 ? 7 : 0), rows, 1));
            }
    for (int64_t rows = 1; rows <= 10; rows++) TRY(linear_case(FORMAT_FP8, 21, 1024, rows, 4));
    return total;
}

static int products(void)
{
    int total = 0;
    TRY(linears());
    for (int r = 1; r < ROW_COUNTS; r++)
        TRY(moe_case(row_counts[r] > 9 ? 96 : 192, 256, row_counts[r], row_counts[r] % 2 ? 1 : 2));
    TRY(indexer());
    return total;
}

int main(void)
{
    const int some = products(), more = some < 0 ? -1 : row_kernels();
    if (more >= 0) printf("%d agree\n", some + more);
    return more < 0;
}

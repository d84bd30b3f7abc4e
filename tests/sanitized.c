/* Linears, experts and the indexer under the address and undefined-behaviour sanitizers: every operand is its own heap
 * block of exactly its size (odd ones at odd addresses), outputs are poisoned, all instruction sets must agree in bits.
 * Prints how many results agreed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels.h"

static const char *const sets[] = {"scalar", "avx2", "avx512", "avx512bf16"};
static uint32_t state = 1;
static uint32_t draw(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static float number(void) { return (float)(int)(draw() % 4001 - 2000) / 512; }

/* A block that ends where its allocation ends, `skew` bytes off alignment. */
static void *block(size_t size, size_t skew) { return (char *)malloc(size + skew) + skew; }
static void release(void *p, size_t skew) { free((char *)p - skew); }

static float *numbers(int64_t n)
{
    float *x = block(4 * (size_t)n, 4);
    for (int64_t i = 0; i < n; i++) x[i] = number();
    return x;
}

static struct matrix weights(enum format format, int64_t n, int64_t k)
{
    static const int bits[] = {8, 4, 16, 32};
    struct matrix w = {.format = format, .n = n, .k = k, .weight_stride = k * bits[format] / 8};
    const size_t skew = format == FORMAT_BF16 ? 2 : format == FORMAT_F32 ? 4 : 1;
    uint8_t *codes = block((size_t)(n * w.weight_stride), skew);
    for (int64_t i = 0; i < n * w.weight_stride; i++) codes[i] = (uint8_t)draw();
    for (int64_t i = 0; format == FORMAT_FP8 && i < n * k; i++) codes[i] = (codes[i] & 127) == 127 ? 0 : codes[i];
    for (int64_t i = 0; format == FORMAT_BF16 && i < n * k; i++) codes[2 * i + 1] = (codes[2 * i + 1] & 0x80) | 0x3f;
    for (int64_t i = 0; format == FORMAT_F32 && i < n * k; i++) memcpy(codes + 4 * i, &(float){number()}, 4);
    w.weight = codes;
    w.scale_stride = format == FORMAT_FP4 ? k / 32 : (k + 127) / 128;
    const int64_t scales = (format == FORMAT_FP4 ? n : (n + 127) / 128) * w.scale_stride;
    uint8_t *scale = block((size_t)scales, 1);
    for (int64_t i = 0; i < scales; i++) scale[i] = (uint8_t)(118 + draw() % 8);
    w.scale = scale;
    return w;
}

static void drop(struct matrix w)
{
    release((void *)w.weight, w.format == FORMAT_BF16 ? 2 : w.format == FORMAT_F32 ? 4 : 1);
    release((void *)w.scale, 1);
}

/* Keeps the first result; whether this one has its bits. */
static int agree(void **kept, void *y, size_t size)
{
    if (!*kept) return *kept = y, 1;
    const int same = !memcmp(*kept, y, size);
    free(y);
    return same;
}

static int linear_case(enum format format, int64_t n, int64_t k, int64_t rows, int slices)
{
    struct matrix w = weights(format, n, k);
    float *x = numbers(rows * k);
    void *kept = NULL;
    int good = 0;
    for (int i = 0; i < 4; i++) {
        const struct kernels *kernels = kernels_find(sets[i]);
        if (!kernels) continue;
        const int64_t stride = format == FORMAT_FP4 ? (k + 63) / 64 * 64 : k;
        float *y = malloc(4 * (size_t)(rows * n)), *quads = block(4 * (size_t)(rows * stride), 4);
        memset(y, 0xff, 4 * (size_t)(rows * n));
        if (format == FORMAT_FP4) kernels->quads(x, quads, rows, k);
        struct linear_args a = {&w, format == FORMAT_FP4 ? quads : x, stride, y, rows, 1, slices};
        for (int tid = 0; tid < 3; tid++) kernels->linear(&a, tid, 3);
        release(quads, 4);
        if (!agree(&kept, y, 4 * (size_t)(rows * n))) return printf("linear %d: %s differs\n", format, sets[i]), -1;
        good++;
    }
    free(kept);
    release(x, 4);
    drop(w);
    return good;
}

#define TO_64(n) (((n) + 63) / 64 * 64)

static int moe_case(int64_t d, int64_t inner, int64_t rows, int slices)
{
    struct matrix m[6];
    for (int i = 0; i < 6; i++)
        m[i] = weights(i < 3 ? FORMAT_FP4 : FORMAT_FP8, i % 3 == 1 ? d : inner, i % 3 == 1 ? inner : d);
    float *x = numbers(rows * d), *weight = numbers(2 * rows);
    int32_t expert[2] = {0, 1}, *row = malloc(8 * (size_t)rows);
    int64_t first[3] = {0, rows, 2 * rows};
    for (int64_t i = 0; i < 2 * rows; i++) row[i] = (int32_t)(i % rows);
    void *kept = NULL;
    int good = 0;
    for (int i = 0; i < 4; i++) {
        const struct kernels *kernels = kernels_find(sets[i]);
        if (!kernels) continue;
        float *y = malloc(4 * (size_t)(rows * d)), *plain = malloc(4 * (size_t)(rows * d));
        float *act = malloc(8 * (size_t)(rows * TO_64(inner))), *totals = malloc(4 * (size_t)(slices * rows * MOE_WIDTH));
        void *packed = malloc(4 * (size_t)(rows * TO_64(d)));
        memset(y, 0xff, 4 * (size_t)(rows * d));
        struct moe_args a = {.matrices = m, .x = x, .y = y, .rows = rows, .d = d, .inner = inner, .uses = 2,
                             .expert = expert, .first = first, .row = row, .weight = weight, .limit = 10,
                             .slices = slices, .plain = plain, .packed = packed, .act = act, .totals = totals};
        kernels->moe(&a, 0, 1);
        free(plain), free(act), free(totals), free(packed);
        if (!agree(&kept, y, 4 * (size_t)(rows * d))) return printf("experts: %s differs\n", sets[i]), -1;
        good++;
    }
    for (int i = 0; i < 6; i++) drop(m[i]);
    free(kept), free(row), release(x, 4), release(weight, 4);
    return good;
}

static int index_case(int heads, int dim, int32_t entries, int k, int exact)
{
    struct index_cache cache = {.codes = block((size_t)(entries * dim / 2), 1), .scales = block((size_t)(entries * dim / 32), 1), .dim = dim};
    for (int64_t i = 0; i < (int64_t)entries * dim / 2; i++) cache.codes[i] = (uint8_t)draw();
    for (int64_t i = 0; i < (int64_t)entries * dim / 32; i++) cache.scales[i] = (uint8_t)(124 + draw() % 6);
    float *q = numbers(heads * dim), *w = numbers(heads);
    for (int i = 0; exact && i < heads * dim; i++) q[i] = (float)(int)(draw() % 7) - 3;
    int32_t slot = 0, visible = entries, page = 0;
    void *kept = NULL;
    int good = 0;
    for (int i = 0; i < 4; i++) {
        const struct kernels *kernels = kernels_find(sets[i]);
        if (!kernels) continue;
        int32_t *out = malloc(4 * (size_t)k);
        const size_t stride = (size_t)(entries + 15) / 16 * 16;
        float *scratch = malloc(4 * (size_t)select_scratch(heads, dim)), *scores = malloc(4 * stride);
        struct index_select_args a = {.cache = cache, .q = q, .w = w, .slots = &slot, .visible = &visible, .pages = &page,
                                      .slot_pages = 1, .page_entries = entries, .rows = 1, .heads = heads, .k = k,
                                      .out = out, .scratch = scratch, .scores = scores, .score_stride = (int)stride};
        kernels->index_select(&a, 0, 1);
        free(scratch), free(scores);
        if (!agree(&kept, out, 4 * (size_t)k)) return printf("indexer: %s differs\n", sets[i]), -1;
        good++;
    }
    free(kept), release(q, 4), release(w, 4), release(cache.codes, 1), release(cache.scales, 1);
    return good;
}

int main(void)
{
    static const int64_t shapes[][2] = {{5, 32}, {19, 160}, {33, 544}, {130, 256}, {7, 1152}};
    int total = 0, got = 0;
    for (int64_t rows = 1; rows <= 20 && got >= 0; rows += rows < 9 ? 1 : 4)
        for (int s = 0; s < 5 && got >= 0; s++)
            for (int f = 0; f < 4 && got >= 0; f++)
                total += got = linear_case((enum format)f, shapes[s][0] + (f ? 0 : rows % 3), shapes[s][1] + (f && f != FORMAT_FP4 ? 7 : 0), rows, 1);
    for (int64_t rows = 1; rows <= 10 && got >= 0; rows++) total += got = linear_case(FORMAT_FP8, 21, 1024, rows, 4);
    for (int64_t rows = 1; rows <= 10 && got >= 0; rows++) total += got = moe_case(192, 256, rows, rows % 2 ? 1 : 2);
    for (int exact = 0; exact < 2 && got >= 0; exact++)
        for (int heads = 1; heads <= 6 && got >= 0; heads++) total += got = index_case(heads, 32 << heads % 3, 77, 9, exact);
    if (got >= 0) printf("%d agree\n", total);
    return got < 0;
}

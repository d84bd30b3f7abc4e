/* What the sanitized drivers share. Every operand is its own heap block that ends where its allocation ends, at an odd
 * address: one element, or an odd multiple of 8 bytes, off the allocator's 16. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels.h"

int row_kernels(void); /* how many results agreed, −1 where some did not */

enum { SETS = 4, MOST_BLOCKS = 128 };
static const char *const sets[SETS] = {"scalar", "avx2", "avx512", "avx512bf16"};
enum { ROW_COUNTS = 13 };
static const int row_counts[ROW_COUNTS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 130};
static uint32_t state = 1;
static void *blocks[MOST_BLOCKS];
static int held, turn;

static inline uint32_t draw(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static inline float number(void) { return (float)(int)(draw() % 4001 - 2000) / 512; }

/* A block of `size` bytes for elements of `element`; forget() frees all of them. */
static inline void *block(int64_t size, size_t element)
{
    const size_t skews[] = {element, 8, 24, 40}, skew = skews[turn++ % 4];
    if (held == MOST_BLOCKS) abort();
    blocks[held] = malloc((size_t)size + skew);
    return (char *)blocks[held++] + skew;
}

static inline void forget(void)
{
    while (held) free(blocks[--held]);
}

static inline float *numbers(int64_t n)
{
    float *x = block(4 * n, 4);
    for (int64_t i = 0; i < n; i++) x[i] = number();
    return x;
}

static inline uint8_t *bytes(int64_t n, int least, int count)
{
    uint8_t *x = block(n, 1);
    for (int64_t i = 0; i < n; i++) x[i] = (uint8_t)(least + (int)(draw() % (uint32_t)count));
    return x;
}

static inline int32_t *integers(int64_t n, int least, int count)
{
    int32_t *x = block(4 * n, 4);
    for (int64_t i = 0; i < n; i++) x[i] = least + (int32_t)(draw() % (uint32_t)count);
    return x;
}

/* What a kernel writes. `before` holds what must be there when it starts; NULL: all of it is written, and was poison. */
struct result {
    void *at;
    int64_t size;
    const void *before;
};

/* Runs a kernel with every instruction set, on one thread and on `threads`: all results must have the same bits,
 * whichever poison was there before. Returns how many instruction sets agreed, or −1. */
static inline int everywhere(const char *name, size_t kernel, void *args, int threads, const struct result *results,
                             int count)
{
    void *kept[4] = {NULL};
    int good = 0, wrong = 0;
    for (int i = 0; i < SETS; i++) {
        const struct kernels *kernels = kernels_find(sets[i]);
        if (!kernels) continue;
        const team_fn *work = (const team_fn *)(const void *)((const char *)kernels + kernel);
        for (int n = 1, same = 1; n; n = n < threads ? threads : 0) {
            for (int r = 0; r < count; r++) {
                const size_t size = (size_t)results[r].size;
                if (results[r].before) memcpy(results[r].at, results[r].before, size);
                else memset(results[r].at, n > 1 ? 0x55 : 0xff, size);
            }
            if (team_run(n, work, args)) abort();
            for (int r = 0; r < count; r++) {
                const size_t size = (size_t)results[r].size;
                if (kept[r]) same = same && !memcmp(kept[r], results[r].at, size);
                else memcpy(kept[r] = malloc(size), results[r].at, size);
            }
            if (!same) fprintf(stderr, "%s: %s with %d threads differs\n", name, sets[i], n), wrong = 1;
        }
        good++;
    }
    for (int r = 0; r < count; r++) free(kept[r]);
    return wrong ? -1 : good;
}

#define RESULTS(...) \
    (const struct result[]){__VA_ARGS__}, (int)(sizeof(struct result[]){__VA_ARGS__} / sizeof(struct result))
#define EVERYWHERE(kernel, args, ...) \
    everywhere(#kernel, offsetof(struct kernels, kernel), &args, 3, RESULTS(__VA_ARGS__))

/* Adds what a case returns to `total`; leaves with −1 where it failed. */
#define TRY(call) \
    do { \
        const int some = call; \
        forget(); \
        if (some < 0) return -1; \
        total += some; \
    } while (0)

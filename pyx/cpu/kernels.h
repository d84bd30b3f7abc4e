/* The table of compiled kernels: one per instruction set, the same bits in all of them.
 *
 * A kernel is work for team_run: n threads run its phases with the same arguments, a share by its tid.
 * Argument structs are declared here; the bodies are in the headers that kernels_body.h includes.
 */
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include "team.h"

#define STRIP 16     /* outputs of a linear that are computed together */
#define BLOCK 64     /* rows of a linear that are computed together */
#define FEW_PAIRS 4  /* up to so many rows the inputs of whole rows of weights fit the nearest cache */
#define MOE_WIDTH 64 /* outputs of the experts that one job computes */

enum format { FORMAT_FP8, FORMAT_FP4, FORMAT_BF16, FORMAT_F32 };

/* A linear's weights, row-major [n, k] as in the checkpoint; any alignment. */
struct matrix {
    enum format format;
    int64_t n, k;
    const uint8_t *weight;
    const uint8_t *scale;  /* FP8 [ceil(n/128), ceil(k/128)], FP4 [n, k/32], else unused */
    int64_t weight_stride; /* bytes from one output to the next */
    int64_t scale_stride;  /* bytes from one row of scales to the next */
};

/* y[t, g·r + j] = Σ_k w[g·r + j, k] · x[t, g·k + ..]: groups 1 is an ordinary linear; r = w.n / groups */
struct linear_args {
    const struct matrix *w;
    const float *x; /* [rows, groups, stride]; for FP4 in the order that quads makes */
    int64_t stride; /* w.k; for FP4 the next multiple of 64 */
    float *y;       /* [rows, w.n] */
    int64_t rows;
    int groups;
    int slices; /* of k, added as a binary tree: 1, 2, 4 or 8 */
    uint16_t *pairs; /* [threads, min(rows, BLOCK), w.k] to work in, at a cache line; NULL: FP8 goes without */
};

struct swiglu_args {
    const float *g, *u; /* [rows, n] */
    const float *weight; /* [rows] or NULL */
    float *y;
    int64_t rows, n;
    float limit; /* 0: none */
};

/* The experts of one layer for all rows, or some of them. Every distinct expert in use is one "use" with its entries
 * (row, part, weight). A part is what entries add up to: a row's result, or sums that other calls go on with. */
struct moe_args {
    const struct matrix *matrices; /* w1, w2, w3 of expert 0, of expert 1, .., of the shared one */
    const float *x;                /* [rows, d] */
    float *y;                      /* [parts = rows, d]; NULL: the parts are in `sums` */
    float *sums;                   /* [.., slices, d] what parts begin with and end as; NULL: zeros, and the tree in y */
    const int64_t *place;          /* [parts] where in sums each one is; different */
    int64_t rows, parts, d, inner, uses;
    const int32_t *expert; /* [uses] ascending, the shared one last */
    const int64_t *first;  /* [uses + 1] where each use's entries begin */
    const int32_t *order;  /* [uses] in which threads take them, the largest first: then none waits long for another */
    const int32_t *row;    /* [entries] */
    const int32_t *part;   /* [entries] */
    const float *weight;   /* [entries] */
    float limit;
    int slices;
    float *plain;           /* [rows, d] x rounded */
    void *packed;           /* [rows, d as a multiple of 64] the same as FP4 wants it (NULL where no expert is FP4) */
    uint16_t *pairs;        /* the same as FP8 linears of many rows may want it */
    float *act;             /* [entries, inner as a multiple of 64] */
    _Atomic int wide;       /* set where the kernel met activations too large for it: use `plain` of the table */
    float *totals;          /* [threads, slices, parts, MOE_WIDTH] */
    _Atomic int64_t next_inner, next_output; /* jobs handed out; 0 at the start */
};

/* y[t] = the sum of a row's parts in order, slices as a binary tree */
struct moe_end_args {
    const float *sums; /* [rows, lanes, slices, d] */
    float *y;          /* [rows, d] */
    int64_t rows, lanes, d;
    int slices;
};

/* Multiply-adds of bytes, to measure their rate */
struct multiply_args {
    int64_t rounds;
    _Atomic int64_t done;
};

#include "rows_args.h"

struct kernels {
    const char *name;
    team_work linear;
    team_work swiglu;
    team_work moe;
    team_work moe_end;
    team_work multiply_bytes;
    int takes_pairs; /* whether FP8 linears of more than FEW_PAIRS rows gain by linear_args.pairs */
    void (*quads)(const float *x, float *y, int64_t rows, int64_t k); /* the order of FP4 inputs; y: k to 64s */
    const struct kernels *plain; /* whose moe knows any size of activation, where this one's does not; else NULL */
#define ROW_KERNEL(name, ...) team_work name;
#include "rows_kernels.h"
#undef ROW_KERNEL
};

extern const struct kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_avx512bf16;

/* Whether this processor's multiply-add of bf16 pairs is two fused multiply-adds, upper halves first, as its makers say:
 * sums are made in that order. Call it only where there is AVX-512 BF16. */
int avx512bf16_in_order(void);

/* The table called "scalar", "avx2", "avx512" or "avx512bf16", NULL where this machine or build lacks it; NULL names
 * the best one. */
const struct kernels *kernels_find(const char *isa);

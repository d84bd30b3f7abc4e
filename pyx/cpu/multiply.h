/* Multiplying and adding bytes as fast as the processor can, with the instruction of index scores: what measurements of
 * them are compared with. */
#pragma once

/* Every thread adds products of ones to sums in registers, `rounds` times some thousands. All sums together, which are
 * the number of multiply-adds, are added to `done`. */
static void FN(multiply_bytes)(void *args, int tid, int n)
{
    enum { SUMS = V16_ROWS * V16_ROWS, TURNS = 256, STEPS = 8 }; /* after so many, sums are still below 2^15 */
    struct multiply_args *a = args;
    v16i one = v16i_set1(0x01010101), same = one;
    int64_t total = 0;
    (void)tid, (void)n;
    for (int64_t r = 0; r < a->rounds; r++) {
        v16i sum[SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) sum[i] = v16i_dot_start(0);
        for (int turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 8
            for (int step = 0; step < STEPS; step++)
#pragma GCC unroll 16
                for (int i = 0; i < SUMS; i++) {
                    v16i_hide(&one);
                    sum[i] = v16i_dot(sum[i], one, same);
                }
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) total += (int64_t)v16_sum(v16i_to_float(v16i_dot_sum(sum[i])));
    }
    atomic_fetch_add(&a->done, total);
}

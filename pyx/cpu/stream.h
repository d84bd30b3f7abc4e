/* Reading memory as fast as it comes: what measurements of kernels are compared with. */
#pragma once
#include "team.h"

struct stream_args {
    const uint64_t *words;
    int64_t count;
    uint64_t sums[TEAM_MAX]; /* by thread; kept, so that no read can be left out */
};

/* Every thread reads its contiguous share once, front to back: four cache lines a turn. */
static void stream_read(void *args, int tid, int n)
{
    struct stream_args *a = args;
    uint64_t sums[32] = {0};
    int64_t first, last;
    team_share(a->count / 32, tid, n, &first, &last);
    for (int64_t i = first; i < last; i++)
        for (int j = 0; j < 32; j++) sums[j] += a->words[i * 32 + j];
    a->sums[tid] = 0;
    for (int j = 0; j < 32; j++) a->sums[tid] += sums[j];
}

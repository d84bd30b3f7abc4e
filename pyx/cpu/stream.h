/* Reading memory as fast as it comes: what measurements of kernels are compared with. */
#pragma once
#include "team.h"

struct stream_args {
    const uint64_t *words;
    int64_t count;
    uint64_t sums[TEAM_MAX]; /* by thread; kept, so that no read can be left out */
};

#define AHEAD 8192 /* bytes: so much is on its way, however few loads a processor keeps in flight by itself */

/* Every thread reads its contiguous share once, front to back: four cache lines a turn. */
static void stream_read(void *args, int tid, int n)
{
    struct stream_args *a = args;
    uint64_t sums[16] = {0};
    int64_t first, last;
    team_share(a->count / 32, tid, n, &first, &last);
    for (int64_t i = first; i < last; i++) {
        const uint64_t *p = a->words + i * 32;
        for (int j = 0; j < 32; j += 8) __builtin_prefetch((const char *)(p + j) + AHEAD, 0, 2);
        for (int j = 0; j < 16; j++) sums[j] += p[j];
        for (int j = 0; j < 16; j++) sums[j] += p[j + 16];
    }
    a->sums[tid] = 0;
    for (int j = 0; j < 16; j++) a->sums[tid] += sums[j];
}

static const team_work stream_work = {stream_read};

/* One persistent team of threads for the whole process.
 *
 * team_run calls fn(args, tid, n) once on each of n threads, tid 0 being the caller's own, and returns when all are
 * done. Calls from different threads take turns; a forked child starts its own team. Threads wait by spinning for
 * some microseconds, then sleep.
 */
#pragma once
#include <stdint.h>

typedef void (*team_fn)(void *args, int tid, int n);

#define TEAM_MAX 256

/* 0, or an errno when threads could not be started (then nothing ran). 1 <= n <= TEAM_MAX. */
int team_run(int n, team_fn fn, void *args);

/* Every thread of the running team_run reaches this before any goes on. n: as given to fn. */
void team_barrier(int n);

/* The share [*first, *last) of `count` items that thread tid of n takes: contiguous, equal to within one. */
static inline void team_share(int64_t count, int tid, int n, int64_t *first, int64_t *last)
{
    *first = count * tid / n;
    *last = count * (tid + 1) / n;
}

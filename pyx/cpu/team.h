/* One persistent team of threads for the whole process.
 *
 * team_run computes n shares of some work, tid 0 .. n−1, phase by phase: phase(args, tid, n) is called once for every
 * share, by whichever thread gets to it first. Each thread begins with its own share, then takes those that nobody has
 * begun: one that the system does not let run holds nobody up, the caller (thread 0) computes its share. So a share must
 * not wait for another one: what does is a later phase, which begins when all shares of the one before are done.
 *
 * Calls from different threads take turns; a forked child starts its own team. Threads wait by spinning for some
 * microseconds, then sleep.
 */
#pragma once
#include <stdint.h>

typedef void (*team_fn)(void *args, int tid, int n);

#define TEAM_MAX 256
#define TEAM_PHASES 3

/* The phases in order, then NULL. */
typedef team_fn team_work[TEAM_PHASES + 1];

/* 0, or an errno when threads could not be started (then nothing ran). 1 <= n <= TEAM_MAX. No thread uses args or work
 * after it has returned. */
int team_run(int n, const team_fn *work, void *args);

/* The share [*first, *last) of `count` items that is tid's of n: contiguous, equal to within one. */
static inline void team_share(int64_t count, int tid, int n, int64_t *first, int64_t *last)
{
    *first = count * tid / n;
    *last = count * (tid + 1) / n;
}

#include "team.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

#define SPINS 2000  /* looks of a waiting thread that keeps its core, */
#define YIELDS 1000 /* then looks between which others have it; then it sleeps */

/* A number that only grows, and that one thread waits on. */
struct event {
    _Atomic uint64_t value;
    _Atomic uint32_t asleep; /* whether that thread sleeps, and what it sleeps on */
};

/* A round is one phase of one run. Its number, which no other round has, holds its n, too. A share that somebody has
 * begun is at round | BEGUN: whoever comes late, from a round long over, finds another number there and touches nothing. */
#define BEGUN 1
#define ROUND 1024 /* from one round to the next */
#define SHARES(round) ((int)((round) % ROUND / 2))

struct share {
    _Alignas(64) struct event at; /* its own thread waits on it */
    team_fn fn;                   /* these are for who has begun the share: until it is done they stay */
    void *args;
    uint64_t last; /* what team.done comes to with the round */
};

static struct {
    pthread_mutex_t turn; /* held for the length of one team_run */
    int started;          /* worker threads, tids 1..started */
    uint64_t round;
    uint64_t given;                /* shares of all rounds until now */
    _Alignas(64) struct event done; /* as many are done; the caller waits on it */
    struct share share[TEAM_MAX];
} team = {.turn = PTHREAD_MUTEX_INITIALIZER};

static void event_wake(struct event *e)
{
#if defined(__linux__)
    if (atomic_load(&e->asleep) && atomic_exchange(&e->asleep, 0))
        syscall(SYS_futex, &e->asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
#else
    (void)e;
#endif
}

/* The first value seen that is above `past`. */
static uint64_t event_wait(struct event *e, uint64_t past)
{
    uint64_t value;
    for (int i = 0; i < SPINS + YIELDS; i++) {
        value = atomic_load_explicit(&e->value, memory_order_acquire);
        if (value > past) return value;
        if (i < SPINS) PAUSE();
        else sched_yield();
    }
    for (;;) {
        atomic_store(&e->asleep, 1); /* before the look: whoever changes the value checks this afterwards */
        value = atomic_load(&e->value);
        if (value > past) break;
#if defined(__linux__)
        syscall(SYS_futex, &e->asleep, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
#else
        sched_yield();
#endif
    }
    atomic_store(&e->asleep, 0);
    return value;
}

/* Computes the shares of a round that nobody has begun, from tid's on. */
static void take_shares(uint64_t round, int tid)
{
    const int n = SHARES(round);
    for (int i = 0; i < n; i++) {
        const int which = tid + i < n ? tid + i : tid + i - n;
        struct share *share = &team.share[which];
        uint64_t open = round;
        if (atomic_load_explicit(&share->at.value, memory_order_relaxed) != round) continue;
        if (!atomic_compare_exchange_strong(&share->at.value, &open, round | BEGUN)) continue;
        const uint64_t last = share->last;
        share->fn(share->args, which, n);
        if (atomic_fetch_add(&team.done.value, 1) + 1 == last) event_wake(&team.done);
    }
}

static void *worker(void *arg)
{
    const int tid = (int)(intptr_t)arg;
    for (uint64_t round = 0;;) {
        round = event_wait(&team.share[tid].at, round | BEGUN) & ~(uint64_t)BEGUN;
        take_shares(round, tid);
    }
    return NULL;
}

static void forget_team(void) /* in a forked child: the threads stayed behind */
{
    memset(&team, 0, sizeof team);
    pthread_mutex_init(&team.turn, NULL);
}

static void register_fork(void) { pthread_atfork(NULL, NULL, forget_team); }

static int start_workers(int n)
{
    if (team.started >= n - 1) return 0;
    static pthread_once_t once = PTHREAD_ONCE_INIT; /* handlers outlive a fork, so once is enough */
    pthread_once(&once, register_fork);
    sigset_t all, old;
    sigfillset(&all); /* signals are the caller's, but a fault is of the thread that has it (staging/guard.c) */
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = 0;
    while (!error && team.started < n - 1) {
        pthread_t thread;
        error = pthread_create(&thread, NULL, worker, (void *)(intptr_t)(team.started + 1));
        if (!error) {
            pthread_detach(thread);
            team.started++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

/* One phase; the caller is thread 0. */
static void run_round(int n, team_fn fn, void *args)
{
    const uint64_t round = team.round += ROUND, open = round + 2 * (uint64_t)n, last = team.given += (uint64_t)n;
    for (int tid = 0; tid < n; tid++) {
        struct share *share = &team.share[tid];
        share->fn = fn;
        share->args = args;
        share->last = last;
        atomic_store(&share->at.value, open);
    }
    for (int tid = 1; tid < n; tid++) event_wake(&team.share[tid].at);
    take_shares(open, 0);
    event_wait(&team.done, last - 1);
}

int team_run(int n, const team_fn *work, void *args)
{
    if (n < 1 || n > TEAM_MAX) return EINVAL;
    if (n == 1) {
        for (; *work; work++) (*work)(args, 0, 1);
        return 0;
    }
    pthread_mutex_lock(&team.turn);
    const int error = start_workers(n);
    for (; !error && *work; work++) run_round(n, *work, args);
    pthread_mutex_unlock(&team.turn);
    return error;
}

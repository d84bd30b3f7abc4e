#include "team.h"

#include <errno.h>
#include <limits.h>
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

/* A number that one side changes and others wait on. */
struct event {
    _Atomic uint32_t value;
    _Atomic int sleepers;
    char pad[56]; /* a cache line each */
};

static struct {
    pthread_mutex_t turn; /* held for the length of one team_run */
    int started;          /* worker threads, tids 1..started */
    team_fn fn;
    void *args;
    int n;
    _Atomic int busy;    /* workers of this run that have not finished */
    _Atomic int arrived; /* at the barrier */
    struct event done, passed;
    struct event go[TEAM_MAX];
} team = {.turn = PTHREAD_MUTEX_INITIALIZER};

static void event_bump(struct event *e)
{
    atomic_fetch_add(&e->value, 1);
#if defined(__linux__)
    if (atomic_load(&e->sleepers)) syscall(SYS_futex, &e->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

/* Returns once the value is no longer `seen`. */
static void event_wait(struct event *e, uint32_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&e->value, memory_order_acquire) != seen) return;
        PAUSE();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (atomic_load_explicit(&e->value, memory_order_acquire) != seen) return;
        sched_yield();
    }
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->value) == seen) {
#if defined(__linux__)
        syscall(SYS_futex, &e->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
        sched_yield();
#endif
    }
    atomic_fetch_sub(&e->sleepers, 1);
}

static void *worker(void *arg)
{
    int tid = (int)(intptr_t)arg;
    for (uint32_t seen = 0;; seen++) {
        event_wait(&team.go[tid], seen);
        team.fn(team.args, tid, team.n);
        if (atomic_fetch_sub(&team.busy, 1) == 1) event_bump(&team.done);
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

int team_run(int n, team_fn fn, void *args)
{
    if (n < 1 || n > TEAM_MAX) return EINVAL;
    if (n == 1) {
        fn(args, 0, 1);
        return 0;
    }
    pthread_mutex_lock(&team.turn);
    int error = start_workers(n);
    if (!error) {
        team.fn = fn;
        team.args = args;
        team.n = n;
        atomic_store(&team.busy, n - 1);
        uint32_t seen = atomic_load(&team.done.value);
        for (int tid = 1; tid < n; tid++) event_bump(&team.go[tid]);
        fn(args, 0, n);
        event_wait(&team.done, seen);
    }
    pthread_mutex_unlock(&team.turn);
    return error;
}

void team_barrier(int n)
{
    if (n == 1) return;
    uint32_t seen = atomic_load(&team.passed.value);
    if (atomic_fetch_add(&team.arrived, 1) == n - 1) {
        atomic_store(&team.arrived, 0);
        event_bump(&team.passed);
    } else {
        event_wait(&team.passed, seen);
    }
}

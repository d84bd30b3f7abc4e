/* Short runs of random width and phases by several callers at once, every thread late at random before it claims a share
 * and within it: each share once in each phase, phases in order, nothing of a run used after it; children forked in
 * between do the same. Prints what went wrong. team.c comes from the folder that is searched first. */
#include <stdatomic.h>
#include <stdint.h>

static void be_late(void);
#undef atomic_compare_exchange_strong
#define atomic_compare_exchange_strong(at, expected, value) \
    (be_late(), atomic_compare_exchange_strong_explicit(at, expected, value, memory_order_seq_cst, memory_order_seq_cst))
#include "team.c"

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

enum { CALLERS = 3, RUNS = 1500, MOST = 8, CHILDREN = 12 };

struct run {
    int n, phases;
    pthread_t caller;
    _Atomic int begun[TEAM_PHASES][MOST], done[TEAM_PHASES];
};

static _Atomic int helped;
static _Thread_local uint64_t seed;

static int draw(int below)
{
    if (!seed) seed = (uint64_t)(uintptr_t)&seed;
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int)((seed >> 33) % (unsigned)below);
}

static void be_late(void)
{
    const int how = draw(64);
    if (how == 0) usleep((useconds_t)draw(300));
    else if (how < 8) sched_yield();
    else for (int i = 8 * draw(how); i; i--) PAUSE();
}

static void fail(const char *what)
{
    printf("%s\n", what);
    fflush(stdout);
    _exit(1);
}

static void share(struct run *run, int phase, int tid, int n)
{
    if (n != run->n) fail("another run's n");
    if (phase && atomic_load(&run->done[phase - 1]) != n) fail("a phase began before the last one's end");
    if (atomic_fetch_add(&run->begun[phase][tid], 1)) fail("a share was begun twice");
    if (!pthread_equal(pthread_self(), run->caller)) helped++;
    be_late();
    atomic_fetch_add(&run->done[phase], 1);
}

static void first(void *args, int tid, int n) { share(args, 0, tid, n); }
static void second(void *args, int tid, int n) { share(args, 1, tid, n); }
static void third(void *args, int tid, int n) { share(args, 2, tid, n); }

static void too_long(int signal)
{
    (void)signal;
    fail("no end");
}

static void *caller(void *runs)
{
    static const team_work all = {first, second, third};
    for (intptr_t i = 0; i < (intptr_t)runs; i++) {
        struct run *run = calloc(1, sizeof *run);
        const int n = run->n = 1 + draw(MOST);
        team_work work = {NULL};
        run->phases = 1 + draw(TEAM_PHASES);
        run->caller = pthread_self();
        memcpy(work, all, (size_t)run->phases * sizeof *work);
        if (team_run(n, work, run)) fail("no threads");
        for (int phase = 0; phase < run->phases; phase++)
            if (run->done[phase] != n) fail("a run ended before its shares");
        memset(run, 0xA5, sizeof *run);
        free(run);
    }
    return NULL;
}

static void child(unsigned seconds)
{
    const pid_t pid = fork();
    int status = 1;
    if (!pid) {
        alarm(seconds / 2); /* before the parent's */
        caller((void *)(intptr_t)20);
        _exit(0);
    }
    if (waitpid(pid, &status, 0) != pid || status) fail("a forked child failed");
}

/* seconds that it may take, then whether to fork */
int main(int argc, char **argv)
{
    const unsigned seconds = argc > 1 ? (unsigned)atoi(argv[1]) : 60;
    pthread_t threads[CALLERS];
    signal(SIGALRM, too_long);
    alarm(seconds);
    for (int i = 0; i < CALLERS; i++) pthread_create(&threads[i], NULL, caller, (void *)(intptr_t)RUNS);
    for (int i = 0; i < CHILDREN && argc > 2; i++) child(seconds);
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    if (!helped) fail("no thread but the callers computed anything");
    return 0;
}

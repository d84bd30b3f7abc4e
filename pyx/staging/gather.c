#include "gather.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNIT (256 << 10) /* bytes of a file that a thread takes at a time: what its own cache holds */
#define THREADS_MAX 64

struct job {
    const struct piece *pieces;
    int64_t count;
    _Atomic int64_t next; /* unit, counted through all pieces */
    _Atomic int stopped;
    pthread_mutex_t lock; /* of fault */
    struct fault fault;
};

static int contiguous(const struct piece *p) { return p->rows == 1 || p->pitch == p->bytes; }

static int64_t rows_of_unit(const struct piece *p) { return p->pitch < UNIT ? UNIT / p->pitch : 1; }

static int64_t units_of(const struct piece *p)
{
    if (p->rows == 0 || p->bytes == 0) return 0;
    const int64_t length = contiguous(p) ? p->rows * p->bytes : p->rows, unit = contiguous(p) ? UNIT : rows_of_unit(p);
    return (length + unit - 1) / unit;
}

static void stop(struct job *job, enum fault_kind kind, int error, int64_t piece, int64_t at)
{
    pthread_mutex_lock(&job->lock);
    if (job->fault.kind == GATHER_DONE) job->fault = (struct fault){kind, error, piece, at};
    pthread_mutex_unlock(&job->lock);
    atomic_store(&job->stopped, 1);
}

/* 1 where all bytes came */
static int read_all(struct job *job, int64_t piece, uint8_t *to, int64_t bytes, int64_t at)
{
    const int fd = job->pieces[piece].fd;
    while (bytes > 0) {
        const ssize_t n = pread(fd, to, (size_t)bytes, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            stop(job, n ? GATHER_ERROR : GATHER_SHORT, n ? errno : 0, piece, at);
            return 0;
        }
        to += n, at += n, bytes -= n;
    }
    return 1;
}

/* Unit `unit` of a piece; scratch holds UNIT bytes. `from`: the byte of the file that came to `to`, for a NaN's place. */
static void take(struct job *job, int64_t piece, int64_t unit, uint8_t *scratch)
{
    const struct piece *p = &job->pieces[piece];
    uint8_t *to;
    int64_t length, from;
    if (contiguous(p)) {
        const int64_t first = unit * UNIT, all = p->rows * p->bytes;
        to = p->to + first, from = p->offset + first;
        length = all - first < UNIT ? all - first : UNIT;
        if (!read_all(job, piece, to, length, from)) return;
    } else {
        const int64_t each = rows_of_unit(p), first = unit * each, n = p->rows - first < each ? p->rows - first : each;
        to = p->to + first * p->bytes, from = p->offset + first * p->pitch, length = n * p->bytes;
        uint8_t *at = n == 1 ? to : scratch;
        if (!read_all(job, piece, at, (n - 1) * p->pitch + p->bytes, from)) return;
        if (n > 1)
            for (int64_t r = 0; r < n; r++) memcpy(to + r * p->bytes, at + r * p->pitch, (size_t)p->bytes);
    }
    const uint8_t *nan = p->scales ? memchr(to, 0xFF, (size_t)length) : NULL;
    if (nan) stop(job, GATHER_NAN, 0, piece, from + (nan - to) / p->bytes * p->pitch + (nan - to) % p->bytes);
}

static void *work(void *arg)
{
    struct job *job = arg;
    uint8_t *scratch = malloc(UNIT);
    if (!scratch) stop(job, GATHER_ERROR, ENOMEM, 0, 0);
    int64_t piece = 0, before = 0; /* units of the pieces before this one */
    while (!atomic_load_explicit(&job->stopped, memory_order_relaxed)) {
        const int64_t unit = atomic_fetch_add(&job->next, 1);
        while (piece < job->count && unit - before >= units_of(&job->pieces[piece]))
            before += units_of(&job->pieces[piece++]);
        if (piece == job->count) break;
        take(job, piece, unit - before, scratch);
    }
    free(scratch);
    return NULL;
}

struct fault gather(const struct piece *pieces, int64_t count, int threads)
{
    struct job job = {.pieces = pieces, .count = count, .lock = PTHREAD_MUTEX_INITIALIZER};
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) bytes += pieces[i].rows * pieces[i].bytes;
    if (threads > 1 + bytes / UNIT) threads = (int)(1 + bytes / UNIT); /* less than a unit is not worth a thread */
    pthread_t others[THREADS_MAX];
    int started = 0;
    if (threads > THREADS_MAX) threads = THREADS_MAX;
    sigset_t all, old;
    sigfillset(&all); /* signals are the caller's */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (started < threads - 1 && !pthread_create(&others[started], NULL, work, &job)) started++;
    pthread_sigmask(SIG_SETMASK, &old, NULL); /* a thread that cannot be had leaves its share to the others */
    work(&job);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
    return job.fault;
}

# What measurements need.

from libc.stdint cimport uint64_t

cdef extern from "stream.h" nogil:
    cdef struct stream_args:
        const uint64_t *words
        int64_t count
        uint64_t sums[TEAM_MAX]
    const team_work stream_work


cdef extern from "kernels.h" nogil:
    cdef struct multiply_args:
        int64_t rounds
        int64_t done


def read_all(Team team, words):
    """Read a uint64 array of a multiple of 32 items once, on all threads → the sum of it, modulo 2^64."""
    cdef Buffer held = Buffer(words)
    cdef stream_args a
    if held.view.format[0] not in (c"L", c"Q") or held.view.ndim != 1 or held.view.shape[0] % 32:
        raise InputError(f"read: expected uint64 [a multiple of 32], found {words.dtype} {words.shape}")
    a.words, a.count = <const uint64_t *>held.view.buf, held.view.shape[0]
    team.run(stream_work, &a, team.threads)
    return sum([a.sums[i] for i in range(team.threads)]) % (1 << 64)


def multiply_bytes(Team team, int64_t rounds):
    """Multiply and add bytes in registers, `rounds` times some of them on every thread → how many multiply-adds."""
    cdef multiply_args a
    a.rounds, a.done = rounds, 0
    team.run(team.kernels.multiply_bytes, &a, team.threads)
    return a.done

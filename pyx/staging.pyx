# cython: language_level=3, boundscheck=False, wraparound=False
"""Experts from files into staging memory, and files that shrink: thin bindings of staging/."""

from __future__ import annotations

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc

import os

from dsv4.errors import InputError

COLUMNS = ("fd", "offset", "pitch", "rows", "bytes", "to", "scales")


cdef extern from "gather.h" nogil:
    cdef struct piece:
        int fd, scales
        int64_t offset, pitch, rows, bytes
        uint8_t *to

    enum fault_kind:
        GATHER_DONE
        GATHER_SHORT
        GATHER_ERROR
        GATHER_NAN

    cdef struct fault:
        fault_kind kind
        int error
        int64_t piece, at

    fault c_gather "gather" (const piece *pieces, int64_t count, int threads)


cdef extern from "guard.h" nogil:
    int c_guard "guard_mapped_files" ()


def guard_mapped_files():
    """Have a mapped file that is cut short while it is read end the process with one line (guard.h)."""
    error = c_guard()
    if error:
        raise OSError(error, os.strerror(error))


def gather(uint8_t[::1] buffer, const int64_t[:, ::1] pieces, int threads):
    """Read pieces of files into `buffer` on up to `threads` threads, without the GIL.

    pieces int64 [n, 7]: COLUMNS, `to` counted from the start of the buffer (gather.h says what they mean).
    Returns None, or of the first fault (piece, byte of the file, what was found there).
    Raises InputError for pieces that do not lie in the buffer.
    """
    cdef int64_t i, count = pieces.shape[0], size = buffer.shape[0]
    cdef fault found
    if pieces.shape[1] != 7:
        raise InputError(f"gather: expected pieces [n, {len(COLUMNS)}] of {', '.join(COLUMNS)}; found {pieces.shape[1]}")
    cdef piece *all = <piece *>malloc(max(1, count) * sizeof(piece))
    if all is NULL:
        raise MemoryError()
    try:
        for i in range(count):
            all[i].fd, all[i].scales = <int>pieces[i, 0], pieces[i, 6] != 0
            all[i].offset, all[i].pitch = pieces[i, 1], pieces[i, 2]
            all[i].rows, all[i].bytes = pieces[i, 3], pieces[i, 4]
            if (pieces[i, 1] < 0 or all[i].rows < 0 or all[i].bytes < 0 or all[i].pitch < max(1, all[i].bytes)
                    or pieces[i, 5] < 0 or (all[i].bytes and all[i].rows > (size - pieces[i, 5]) // all[i].bytes)):
                raise InputError(f"gather: expected pieces within a buffer of {size} bytes; found {list(pieces[i])}")
            all[i].to = &buffer[0] + pieces[i, 5] if size else NULL
        with nogil:
            found = c_gather(all, count, threads)
    finally:
        free(all)
    if found.kind == GATHER_DONE:
        return None
    words = {GATHER_SHORT: "the end of the file", GATHER_NAN: "a NaN (0xFF) scale"}
    return found.piece, found.at, words.get(found.kind) or os.strerror(found.error)

/* Pieces of files into memory, with several threads. */
#pragma once
#include <stdint.h>

/* `rows` runs of `bytes` bytes, `pitch` apart in the file from `offset` on (bytes <= pitch), adjacent at `to`.
 * scales: the bytes are e8m0, where 0xFF is a NaN and a fault. */
struct piece {
    int fd, scales;
    int64_t offset, pitch, rows, bytes;
    uint8_t *to;
};

enum fault_kind { GATHER_DONE, GATHER_SHORT, GATHER_ERROR, GATHER_NAN };

/* The first thing that went wrong: in which piece, at which byte of the file; error: an errno. */
struct fault {
    enum fault_kind kind;
    int error;
    int64_t piece, at;
};

/* Reads all pieces on up to `threads` threads, the caller's among them, and returns when all are done; after a fault,
 * when all have stopped. Nothing is shared between calls. */
struct fault gather(const struct piece *pieces, int64_t count, int threads);

# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled kernels of the CPU backend: thin bindings. Shapes and errors are the business of dsv4/ops/cpu*.py
except where a wrong one would touch memory: those are checked here."""

from __future__ import annotations

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from libc.stdlib cimport free
from numpy cimport NPY_FLOAT32, PyArray_SimpleNewFromData, import_array, npy_intp, set_array_base
from posix.mman cimport MAP_ANON, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

import numpy as np

from dsv4.config import pooled_blocks
from dsv4.errors import BackendError, CheckpointError, ConfigError, InputError

import_array()
cdef object empty = np.empty
cdef object float32 = np.float32


cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **start, size_t alignment, size_t size)


cdef extern from "team.h" nogil:
    ctypedef void (*team_fn)(void *args, int tid, int n) noexcept nogil
    ctypedef team_fn team_work[4]
    int team_run(int n, const team_fn *work, void *args)
    enum: TEAM_MAX


cdef extern from "kernels.h" nogil:
    enum format:
        FORMAT_FP8
        FORMAT_FP4
        FORMAT_BF16
        FORMAT_F32

    enum:
        BLOCK
        FEW_PAIRS
        MOE_WIDTH

    cdef struct matrix:
        format format
        int64_t n, k
        const uint8_t *weight
        const uint8_t *scale
        int64_t weight_stride, scale_stride

    cdef struct linear_args:
        const matrix *w
        const float *x
        float *y
        int64_t rows, stride
        int groups, slices
        uint16_t *pairs

    cdef struct swiglu_args:
        const float *g
        const float *u
        const float *weight
        float *y
        int64_t rows, n
        float limit

    cdef struct moe_args:
        const matrix *matrices
        const float *x
        float *y
        float *sums
        const int64_t *place
        int64_t rows, parts, d, inner, uses
        const int32_t *expert
        const int64_t *first
        const int32_t *order
        const int32_t *row
        const int32_t *part
        const float *weight
        float limit
        int slices
        float *plain
        void *packed
        uint16_t *pairs
        float *act
        float *totals
        int wide
        int64_t next_inner, next_output

    cdef struct moe_end_args:
        const float *sums
        float *y
        int64_t rows, lanes, d
        int slices

    cdef struct kernels:
        const char *name
        team_work linear
        team_work swiglu
        team_work moe, moe_end
        team_work multiply_bytes
        team_work embed, act_quant, rmsnorm, hc_pre, hc_post, mean_streams, rope_angles, rotate, encode_keys, decode_keys
        team_work attend, compress_store, compress_pool, index_quant, decode_index, index_select, entry_places
        team_work ring_places, visible_places, gate, best, nonfinite
        bint takes_pairs
        void (*quads)(const float *x, float *y, int64_t rows, int64_t k) noexcept nogil
        const kernels *plain
    const kernels *kernels_find(const char *isa)


cdef class Team:
    """How many threads compute and with which instruction set: the first argument of every kernel."""

    cdef const kernels *kernels
    cdef readonly int threads

    def __init__(self, int threads, isa=None):
        """threads 1..256; isa "scalar", "avx2", "avx512", "avx512bf16" or None for the best this machine has."""
        if not 1 <= threads <= TEAM_MAX:
            raise ConfigError(f"threads: expected 1 to {TEAM_MAX}, found {threads}")
        self.kernels = kernels_find(NULL) if isa is None else kernels_find(isa.encode())
        if self.kernels is NULL:
            raise BackendError(f"instruction set {isa!r}: this machine offers {', '.join(instruction_sets())}")
        self.threads = threads

    @property
    def isa(self):
        return self.kernels.name.decode()

    cdef int run(self, const team_fn *work, void *args, int threads) except -1:
        """Run a kernel on `threads` threads (1: on the caller's own), without the GIL."""
        cdef int error
        with nogil:
            error = team_run(threads, work, args)
        if error:
            raise BackendError(f"cannot start {threads} threads (error {error}): lower the number of threads")
        return 0

    cdef int share(self, double work) noexcept:
        """Threads worth waking for `work` multiply-adds, or what takes as long: moving a float between cores, too.

        Measured in whole forwards: a second thread costs 1 to 2 us, and keeps rows with the core that made them.
        """
        return self.threads if work >= 100e3 else 1


def instruction_sets() -> list:
    """The instruction sets this machine and build can run, plainest first."""
    return [isa for isa in ("scalar", "avx2", "avx512", "avx512bf16") if kernels_find(isa.encode()) is not NULL]


cdef class Buffer:
    """A C-contiguous array held by pointer; its memory stays alive and in place as long as this object does.

    strided: only the last dimension must be contiguous, as in a slice of a matrix's columns.
    """

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, array, bint writable=False, bint strided=False):
        cdef int layout = PyBUF_STRIDES if strided else PyBUF_C_CONTIGUOUS
        PyObject_GetBuffer(array, &self.view, layout | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
        self.held = True
        if strided and self.view.strides[self.view.ndim - 1] != self.view.itemsize:
            raise ValueError(f"expected rows of adjacent items, found strides {array.strides}")

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef Buffer floats(array, int64_t columns):
    """A float32 array [T, columns]; columns −1: any."""
    cdef Buffer b = Buffer(array)
    if b.view.ndim != 2 or b.view.format[0] != c"f" or (columns >= 0 and b.view.shape[1] != columns):
        raise InputError(
            f"expected float32 [rows, {columns if columns >= 0 else 'columns'}], found {array.dtype} {array.shape}"
        )
    return b


# ---------------------------------------------------------------------- arrays at cache lines
# NumPy's arrays begin anywhere in a cache line, and three vectors in four straddle two; and what malloc gives again and
# again to arrays of ever other sizes it scatters over ever more pages. So kernels return arrays over blocks of their
# own, of a few sizes (64, 128, .. 512 bytes, and then four to each doubling), which are used again.
cdef enum:
    LINE = 64
    MAPPED = 64 << 10      # from here on blocks are mapped: malloc keeps what is given back, and scatters it
    SIZES = 68             # up to 16 MB; larger blocks are given back at once
    SPARE_BYTES = 16 << 20 # of blocks in no use; beyond, those go of the size that was longest not asked for

cdef int64_t MOST = <int64_t>1 << 56 # floats of an array: beyond, numbers of bytes would overflow

cdef struct block:        # what a spare block holds: the next of its size
    block *next

cdef block *spare[SIZES]
cdef int64_t spare_bytes = 0
cdef int64_t asked[SIZES] # when a block of this size was last asked for, in blocks
cdef int64_t asks = 0


cdef void free_spare(int64_t most) noexcept:
    """Give blocks back until so many bytes are spare."""
    global spare_bytes
    cdef block *start
    cdef int number, oldest
    while spare_bytes > most:
        oldest = -1
        for number in range(SIZES):
            if spare[number] is not NULL and (oldest < 0 or asked[number] < asked[oldest]):
                oldest = number
        start = spare[oldest]
        spare[oldest] = start.next
        spare_bytes -= size_of(oldest)
        free_block(start, size_of(oldest))


cdef void *new_block(int64_t size) noexcept:
    """A block that begins at a cache line, or NULL."""
    cdef void *start = NULL
    if size >= MAPPED:
        start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0)
        return NULL if start == MAP_FAILED else start
    return NULL if posix_memalign(&start, LINE, size) else start


cdef void free_block(void *start, int64_t size) noexcept:
    if size >= MAPPED:
        munmap(start, size)
    else:
        free(start)


cdef int64_t size_of(int number) noexcept:
    """Bytes of the blocks of a size."""
    cdef int shift = max(number // 4 - 1, 0)
    return (<int64_t>(number - 4 * shift + 1) << shift) * LINE


@cython.final
@cython.freelist(256)
cdef class Memory:
    """A block, the base of an array and so of its views; spare again when the last of them is gone."""

    cdef block *start
    cdef int number  # of the size; SIZES and more: not kept

    def __cinit__(self, int64_t size):
        global spare_bytes, asks
        cdef int64_t last = max(size - 1, 0) // LINE
        cdef int shift = 0
        while last >> shift > 7:
            shift += 1
        self.number = 4 * shift + <int>(last >> shift)
        size = size_of(self.number)
        if self.number < SIZES:
            asks += 1
            asked[self.number] = asks
            self.start = spare[self.number]
            if self.start is not NULL:
                spare[self.number] = self.start.next
                spare_bytes -= size
                return
        self.start = <block *>new_block(size)
        if self.start is NULL:
            free_spare(0)
            self.start = <block *>new_block(size)
        if self.start is NULL:
            raise MemoryError(f"expected {size} bytes for an array, found no memory")

    def __dealloc__(self):
        global spare_bytes
        if self.start is NULL:
            return
        if self.number >= SIZES:
            free_block(self.start, size_of(self.number))
            return
        self.start.next = spare[self.number]
        spare[self.number] = self.start
        spare_bytes += size_of(self.number)
        if spare_bytes > SPARE_BYTES:
            free_spare(SPARE_BYTES)


def lines(tuple shape):
    """A float32 array of up to 4 dimensions, uninitialised like np.empty's, that begins at a cache line."""
    cdef npy_intp dims[4]
    cdef int64_t size = 1
    cdef int i, n = len(shape)
    if n > 4:
        raise InputError(f"expected at most 4 dimensions, found {n}")
    for i in range(n):
        dims[i] = shape[i]
        if dims[i] < 0 or (dims[i] and size > MOST // dims[i]):
            raise MemoryError(f"expected an array of at most {MOST} floats, found {shape}")
        size *= dims[i]
    cdef Memory memory = Memory(4 * size)
    array = PyArray_SimpleNewFromData(n, dims, NPY_FLOAT32, memory.start)
    set_array_base(array, memory)
    return array


def spare_memory() -> int:
    """Bytes of the blocks that no array uses."""
    return spare_bytes


include "gemm.pxi"
include "rows.pxi"
include "bench.pxi"

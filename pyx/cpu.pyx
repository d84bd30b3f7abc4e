# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled kernels of the CPU backend: thin bindings. Shapes and errors are the business of dsv4/ops/cpu*.py
except where a wrong one would touch memory: those are checked here."""

from __future__ import annotations

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t

import numpy as np

from dsv4.errors import BackendError, CheckpointError, ConfigError, InputError

cdef object empty = np.empty
cdef object float32 = np.float32

# Arrays are made and freed again with every forward. glibc gives the memory back to the system, and a page fault for
# every 4 KB is the price of the next one, until it has seen a block of such a size freed: then it keeps twice as much.
PyMem_RawFree(PyMem_RawMalloc(16 << 20))


cdef extern from "Python.h":  # borrowed references: nothing is counted
    ctypedef struct PyObject
    Py_ssize_t Py_REFCNT(PyObject *o)
    PyObject *PyList_GET_ITEM(object items, Py_ssize_t i)
    PyObject *PyTuple_GET_ITEM(PyObject *items, Py_ssize_t i)


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
# NumPy's arrays begin anywhere in a cache line, and three vectors in four straddle two. What kernels return begins at
# one: memory a bit larger than needed, cut. Cutting takes longer than np.empty, so small arrays are kept and given out
# again once nobody refers to them: neither to the array nor, as views of it do, to its memory.
cdef enum:
    KEPT_SIZE = 64 << 10  # floats of one array
    KEPT_EACH = 16        # arrays of one shape
    KEPT_ALL = 1 << 20    # floats altogether: of a load test, 92 in 100 arrays are kept ones; four times as many, 96

cdef dict kept = {}  # shape → [(array, memory)], the last given out the last
cdef int64_t kept_size = 0


cdef object cut(tuple shape):
    """(array, memory): memory of 15 floats more than the array, which begins at a cache line of it."""
    cdef int64_t size = 1, start
    cdef Py_buffer view
    for n in shape:
        size *= n
    memory = empty(size + 15, float32)
    PyObject_GetBuffer(memory, &view, PyBUF_C_CONTIGUOUS)
    start = (64 - <size_t>view.buf % 64) % 64 // 4
    PyBuffer_Release(&view)
    return memory[start : start + size].reshape(shape), memory


def lines(tuple shape):
    """A float32 array of anything, like np.empty, that begins at a cache line."""
    global kept_size
    cdef list pairs = kept.get(shape)
    cdef PyObject *pair
    cdef Py_ssize_t i
    if pairs is not None:
        for i in range(len(pairs) - 1, -1, -1):
            pair = PyList_GET_ITEM(pairs, i)
            if Py_REFCNT(PyTuple_GET_ITEM(pair, 0)) == 1 and Py_REFCNT(PyTuple_GET_ITEM(pair, 1)) == 2:
                return <object>PyTuple_GET_ITEM(pair, 0)
    made = cut(shape)
    if made[1].size > KEPT_SIZE:
        return made[0]
    if pairs is not None and len(pairs) == KEPT_EACH:
        kept_size -= pairs.pop(0)[1].size
    if kept_size + made[1].size > KEPT_ALL:
        kept.clear()
        kept_size = 0
    kept.setdefault(shape, []).append(made)
    kept_size += made[1].size
    return made[0]


def kept_arrays() -> dict:
    """How many arrays of each shape are kept, whether somebody has them or not."""
    return {shape: len(pairs) for shape, pairs in kept.items()}


include "gemm.pxi"
include "rows.pxi"
include "bench.pxi"

# Linears and experts.

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

cdef dict FORMATS = {"fp8": FORMAT_FP8, "fp4": FORMAT_FP4, "bf16": FORMAT_BF16, "f32": FORMAT_F32}
cdef dict ITEM_SIZES = {"fp8": 1, "fp4": 1, "bf16": 2, "f32": 4}


cdef class Matrix:
    """A linear's weights where they lie: the arrays are kept, not copied; they may be columns of larger ones.

    Attributes fmt and shape = (N, K).
    """

    cdef matrix m
    cdef Buffer weight, scale
    cdef readonly str fmt
    cdef readonly tuple shape

    def __init__(self, str fmt, weight, scale=None):
        """Arrays as Ops.matrix describes them. Raises CheckpointError where they do not fit together."""
        if fmt not in FORMATS:
            raise BackendError(f"matrix: expected fmt one of {', '.join(FORMATS)}, found {fmt!r}")
        if weight.ndim != 2 or weight.itemsize != ITEM_SIZES[fmt]:
            raise CheckpointError(
                f"{fmt} weight: expected 2 dimensions of {ITEM_SIZES[fmt]}-byte items, found {weight.dtype} {weight.shape}"
            )
        n, k = weight.shape
        expected = None
        if fmt == "fp8":
            expected = (-(-n // 128), -(-k // 128))
        elif fmt == "fp4":
            k *= 2
            expected = (n, k // 32)
            if k % 32:
                raise CheckpointError(f"fp4 weight: expected K in groups of 32, found K = {k}")
        found = None if scale is None else tuple(scale.shape)
        if found != expected or (scale is not None and scale.itemsize != 1):
            raise CheckpointError(f"{fmt} weight [{n}, {k}]: expected a one-byte scale {expected}, found {found}")
        self.fmt, self.shape = fmt, (n, k)
        self.weight = Buffer(weight, strided=True)
        self.m.format = FORMATS[fmt]
        self.m.n, self.m.k = n, k
        self.m.weight = <const uint8_t *>self.weight.view.buf
        self.m.weight_stride = self.weight.view.strides[0]
        if scale is not None:
            self.scale = Buffer(scale, strided=True)
            self.m.scale = <const uint8_t *>self.scale.view.buf
            self.m.scale_stride = self.scale.view.strides[0]


cdef class Bank:
    """The experts of one layer: w1, w2, w3 of each by id, the shared one last."""

    cdef matrix *matrices
    cdef tuple kept
    cdef readonly int experts
    cdef int64_t dim, inner
    cdef bint any_fp4

    def __init__(self, list experts, tuple shared):
        """(w1, w2, w3) Matrix objects. Raises CheckpointError where shapes or formats differ."""
        self.kept = tuple(m for expert in experts + [shared] for m in expert)
        self.experts = len(experts)
        self.inner, self.dim = shared[0].shape
        self.matrices = <matrix *>PyMem_Malloc(len(self.kept) * sizeof(matrix))
        if self.matrices is NULL:
            raise MemoryError()
        cdef Matrix m
        for i, m in enumerate(self.kept):
            expected = (self.dim, self.inner) if i % 3 == 1 else (self.inner, self.dim)
            if m.shape != expected or m.fmt not in ("fp4", "fp8") or m.fmt != self.kept[i - i % 3].fmt:
                raise CheckpointError(
                    f"expert {i // 3}, w{i % 3 + 1}: expected fp4 or fp8 {expected} like the shared expert and one "
                    f"format per expert, found {m.fmt} {m.shape}"
                )
            self.any_fp4 = self.any_fp4 or m.fmt == "fp4"
            self.matrices[i] = m.m

    def __dealloc__(self):
        PyMem_Free(self.matrices)


cdef inline int64_t to_64(int64_t n) noexcept nogil:
    return (n + 63) // 64 * 64


cdef int check_slices(int slices, int64_t k, format fmt) except -1:
    cdef bint packed = fmt == FORMAT_FP8 or fmt == FORMAT_FP4
    if slices == 1:
        return 0
    if slices not in (2, 4, 8) or k % slices or (packed and k // slices % 128):
        raise InputError(
            f"slices: expected 1, 2, 4 or 8 equal ones, of whole 128s for packed weights; found {slices} of K = {k}"
        )
    return 0


def linear(Team team, x, Matrix w, int slices=1, int groups=1):
    """float32 x [T, groups · K] and w [groups · r, K] → [T, groups · r]; Ops.linear and Ops.grouped_linear."""
    cdef linear_args a
    check_slices(slices, w.m.k, w.m.format)
    if groups < 1 or w.m.n % groups:
        raise InputError(f"grouped linear: expected outputs in {groups} equal groups, found {w.shape[0]}")
    cdef Buffer xs = floats(x, w.m.k * groups)
    cdef Memory moved, room
    cdef int threads
    a.w, a.rows, a.groups, a.slices, a.stride = &w.m, xs.view.shape[0], groups, slices, w.m.k
    y = lines((a.rows, w.m.n))
    cdef Buffer ys = Buffer(y)
    a.x, a.y = <const float *>xs.view.buf, <float *>ys.view.buf
    if a.rows == 0 or w.m.n == 0:
        return y
    if w.m.format == FORMAT_FP4:
        a.stride = to_64(w.m.k)
        moved = Memory(4 * a.rows * groups * a.stride)
        with nogil:
            team.kernels.quads(a.x, <float *>moved.start, a.rows * groups, w.m.k)
        a.x = <const float *>moved.start
    elif a.rows > 1 and <uintptr_t>a.x % LINE:  # what is read again and again must not straddle two lines
        moved = Memory(4 * a.rows * groups * a.stride)
        a.x = <const float *>memcpy(moved.start, a.x, 4 * a.rows * groups * a.stride)
    threads = team.share(<double>a.rows * w.m.n * w.m.k)
    a.pairs = NULL
    if team.kernels.takes_pairs and w.m.format == FORMAT_FP8 and a.rows > FEW_PAIRS and groups == 1 and w.m.k % 128 == 0:
        room = Memory(2 * threads * min(a.rows, BLOCK) * w.m.k)
        a.pairs = <uint16_t *>room.start
    team.run(team.kernels.linear, &a, threads)
    return y


def swiglu(Team team, g, u, weight, float limit):
    """Ops.swiglu."""
    cdef Buffer gs = floats(g, -1), us = floats(u, gs.view.shape[1]), ws
    cdef swiglu_args a
    a.rows, a.n, a.limit, a.weight = gs.view.shape[0], gs.view.shape[1], limit, NULL
    if us.view.shape[0] != a.rows:
        raise InputError(f"swiglu: expected {a.rows} rows of u, found {us.view.shape[0]}")
    if weight is not None:
        ws = Buffer(weight)
        if ws.view.ndim != 1 or ws.view.format[0] != c"f" or ws.view.shape[0] != a.rows:
            raise InputError(f"swiglu weight: expected float32 [{a.rows}], found {weight.dtype} {weight.shape}")
        a.weight = <const float *>ws.view.buf
    y = lines((a.rows, a.n))
    cdef Buffer ys = Buffer(y)
    a.g, a.u, a.y = <const float *>gs.view.buf, <const float *>us.view.buf, <float *>ys.view.buf
    team.run(team.kernels.swiglu, &a, team.share(20.0 * a.rows * a.n))
    return y


cdef enum:
    JOBS = 8  # of a thread, at least, where experts have the rows for it


cdef class Choices:
    """ids int32 [T, k] and weights float32 [T, k] that belong to x [T, d]."""

    cdef Buffer x, weights, ids
    cdef int64_t rows, k

    def __cinit__(self, x, ids, weights, Bank bank):
        self.x, self.weights, self.ids = floats(x, bank.dim), floats(weights, -1), Buffer(ids)
        self.rows, self.k = self.x.view.shape[0], self.weights.view.shape[1]
        if (self.ids.view.ndim != 2 or self.ids.view.format[0] != c"i" or self.ids.view.shape[0] != self.rows
                or self.ids.view.shape[1] != self.k or self.weights.view.shape[0] != self.rows):
            raise InputError(
                f"moe: expected ids int32 and weights float32 [{self.rows}, k], found {ids.dtype} {ids.shape}, {weights.shape}"
            )


cdef class MoeScratch:
    """The work areas of one moe call, in one block."""

    cdef Memory memory
    cdef moe_args a
    cdef int32_t *expert
    cdef int64_t *first
    cdef int32_t *order
    cdef int32_t *row
    cdef int32_t *part
    cdef float *weight
    cdef int64_t *count
    cdef int64_t *place
    cdef int64_t most  # entries of one use

    def __cinit__(self, Bank bank, int64_t rows, int64_t k, int64_t parts, int slices, int threads):
        cdef int64_t entries = rows * (k + 1), total = 0, uses
        # Where there are few jobs, experts of many rows are several uses, or threads wait for whoever has the largest:
        # the shared one has all rows. Every use decodes the weights again.
        cdef bint few = (bank.experts + 1) * ((bank.inner + 127) // 128) < JOBS * threads and threads > 1
        cdef int64_t even = min(BLOCK, -(-rows // threads))
        self.most = max(16, (max(entries // (JOBS * threads), even) + 7) // 8 * 8) if few else entries
        uses = bank.experts + 1 + entries // self.most
        cdef int64_t[13] sizes = [
            4 * rows * bank.dim, 4 * rows * to_64(bank.dim) if bank.any_fp4 else 0, 4 * entries * to_64(bank.inner),
            4 * MOE_WIDTH * threads * slices * parts, 4 * uses, 8 * (uses + 1), 4 * entries, 4 * entries,
            8 * bank.experts, 4 * entries, 8 * parts, 2 * rows * to_64(bank.dim), 4 * uses,
        ]
        cdef int64_t[13] at
        for i in range(13):
            at[i] = total
            total += (sizes[i] + 63) // 64 * 64
        self.memory = Memory(total)
        cdef char *base = <char *>self.memory.start
        self.a.plain = <float *>(base + at[0])
        self.a.packed = <void *>(base + at[1]) if bank.any_fp4 else NULL
        self.a.act = <float *>(base + at[2])
        self.a.totals = <float *>(base + at[3])
        self.a.expert = self.expert = <int32_t *>(base + at[4])
        self.a.first = self.first = <int64_t *>(base + at[5])
        self.a.row = self.row = <int32_t *>(base + at[6])
        self.a.weight = self.weight = <float *>(base + at[7])
        self.count = <int64_t *>(base + at[8])
        self.a.part = self.part = <int32_t *>(base + at[9])
        self.a.place = self.place = <int64_t *>(base + at[10])
        self.a.pairs = <uint16_t *>(base + at[11])
        self.a.order = self.order = <int32_t *>(base + at[12])

    cdef bint plan(self, Choices given, int experts, const int32_t *where, int64_t lanes, bint shared) noexcept nogil:
        """Sorts (row, choice) by expert, rows ascending, then with `shared` every row for the shared expert.

        where: the rows of sums [.., lanes, ..] that they add to, and −1 is no choice; NULL, lanes 0: each row is a part by
        itself. False: a wrong id.
        """
        cdef const int32_t *ids = <const int32_t *>given.ids.view.buf
        cdef const float *weights = <const float *>given.weights.view.buf
        cdef int64_t i, e, entries, uses = 0, at = 0, rows = given.rows, k = given.k
        for e in range(experts):
            self.count[e] = 0
        for i in range(rows * k):
            if where is not NULL and ids[i] == -1:
                continue
            if ids[i] < 0 or ids[i] >= experts:
                return False
            self.count[ids[i]] += 1
        for e in range(experts):
            entries = self.count[e]
            self.count[e] = at
            uses = self.use(uses, e, at, entries)
            at += entries
        for i in range(rows * k):
            if ids[i] == -1:
                continue
            e = self.count[ids[i]]
            self.count[ids[i]] += 1
            self.enter(e, i // k, i % k, weights[i], where, lanes)
        if shared:
            for i in range(rows):
                self.enter(at + i, i, k, 1.0, where, lanes)
            uses = self.use(uses, experts, at, rows)
            at += rows
        for i in range(rows if lanes == 1 else 0):
            self.place[i] = where[i]
        self.a.uses, self.a.parts = uses, at if lanes > 1 else rows
        self.first[uses] = at
        self.sort(uses)
        return True

    cdef void sort(self, int64_t uses) noexcept nogil:
        """Puts the uses in order of their entries, the most first."""
        cdef int64_t use, entries, i, before
        for use in range(uses):
            entries, i = self.first[use + 1] - self.first[use], use
            while i > 0:
                before = self.order[i - 1]
                if self.first[before + 1] - self.first[before] >= entries:
                    break
                self.order[i] = <int32_t>before
                i -= 1
            self.order[i] = <int32_t>use

    cdef int64_t use(self, int64_t uses, int64_t expert, int64_t at, int64_t entries) noexcept nogil:
        """Adds the uses of one expert, whose entries begin `at`; how many there are now."""
        cdef int64_t end = at + entries
        while at < end:
            self.expert[uses] = <int32_t>expert
            self.first[uses] = at
            at += self.most
            uses += 1
        return uses

    cdef void enter(self, int64_t e, int64_t row, int64_t choice, float weight, const int32_t *where,
                    int64_t lanes) noexcept nogil:
        """Entry e. With several lanes each entry is a part by itself."""
        cdef int64_t part = e if lanes > 1 else row
        self.row[e], self.part[e], self.weight[e] = <int32_t>row, <int32_t>part, weight
        if lanes > 1:
            self.place[part] = where[row] * lanes + choice


cdef int run_moe(Team team, MoeScratch scratch, Choices given, Bank bank, float limit, int slices, int threads) except -1:
    cdef moe_args *a = &scratch.a
    a.matrices, a.x = bank.matrices, <const float *>given.x.view.buf
    a.rows, a.d, a.inner, a.limit, a.slices = given.rows, bank.dim, bank.inner, limit, slices
    a.next_inner = a.next_output = a.wide = 0
    team.run(team.kernels.moe, a, threads)
    if a.wide:
        a.next_inner = a.next_output = a.wide = 0
        team.run(team.kernels.plain.moe, a, threads)
    return 0


def moe(Team team, x, ids, weights, Bank bank, float limit, int slices):
    """Ops.moe: x [T, d], ids int32 [T, k], weights [T, k] → [T, d]."""
    check_slices(slices, bank.inner, FORMAT_FP4)
    cdef Choices given = Choices(x, ids, weights, bank)
    cdef int64_t rows = given.rows, k = given.k
    y = lines((rows, bank.dim))
    if rows == 0:
        return y
    cdef Buffer ys = Buffer(y)
    cdef int threads = team.share(3.0 * rows * (k + 1) * bank.dim * bank.inner)
    cdef MoeScratch scratch = MoeScratch(bank, rows, k, rows, slices, threads)
    if not scratch.plan(given, bank.experts, NULL, 0, True):
        raise InputError(f"moe: expected expert ids 0 to {bank.experts - 1}, found {ids.min()} to {ids.max()}")
    scratch.a.y, scratch.a.sums = <float *>ys.view.buf, NULL
    run_moe(team, scratch, given, bank, limit, slices, threads)
    return y


def moe_add(Team team, sums, where, x, ids, weights, Bank bank, float limit, bint shared):
    """Ops.moe_add: sums float32 [rows, lanes, slices, d], in place; where int32 [T]."""
    cdef Choices given = Choices(x, ids, weights, bank)
    cdef Buffer to = Buffer(sums, writable=True), places = Buffer(where)
    cdef int64_t rows = given.rows, k = given.k, i
    if (to.view.ndim != 4 or to.view.format[0] != c"f" or to.view.shape[3] != bank.dim or to.view.shape[1] not in (1, k + 1)
            or places.view.ndim != 1 or places.view.format[0] != c"i" or places.view.shape[0] != rows):
        raise InputError(
            f"moe_add: expected sums float32 [rows, 1 or {k + 1}, slices, {bank.dim}] and where int32 [{rows}], "
            f"found {sums.dtype} {sums.shape} and {where.dtype} {where.shape}"
        )
    cdef int64_t lanes = to.view.shape[1]
    cdef int slices = to.view.shape[2], threads = team.share(3.0 * rows * bank.dim * bank.inner)
    check_slices(slices, bank.inner, FORMAT_FP4)
    if rows == 0:
        return
    cdef MoeScratch scratch = MoeScratch(bank, rows, k, rows if lanes == 1 else rows * lanes, slices, threads)
    cdef const int32_t *to_row = <const int32_t *>places.view.buf
    for i in range(rows):
        if to_row[i] < 0 or to_row[i] >= to.view.shape[0]:
            raise InputError(f"moe_add: expected rows 0 to {sums.shape[0] - 1}, found {where.min()} to {where.max()}")
    if not scratch.plan(given, bank.experts, to_row, lanes, shared):
        raise InputError(f"moe_add: expected expert ids -1 to {bank.experts - 1}, found {ids.min()} to {ids.max()}")
    if scratch.a.uses == 0:
        return
    scratch.a.y, scratch.a.sums = NULL, <float *>to.view.buf
    run_moe(team, scratch, given, bank, limit, slices, threads)


def moe_end(Team team, sums):
    """Ops.moe_end: sums float32 [T, lanes, slices, d] → [T, d]."""
    cdef Buffer given = Buffer(sums)
    if given.view.ndim != 4 or given.view.format[0] != c"f" or given.view.shape[2] not in (1, 2, 4, 8):
        raise InputError(f"moe_end: expected float32 [rows, lanes, 1, 2, 4 or 8 slices, d], found {sums.dtype} {sums.shape}")
    cdef moe_end_args a
    a.rows, a.lanes, a.slices, a.d = given.view.shape[0], given.view.shape[1], given.view.shape[2], given.view.shape[3]
    y = lines((a.rows, a.d))
    cdef Buffer ys = Buffer(y)
    a.sums, a.y = <const float *>given.view.buf, <float *>ys.view.buf
    team.run(team.kernels.moe_end, &a, team.share(<double>a.rows * a.lanes * a.slices * a.d))
    return y

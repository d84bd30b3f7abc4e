"""The CUDA backend's matrices: linears, routing and experts (cuda/linear.cu, moe.cu, head.cu).

Packed weights (fp8, fp4) run on tensor cores. Which kernel does it depends on the number of rows; the order of every sum
on the shapes of the weights alone (cuda/product.cuh), so that no bit of a row depends on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import BackendError, CheckpointError, InputError
from .cuda_base import Array, CudaBase, ceil

_THREADS, _WARPS = 256, 8
_BLOCK = 128  # inputs per scale
FEW = 32  # rows up to which a linear's blocks add up its slices themselves
_ALIGNED = 16  # bytes: addresses and rows of packed weights
EXPERT_SCRATCH = 64 << 20  # bytes: what the experts add to each row is kept for so many outputs at a time
_MAX_CHOICES = 32
_BYTES = {"fp8": 1, "fp4": 1, "bf16": 2, "f32": 4}

_i32, _f32 = np.int32, np.float32


@dataclass(frozen=True)
class Matrix:
    """A linear's weights where the kernels run. stride: bytes of a row of codes; blocks: of 128 inputs."""

    fmt: str
    shape: tuple[int, int]
    weight: Array
    scale: Array | None
    stride: int

    @property
    def blocks(self) -> int:
        return ceil(self.shape[1], _BLOCK)


@dataclass(frozen=True)
class Bank:
    """One layer's experts. table int64 [experts + 1, 3, 2]: addresses of each one's codes and scales, the shared one last."""

    experts: list[tuple[Matrix, Matrix, Matrix]]
    shared: tuple[Matrix, Matrix, Matrix]
    table: Array = field(repr=False)


class _Rows(NamedTuple):
    """Rows of x as the products take them (cuda/product.cuh); low: the second piece, None where all are rounded."""

    high: Array
    low: Array | None
    scale: Array


class _Entries(NamedTuple):
    """What a product multiplies: entries begin .. end − 1 of one expert, or tiles of several. See cuda/linear.cu."""

    end: int
    height: int
    begin: int = 0
    rows: Array | None = None
    tiles: Array | None = None
    tile_count: Array | None = None
    most: int = 0  # tiles there may be
    expert: int = 0


class _Out(NamedTuple):
    """Where sums go: out[entry · row + z · group + slice · part + output]; part 0: slices are added up."""

    array: Array
    row: int
    group: int = 0
    part: int = 0


def _height(rows: int) -> int:
    """Entries of a tile: 8 or FEW where few rows share weights that are read once, else 64."""
    return 8 if rows <= 8 else FEW if rows <= FEW else 64


def _parts(blocks: int) -> int:
    """Number of parts that a slice of so many blocks is cut into: at least four blocks each, so that a part is worth a warp."""
    return next(p for p in (8, 4, 2, 1) if blocks >= 4 * p or p == 1)


class DenseMixin(CudaBase):
    """Ops of this family; what they compute is said in Ops."""

    # ------------------------------------------------------------------ what the backend keeps
    def matrix(self, fmt: str, weight: Array, scale: Array | None = None) -> Matrix:
        """As in Ops. Arrays that are on the device already are kept, not copied, where their rows are aligned to 16 bytes.

        Raises CheckpointError where weight and scale do not fit together.
        """
        shape = self._check_matrix(fmt, weight, scale)
        weight = self.upload(weight)
        if fmt in ("bf16", "f32"):
            return Matrix(fmt, shape, weight, None, weight.shape[1] * _BYTES[fmt])
        rows, size = weight.shape
        stride = ceil(size, _ALIGNED) * _ALIGNED
        if stride != size or self.launcher.address(weight) % _ALIGNED:
            padded = self.empty((rows, stride), np.uint8)
            grid = (ceil(rows * stride, _THREADS),)
            self.run("linear.cu", "pad_rows", grid, (_THREADS,), weight, padded, np.int64(rows), _i32(size), _i32(stride))
            weight = padded
        return Matrix(fmt, shape, weight, self._aligned(self.upload(scale)), stride)

    def _aligned(self, scale: Array) -> Array:
        """Scales of fp4 are read four at a time."""
        if self.launcher.address(scale) % 4 == 0:
            return scale
        copy, size = self.empty(scale.shape, np.uint8), scale.size
        grid = (ceil(size, _THREADS),)
        self.run("linear.cu", "pad_rows", grid, (_THREADS,), scale, copy, np.int64(1), _i32(size), _i32(size))
        return copy

    @staticmethod
    def _check_matrix(fmt: str, weight: Array, scale: Array | None) -> tuple[int, int]:
        if fmt not in _BYTES:
            raise BackendError(f"matrix: expected fmt one of {', '.join(_BYTES)}, found {fmt!r}")
        if weight.ndim != 2 or weight.dtype.itemsize != _BYTES[fmt]:
            raise CheckpointError(
                f"{fmt} weight: expected 2 dimensions of {_BYTES[fmt]}-byte items, found {weight.dtype} {weight.shape}"
            )
        n, k = weight.shape
        expected = None
        if fmt == "fp8":
            expected = (ceil(n, _BLOCK), ceil(k, _BLOCK))
        elif fmt == "fp4":
            k *= 2
            expected = (n, k // 32)
            if k % 32:
                raise CheckpointError(f"fp4 weight: expected K in groups of 32, found K = {k}")
        found = None if scale is None else tuple(scale.shape)
        if found != expected or (scale is not None and scale.dtype.itemsize != 1):
            raise CheckpointError(f"{fmt} weight [{n}, {k}]: expected a one-byte scale {expected}, found {found}")
        return n, k

    def bank(self, experts: list[tuple[Matrix, Matrix, Matrix]], shared: tuple[Matrix, Matrix, Matrix]) -> Bank:
        """As in Ops: a table of addresses. Raises CheckpointError where shapes or formats differ."""
        inner, dim = shared[0].shape
        every = [*experts, shared]
        for e, matrices in enumerate(every):
            for i, m in enumerate(matrices):
                expected = (dim, inner) if i == 1 else (inner, dim)
                fmt = shared[0].fmt if e == len(experts) else experts[0][0].fmt
                if m.shape != expected or m.fmt != fmt or fmt not in ("fp4", "fp8"):
                    raise CheckpointError(
                        f"expert {e}, w{i + 1}: expected fp4 or fp8 {expected} like the shared expert and one format for "
                        f"all routed ones, found {m.fmt} {m.shape}"
                    )
        address = self.launcher.address
        table = [[[address(m.weight), address(m.scale)] for m in matrices] for matrices in every]
        return Bank(list(experts), tuple(shared), self.upload(np.array(table, np.int64)))

    # ------------------------------------------------------------------ linears
    def linear(self, x: Array, w: Matrix, slices: int = 1) -> Array:
        return self._linear(x, w, slices, 1)

    def grouped_linear(self, o: Array, w: Matrix, groups: int) -> Array:
        return self._linear(o, w, 1, groups)

    def _linear(self, x: Array, w: Matrix, slices: int, groups: int) -> Array:
        (n, k), t = w.shape, len(x)
        self._check_slices(slices, k, w.fmt)
        if groups < 1 or n % groups:
            raise InputError(f"grouped linear: expected outputs in {groups} equal groups, found {n}")
        if x.ndim != 2 or x.shape[1] != groups * k or x.dtype != np.float32:
            raise InputError(f"linear: expected float32 [rows, {groups * k}], found {x.dtype} {x.shape}")
        y = self.empty((t, n))
        if not t or not n:
            return y
        if w.scale is None:
            rows = 1 if t == 1 else 8
            grid = (ceil(n // groups, 4 * _WARPS), ceil(t, rows), groups)
            sizes = _i32(t), _i32(n // groups), _i32(k), _i32(slices)
            self.run("linear.cu", f"dense_{w.fmt}_{rows}", grid, (_THREADS,), x, w.weight, y, *sizes)
            return y
        packed = self._pack(x, t * groups, k, rounded=False)
        height = _height(t)
        if height == 64 and slices > 1:
            part = self.empty((slices, t, n))
            self._product(w, packed, _Entries(t, height), _Out(part, n, n // groups, t * n), slices=slices, groups=groups)
            grid = (ceil(t * n, _THREADS),)
            self.run("linear.cu", "add_slices", grid, (_THREADS,), part, y, np.int64(t * n), _i32(slices))
        else:
            self._product(w, packed, _Entries(t, height), _Out(y, n, n // groups), slices=slices, groups=groups)
        return y

    @staticmethod
    def _check_slices(slices: int, k: int, fmt: str) -> None:
        if slices == 1:
            return
        if slices not in (2, 4, 8) or k % slices or (fmt in ("fp8", "fp4") and k // slices % _BLOCK):
            raise InputError(
                f"slices: expected 1, 2, 4 or 8 equal ones, of whole 128s for packed weights; found {slices} of K = {k}"
            )

    def _pack(self, x: Array, rows: int, k: int, rounded: bool) -> _Rows:
        """x, float32 [rows, k] in memory, as packed rows; rounded: to e4m3 first."""
        blocks = ceil(k, _BLOCK)
        high, scale = self.empty((rows, blocks, _BLOCK), np.uint16), self.empty((rows, blocks))
        low = None if rounded else self.empty((rows, blocks, _BLOCK), np.uint16)
        grid = (ceil(rows * blocks, _WARPS),)
        sizes = _i32(rows), _i32(k), _i32(blocks), _i32(rounded)
        self.run("linear.cu", "pack_rows", grid, (_THREADS,), x, *sizes, high, low, scale)
        return _Rows(high, low, scale)

    def _product(
        self, w: Matrix, x: _Rows, entries: _Entries, out: _Out, *, slices: int = 1, groups: int = 1, table: Array | None = None,
        member: int = 0, first: int = 0, outputs: int | None = None,
    ) -> None:  # fmt: skip
        """Entries times a matrix; with a table `w` says format and shape only. groups: of the matrix's rows and of x, or, with
        a table, matrices `member`, `member` + 2 … of each expert. Outputs first .. first + outputs − 1, of every group."""
        n = outputs if outputs else w.shape[0] // (1 if table is not None else groups)
        parts = _parts(w.blocks // slices)
        leaves, height = slices * parts, entries.height
        if height == 32 and leaves > 16 and entries.tiles is None:
            height = 8  # sums of 32 rows do not fit into shared memory
        tiles = entries.most if entries.tiles is not None else ceil(entries.end - entries.begin, height)
        lanes = min(_WARPS, leaves)
        if height == 64:
            grid, shared = (ceil(n, _BLOCK), tiles, groups * slices), 0
        else:
            grid = (ceil(n, 16 * _WARPS // lanes), tiles, groups)
            shared = 4 * _WARPS // lanes * leaves * height * 16
        step = (1, 0) if table is not None else (groups, 1)
        self.run(
            "linear.cu", f"product_{w.fmt}_{height}", grid, (_THREADS,), None if table is not None else w.weight,
            None if table is not None else w.scale, table, _i32(entries.expert), _i32(member), x.high, x.low, x.scale,
            entries.rows, *map(_i32, step), entries.tiles, entries.tile_count,
            *map(_i32, (entries.begin, entries.end, n, first, w.stride, w.blocks, slices, parts)),
            out.array, np.int64(out.row), np.int64(out.group), np.int64(out.part), shared=shared,
        )  # fmt: skip

    # ------------------------------------------------------------------ experts
    def gate(
        self, x: Array, w: Matrix, bias: Array | None, fixed: Array | None, tokens: Array, k: int, scale: float
    ) -> tuple[Array, Array]:
        t, experts = len(x), w.shape[0]
        if not 1 <= k <= min(experts, _MAX_CHOICES):
            raise InputError(f"gate: expected 1 to {min(experts, _MAX_CHOICES)} experts per row, found {k}")
        logits = self.linear(x, w)
        ids, weights = self.empty((t, k), np.int32), self.empty((t, k))
        self.run("moe.cu", "gate", (t,), (128,), logits, bias, fixed, tokens, ids, weights, _i32(experts), _i32(k), _f32(scale),
                 shared=8 * experts)  # fmt: skip
        return ids, weights

    def swiglu(self, g: Array, u: Array, weight: Array | None, limit: float) -> Array:
        if g.shape != u.shape or g.ndim != 2 or (weight is not None and weight.shape != g.shape[:1]):
            raise InputError(f"swiglu: expected g and u [n, inter] and weight [n], found {g.shape}, {u.shape}")
        y, (rows, n) = self.empty(g.shape), g.shape
        grid = (ceil(rows * n, _THREADS),)
        self.run("moe.cu", "swiglu", grid, (_THREADS,), g, u, weight, y, _i32(rows), _i32(n), _f32(limit))
        return y

    def moe(self, x: Array, ids: Array, weights: Array, bank: Bank, limit: float, slices: int) -> Array:
        """As in Ops. A row with an id of no expert becomes NaN: what ids hold is not known here without waiting for it."""
        d = self._check_moe(x, ids, weights, bank, slices)
        (t, k), y = ids.shape, self.empty(x.shape)
        if not t:
            return y
        routed, shared, factor, place = self._plan(ids, weights, len(bank.experts))

        def combine(z: Array, first: int, width: int) -> None:
            sizes = map(_i32, (t, k, slices, width, first, d))
            self.run("moe.cu", "combine", (ceil(width, _THREADS), t), (_THREADS,), z, place, y, *sizes)

        self._products(x, [(bank.experts[0], routed), (bank.shared, shared)], factor, bank, limit, slices, combine)
        return y

    def moe_add(
        self, sums: Array, where: Array, x: Array, ids: Array, weights: Array, bank: Bank, limit: float, shared: bool
    ) -> None:
        """As in Ops; an id of no expert counts as −1."""
        (_, lanes, slices, _), (t, k) = sums.shape, ids.shape
        d = self._check_moe(x, ids, weights, bank, slices)
        if lanes not in (1, k + 1) or sums.shape[3] != d or where.shape != (t,) or where.dtype != np.int32:
            raise InputError(
                f"moe_add: expected sums [rows, 1 or {k + 1}, slices, {d}] and where int32 [{t}], found {sums.shape} and "
                f"{where.dtype} {where.shape}"
            )
        if not t or not (bank.experts or shared):
            return
        routed, everybody, factor, place = self._plan(ids, weights, len(bank.experts))
        work = [(bank.experts[0], routed)] if bank.experts else []
        if shared:
            work.append((bank.shared, everybody))

        def add(z: Array, first: int, width: int) -> None:
            sizes = map(_i32, (t, k, lanes, slices, width, first, d, shared))
            self.run("moe.cu", "add_parts", (ceil(width, _THREADS), t), (_THREADS,), z, place, where, sums, *sizes)

        self._products(x, work, factor, bank, limit, slices, add)

    def moe_end(self, sums: Array) -> Array:
        (t, lanes, slices, d), y = sums.shape, self.empty((len(sums), sums.shape[3]))
        if t:
            sizes = map(_i32, (lanes, slices, d))
            self.run("moe.cu", "add_lanes", (ceil(d, _THREADS), t), (_THREADS,), sums, y, *sizes)
        return y

    def _check_moe(self, x: Array, ids: Array, weights: Array, bank: Bank, slices: int) -> int:
        """→ d."""
        inner, d = bank.shared[0].shape
        self._check_slices(slices, inner, "fp4")
        if ids.ndim != 2 or weights.shape != ids.shape or x.shape != (len(ids), d) or ids.dtype != np.int32:
            raise InputError(
                f"moe: expected x [T, {d}], ids int32 and weights float32 [T, k]; found {x.shape}, {ids.dtype} {ids.shape}, "
                f"{weights.shape}"
            )
        return d

    def _products(
        self, x: Array, work: list[tuple[tuple[Matrix, ...], _Entries]], factor: Array, bank: Bank, limit: float, slices: int,
        add: Callable[[Array, int, int], None],
    ) -> None:  # fmt: skip
        """add(z [entries, slices, width], first, width): what each entry gives to some outputs, for all outputs in turn.

        work: entries and matrices of their format. The others' places in z are not written.
        """
        (t, d), count, inner = x.shape, len(factor), bank.shared[0].shape[0]
        packed = self._pack(x, t, d, rounded=True)
        products = self.empty((2, count, inner))
        for matrices, entries in work:
            self._product(matrices[0], packed, entries, _Out(products, inner, products.size // 2), groups=2, table=bank.table)
        act = self._activate(products, factor, limit)
        width = max(1, EXPERT_SCRATCH // (4 * slices * count * _BLOCK)) * _BLOCK
        for first in range(0, d, width):
            width = min(width, d - first)
            z = self.empty((count, slices, width))
            for matrices, entries in work:
                out = _Out(z, slices * width, 0, width)
                self._product(matrices[1], act, entries._replace(rows=None), out, slices=slices, table=bank.table, member=1,
                              first=first, outputs=width)  # fmt: skip
            add(z, first, width)
            del z, out  # before there are the next

    def _plan(self, ids: Array, weights: Array, experts: int) -> tuple[_Entries, _Entries, Array, Array]:
        """Entries sorted by expert: the routed ones and the shared expert's, each entry's weight, and each choice's entry."""
        t, k = ids.shape
        height = _height(t)
        most = min(experts, t * k) + t * k // height
        rows, factor, place = self.empty(t * (k + 1), np.int32), self.empty(t * (k + 1)), self.empty((t, k), np.int32)
        tiles, tile_count = self.empty((most, 3), np.int32), self.empty(1, np.int32)
        sizes = _i32(t), _i32(k), _i32(experts), _i32(height)
        self.run("moe.cu", "plan", (1,), (512,), ids, weights, rows, factor, place, tiles, tile_count, *sizes, shared=8 * experts)
        routed = _Entries(t * k, height, rows=rows, tiles=tiles, tile_count=tile_count, most=most)
        shared = _Entries(t * (k + 1), height, begin=t * k, rows=rows, expert=experts)
        return routed, shared, factor, place

    def _activate(self, products: Array, factor: Array, limit: float) -> _Rows:
        _, entries, inner = products.shape
        blocks = ceil(inner, _BLOCK)
        high, scale = self.empty((entries, blocks, _BLOCK), np.uint16), self.empty((entries, blocks))
        grid = (ceil(entries * blocks, _WARPS),)
        sizes = _i32(entries), _i32(inner), _i32(blocks), _f32(limit)
        self.run("moe.cu", "activate", grid, (_THREADS,), products, factor, *sizes, high, scale)
        return _Rows(high, None, scale)

    # ------------------------------------------------------------------ head
    def best(self, logits: Array) -> tuple[Array, Array]:
        t, vocab = logits.shape
        ids, lead = self.empty(t, np.int32), self.empty(t)
        self.run("head.cu", "head_best", (t,), (1024,), logits, ids, lead, _i32(vocab))
        return ids, lead

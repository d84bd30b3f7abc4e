"""The CPU backend: compiled kernels (pyx/) on NumPy arrays.

What is here: weights, linears and experts. Everything that works row by row without a matrix is in cpu_rows.py. Every
sum has a fixed order, so the bits depend neither on the number of rows nor on threads nor on the instruction set.
"""

from __future__ import annotations

import numpy as np

from .. import _cpu
from . import IndexCache, KeyCache, Ops
from .cpu_rows import RowsMixin


class CpuOps(RowsMixin, Ops):
    """Ops on this machine's processor. Weights stay where they lie (a memory-mapped file, say): nothing is copied."""

    name = "cpu"

    def __init__(self, threads: int = 1, isa: str | None = None) -> None:
        """threads: 1 to 256, the caller's own among them. isa: "scalar", "avx2", "avx512", "avx512bf16"; None: the best there is.

        Raises ConfigError for a wrong number of threads, BackendError for an instruction set that is not there.
        """
        self.team = _cpu.Team(threads, isa)

    # ------------------------------------------------------------------ what the backend keeps
    def matrix(self, fmt: str, weight: np.ndarray, scale: np.ndarray | None = None) -> _cpu.Matrix:
        return _cpu.Matrix(fmt, weight, scale)

    def vector(self, array: np.ndarray) -> np.ndarray:
        if array.dtype == np.uint16:
            return (array.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(array, np.float32)

    def table(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def bank(self, experts: list, shared: tuple) -> _cpu.Bank:
        return _cpu.Bank(list(experts), tuple(shared))

    def zeros(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        return np.zeros(shape, dtype)

    def key_cache(self, n: int, dim: int, rope_dim: int) -> KeyCache:
        plain = dim - rope_dim
        return KeyCache(
            np.zeros((n, plain), np.uint8), np.zeros((n, -(-plain // 64)), np.uint8), np.zeros((n, rope_dim), np.uint16)
        )

    def index_cache(self, n: int, dim: int) -> IndexCache:
        return IndexCache(np.zeros((n, dim // 2), np.uint8), np.zeros((n, -(-dim // 32)), np.uint8))

    # ------------------------------------------------------------------ linears and experts
    def linear(self, x: np.ndarray, w: _cpu.Matrix, slices: int = 1) -> np.ndarray:
        return _cpu.linear(self.team, x, w, slices)

    def grouped_linear(self, o: np.ndarray, w: _cpu.Matrix, groups: int) -> np.ndarray:
        return _cpu.linear(self.team, o, w, 1, groups)

    def swiglu(self, g: np.ndarray, u: np.ndarray, weight: np.ndarray | None, limit: float) -> np.ndarray:
        return _cpu.swiglu(self.team, g, u, weight, limit)

    def moe(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, bank: _cpu.Bank, limit: float, slices: int
    ) -> np.ndarray:
        return _cpu.moe(self.team, x, ids, weights, bank, limit, slices)

    def moe_add(
        self,
        sums: np.ndarray,
        where: np.ndarray,
        x: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
        bank: _cpu.Bank,
        limit: float,
        shared: bool,
    ) -> None:
        _cpu.moe_add(self.team, sums, where, x, ids, weights, bank, limit, shared)

    def moe_end(self, sums: np.ndarray) -> np.ndarray:
        return _cpu.moe_end(self.team, sums)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

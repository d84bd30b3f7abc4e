"""The CUDA backend's attention side on NumPy arrays, for tests of its kernels: outputs start as NaN, or far outside."""

from __future__ import annotations

import numpy as np
from compare import same_bits
from emulation.launcher import FORWARD, REVERSE, EmulatedLauncher

from dsv4.ops import Ops
from dsv4.ops.cuda_rows import RowsMixin
from dsv4.ops.reference import ReferenceOps


class EmulatedRows(RowsMixin, ReferenceOps):
    """RowsMixin's ops, run on the CPU. What it does not have is the reference's."""

    name = "emulated"

    def __init__(self, order: int = FORWARD, shift: int = 0):
        """shift: items by which the arrays that the ops make begin after a 64-byte boundary; fragments (uint32) never do."""
        self.launcher, self.shift = EmulatedLauncher(order), shift

    def empty(self, shape, dtype=np.float32):
        dtype = np.dtype(dtype)
        size, shift = int(np.prod(shape)) * dtype.itemsize, 0 if dtype == np.uint32 else self.shift * dtype.itemsize
        room = np.full(size + 128 + shift, 0xFF, np.uint8)
        start = -room.ctypes.data % 64 + shift
        return room[start : start + size].view(dtype).reshape(shape)

    def moved(self, array: np.ndarray) -> np.ndarray:
        """A copy of an array that begins where this backend's begin."""
        out = self.empty(array.shape, array.dtype)
        out[...] = array
        return out

    def key_cache(self, n, dim, rope_dim):
        return type(cache := super().key_cache(n, dim, rope_dim))(*map(self.moved, cache))

    def index_cache(self, n, dim):
        return type(cache := super().index_cache(n, dim))(*map(self.moved, cache))


PLAIN = EmulatedRows()
OTHERS = {"reverse": EmulatedRows(REVERSE), "shuffled": EmulatedRows(11), "misaligned": EmulatedRows(shift=1)}


def same_rows(case, ops: Ops = PLAIN, counts=(1, 2, 7, 31)) -> None:
    """Rows alone, and the first `count` of them, have the bits they have among all."""
    every, n = case(ops), case.rows
    parts = [slice(0, count) for count in counts if count < n]
    for rows in [*parts, slice(n // 2, n // 2 + 1), slice(n - 1, n)]:
        for name, found in case(ops, rows).items():
            same_bits(found, every[name][rows], f"{case.name}: {name}, rows {rows.start}..{rows.stop - 1} of {n}")


def same_otherwise(case) -> None:
    """Threads in another order and arrays at other addresses change no bit."""
    expected = case(PLAIN)
    for kind, ops in OTHERS.items():
        inputs = {name: ops.moved(a) if isinstance(a, np.ndarray) else a for name, a in case.inputs.items()}
        found = {name: ops.to_host(a) for name, a in case.run(ops, **inputs).items()}
        for name in expected:
            same_bits(found[name], expected[name], f"{case.name}: {name}, {kind}")

"""The CUDA backend's attention side on NumPy arrays, for tests of its kernels: outputs start as NaN, or far outside."""

from __future__ import annotations

import numpy as np
from emulation.launcher import FORWARD, EmulatedLauncher

from dsv4.ops.cuda_rows import RowsMixin
from dsv4.ops.reference import ReferenceOps


class EmulatedRows(RowsMixin, ReferenceOps):
    """RowsMixin's ops, run on the CPU. What it does not have is the reference's."""

    name = "emulated"

    def __init__(self, order: int = FORWARD, sanitizer: str = "", shift: int = 0):
        """shift: items by which the arrays that the ops make begin after a 64-byte boundary."""
        self.launcher, self.shift = EmulatedLauncher(order, sanitizer), shift

    def empty(self, shape, dtype=np.float32):
        return self.moved(np.empty(shape, dtype), True)

    def moved(self, array: np.ndarray, poison: bool = False) -> np.ndarray:
        """A copy of an array that begins `shift` items after a 64-byte boundary, or an array that nobody has written."""
        room = np.full(array.nbytes + 128 + self.shift * array.itemsize, 0xFF, np.uint8)
        start = -room.ctypes.data % 64 + self.shift * array.itemsize
        out = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        if not poison:
            out[...] = array
        return out

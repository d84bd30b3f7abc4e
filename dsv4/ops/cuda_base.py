"""What the CUDA backend's parts share: arrays where the kernels run, and launches through the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from .kernels import Launcher

Array = Any
_GRID = 65535  # blocks of a grid's second and third dimension


def ceil(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


class CudaBase:
    """Arrays and launches. Everything goes to the launcher's one compute stream, in order; nothing here waits for it."""

    launcher: Launcher

    def empty(self, shape: tuple[int, ...] | int, dtype: Any = np.float32) -> Array:
        """An uninitialised array where the kernels run."""
        return self.launcher.empty(shape, dtype)

    def upload(self, array: np.ndarray) -> Array:
        """A copy of a host array where the kernels run; an array that is there already, as it is."""
        return self.launcher.upload(array) if isinstance(array, np.ndarray) else array

    def run(
        self, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], *args: Any,
        shared: int = 0, defines: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Launch a kernel of a file in cuda/; see kernels.Kernel. Raises InputError for more rows than a grid has room for."""
        if max(grid[1:], default=0) > _GRID:
            raise InputError(f"{kernel}: expected at most {_GRID} rows in one forward, found more; use smaller chunks (--chunk)")
        self.launcher.compile(source, defines).kernel(kernel)(grid, block, args, shared)

    def each(self, function: Callable, n: int, *args: Any) -> None:
        """function(i, *args) for i in 0 .. n−1, in no order and without cooperation; for index bookkeeping."""
        self.launcher.each(function, n, args)

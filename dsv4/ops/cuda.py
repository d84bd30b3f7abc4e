"""The CUDA backend: the kernels of cuda/, given their work by a launcher.

Each family of ops has its module: cuda_dense.py (matrices and experts), cuda_rows.py (attention, compressor, indexer),
cuda_places.py (where keys lie), cuda_norm.py (norms, hyper-connections, quantiser). Here: memory; cuda_room.py says how
much of it a forward takes. Nothing waits for the device but to_host and has_nonfinite. Every sum has a fixed
order, so a row's bits do not depend on the number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import formats
from ..config import ModelConfig
from ..errors import CapacityError
from . import IndexCache, KeyCache, Ops
from .cuda_base import Array, ceil
from .cuda_dense import DenseMixin
from .cuda_norm import NormMixin
from .cuda_room import step_bytes
from .cuda_rows import RowsMixin
from .cuda_stage import DeviceStage
from .kernels import Launcher


class CudaOps(DenseMixin, RowsMixin, NormMixin, Ops):
    """Ops on the launcher's device."""

    name = "cuda"

    def __init__(self, launcher: Launcher):
        self.launcher = launcher

    # ------------------------------------------------------------------ what the backend keeps
    def vector(self, array: Array) -> Array:
        if isinstance(array, np.ndarray):
            array = formats.bf16_decode(array) if array.dtype == np.uint16 else np.ascontiguousarray(array, np.float32)
        return self.upload(array)

    def table(self, array: Array) -> Array:
        return self.upload(array)

    def stage(self, slots: int, slot_bytes: int) -> DeviceStage:
        return DeviceStage(self.launcher, slots, slot_bytes)

    def room(self, weights: int) -> int:
        free = self.launcher.free_bytes()
        if free < weights:
            raise CapacityError(
                f"backend cuda: expected {weights / 1e9:.2f} GB of device memory for the weights, found {free / 1e9:.2f} GB "
                "free; stage the experts (--expert-cache), start more ranks, or use --backend cpu"
            )
        return free - weights

    def step_bytes(self, config: ModelConfig, split: Any, rows: int, context: int) -> int:
        return step_bytes(config, split, rows, context)

    def reserve(self, nbytes: int) -> None:
        self.launcher.reserve(nbytes)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.launcher.zeros(shape, dtype)

    def key_cache(self, n: int, dim: int, rope_dim: int) -> KeyCache:
        plain = dim - rope_dim
        scales = ceil(plain, formats.KEY_BLOCK)
        zeros = self.launcher.zeros
        return KeyCache(zeros((n, plain), np.uint8), zeros((n, scales), np.uint8), zeros((n, rope_dim), np.uint16))

    def index_cache(self, n: int, dim: int) -> IndexCache:
        zeros = self.launcher.zeros
        return IndexCache(zeros((n, dim // 2), np.uint8), zeros((n, dim // formats.FP4_BLOCK), np.uint8))

    def to_host(self, x: Array) -> np.ndarray:
        return x if isinstance(x, np.ndarray) else self.launcher.download(x)

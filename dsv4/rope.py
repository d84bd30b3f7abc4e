"""The rotation of positions: angles per position and pair of dimensions."""

from __future__ import annotations

import math

import numpy as np

from .config import ModelConfig


def correction_dims(config: ModelConfig) -> tuple[int, int]:
    """YaRN's first and last dimension pair of the ramp from the layers' own frequencies to those divided by `factor`."""
    yarn, dims, base = config.yarn, config.qk_rope_head_dim, config.compress_rope_theta

    def dim(beta: float) -> float:
        turns = yarn.original_max_position_embeddings / (2 * math.pi * beta)
        return dims * math.log(turns) / (2 * math.log(base))

    return max(math.floor(dim(yarn.beta_fast)), 0), min(math.ceil(dim(yarn.beta_slow)), dims - 1)


def rope_thetas(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Rotation per position and pair: (layers without compression, layers with), float32 [R/2] each.

    Every step is rounded to float32: from float64 the angles at position 100,000 would be off by 1e-3.
    """
    f32 = np.float32
    pairs = np.arange(config.qk_rope_head_dim // 2)
    exponent = (2 * pairs).astype(f32) / f32(config.qk_rope_head_dim)

    def frequency(base: float) -> np.ndarray:
        return f32(1) / (np.float64(base) ** exponent.astype(np.float64)).astype(f32)

    low, high = correction_dims(config)
    width = f32(high - low if high != low else 0.001)
    ramp = np.clip((pairs - low).astype(f32) / width, f32(0), f32(1))
    keep = f32(1) - ramp
    scaled = f32(1) - keep
    f = frequency(config.compress_rope_theta)
    return frequency(config.rope_theta), (f / f32(config.yarn.factor)) * scaled + f * keep

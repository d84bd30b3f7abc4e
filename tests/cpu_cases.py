"""What the tests of the compiled linears and experts share: instruction sets and random weights by format."""

import numpy as np

from dsv4 import _cpu, formats

ISAS = _cpu.instruction_sets()
FORMATS = ("fp8", "fp4", "bf16", "f32")


def weights(fmt: str, n: int, k: int, seed: int = 0) -> tuple:
    """Arguments of ops.matrix: random codes over random scales around 2^-7."""
    rng = np.random.default_rng([seed, n, k])
    if fmt == "fp8":
        codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x38  # no NaN
        return fmt, codes, rng.integers(116, 124, (-(-n // 128), -(-k // 128)), dtype=np.uint8)
    if fmt == "fp4":
        codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        return fmt, codes, rng.integers(116, 124, (n, k // 32), dtype=np.uint8)
    values = rng.standard_normal((n, k)).astype(np.float32)
    return (fmt, formats.bf16_encode(values)) if fmt == "bf16" else (fmt, values)


def decoded(fmt: str, weight: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """The weights as float64 [N, K], from tables and powers of two."""
    if fmt == "fp8":
        values = formats.e4m3_decode(weight).astype(np.float64)
        n, k = weight.shape
        return values * np.exp2(scale.astype(np.float64) - 127).repeat(128, 0).repeat(128, 1)[:n, :k]
    if fmt == "fp4":
        magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = np.concatenate([magnitude, -magnitude])
        values = np.stack([table[weight & 15], table[weight >> 4]], axis=-1).reshape(len(weight), -1)
        return values * np.exp2(scale.astype(np.float64) - 127).repeat(32, 1)
    return (formats.bf16_decode(weight) if fmt == "bf16" else weight).astype(np.float64)


def inputs(t: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, t, k]).standard_normal((t, k)).astype(np.float32)


def poison(*shape: int) -> None:
    """Leave NaNs in the array of this shape that a kernel returns next."""
    _cpu.lines(shape).fill(np.nan)

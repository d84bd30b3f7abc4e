"""Times of kernels, beside what the memory and the processor could do in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from ..config import default_threads
from ..ops import open_ops

READ_BYTES = 512 << 20  # far more than any cache
BYTE_PRODUCTS = 1 << 28  # multiply-adds a thread whose time is measured
_PAUSE = 2  # calls before any is timed


def seconds(run: Callable[[int], object], repeats: int) -> float:
    """Median time of run(i), i counting up: for a caller that takes other weights with every i."""
    for i in range(_PAUSE):
        run(i)
    taken = []
    for i in range(_PAUSE, _PAUSE + repeats):
        start = time.perf_counter()
        run(i)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@cache
def _words() -> np.ndarray:
    return np.ones(READ_BYTES // 8, np.uint64)


def bandwidth(threads: int, repeats: int = 9) -> float:
    """Bytes a second at which so many threads read memory from front to back."""
    from ..ops.stream import read_all

    ops, words = open_ops("cpu", threads=threads), _words()
    return words.nbytes / seconds(lambda i: read_all(ops.team, words), repeats)


def byte_rate(threads: int, repeats: int = 9) -> float:
    """Multiply-adds of bytes a second, from registers, with the instruction that the indexer's scores take."""
    from ..ops.stream import multiply_bytes

    team, rounds, done = open_ops("cpu", threads=threads).team, 1, 0
    while done < BYTE_PRODUCTS * threads:
        rounds, done = 2 * rounds, multiply_bytes(team, rounds)
    return multiply_bytes(team, rounds) / seconds(lambda i: multiply_bytes(team, rounds), repeats)


def matmul_rate(rows: int, inputs: int, outputs: int, repeats: int = 5) -> float:
    """Operations a second (a multiply-add is two) of NumPy's float32 matrix product, with all the threads it takes."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((rows, inputs), (inputs, outputs)))
    return 2 * rows * inputs * outputs / seconds(lambda i: x @ w, repeats)


def record(name: str, threads: int, rows: int, taken: float, size: float, speed: float, **more) -> dict:
    """What every measurement says. bytes: that must be read; ratio: the time to read them, to the time it took."""
    return {
        "name": name, "threads": threads, "rows": rows, "seconds": taken, "bytes": int(size), "gbs": size / taken / 1e9,
        "bandwidth_gbs": speed / 1e9, "ratio": size / taken / speed, **more,
    }  # fmt: skip


def thread_counts(asked: Sequence[int] | None) -> list[int]:
    """The numbers of threads asked for; None: one, and as many as this process may use."""
    return list(asked or sorted({1, default_threads()}))

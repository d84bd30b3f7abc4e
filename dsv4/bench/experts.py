"""The routed experts' kernel, cold in memory: no cache holds what a call reads, because others came between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np

from ..config import ModelConfig
from ..ops import IndexCache, Ops, open_ops
from ..plan import index_key_bytes
from .timing import bandwidth, byte_rate, record, seconds, thread_counts

ROWS = 6
ENTRIES = (4096, 16384, 65536)
PAGE_ENTRIES = 64  # of 256 positions
COLD = 256 << 20  # bytes that calls go through before they come back to the same


def random_expert(ops: Ops, config: ModelConfig, rng: np.random.Generator) -> tuple:
    """(w1, w2, w3): random codes, scales that keep the variance of the input, to a factor 4."""
    d, inner = config.hidden_size, config.moe_intermediate_size

    def matrix(n: int, k: int):
        weight = rng.integers(0, 256, (n, k // 2), np.uint8)
        middle = 125 - round(np.log2(k) / 2)
        return ops.matrix("fp4", weight, rng.integers(middle - 1, middle + 1, (n, k // 32), np.uint8))

    return matrix(inner, d), matrix(d, inner), matrix(inner, d)


def expert_bytes(config: ModelConfig) -> int:
    """Codes of half a byte and a scale per 32."""
    return 3 * config.hidden_size * config.moe_intermediate_size * 17 // 32


class _Layer:
    """Experts of one layer. The one always chosen is FP4 too, so that all a call reads is FP4."""

    def __init__(self, config: ModelConfig):
        self.config, self.chosen = config, config.num_experts_per_tok - 1
        groups = max(ROWS, ceil(COLD / (expert_bytes(config) * self.chosen)))
        ops, rng = open_ops("cpu"), np.random.default_rng(0)
        experts = [random_expert(ops, config, rng) for _ in range(groups * self.chosen + 1)]
        self.bank = ops.bank(experts[:-1], experts[-1])
        self.groups = np.arange(groups * self.chosen, dtype=np.int32).reshape(groups, self.chosen)
        self.x = rng.standard_normal((ROWS, config.hidden_size), np.float32)
        self.weights = np.full((ROWS, self.chosen), 1.5 / self.chosen, np.float32)

    def time(self, threads: int, rows: int, groups: int, repeats: int) -> tuple[float, int]:
        """(seconds, bytes) of `rows` rows that choose among so many groups of experts, other groups every time."""
        ops, c = open_ops("cpu", threads=threads), self.config

        def run(i: int) -> None:
            ids = self.groups[(i * groups + np.arange(rows) % groups) % len(self.groups)]
            ops.moe(self.x[:rows], ids, self.weights[:rows], self.bank, c.swiglu_limit, c.moe_slices)

        return seconds(run, repeats), expert_bytes(c) * (groups * self.chosen + 1)


def experts(
    config: ModelConfig, threads: Sequence[int] | None = None, repeats: int = 15, progress: Callable | None = None
) -> list[dict]:
    """One row with all its experts, 6 rows that choose the same, 6 rows that choose others each; the indexer's scores."""
    layer, found = _Layer(config), []
    counts = thread_counts(threads)
    for number, n in enumerate(counts):
        speed = bandwidth(n)
        one, size = layer.time(n, 1, 1, repeats)
        found.append(record("experts, 1 row", n, 1, one, size, speed, experts=layer.chosen + 1))
        for name, groups in (("experts, same", 1), ("experts, different", ROWS)):
            taken, size = layer.time(n, ROWS, groups, repeats)
            of = {"experts": groups * layer.chosen + 1, "to_one_row": taken / one}
            found.append(record(name, n, ROWS, taken, size, speed, **of))
        found += indexer(config, n, speed, repeats)
        if progress:
            progress("measure", number + 1, len(counts))
    return found


def indexer(config: ModelConfig, threads: int, speed: float, repeats: int, counts: Sequence[int] = ENTRIES) -> list[dict]:
    """Scores of compressed entries and the choice among them, for one row. ops: multiply-adds of bytes."""
    ops, rng, c = open_ops("cpu", threads=threads), np.random.default_rng(0), config
    size = index_key_bytes(c)
    page = PAGE_ENTRIES
    pages = max(ceil(COLD / 4 / size), 2 * max(counts)) // page
    cache = IndexCache(
        rng.integers(0, 256, (pages * page, c.index_head_dim // 2), np.uint8),
        rng.integers(125, 129, (pages * page, c.index_head_dim // 32), np.uint8),
    )
    q = rng.integers(-2, 3, (1, c.index_n_heads, c.index_head_dim)).astype(np.float32)
    w = rng.standard_normal((1, c.index_n_heads), np.float32)
    slot = np.zeros(1, np.int32)
    rate, found = byte_rate(threads), []
    for entries in counts:
        held = entries // page
        tables = [np.arange(i, i + held, dtype=np.int32)[None] for i in range(0, pages - held + 1, held)]
        visible = np.array([entries], np.int32)

        def run(i: int) -> None:
            table = tables[i % len(tables)]
            ops.index_select(q, w, cache, slot, visible, table, page, c.index_topk)

        taken = seconds(run, repeats)
        products = entries * c.index_n_heads * c.index_head_dim
        least = max(entries * size / speed, products / rate)
        of = {"entries": entries, "ns_per_entry": 1e9 * taken / entries}
        of |= {"ops": products, "ops_rate": rate, "ratio_ops": least / taken}
        found.append(record("indexer", threads, 1, taken, entries * size, speed, **of))
    return found

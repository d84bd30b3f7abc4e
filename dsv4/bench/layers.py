"""Whole decoder layers of the real size with random weights, and the speed of the whole model that follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..comm import Single
from ..config import INDEXED_RATIO, ModelConfig
from ..model import Model
from ..ops import KeyCache, Ops, open_ops
from ..plan import index_key_bytes, key_bytes
from ..rows import Rows
from ..state import LayerState, Pool
from ..step import Step
from ..synth import Drawn, Recipe
from ..weights import ROUTED, expected, load_weights
from .experts import ROWS, expert_bytes
from .timing import bandwidth, matmul_rate, record, seconds, thread_counts

CONTEXT = 8192
VOCABULARY = 4096  # of the layers measured; they use no more tokens
PREFILL = 512


class Slice:
    """Layers of some compression ratios, with a sequence of `context` positions whose keys are random, on any backend.

    Routing is by token, so that the caller says which experts are chosen: token t takes group t of them.
    """

    def __init__(self, config: ModelConfig, ratios: tuple[int, ...], experts: int, context: int, ops: Ops, headroom: int):
        small = replace(config, vocab_size=VOCABULARY, num_hash_layers=len(ratios), dspark=None)
        small = replace(small, bos_token_id=0, eos_token_ids=(0,))
        self.recipe = Recipe.of(small, layers=len(ratios), ratios=ratios, experts=experts)
        self.config, self.ops, self.context = self.recipe.config, ops, context
        weights = load_weights(Drawn(self.recipe), self.config, self.ops)
        self.model = Model(self.config, weights, self.ops, Single())
        self.pool = Pool(self.ops, self.config, slots=1, max_context=context + headroom, headroom=headroom)
        self.pool.reserve(self.pool.take_slot(), context + headroom)
        self.rng = np.random.default_rng(0)
        for layer in self.pool.layers:
            self._fill(layer)
        k = self.config.num_experts_per_tok
        self.groups = experts // k
        chosen = self.ops.table(np.arange(self.groups * k).reshape(self.groups, k))
        for block in weights.blocks:
            block.ffn.fixed[: self.groups] = chosen

    def _fill(self, layer: LayerState) -> None:
        """Random keys, index keys and compressor rows everywhere."""
        rng = self.rng
        for part in layer.caches().values():
            for field, array in zip(part._fields, part):
                if array.dtype == np.float32:
                    values = rng.standard_normal(array.shape, np.float32)
                elif field == "scales":
                    values = rng.integers(118, 122, array.shape)
                elif field == "rope":
                    values = rng.integers(0x3E80, 0x3F80, array.shape)  # bf16 of 0.25 .. 1
                elif isinstance(part, KeyCache):
                    values = rng.integers(0, 0x7E, array.shape)  # e4m3 without NaN
                else:
                    values = rng.integers(0, 256, array.shape)
                array[:] = self.ops.table(values.astype(array.dtype))

    def forward(self, rows: int, call: int = 0) -> np.ndarray:
        """The logits [rows, vocab] of rows that end the context, each with experts of its own, others with every call."""
        tokens = (np.arange(rows) + call * rows) % self.groups
        step = Step(self.ops, self.pool, Rows.of(0, self.context - rows, tokens, "all"))
        return self.model.forward(step, self.pool).logits


class Bench(Slice):
    """One layer of a compression ratio."""

    def __init__(self, config: ModelConfig, ratio: int, experts: int, context: int, ops: Ops, headroom: int):
        super().__init__(config, (ratio,), experts, context, ops, headroom)
        self.ratio = ratio

    def time(self, choices: Sequence[np.ndarray], repeats: int, seconds: Callable = seconds) -> float:
        """Seconds of the layer over rows that end the context; choices: the rows' groups of experts, call by call."""
        rows = len(choices[0])
        steps = [Step(self.ops, self.pool, Rows.of(0, self.context - rows, c % self.groups, "none")) for c in choices]
        shape = (rows, self.config.hc_mult, self.config.hidden_size)
        h = [self.ops.table(self.rng.standard_normal(shape, np.float32)) for _ in range(2)]
        block, state = self.model.weights.blocks[0], self.pool.layers[0]
        for step in steps:
            self.model.block(block, h[0], step, state)  # places and rotations are worked out once for all layers
        return seconds(lambda i: self.model.block(block, h[i % 2], steps[i % len(steps)], state), repeats)

    def read_bytes(self, experts: int) -> int:
        """Bytes one row must read: weights but the routed experts and the table of ids, so many experts, keys."""
        c = self.config
        size = {"BF16": 2, "F32": 4}
        dense = sum(
            math.prod(t.shape) * size.get(t.dtype, 1)
            for name, t in expected(c, ()).items()
            if t.row.where not in ("model", "model, last stage") and t.row.part != ROUTED and t.dtype != "I64"
        )
        entries = self.context // self.ratio if self.ratio else 0
        chosen = min(entries, c.index_topk) if self.ratio == INDEXED_RATIO else entries
        keys = (min(self.context, c.sliding_window) + chosen) * key_bytes(c)
        index = entries * index_key_bytes(c) if self.ratio == INDEXED_RATIO else 0
        return dense + experts * expert_bytes(c) + keys + index

    def operations(self, rows: int) -> float:
        """Operations of a prefill forward of so many rows: linears, experts chosen, scores and sums over keys."""
        c, linear = self.config, 0
        for t in expected(c, ()).values():
            where, matrix = t.row.where, t.row.form.endswith("matrix") and t.dtype != "F8_E8M0"
            if matrix and where not in ("model", "model, last stage", "expert"):
                linear += math.prod(t.shape)
        linear += c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
        entries = (self.context - rows // 2) // self.ratio if self.ratio else 0
        chosen = min(entries, c.index_topk) if self.ratio == INDEXED_RATIO else entries
        attention = 2 * c.num_attention_heads * c.head_dim * (c.sliding_window + chosen)
        index = c.index_n_heads * c.index_head_dim * entries if self.ratio == INDEXED_RATIO else 0
        return 2.0 * rows * (linear + attention + index)


def _name(ratio: int) -> str:
    return f"layer, ratio {ratio}" if ratio else "layer, window only"


def layers(
    config: ModelConfig, threads: Sequence[int] | None = None, repeats: int = 15, progress: Callable | None = None,
    context: int = CONTEXT,
) -> list[dict]:  # fmt: skip
    """One row, and 6 rows that choose 6 to 36 different experts, through a layer of every kind; the whole model."""
    found = []
    experts, ratios = ROWS * config.num_experts_per_tok, sorted(set(config.compress_ratios))
    for n in thread_counts(threads):
        one = {}
        for ratio in ratios:
            bench, speed = Bench(config, ratio, experts, context, open_ops("cpu", threads=n), ROWS), bandwidth(n)
            taken = bench.time([np.array([i]) for i in range(ROWS)], repeats)
            one[ratio] = record(_name(ratio), n, 1, taken, bench.read_bytes(config.num_experts_per_tok), speed,
                                context=context, experts=config.num_experts_per_tok)  # fmt: skip
            found += [one[ratio], *_several(bench, n, speed, repeats)]
            if progress:
                progress(f"measure, {n} threads", len(one), len(ratios))
        found.append(project(config, one, n, repeats))
    return found


def _several(bench: Bench, threads: int, speed: float, repeats: int) -> list[dict]:
    """6 rows with 6 to 36 different experts, beside the line through these: base + slope · experts."""
    k = bench.config.num_experts_per_tok
    counts, taken = [], []
    for groups in range(1, ROWS + 1):
        choices = [(np.arange(ROWS) + i) % groups + (i * groups if groups <= ROWS // 2 else 0) for i in range(ROWS)]
        counts.append(groups * k)
        taken.append(bench.time(choices, repeats))
    slope, base = np.polyfit(counts, taken, 1)
    return [
        record(
            _name(bench.ratio), threads, ROWS, t, bench.read_bytes(n), speed, context=bench.context, experts=n,
            line_seconds=base + slope * n, to_line=t / (base + slope * n),
        )
        for n, t in zip(counts, taken)
    ]  # fmt: skip


def project(config: ModelConfig, one: dict[int, dict], threads: int, repeats: int) -> dict:
    """Tokens a second of all the config's layers and the head, beside what reading their bytes allows."""
    ops, rng = open_ops("cpu", threads=threads), np.random.default_rng(0)
    head = ops.matrix("bf16", rng.integers(0x3C00, 0x3D00, (config.vocab_size, config.hidden_size), np.uint16))
    x = rng.standard_normal((1, config.hidden_size), np.float32)
    taken = seconds(lambda i: ops.linear(x, head), max(3, repeats // 3))
    size = 2 * config.vocab_size * config.hidden_size
    head, speed = taken, bandwidth(threads)
    for ratio in config.compress_ratios:
        taken += one[ratio]["seconds"]
        size += one[ratio]["bytes"]
    return record("whole model", threads, 1, taken, size, speed, tokens_per_s=1 / taken, limit_tokens_per_s=speed / size,
                  layers=config.num_hidden_layers, head_seconds=head)  # fmt: skip


def prefill(
    config: ModelConfig, threads: Sequence[int] | None = None, repeats: int = 3, progress: Callable | None = None,
    context: int = CONTEXT, rows: int = PREFILL,
) -> list[dict]:  # fmt: skip
    """Many rows through a layer with all its experts, beside a float32 matrix product of as many operations.

    threads: None measures with as many as this process may use.
    """
    found, ratios = [], sorted(set(config.compress_ratios))
    runs = [(n, ratio) for n in threads or thread_counts(None)[-1:] for ratio in ratios]
    for number, (n, ratio) in enumerate(runs, 1):
        ops, speed = open_ops("cpu", threads=n), bandwidth(n)
        bench = Bench(config, ratio, config.n_routed_experts, context, ops, rows)
        taken = bench.time([np.arange(rows) + i for i in range(2)], repeats)
        rate, possible = bench.operations(rows) / taken, matmul_rate(rows, config.hidden_size, 2 * config.hidden_size)
        found.append(
            record(_name(ratio), n, rows, taken, bench.read_bytes(config.n_routed_experts), speed, context=context,
                   experts=config.n_routed_experts, rows_per_s=rows / taken, gflops=rate / 1e9,
                   matmul_gflops=possible / 1e9)
            | {"ratio": rate / possible}
        )  # fmt: skip
        if progress:
            progress("measure", number, len(runs))
    return found

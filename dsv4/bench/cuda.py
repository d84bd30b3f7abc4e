"""The CUDA kernels' speed beside what the card can do: its copy bandwidth and its matrix rate, measured in the same run.

A kernel is timed by the device's own clock over many calls, which are queued while the device is busy with something else,
so that the device is measured and not how fast Python launches. Calls go through more memory than any cache holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np

from ..cli_support import console
from ..config import INDEXED_RATIO, ModelConfig, pooled_blocks
from ..formats import FP4_BLOCK
from ..ops import IndexCache, KeyCache, Ring
from ..ops.cuda import CudaOps
from ..parameters import HyperConnection
from ..plan import index_key_bytes, key_bytes
from . import machine
from .experts import expert_bytes, random_expert
from .layers import CONTEXT, Bench, Slice
from .timing import seconds

BARS = {"fp4 experts": 0.70, "fp8 linear": 0.70, "attention": 0.50, "prefill": 0.35}  # the ratio to reach, by the name's start
DRAFTED = 5
_PAUSE = 2  # calls before any is timed


@dataclass(frozen=True)
class Sizes:
    """How much is measured. cold: bytes that calls go through before they come back to the same."""

    copy: int = 1 << 30
    matrix: int = 8192
    staged: int = 256 << 20
    cold: int = 512 << 20
    context: int = 1 << 17
    layer_context: int = CONTEXT
    entries: int = 1 << 16
    page: int = 64  # entries
    sequences: int = 64
    prefill: int = 2048
    experts: int = 0  # of a prefill; 0: the config's
    repeats: int = 20


class Card:
    """A launcher's device, its measured limits, and times of what it does."""

    def __init__(self, ops: CudaOps, sizes: Sizes):
        self.ops, self.launcher, self.sizes = ops, ops.launcher, sizes
        self._from, self._to = (self.launcher.zeros(sizes.copy, np.uint8) for _ in range(2))
        self._copy = lambda i: self.launcher.duplicate(self._from, self._to)
        self.copy_seconds = self._elapsed(self._copy, sizes.repeats)
        self.bandwidth = 2 * sizes.copy / self.copy_seconds
        self.matrix_rate = self._matrix_rate()
        self.staging = self._staging()

    def _elapsed(self, run: Callable[[int], object], calls: int) -> float:
        start = self.launcher.clock()
        for i in range(calls):
            run(i)
        return self.launcher.between(start, self.launcher.clock()) / calls

    def seconds(self, run: Callable[[int], object], repeats: int, rounds: int = 3) -> float:
        """Seconds of one run(i), i counting up: the median of rounds of `repeats` calls each."""
        for i in range(_PAUSE):
            run(i)
        started = time.perf_counter()
        self._elapsed(run, repeats)
        covered = ceil(2 * (time.perf_counter() - started) / self.copy_seconds)  # copies that last while calls are queued
        taken = []
        for _ in range(rounds):
            for i in range(min(covered, 500)):
                self._copy(i)
            taken.append(self._elapsed(run, repeats))
        return statistics.median(taken)

    def _matrix_rate(self) -> float:
        n, rng = self.sizes.matrix, np.random.default_rng(0)
        a, b = (self.launcher.upload(rng.standard_normal((n, n), np.float32).astype(np.float16)) for _ in range(2))
        return 2 * n**3 / self.seconds(lambda i: self.launcher.multiply(a, b), self.sizes.repeats)

    def _staging(self) -> float:
        """Bytes a second from pinned memory to the device, on the copy stream."""
        launcher, size = self.launcher, self.sizes.staged
        source, target = launcher.pinned(size), launcher.empty(size, np.uint8)
        return size / self.seconds(lambda i: launcher.wait(launcher.copy(source, target, launcher.mark())), 5)

    def about(self) -> dict:
        return self.launcher.about() | {
            "copy_gbs": self.bandwidth / 1e9, "matrix_tflops": self.matrix_rate / 1e12, "staging_gbs": self.staging / 1e9,
        }  # fmt: skip

    # ------------------------------------------------------------------ records
    def moved(self, name: str, rows: int, nbytes: float, run: Callable[[int], object], **more) -> dict:
        """A record of something that memory bounds: bytes that must be read."""
        taken = self.seconds(run, self.sizes.repeats)
        rate = {"seconds": taken, "bytes": int(nbytes), "gbs": nbytes / taken / 1e9}
        return {"name": name, "rows": rows, **rate, "ratio": nbytes / taken / self.bandwidth, **_bar(name), **more}

    def computed(self, name: str, rows: int, operations: float, run: Callable[[int], object], **more) -> dict:
        """A record of something that arithmetic bounds; a multiply-add is two operations."""
        taken = self.seconds(run, max(2, self.sizes.repeats // 4))
        rate = {"seconds": taken, "operations": operations, "tflops": operations / taken / 1e12}
        return {"name": name, "rows": rows, **rate, "ratio": operations / taken / self.matrix_rate, **_bar(name), **more}

    def rows(self, n: int, k: int):
        return self.ops.table(np.random.default_rng(n).standard_normal((n, k), np.float32))


def _bar(name: str) -> dict:
    return next(({"bar": bar} for start, bar in BARS.items() if name.startswith(start)), {})


# ---------------------------------------------------------------------- linears and experts
FEW = (1, 2, 4, 8)


def linears(card: Card, c: ModelConfig) -> list[dict]:
    """The two largest FP8 linears of a layer; the head in bf16, and the best of its logits."""
    rng, ops, found = np.random.default_rng(0), card.ops, []
    shapes = {
        "fp8 linear, wq_b": (c.num_attention_heads * c.head_dim, c.q_lora_rank),
        "fp8 linear, wo_b": (c.hidden_size, c.o_groups * c.o_lora_rank),
    }
    for name, (n, k) in shapes.items():
        size = n * k + ceil(n / 128) * ceil(k / 128)
        weight = rng.integers(0, 0x7E, (n, k), np.uint8)
        scale = rng.integers(118, 122, (ceil(n / 128), ceil(k / 128)), np.uint8)
        every = [ops.matrix("fp8", weight, scale) for _ in range(max(2, ceil(card.sizes.cold / size)))]
        for rows in FEW:
            found.append(card.moved(name, rows, size, partial(_linear, ops, card.rows(rows, k), every)))
        rows = card.sizes.prefill
        found.append(card.computed(name.replace("fp8", "prefill,"), rows, 2 * rows * n * k, partial(_linear, ops, card.rows(rows, k), every)))
    head = [ops.matrix("bf16", rng.integers(0x3C00, 0x3D00, (c.vocab_size, c.hidden_size), np.uint16))]
    size = 2 * c.vocab_size * c.hidden_size
    found += [card.moved("bf16 head", rows, size, partial(_linear, ops, card.rows(rows, c.hidden_size), head)) for rows in (1, 6)]
    return [*found, *(card.moved("best of logits", rows, 4 * rows * c.vocab_size, _best(card, rows, c.vocab_size)) for rows in (1, 6))]


def _best(card: Card, rows: int, vocab: int) -> Callable[[int], object]:
    every = [card.rows(rows, vocab) for _ in range(max(2, ceil(card.sizes.cold / (4 * rows * vocab))))]
    return lambda i: card.ops.best(every[i % len(every)])


def _linear(ops: CudaOps, x, every: list, i: int) -> None:
    ops.linear(x, every[i % len(every)])


def experts(card: Card, c: ModelConfig) -> list[dict]:
    """Routed experts and one always chosen, all FP4: few rows, with experts of their own each, and a prefill."""
    ops, rng, s = card.ops, np.random.default_rng(0), card.sizes
    chosen, total = c.num_experts_per_tok, s.experts or c.n_routed_experts
    drawn = [random_expert(ops, c, rng) for _ in range(min(8, total))]
    own = [[(w.weight, w.scale) for w in expert] for expert in drawn]

    def again(number: int) -> tuple:
        """The same values in other memory."""
        return tuple(ops.matrix("fp4", _twin(card, weight), _twin(card, scale)) for weight, scale in own[number % len(own)])

    bank = ops.bank([*drawn, *(again(i) for i in range(len(drawn), total))], again(0))
    groups = np.arange(total // chosen * chosen, dtype=np.int32).reshape(-1, chosen)
    found = []
    for rows in (rows for rows in FEW if rows <= len(groups)):
        tables = [ops.table(groups[(i * rows + np.arange(rows)) % len(groups)]) for i in range(len(groups))]
        found.append(card.moved("fp4 experts", rows, expert_bytes(c) * (rows * chosen + 1), _moe(card, c, bank, rows, tables),
                                experts=rows * chosen + 1))  # fmt: skip
    rows = s.prefill
    ids = np.sort(rng.random((rows, total)).argsort(1)[:, :chosen].astype(np.int32), 1)
    work = 2.0 * rows * (chosen + 1) * 3 * c.hidden_size * c.moe_intermediate_size
    return [*found, card.computed("prefill, experts", rows, work, _moe(card, c, bank, rows, [ops.table(ids)]), experts=total + 1)]


def _twin(card: Card, array):
    copy = card.ops.empty(array.shape, array.dtype)
    card.launcher.duplicate(array, copy)
    return copy


def _moe(card: Card, c: ModelConfig, bank, rows: int, tables: list) -> Callable[[int], object]:
    x, k = card.rows(rows, c.hidden_size), c.num_experts_per_tok
    weights = card.ops.table(np.full((rows, k), 1.5 / k, np.float32))
    return lambda i: card.ops.moe(x, tables[i % len(tables)], weights, bank, c.swiglu_limit, c.moe_slices)


# ---------------------------------------------------------------------- attention and indexer
def attention(card: Card, c: ModelConfig) -> list[dict]:
    """Decoding after a long context: one sequence, and many side by side with keys of their own each."""
    ops, rng, s = card.ops, np.random.default_rng(0), card.sizes
    found = []
    for ratio in sorted({r for r in c.compress_ratios if r}):
        entries = min(s.context // ratio, c.index_topk) if ratio == INDEXED_RATIO else s.context // ratio
        seen = entries + c.sliding_window
        sets = max(2, ceil(s.cold / (seen * key_bytes(c) * s.sequences)))
        n = sets * s.sequences * seen
        cache = _keys(card, c, rng, n)
        places = np.arange(n, dtype=np.int32).reshape(-1, seen)
        sink = card.rows(1, c.num_attention_heads).reshape(-1)
        for rows in (1, s.sequences):
            tables = [[ops.table(part[:, :entries]), ops.table(part[:, entries:])] for part in places.reshape(-1, rows, seen)]
            q = card.rows(rows, c.num_attention_heads * c.head_dim).reshape(rows, c.num_attention_heads, c.head_dim)

            def run(i: int) -> None:
                chosen, window = tables[i % len(tables)]  # noqa: B023
                ops.attend(q, sink, [(cache, chosen), (cache, window)])  # noqa: B023

            found.append(card.moved(f"attention, ratio {ratio}", rows, rows * seen * key_bytes(c), run, context=s.context, keys=seen))
    return found


def _keys(card: Card, c: ModelConfig, rng: np.random.Generator, n: int) -> KeyCache:
    plain, rope = c.head_dim - c.qk_rope_head_dim, c.qk_rope_head_dim
    return KeyCache(
        card.ops.table(rng.integers(0, 0x7E, (n, plain), np.uint8)),
        card.ops.table(rng.integers(118, 122, (n, ceil(plain / 64)), np.uint8)),
        card.ops.table(rng.integers(0x3E80, 0x3F80, (n, rope), np.uint16)),
    )


def indexer(card: Card, c: ModelConfig) -> list[dict]:
    """Scores of the entries of a long context, and the choice among them."""
    ops, rng, s = card.ops, np.random.default_rng(0), card.sizes
    size, held = index_key_bytes(c), s.entries // s.page
    sets = max(2, ceil(s.cold / (s.entries * size)))
    n = sets * s.entries
    cache = IndexCache(
        ops.table(rng.integers(0, 256, (n, c.index_head_dim // 2), np.uint8)),
        ops.table(rng.integers(125, 129, (n, c.index_head_dim // FP4_BLOCK), np.uint8)),
    )
    pages = [ops.table(np.arange(i * held, (i + 1) * held, dtype=np.int32)[None]) for i in range(sets)]
    found = []
    for rows in (1, 6):
        q = ops.table(rng.integers(-2, 3, (rows, c.index_n_heads, c.index_head_dim)).astype(np.float32))
        slots, visible = ops.table(np.zeros(rows, np.int32)), ops.table(np.full(rows, s.entries, np.int32))
        w = card.rows(rows, c.index_n_heads)

        def run(i: int) -> None:
            ops.index_select(q, w, cache, slots, visible, pages[i % sets], s.page, c.index_topk)  # noqa: B023

        found.append(card.moved("indexer", rows, s.entries * size, run, entries=s.entries))
    return found


# ---------------------------------------------------------------------- between the products
def between(card: Card, c: ModelConfig) -> list[dict]:
    """What runs over rows of float32 between the products; bytes read and written. A single row stays in the cache."""
    ops, m, d = card.ops, c.hc_mult, c.hidden_size
    mixes = (2 + m) * m
    hc = HyperConnection(
        ops.matrix("f32", np.random.default_rng(0).standard_normal((mixes, m * d), np.float32) / d), ops.vector(np.zeros(mixes, np.float32)),
        ops.vector(np.ones(3, np.float32)), m, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps,
    )  # fmt: skip
    norm, found = ops.vector(np.ones(d, np.float32)), []
    for rows in (1, card.sizes.prefill):
        x, h = card.rows(rows, d), card.rows(rows, m * d).reshape(rows, m, d)
        _, mix = ops.hc_pre(h, hc)
        for name, floats, run in (
            ("activation quantisation", 2 * rows * d, partial(ops.act_quant, x)),
            ("rmsnorm", 2 * rows * d, partial(ops.rmsnorm, x, norm, c.rms_norm_eps)),
            ("hyper-connection, in", (rows * (m + 1) + mixes * m) * d, partial(ops.hc_pre_norm, h, hc, norm, c.rms_norm_eps)),
            ("hyper-connection, out", rows * (2 * m + 1) * d, partial(ops.hc_post, x, h, mix)),
        ):
            found.append(card.moved(name, rows, 4 * floats, _ignoring(run)))
    return [*found, *(_compressor(card, c, ratio) for ratio in sorted({r for r in c.compress_ratios if r}))]


def _ignoring(run: Callable[[], object]) -> Callable[[int], object]:
    return lambda i: run()


def _compressor(card: Card, c: ModelConfig, ratio: int) -> dict:
    """Pooling of the entries that a prefill completes."""
    n, width = max(1, card.sizes.prefill // ratio), c.head_dim * pooled_blocks(ratio)
    capacity = (n + 1) * ratio
    ring = Ring(card.rows(capacity, width), card.rows(capacity, width))
    slots, entries = card.ops.table(np.zeros(n, np.int32)), card.ops.table(np.arange(1, n + 1, dtype=np.int32))
    run = partial(card.ops.compress_pool, ring, slots, entries, ratio, capacity)
    return card.moved(f"compressor, ratio {ratio}", n, 4 * n * (2 * ratio * width + c.head_dim), _ignoring(run))


# ---------------------------------------------------------------------- layers, and a slice of the model
def layers(card: Card, c: ModelConfig) -> list[dict]:
    """Whole layers of every kind, and forwards of a slice with one of each: decoding (1 row) and verifying n = 0 .. 5
    drafted tokens (n + 1 rows), every row with experts of its own. A forward is timed by the host's clock, as the engine
    waits for it: logits included."""
    ops, s, most = card.ops, card.sizes, DRAFTED + 1
    experts_, ratios = most * c.num_experts_per_tok, tuple(sorted(set(c.compress_ratios)))
    found = []
    for ratio in ratios:
        bench = Bench(c, ratio, experts_, s.layer_context, ops, most)
        for rows in (1, most):
            choices = [np.arange(rows) + i * rows for i in range(most)]
            taken = bench.time(choices, s.repeats, card.seconds)
            nbytes = bench.read_bytes(rows * c.num_experts_per_tok)
            found.append({
                "name": f"layer, ratio {ratio}" if ratio else "layer, window only", "rows": rows, "seconds": taken,
                "bytes": nbytes, "gbs": nbytes / taken / 1e9, "ratio": nbytes / taken / card.bandwidth, "context": s.layer_context,
            })  # fmt: skip
    part = Slice(c, ratios, experts_, s.layer_context, ops, most)
    for rows in range(1, most + 1):
        taken = seconds(partial(part.forward, rows), s.repeats)
        found.append({"name": f"{len(ratios)} layers, verify {rows - 1}", "rows": rows, "seconds": taken, "context": s.layer_context})
    return found


PARTS = {"linears": linears, "experts": experts, "attention": attention, "indexer": indexer, "between": between, "layers": layers}


def measure(
    ops: CudaOps, config: ModelConfig, sizes: Sizes | None = None, progress: Callable | None = None, parts: Sequence[str] = tuple(PARTS)
) -> list[dict]:
    """The record "card", then those of every part. ratio: bytes a second to the copy bandwidth (read and write counted), or
    operations a second to the rate of a float16 matrix product; bar, met: where the project has set one."""
    card = Card(ops, sizes or Sizes())
    about, found = card.about() | machine.describe(), []
    for number, part in enumerate(parts):
        found += PARTS[part](card, config)
        if progress:
            progress("measure", number + 1, len(parts))
    records = [record | {"met": record["ratio"] >= record["bar"]} if "bar" in record else record for record in found]
    return [{"name": "card", **about}, *({**record, "device": about["device"]} for record in records)]


def render(records: list[dict]) -> None:
    """The records as one table."""
    from rich.table import Table

    out = console()
    card, *rest = records
    out.print(f"{card['device']}, {card['memory_bytes'] / 1e9:.0f} GB, compute capability {card['capability']}, CUDA {card['driver_cuda']}")
    out.print(f"copies {card['copy_gbs']:.0f} GB/s (read and write), float16 matrix product {card['matrix_tflops']:.1f} TFLOP/s, "
                  f"from pinned memory {card['staging_gbs']:.1f} GB/s")  # fmt: skip
    table = Table("", "rows", "ms", "MB", "GB/s", "TFLOP/s", "ratio", "bar", "", box=None)
    for column in table.columns[1:8]:
        column.justify = "right"
    for r in rest:
        cell = lambda key, form, unit=1.0: format(r[key] / unit, form) if key in r else ""  # noqa: B023, E731
        table.add_row(
            r["name"], str(r["rows"]), cell("seconds", ".3f", 1e-3), cell("bytes", ".1f", 1e6), cell("gbs", ".0f"),
            cell("tflops", ".1f"), cell("ratio", ".2f"), cell("bar", ".2f"), ("met" if r["met"] else "not met") if "bar" in r else "",
        )  # fmt: skip
    out.print(table)

"""What the tests of the ops share: the golden file, inputs by seed, cases per op, and ops without quantisers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dsv4 import formats
from dsv4.ops import IndexCache, KeyCache, Ring
from dsv4.ops.reference import ReferenceOps
from dsv4.parameters import HyperConnection

DTYPES = {
    "F32": np.float32, "U8": np.uint8, "I8": np.uint8, "I32": np.int32, "I64": np.int64,
    "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip


def read_tensors(path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file; bf16 as uint16 bits, the 8-bit formats and I8 as uint8."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        first, last = info["data_offsets"]
        array = np.frombuffer(data[start + first : start + last], DTYPES[info["dtype"]])
        tensors[name] = array.reshape(info["shape"])
    return tensors


class NoQuantOps(ReferenceOps):
    """The reference with its quantisers of activations, keys and index keys replaced by identity."""

    def act_quant(self, x):
        return x

    def key_cache(self, n, dim, rope_dim):
        plain = np.zeros((n, dim - rope_dim), np.float32)
        return KeyCache(plain, np.zeros((n, 1), np.uint8), np.zeros((n, rope_dim), np.float32))

    def encode_keys(self, k, cache, where):
        plain = cache.codes.shape[1]
        cache.codes[where], cache.rope[where] = k[:, :plain], k[:, plain:]

    def decode_keys(self, cache, where):
        return np.concatenate([cache.codes[where], cache.rope[where]], axis=1)

    def index_cache(self, n, dim):
        return IndexCache(np.zeros((n, dim), np.float32), np.zeros((n, 1), np.uint8))

    def index_query(self, q, rope):
        return formats.hadamard(self.rotate(q.copy(), rope))

    def encode_index(self, k, cache, where):
        cache.codes[where] = formats.hadamard(k)

    def decode_index(self, cache, where):
        return cache.codes[where]


# ---------------------------------------------------------------------------------------------- cases
@dataclass(frozen=True)
class Case:
    """One op on given inputs. `run(ops, **inputs)` returns named results, one row for each row of the inputs.

    by_row: the inputs that have T rows. limit: rel_l2 of float results, 0 where they must be equal; other types always
    must. flips: the share of rows in which a quantiser inside the op may round one value the other way, as the last bit
    of its input decides.
    """

    name: str
    run: Callable[..., dict] = field(repr=False)
    inputs: dict = field(repr=False)
    by_row: tuple[str, ...]
    limit: float = 1e-6
    flips: float = 0.0

    @property
    def rows(self) -> int:
        return len(self.inputs[self.by_row[0]])

    def __call__(self, ops, rows=slice(None)) -> dict[str, np.ndarray]:
        taken = {n: np.ascontiguousarray(a[rows]) if n in self.by_row else a for n, a in self.inputs.items()}
        return {name: ops.to_host(result) for name, result in self.run(ops, **taken).items()}


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def normal(rng, *shape, scale=1.0) -> np.ndarray:
    """Normal values, some of them ten times as large."""
    x = rng.normal(0, scale, shape) * np.where(rng.random(shape) < 0.02, 10, 1)
    return x.astype(np.float32)


def weights(rng, fmt: str, n: int, k: int) -> tuple:
    """Random (weight, scale) as ops.matrix takes them; rows of about unit length."""
    if fmt == "f32":
        return normal(rng, n, k, scale=k**-0.5), None
    if fmt == "bf16":
        return formats.bf16_encode(normal(rng, n, k, scale=k**-0.5)), None
    small = int(np.round(-0.5 * np.log2(k)))
    if fmt == "fp4":
        scale = rng.integers(125 + small, 129 + small, (n, k // 32)).astype(np.uint8)
        return rng.integers(0, 256, (n, k // 2)).astype(np.uint8), scale
    scale = rng.integers(119 + small, 123 + small, (-(-n // 128), -(-k // 128))).astype(np.uint8)
    return (rng.integers(0, 127, (n, k)) + 128 * rng.integers(0, 2, (n, k))).astype(np.uint8), scale


def build(op):
    """Turn `op(name, rng, *shape)` → Case arguments into a maker of one Case."""

    def make(*shape):
        name = "-".join(map(str, (op.__name__, *shape)))
        return Case(name, *op(seeded(name), *shape))

    return make


@build
def embed(rng, t, vocab, d, streams):
    def run(ops, table, tokens):
        return {"h": ops.embed(ops.table(table), tokens, streams)}

    table = formats.bf16_encode(normal(rng, vocab, d))
    return run, {"table": table, "tokens": rng.integers(0, vocab, t).astype(np.int32)}, ("tokens",), 0.0


@build
def linear(rng, fmt, t, n, k, slices, quantised):
    def run(ops, x, weight, scale):
        return {"y": ops.linear(x, ops.matrix(fmt, weight, scale), slices)}

    x = normal(rng, t, k)
    if quantised:
        x = formats.act_dequant(*formats.act_quant(x, 128), 128)
    weight, scale = weights(rng, fmt, n, k)
    return run, {"x": x, "weight": weight, "scale": scale}, ("x",)


@build
def grouped_linear(rng, t, groups, k, r):
    def run(ops, o, weight, scale):
        return {"z": ops.grouped_linear(o, ops.matrix("fp8", weight, scale), groups)}

    weight, scale = weights(rng, "fp8", groups * r, k)
    return run, {"o": normal(rng, t, groups * k), "weight": weight, "scale": scale}, ("o",)


@build
def act_quant(rng, t, k):
    """Rows of many sizes, from below the scale's floor up; every third is a midpoint between two codes throughout."""
    x = normal(rng, t, k) * np.ldexp(np.float32(1), rng.integers(-40, 90, (t, 1)))
    codes = rng.integers(1, 125, x[2::3].shape)
    x[2::3] = (formats.E4M3[codes] + formats.E4M3[codes + 1]) / 2
    x[2::3, 0] = 448
    x[::7] = 0
    return lambda ops, x: {"y": ops.act_quant(x)}, {"x": x}, ("x",), 0.0


@build
def rmsnorm(rng, t, k):
    x = normal(rng, t, k) * np.ldexp(np.float32(1), rng.integers(-12, 12, (t, 1)))
    x[::5] = 0
    return lambda ops, x, w: {"y": ops.rmsnorm(x, w, 1e-5)}, {"x": x, "w": normal(rng, k)}, ("x",)


@build
def connections(rng, t, m, d, eps, norm_eps):
    """hc_pre, hc_post, hc_pre_norm, hc_head and mean_streams."""

    def run(ops, h, y, fn, base, scale, norm):
        w = HyperConnection(ops.matrix("f32", fn), base, scale, m, 20, eps, norm_eps)
        head = HyperConnection(ops.matrix("f32", fn[:m]), base[:m], scale[:1], m, 20, eps, norm_eps)
        u, mix = ops.hc_pre(h, w)
        normed, again = ops.hc_pre_norm(h, w, norm, 1e-6)
        return {
            "u": u, "post": mix.post, "comb": mix.comb, "out": ops.hc_post(y, h, mix), "normed": normed,
            "post again": again.post, "comb again": again.comb, "head": ops.hc_head(h, head),
            "mean": ops.mean_streams(h),
        }  # fmt: skip

    n = (2 + m) * m
    inputs = {
        "h": normal(rng, t, m, d), "y": normal(rng, t, d), "fn": weights(rng, "f32", n, m * d)[0],
        "base": normal(rng, n), "scale": normal(rng, 3), "norm": normal(rng, d),
    }  # fmt: skip
    return run, inputs, ("h", "y")


def angles(rng, t, r):
    theta = (10000.0 ** -np.linspace(0, 1, r // 2)).astype(np.float32)
    return {"positions": rng.integers(0, 100000, t).astype(np.int32), "theta": theta}


@build
def rotation(rng, t, heads, d, r):
    """rope_angles, rotate both ways, query."""

    def run(ops, x, positions, theta):
        rope = ops.rope_angles(positions, theta)
        forward, back = ops.rotate(x.copy(), rope), ops.rotate(x.copy(), rope, inverse=True)
        return {"cos": rope.cos, "sin": rope.sin, "y": forward, "back": back, "query": ops.query(x.copy(), rope, 1e-5)}

    return run, {"x": normal(rng, t, heads, d)} | angles(rng, t, r), ("x", "positions")


@build
def keys(rng, t, d, r):
    """encode_keys and decode_keys at scattered places."""

    def run(ops, k, where):
        cache = ops.key_cache(2 * t + 20, d, r)
        ops.encode_keys(k, cache, where)
        stored = {name: a[where] for name, a in cache._asdict().items()}
        return stored | {"decoded": ops.decode_keys(cache, where)}

    k = normal(rng, t, d) * np.ldexp(np.float32(1), rng.integers(-30, 30, (t, 1)))
    k[::4, : d // 2] = 0
    return run, {"k": k, "where": rng.permutation(2 * t + 20)[:t].astype(np.int32)}, ("k", "where"), 0.0


@build
def store_keys(rng, t, d, r):
    def run(ops, kv, norm, where, positions, theta):
        cache = ops.key_cache(t + 9, d, r)
        ops.store_keys(kv, norm, ops.rope_angles(positions, theta), cache, where, 1e-6)
        return {"k": ops.decode_keys(cache, where)}

    inputs = {"kv": normal(rng, t, d), "norm": normal(rng, d), "where": rng.permutation(t).astype(np.int32)}
    return run, inputs | angles(rng, t, r), ("kv", "where", "positions"), 1e-6, 0.02


@build
def attend(rng, t, heads, d, r, counts, scale):
    """One part per count; places repeat and miss, row 0 has none at all."""

    def run(ops, q, sink, k, **places):
        cache = ops.key_cache(len(k), d, r)
        ops.encode_keys(k, cache, np.arange(len(k), dtype=np.int32))
        return {"o": ops.attend(q, sink, [(cache, where) for where in places.values()])}

    n = 2 * max(counts)
    places = {f"places{i}": rng.integers(-1, n, (t, count)).astype(np.int32) for i, count in enumerate(counts)}
    for where in places.values():
        where[0] = -1
        where[1::3, where.shape[1] // 2 :] = -1
    inputs = {"q": normal(rng, t, heads, d, scale=scale), "sink": normal(rng, heads), "k": normal(rng, n, d)}
    return run, inputs | places, ("q", *places)


@build
def compression(rng, t, ratio, d):
    """compress_store of t rows, and compress_pool of t entries whose rows a ring holds; three slots."""
    channels, capacity = d * (2 if ratio == 4 else 1), 2 * ratio + 7

    def run(ops, kv, gate, where, positions, slots, entries, ape, ring_kv, ring_gate):
        ring = Ring(ops.vector(ring_kv.copy()), ops.vector(ring_gate.copy()))
        pooled = ops.compress_pool(ring, slots, entries, ratio, capacity)
        room = Ring(ops.zeros((2 * t, channels), np.float32), ops.zeros((2 * t, channels), np.float32))
        ops.compress_store(kv, gate, ape, positions, room, where)
        return {"pooled": pooled, "kv": room.kv[where], "gate": room.gate[where]}

    inputs = {
        "kv": normal(rng, t, channels), "gate": normal(rng, t, channels), "ape": normal(rng, ratio, channels),
        "where": rng.permutation(2 * t)[:t].astype(np.int32), "positions": rng.integers(0, 999, t).astype(np.int32),
        "slots": rng.integers(0, 3, t).astype(np.int32), "entries": rng.integers(0, 4, t).astype(np.int32),
        "ring_kv": normal(rng, 3 * capacity, channels), "ring_gate": normal(rng, 3 * capacity, channels, scale=3),
    }  # fmt: skip
    return run, inputs, ("kv", "gate", "where", "positions", "slots", "entries")


@build
def index_keys(rng, t, heads, d, r):
    """index_query, encode_index and decode_index."""

    def run(ops, q, k, where, positions, theta):
        cache = ops.index_cache(2 * t, d)
        ops.encode_index(k, cache, where)
        query = ops.index_query(q, ops.rope_angles(positions, theta))
        return {"query": query, "key": ops.decode_index(cache, where)}

    where = rng.permutation(2 * t)[:t].astype(np.int32)
    inputs = {"q": normal(rng, t, heads, d), "k": normal(rng, t, d), "where": where}
    return run, inputs | angles(rng, t, r), ("q", "k", "where", "positions"), 1e-6, 0.02


@build
def index_select(rng, t, heads, d, n, k, page_entries, kind):
    """Three slots with pages in random order; kind "ties": few different keys; "dead": no head is ever positive."""

    def run(ops, q, w, slots, visible, pages, codes, scales):
        cache = IndexCache(codes, scales)
        return {"chosen": ops.index_select(q, w, cache, slots, visible, pages, page_entries, k)}

    per_slot = -(-n // page_entries)
    key = normal(rng, 3 * per_slot * page_entries, d)
    q = formats.fp4_act_dequant(*formats.fp4_act_quant(normal(rng, t, heads, d)))
    if kind == "ties":
        key = key[rng.integers(0, 5, len(key))]
    if kind == "dead":
        key, q = np.abs(key), -np.abs(q)
    codes, scales = formats.fp4_act_quant(key)
    inputs = {
        "q": q, "w": normal(rng, t, heads), "slots": rng.integers(0, 3, t).astype(np.int32),
        "visible": rng.integers(0, n + 1, t).astype(np.int32), "codes": codes, "scales": scales,
        "pages": rng.permutation(3 * per_slot).reshape(3, per_slot).astype(np.int32),
    }  # fmt: skip
    inputs["visible"][-1] = n
    return run, inputs, ("q", "w", "slots", "visible")


@build
def best(rng, t, vocab, kind):
    """kind "any"; "ties": few different logits; "wide": the lead overflows."""
    logits = normal(rng, t, vocab)
    if kind == "ties":
        logits = rng.integers(-4, 5, (t, vocab)).astype(np.float32)
    if kind == "wide":
        logits = np.where(rng.random((t, vocab)) < 1 / vocab, 3e38, -3e38).astype(np.float32)

    def run(ops, logits):
        ids, lead = ops.best(logits)
        return {"ids": ids, "lead": lead}

    return run, {"logits": logits}, ("logits",), 0


@build
def entry_places(rng, t, n, page_entries):
    def run(ops, entries, slots, pages):
        return {"places": ops.entry_places(entries, slots, pages, page_entries)}

    pages = rng.permutation(12).reshape(3, 4).astype(np.int32)
    entries = rng.integers(0, 4 * page_entries, (t, n)).astype(np.int32)
    entries[rng.random((t, n)) < 0.25] = -1
    slots = rng.integers(0, 3, t).astype(np.int32)
    return run, {"entries": entries, "slots": slots, "pages": pages}, ("entries", "slots")


@build
def ring_places(rng, t, span, capacity):
    def run(ops, slots, positions):
        return {"places": ops.ring_places(slots, positions, span, capacity)}

    positions = rng.integers(0, 3 * capacity, t).astype(np.int32)
    positions[0] = 0
    return run, {"slots": rng.integers(0, 3, t).astype(np.int32), "positions": positions}, ("slots", "positions")


@build
def visible_places(rng, t, n, page_entries):
    def run(ops, visible, slots, pages):
        return {"places": ops.visible_places(visible, n, slots, pages, page_entries)}

    pages = rng.permutation(3 * -(-n // page_entries)).reshape(3, -1).astype(np.int32)
    visible = rng.integers(0, n + 1, t).astype(np.int32)
    visible[-1] = n
    return run, {"visible": visible, "slots": rng.integers(0, 3, t).astype(np.int32), "pages": pages}, ("visible", "slots")


@build
def gate(rng, t, experts, d, k, kind):
    """kind "bias", "plain", "fixed" (by token) or "ties" (every expert three times)."""

    def run(ops, x, tokens, w, bias, fixed):
        ids, weight = ops.gate(x, ops.matrix("bf16", w), bias, fixed, tokens, k, 1.5)
        return {"ids": ids, "weights": weight}

    w, bias = normal(rng, experts, d, scale=d**-0.5), normal(rng, experts) if kind in ("bias", "ties") else None
    if kind == "ties":
        w, bias = np.tile(w[: experts // 3], (3, 1)), np.tile(bias[: experts // 3], 3)
    fixed = np.stack([rng.permutation(experts)[:k] for _ in range(20)]) if kind == "fixed" else None
    inputs = {"x": normal(rng, t, d), "tokens": rng.integers(0, 20, t).astype(np.int32), "w": formats.bf16_encode(w)}
    return run, inputs | {"bias": bias, "fixed": fixed}, ("x", "tokens")


@build
def swiglu(rng, t, inter, limit, weighted):
    inputs = {"g": normal(rng, t, inter, scale=4), "u": normal(rng, t, inter, scale=4)}
    if not weighted:
        return lambda ops, g, u: {"a": ops.swiglu(g, u, None, limit)}, inputs, ("g", "u")
    inputs["weight"] = rng.random(t).astype(np.float32)
    return lambda ops, g, u, weight: {"a": ops.swiglu(g, u, weight, limit)}, inputs, ("g", "u", "weight")


def moe_in_calls(ops, layer, bank, limit, slices, lanes, experts):
    """Ops.moe as moe_begin, moe_add of some experts at a time, and moe_end.

    layer: (x, ids, weights); experts: of each call. With a lane for each choice the shared expert is in the first call,
    beside rows that chose none of them; else it comes by itself, the last.
    """
    x, ids, weights = layer
    shared, every = lanes > 1, np.arange(len(x), dtype=np.int32)
    sums = ops.moe_begin(len(x), lanes, slices, x.shape[1])
    for some in experts:
        now = np.where(np.isin(ids, list(some)), ids, -1).astype(np.int32)
        rows = every if shared else every[(now >= 0).any(axis=1)]
        taken = (np.ascontiguousarray(a[rows]) for a in (x, now, weights))
        ops.moe_add(sums, ops.table(rows), *map(ops.table, taken), bank, limit, shared)
        shared = False
    if lanes == 1:
        nothing = ops.table(np.full_like(ids, -1))
        ops.moe_add(sums, ops.table(every), ops.table(x), nothing, ops.table(weights), bank, limit, True)
    return ops.moe_end(sums)


@build
def moe(rng, t, experts, d, inter, k, slices, limit):
    """FP4 experts and an FP8 shared one; expert 0 is everybody's first choice."""
    shapes = [(inter, d), (d, inter), (inter, d)]
    routed = [[weights(rng, "fp4", *shape) for shape in shapes] for _ in range(experts)]
    shared = [weights(rng, "fp8", *shape) for shape in shapes]

    def run(ops, x, ids, weight):
        made = [tuple(ops.matrix("fp4", *w) for w in expert) for expert in routed]
        bank = ops.bank(made, tuple(ops.matrix("fp8", *w) for w in shared))
        later = moe_in_calls(ops, (x, ids, weight), bank, limit, slices, k + 1, [range(i, experts, 2) for i in (1, 0)])
        return {"y": ops.moe(x, ids, weight, bank, limit, slices), "later": later}

    ids = np.stack([np.sort(np.r_[0, 1 + rng.permutation(experts - 1)[: k - 1]]) for _ in range(t)]).astype(np.int32)
    inputs = {"x": normal(rng, t, d), "ids": ids, "weight": rng.random((t, k)).astype(np.float32)}
    return run, inputs, ("x", "ids", "weight"), 1e-6, 0.02

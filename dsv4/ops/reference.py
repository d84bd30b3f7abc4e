"""The reference backend: what every op means, in plain NumPy.

Sums run in float64 and each op rounds its result to float32 once. Products with a matrix are taken row by row, so that
a row's bits do not depend on how many rows there are. Slow; tests compare the other backends with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import formats
from ..config import INDEXED_RATIO
from ..errors import BackendError
from . import IndexCache, KeyCache, Mix, Ops, Ring, Rope


@dataclass(frozen=True)
class Matrix:
    """A linear's weights as stored; `decoded` holds them as float64 [N, K] from the first use on."""

    fmt: str
    weight: np.ndarray
    scale: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return (n, 2 * k) if self.fmt == "fp4" else (n, k)

    @cached_property
    def decoded(self) -> np.ndarray:
        if self.fmt == "fp8":
            return formats.decode_fp8(self.weight, self.scale).astype(np.float64)
        if self.fmt == "fp4":
            return formats.decode_fp4(self.weight, self.scale).astype(np.float64)
        if self.fmt == "bf16":
            return formats.bf16_decode(self.weight).astype(np.float64)
        return self.weight.astype(np.float64)


class Bank(NamedTuple):
    """One layer's experts, each (w1, w2, w3)."""

    experts: list[tuple[Matrix, Matrix, Matrix]]
    shared: tuple[Matrix, Matrix, Matrix]


def product(x: np.ndarray, w: np.ndarray, slices: int = 1) -> np.ndarray:
    """x [T, K] · w [N, K]ᵀ per slice of K, float64 [T, slices, N]; one matrix-vector product per row and slice."""
    t, (n, k) = len(x), w.shape
    rows = np.asarray(x, np.float64).reshape(t, slices, 1, k // slices)
    return (rows @ w.reshape(n, slices, k // slices).transpose(1, 2, 0))[:, :, 0]


def tree_sum(parts: np.ndarray) -> np.ndarray:
    """[T, slices, N] → [T, N]: float32 sums along a binary tree; slices a power of two."""
    parts = parts.astype(np.float32)
    while parts.shape[1] > 1:
        parts = parts[:, 0::2] + parts[:, 1::2]
    return parts[:, 0]


def rsqrt_mean(x: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(x²) + eps) over the last axis, kept; x float64."""
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), from the exponential that cannot overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), linear above 20."""
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def rotate_pairs(x: np.ndarray, rope: Rope, inverse: bool) -> np.ndarray:
    """x [T, H, D] with the adjacent pairs of its last R dims turned by ±angle, float64."""
    x = x.astype(np.float64)
    cos, sin = rope.cos[:, None, :].astype(np.float64), rope.sin[:, None, :].astype(np.float64)
    if inverse:
        sin = -sin
    tail = x[..., x.shape[-1] - 2 * cos.shape[-1] :]
    even, odd = tail[..., 0::2].copy(), tail[..., 1::2].copy()
    tail[..., 0::2] = even * cos - odd * sin
    tail[..., 1::2] = even * sin + odd * cos
    return x


class ReferenceOps(Ops):
    """Every op as its formula. See Ops for shapes."""

    name = "reference"

    # ------------------------------------------------------------------ what the backend keeps
    def matrix(self, fmt: str, weight: np.ndarray, scale: np.ndarray | None = None) -> Matrix:
        if fmt not in ("fp8", "fp4", "bf16", "f32"):
            raise BackendError(f"matrix: expected fmt fp8, fp4, bf16 or f32; found {fmt!r}")
        return Matrix(fmt, weight, scale)

    def vector(self, array: np.ndarray) -> np.ndarray:
        return formats.bf16_decode(array) if array.dtype == np.uint16 else np.ascontiguousarray(array, np.float32)

    def table(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def bank(self, experts, shared) -> Bank:
        return Bank(list(experts), shared)

    def zeros(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        return np.zeros(shape, dtype)

    def key_cache(self, n: int, dim: int, rope_dim: int) -> KeyCache:
        plain = dim - rope_dim
        blocks = -(-plain // formats.KEY_BLOCK)
        codes, scales = np.zeros((n, plain), np.uint8), np.zeros((n, blocks), np.uint8)
        return KeyCache(codes, scales, np.zeros((n, rope_dim), np.uint16))

    def index_cache(self, n: int, dim: int) -> IndexCache:
        return IndexCache(np.zeros((n, dim // 2), np.uint8), np.zeros((n, dim // formats.FP4_BLOCK), np.uint8))

    # ------------------------------------------------------------------ rows in, rows out
    def embed(self, table: np.ndarray, tokens: np.ndarray, streams: int) -> np.ndarray:
        return np.repeat(formats.bf16_decode(table[tokens])[:, None, :], streams, axis=1)

    def linear(self, x: np.ndarray, w: Matrix, slices: int = 1) -> np.ndarray:
        return tree_sum(product(x, w.decoded, slices))

    def act_quant(self, x: np.ndarray) -> np.ndarray:
        return formats.act_dequant(*formats.act_quant(x, formats.ACT_BLOCK), formats.ACT_BLOCK)

    def rmsnorm(self, x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
        x = x.astype(np.float64)
        return (x * rsqrt_mean(x, eps) * w).astype(np.float32)

    def best(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = np.sort(logits, axis=1)  # NaN comes last
        second = order[:, -2] if order.shape[1] > 1 else np.float32(-np.inf)
        with np.errstate(over="ignore", invalid="ignore"):
            lead = np.where(np.isfinite(logits).all(axis=1), order[:, -1] - second, np.float32(np.nan))
        return logits.argmax(axis=1).astype(np.int32), lead.astype(np.float32)

    # ------------------------------------------------------------------ hyper-connections
    def _mixes(self, h: np.ndarray, hc) -> np.ndarray:
        """(fn · f) · rsqrt(mean(f²) + norm_eps) of the flattened streams: float64 [T, rows of fn]."""
        f = h.reshape(len(h), h.shape[1] * h.shape[2]).astype(np.float64)
        return product(f, hc.fn.decoded)[:, 0] * rsqrt_mean(f, hc.norm_eps)

    def hc_pre(self, h: np.ndarray, hc) -> tuple[np.ndarray, Mix]:
        m, eps = hc.streams, hc.eps
        pre, post, comb = self.hc_split(self._mixes(h, hc), hc.scale, hc.base, m, hc.iterations, eps)
        u = (pre[:, None, :] @ h.astype(np.float64))[:, 0]
        return u.astype(np.float32), Mix(post.astype(np.float32), comb.astype(np.float32))

    def hc_split(self, mix, scale, base, m: int, iterations: int, eps: float) -> tuple[np.ndarray, ...]:
        """mix [T, (2+m)m] → pre [T, m], post [T, m], comb [T, m, m], float64: sigmoids and Sinkhorn's iteration."""
        scale, base = scale.astype(np.float64), base.astype(np.float64)
        pre = sigmoid(mix[:, :m] * scale[0] + base[:m]) + eps
        post = 2 * sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(-1, m, m)
        comb = softmax(comb, axis=2) + eps
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
            comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        return pre, post, comb

    def hc_post(self, y: np.ndarray, h: np.ndarray, mix: Mix) -> np.ndarray:
        post, comb = mix.post.astype(np.float64), mix.comb.astype(np.float64)
        return (post[:, :, None] * y[:, None, :] + comb.transpose(0, 2, 1) @ h).astype(np.float32)

    def hc_head(self, h: np.ndarray, hc) -> np.ndarray:
        pre = sigmoid(self._mixes(h, hc) * hc.scale.astype(np.float64) + hc.base) + hc.eps
        return (pre[:, None, :] @ h.astype(np.float64))[:, 0].astype(np.float32)

    def mean_streams(self, h: np.ndarray) -> np.ndarray:
        return h.astype(np.float64).mean(axis=1).astype(np.float32)

    # ------------------------------------------------------------------ attention
    def rope_angles(self, positions: np.ndarray, theta: np.ndarray) -> Rope:
        angle = (positions.astype(np.float32)[:, None] * theta).astype(np.float64)
        return Rope(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))

    def rotate(self, x: np.ndarray, rope: Rope, inverse: bool = False) -> np.ndarray:
        x[...] = rotate_pairs(x, rope, inverse)
        return x

    def query(self, q: np.ndarray, rope: Rope, eps: float) -> np.ndarray:
        wide = q.astype(np.float64)
        q[...] = rotate_pairs(wide * rsqrt_mean(wide, eps), rope, inverse=False)
        return q

    def encode_keys(self, k: np.ndarray, cache: KeyCache, where: np.ndarray) -> None:
        plain = cache.codes.shape[1]
        cache.codes[where], cache.scales[where] = formats.act_quant(k[:, :plain], formats.KEY_BLOCK)
        cache.rope[where] = formats.bf16_encode(k[:, plain:])

    def decode_keys(self, cache: KeyCache, where: np.ndarray) -> np.ndarray:
        plain = formats.act_dequant(cache.codes[where], cache.scales[where], formats.KEY_BLOCK)
        return np.concatenate([plain, formats.bf16_decode(cache.rope[where])], axis=1)

    def attend(self, q: np.ndarray, sink: np.ndarray, parts: list[tuple[KeyCache, np.ndarray]]) -> np.ndarray:
        sink, out = sink.astype(np.float64), np.empty_like(q)
        for t, row in enumerate(q.astype(np.float64)):
            keys = [self.decode_keys(cache, places[t][places[t] >= 0]) for cache, places in parts]
            k = np.concatenate(keys, axis=0).astype(np.float64)
            s = k @ row.T * row.shape[-1] ** -0.5  # [keys, H]
            top = np.maximum(s.max(axis=0, initial=-np.inf), sink)
            e = np.exp(s - top)
            out[t] = (e.T @ k) / (e.sum(axis=0) + np.exp(sink - top))[:, None]
        return out

    def grouped_linear(self, o: np.ndarray, w: Matrix, groups: int) -> np.ndarray:
        weights = np.split(w.decoded, groups)
        parts = np.split(o, groups, axis=1)
        z = [product(part, weight)[:, 0] for part, weight in zip(parts, weights)]
        return np.concatenate(z, axis=1).astype(np.float32)

    # ------------------------------------------------------------------ compressor
    def compress_store(self, kv, gate, ape, positions, ring: Ring, where) -> None:
        ring.kv[where] = kv
        ring.gate[where] = gate + ape[positions % len(ape)]

    def compress_pool(self, ring: Ring, slots, entries, ratio: int, capacity: int) -> np.ndarray:
        overlap = ratio == INDEXED_RATIO
        before = ratio if overlap else 0
        positions = entries[:, None] * ratio + np.arange(-before, ratio)  # [n, rows]
        where = slots[:, None] * capacity + positions % capacity
        kv, gate = ring.kv[where].astype(np.float64), ring.gate[where].astype(np.float64)  # [n, rows, c·D]
        if overlap:
            dim = kv.shape[-1] // 2
            kv, gate = (np.concatenate([a[:, :ratio, :dim], a[:, ratio:, dim:]], axis=1) for a in (kv, gate))
            none = (positions < 0)[:, :, None]  # there is no block before entry 0
            kv, gate = np.where(none, 0, kv), np.where(none, -np.inf, gate)
        return (softmax(gate, axis=1) * kv).sum(axis=1).astype(np.float32)

    # ------------------------------------------------------------------ indexer
    def index_query(self, q: np.ndarray, rope: Rope) -> np.ndarray:
        q = formats.hadamard(rotate_pairs(q, rope, inverse=False).astype(np.float32))
        return formats.fp4_act_dequant(*formats.fp4_act_quant(q))

    def encode_index(self, k: np.ndarray, cache: IndexCache, where: np.ndarray) -> None:
        cache.codes[where], cache.scales[where] = formats.fp4_act_quant(formats.hadamard(k))

    def decode_index(self, cache: IndexCache, where: np.ndarray) -> np.ndarray:
        return formats.fp4_act_dequant(cache.codes[where], cache.scales[where])

    def index_scores(self, q: np.ndarray, w: np.ndarray, k: np.ndarray) -> np.ndarray:
        """q [Hi, Di], w [Hi], k [n, Di] → float32 [n]: Σ_h w_h · Di^-½ · Hi^-½ · max(0, q_h · k_j)."""
        heads, dim = q.shape
        dots = np.maximum(k.astype(np.float64) @ q.T.astype(np.float64), 0)
        scores = (dots * (w.astype(np.float64) * dim**-0.5 * heads**-0.5)).sum(axis=1)
        return scores.astype(np.float32)

    def index_select(self, q, w, cache: IndexCache, slots, visible, pages, page_entries: int, k: int) -> np.ndarray:
        chosen = np.full((len(q), k), -1, np.int32)
        for t, n in enumerate(visible):
            best = np.arange(n)
            if n > k:
                where = pages[slots[t], best // page_entries] * page_entries + best % page_entries
                scores = self.index_scores(q[t], w[t], self.decode_index(cache, where))
                best = np.sort(np.argsort(-scores, kind="stable")[:k])
            chosen[t, : len(best)] = best
        return chosen

    def entry_places(self, entries, slots, pages, page_entries: int) -> np.ndarray:
        page = pages[slots[:, None], np.maximum(entries, 0) // page_entries]
        return np.where(entries < 0, -1, page * page_entries + entries % page_entries).astype(np.int32)

    def ring_places(self, slots, positions, span: int, capacity: int) -> np.ndarray:
        seen = positions[:, None] + np.arange(1 - span, 1, dtype=np.int32)
        return np.where(seen < 0, np.int32(-1), slots[:, None] * np.int32(capacity) + seen % np.int32(capacity))

    def visible_places(self, visible, n: int, slots, pages, page_entries: int) -> np.ndarray:
        entries = np.arange(n, dtype=np.int32)
        return self.entry_places(np.where(entries < visible[:, None], entries, np.int32(-1)), slots, pages, page_entries)

    # ------------------------------------------------------------------ experts
    def gate_scores(self, x: np.ndarray, w: Matrix) -> np.ndarray:
        """sqrt(softplus(w x)), float32 [T, experts]."""
        return np.sqrt(softplus(product(x, w.decoded)[:, 0])).astype(np.float32)

    def gate(self, x, w: Matrix, bias, fixed, tokens, k: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
        score = self.gate_scores(x, w)
        if fixed is None:
            ids = np.argsort(-(score if bias is None else score + bias), axis=1, kind="stable")[:, :k]
        else:
            ids = fixed[tokens]
        ids = np.sort(ids, axis=1)
        chosen = np.take_along_axis(score, ids, axis=1).astype(np.float64)
        weights = chosen / chosen.sum(axis=1, keepdims=True) * scale
        return ids.astype(np.int32), weights.astype(np.float32)

    def swiglu(self, g: np.ndarray, u: np.ndarray, weight: np.ndarray | None, limit: float) -> np.ndarray:
        g, u = g.astype(np.float64), u.astype(np.float64)
        if limit:
            g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        a = g * sigmoid(g) * u
        return (a if weight is None else a * weight[:, None]).astype(np.float32)

    def moe_begin(self, rows: int, lanes: int, slices: int, d: int) -> np.ndarray:
        return np.zeros((rows, lanes, slices, d))

    def moe_add(self, sums, where, x, ids, weights, bank: Bank, limit: float, shared: bool) -> None:
        xq, (_, lanes, slices, _) = self.act_quant(x), sums.shape

        def expert(rows, matrices, weight):
            w1, w2, w3 = matrices
            a = self.swiglu(self.linear(rows, w1), self.linear(rows, w3), weight, limit)
            return product(self.act_quant(a), w2.decoded, slices)

        for e in np.unique(ids[ids >= 0]):  # ascending, so that each row adds its experts in ascending id
            row, place = np.nonzero(ids == e)
            to = where[row], np.minimum(place, lanes - 1)
            np.add.at(sums, to, expert(xq[row], bank.experts[e], weights[row, place]))  # a row may name it twice
        if shared:
            sums[where, -1] += expert(xq, bank.shared, None)

    def moe_end(self, sums: np.ndarray) -> np.ndarray:
        total = np.zeros_like(sums[:, 0])
        for lane in range(sums.shape[1]):
            total += sums[:, lane]
        return tree_sum(total)

    def has_nonfinite(self, x: np.ndarray) -> bool:
        return not np.isfinite(x).all()

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x)

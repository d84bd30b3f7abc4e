"""The CPU backend's ops that work row by row: everything but linears and experts.

Each is one call of a compiled kernel; what they compute is said in Ops.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _cpu
from . import IndexCache, KeyCache, Mix, Ring, Rope


class RowsMixin:
    """Ops that CpuOps inherits; `team` is the threads and the instruction set they run on."""

    team: _cpu.Team

    # ------------------------------------------------------------------ rows in, rows out
    def embed(self, table: np.ndarray, tokens: np.ndarray, streams: int) -> np.ndarray:
        return _cpu.embed(self.team, table, tokens, streams)

    def act_quant(self, x: np.ndarray) -> np.ndarray:
        return _cpu.act_quant(self.team, x)

    def rmsnorm(self, x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
        return _cpu.rmsnorm(self.team, x, w, eps)

    def best(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _cpu.best(self.team, logits)

    # ------------------------------------------------------------------ hyper-connections
    def hc_pre(self, h: np.ndarray, hc: Any) -> tuple[np.ndarray, Mix]:
        u, post, comb = _cpu.hc_pre(self.team, h, hc, None, 0.0, False)
        return u, Mix(post, comb)

    def hc_pre_norm(self, h: np.ndarray, hc: Any, norm: np.ndarray, eps: float) -> tuple[np.ndarray, Mix]:
        u, post, comb = _cpu.hc_pre(self.team, h, hc, norm, eps, False)
        return u, Mix(post, comb)

    def hc_post(self, y: np.ndarray, h: np.ndarray, mix: Mix) -> np.ndarray:
        return _cpu.hc_post(self.team, y, h, mix.post, mix.comb)

    def hc_head(self, h: np.ndarray, hc: Any) -> np.ndarray:
        return _cpu.hc_pre(self.team, h, hc, None, 0.0, True)

    def mean_streams(self, h: np.ndarray) -> np.ndarray:
        return _cpu.mean_streams(self.team, h)

    # ------------------------------------------------------------------ attention
    def rope_angles(self, positions: np.ndarray, theta: np.ndarray) -> Rope:
        return Rope(*_cpu.rope_angles(self.team, positions, theta))

    def rotate(self, x: np.ndarray, rope: Rope, inverse: bool = False) -> np.ndarray:
        return _cpu.rotate(self.team, x, rope, inverse, False, 0.0)

    def query(self, q: np.ndarray, rope: Rope, eps: float) -> np.ndarray:
        return _cpu.rotate(self.team, q, rope, False, True, eps)

    def encode_keys(self, k: np.ndarray, cache: KeyCache, where: np.ndarray) -> None:
        _cpu.encode_keys(self.team, k, None, None, cache, where, 0.0)

    def store_keys(
        self, kv: np.ndarray, norm: np.ndarray, rope: Rope, cache: KeyCache, where: np.ndarray, eps: float
    ) -> None:
        _cpu.encode_keys(self.team, kv, norm, rope, cache, where, eps)

    def decode_keys(self, cache: KeyCache, where: np.ndarray) -> np.ndarray:
        return _cpu.decode_keys(self.team, cache, where)

    def attend(self, q: np.ndarray, sink: np.ndarray, parts: list[tuple[KeyCache, np.ndarray]]) -> np.ndarray:
        return _cpu.attend(self.team, q, sink, parts)

    # ------------------------------------------------------------------ compressor
    def compress_store(
        self,
        kv: np.ndarray,
        gate: np.ndarray,
        ape: np.ndarray,
        positions: np.ndarray,
        ring: Ring,
        where: np.ndarray,
    ) -> None:
        _cpu.compress_store(self.team, kv, gate, ape, positions, ring, where)

    def compress_pool(
        self, ring: Ring, slots: np.ndarray, entries: np.ndarray, ratio: int, capacity: int
    ) -> np.ndarray:
        return _cpu.compress_pool(self.team, ring, slots, entries, ratio, capacity)

    # ------------------------------------------------------------------ indexer
    def index_query(self, q: np.ndarray, rope: Rope) -> np.ndarray:
        return _cpu.index_query(self.team, q, rope)

    def encode_index(self, k: np.ndarray, cache: IndexCache, where: np.ndarray) -> None:
        _cpu.encode_index(self.team, k, cache, where)

    def decode_index(self, cache: IndexCache, where: np.ndarray) -> np.ndarray:
        return _cpu.decode_index(self.team, cache, where)

    def index_select(
        self,
        q: np.ndarray,
        w: np.ndarray,
        cache: IndexCache,
        slots: np.ndarray,
        visible: np.ndarray,
        pages: np.ndarray,
        page_entries: int,
        k: int,
    ) -> np.ndarray:
        return _cpu.index_select(self.team, q, w, cache, slots, visible, pages, page_entries, k)

    def entry_places(
        self, entries: np.ndarray, slots: np.ndarray, pages: np.ndarray, page_entries: int
    ) -> np.ndarray:
        return _cpu.entry_places(self.team, entries, slots, pages, page_entries)

    def ring_places(self, slots: np.ndarray, positions: np.ndarray, span: int, capacity: int) -> np.ndarray:
        return _cpu.ring_places(self.team, slots, positions, span, capacity)

    def visible_places(
        self, visible: np.ndarray, n: int, slots: np.ndarray, pages: np.ndarray, page_entries: int
    ) -> np.ndarray:
        return _cpu.visible_places(self.team, visible, n, slots, pages, page_entries)

    # ------------------------------------------------------------------ experts
    def gate(
        self,
        x: np.ndarray,
        w: _cpu.Matrix,
        bias: np.ndarray | None,
        fixed: np.ndarray | None,
        tokens: np.ndarray,
        k: int,
        scale: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        return _cpu.gate(self.team, x, w, bias, fixed, tokens, k, scale)

    # ------------------------------------------------------------------ results
    def has_nonfinite(self, x: np.ndarray) -> bool:
        return _cpu.has_nonfinite(self.team, x)

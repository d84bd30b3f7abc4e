"""Ops: the only seam between the model and what computes it.

A backend implements the small operations and may override the large ones, which default to compositions of the
small ones. Shapes use T = rows of the forward, d = hidden size, m = hyper-connection streams, H = heads,
D = head dimension, R = rope dimensions (the last R of a head), N, K = output and input features of a linear.
Every array is float32 and C-contiguous unless said otherwise. An op returns new arrays and leaves its inputs
alone, except where it says "in place".

A row's result never depends on the other rows of the call: every sum has an order fixed by shapes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import BackendError, ConfigError

Array = Any


class Rope(NamedTuple):
    """cos and sin of the rotation angles of some positions, each [n, R/2]."""

    cos: Array
    sin: Array


class KeyCache(NamedTuple):
    """n stored keys: exactly what attention uses, at their stored precision."""

    codes: Array  # uint8 [n, D-R]       e4m3
    scales: Array  # uint8 [n, (D-R)/64]  e8m0, one per 64 codes
    rope: Array  # uint16 [n, R]         bf16


class IndexCache(NamedTuple):
    """n stored index keys of dimension Di."""

    codes: Array  # uint8 [n, Di/2]   two e2m1 a byte, low nibble = even
    scales: Array  # uint8 [n, Di/32]  e8m0


class Ring(NamedTuple):
    """Compressor rows by position: value and gate, each float32 [n, c·D]."""

    kv: Array
    gate: Array


class Mix(NamedTuple):
    """What hc_pre hands to hc_post: post [T, m] and comb [T, m, m] (row j: stream j into streams k)."""

    post: Array
    comb: Array


class Ops:
    """Base class of the backends."""

    name: str

    # ------------------------------------------------------------------ what the backend keeps
    def matrix(self, fmt: str, weight: Array, scale: Array | None = None) -> Any:
        """A linear's weights as the backend wants them; the views into the file are kept, not copied, where possible.

        fmt "fp8": weight uint8 (e4m3) [N, K], scale uint8 (e8m0) [ceil(N/128), ceil(K/128)]
            "fp4": weight uint8 (two e2m1 a byte) [N, K/2], scale uint8 (e8m0) [N, K/32]
            "bf16": weight uint16 [N, K];  "f32": weight float32 [N, K]
        The result has attributes fmt and shape = (N, K).
        """
        raise NotImplementedError

    def vector(self, array: Array) -> Array:
        """A small parameter (norm weight, bias, sink, ape, hc): float32 from float32 or bf16 bits (uint16)."""
        raise NotImplementedError

    def table(self, array: Array) -> Array:
        """An integer or bf16-bits table kept as it is (embedding uint16 [vocab, d], tid2eid int64 [vocab, k])."""
        raise NotImplementedError

    def bank(self, experts: list[tuple[Any, Any, Any]], shared: tuple[Any, Any, Any]) -> Any:
        """The experts of one layer from their (w1, w2, w3) matrices: routed by id, and the shared one."""
        raise NotImplementedError

    def stage(self, slots: int, slot_bytes: int) -> Any:
        """Memory for experts that are not all resident, and the copies to it: staging.HostStage says what it must do."""
        from .staging import HostStage

        return HostStage(slots, slot_bytes)

    def room(self, weights: int) -> int | None:
        """Bytes of the backend's own memory that are left beside `weights` bytes; None where it computes in the host's.

        Raises CapacityError where the weights alone do not fit.
        """
        return None

    def step_bytes(self, config: Any, split: Any, rows: int, context: int) -> int:
        """Bytes of `room` that the arrays of one forward take at most; 0 where there is no such memory.

        config: ModelConfig; split: Split, this rank's; rows of one forward, the last of `context` positions.
        """
        return 0

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes of `room` ready for a forward's arrays, once weights and state are there."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A zeroed array where the backend computes."""
        raise NotImplementedError

    def key_cache(self, n: int, dim: int, rope_dim: int) -> KeyCache:
        """Room for n keys of `dim` dimensions."""
        raise NotImplementedError

    def index_cache(self, n: int, dim: int) -> IndexCache:
        """Room for n index keys."""
        raise NotImplementedError

    # ------------------------------------------------------------------ rows in, rows out
    def embed(self, table: Array, tokens: Array, streams: int) -> Array:
        """table uint16 [vocab, d], tokens int32 [T] → [T, streams, d]: the token's embedding, once per stream."""
        raise NotImplementedError

    def linear(self, x: Array, w: Any, slices: int = 1) -> Array:
        """x [T, K] · wᵀ → [T, N]. K is cut into `slices` equal slices whose sums are added as a binary tree."""
        raise NotImplementedError

    def act_quant(self, x: Array) -> Array:
        """x [T, K] rounded to e4m3 per block of 128 (the last may be short) and decoded again, float32."""
        raise NotImplementedError

    def rmsnorm(self, x: Array, w: Array, eps: float) -> Array:
        """x · rsqrt(mean(x²) + eps) · w over the last axis; w [K]."""
        raise NotImplementedError

    def best(self, logits: Array) -> tuple[Array, Array]:
        """logits [T, vocab] → each row's largest: its id int32 [T], the lower where equal, and its lead over the second [T].

        With a vocabulary of one the lead is infinite. Where a logit is not finite the lead is NaN and the id any of the
        vocabulary's: sampling.greedy says what is wrong with such a row.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ hyper-connections
    def hc_pre(self, h: Array, hc: Any) -> tuple[Array, Mix]:
        """h [T, m, d] → u [T, d] = Σ_j pre_j h_j, and the mix. hc: parameters.HyperConnection."""
        raise NotImplementedError

    def hc_post(self, y: Array, h: Array, mix: Mix) -> Array:
        """post_k · y + Σ_j comb_jk h_j → [T, m, d]; y [T, d]."""
        raise NotImplementedError

    def hc_head(self, h: Array, hc: Any) -> Array:
        """h [T, m, d] → Σ_j pre_j h_j [T, d], pre_j = sigmoid(mix_j · scale + base_j) + hc_eps."""
        raise NotImplementedError

    def hc_pre_norm(self, h: Array, hc: Any, norm: Array, eps: float) -> tuple[Array, Mix]:
        """hc_pre, then rmsnorm: the input of a sub-layer [T, d]."""
        u, mix = self.hc_pre(h, hc)
        return self.rmsnorm(u, norm, eps), mix

    def mean_streams(self, h: Array) -> Array:
        """h [T, m, d] → mean over the m streams [T, d]."""
        raise NotImplementedError

    # ------------------------------------------------------------------ attention
    def rope_angles(self, positions: Array, theta: Array) -> Rope:
        """positions int32 [n], theta float32 [R/2] → cos, sin of fl32(position · theta)."""
        raise NotImplementedError

    def rotate(self, x: Array, rope: Rope, inverse: bool = False) -> Array:
        """x [T, H, D]: rotate the adjacent pairs of the last R dims of every head. In place; returns x."""
        raise NotImplementedError

    def query(self, q: Array, rope: Rope, eps: float) -> Array:
        """q [T, H, D] → each head · rsqrt(mean + eps), then rotated. In place; returns q."""
        raise NotImplementedError

    def encode_keys(self, k: Array, cache: KeyCache, where: Array) -> None:
        """k [n, D] (normed, rotated): first D−R dims to e4m3 per 64, the rest to bf16, at places where int32 [n]."""
        raise NotImplementedError

    def decode_keys(self, cache: KeyCache, where: Array) -> Array:
        """The stored keys at places where int32 [n], as float32 [n, D]."""
        raise NotImplementedError

    def store_keys(self, kv: Array, norm: Array, rope: Rope, cache: KeyCache, where: Array, eps: float) -> None:
        """kv [n, D] → rmsnorm, rotate, encode at `where`."""
        k = self.rmsnorm(kv, norm, eps)
        self.encode_keys(self.rotate(k[:, None, :], rope)[:, 0], cache, where)

    def attend(self, q: Array, sink: Array, parts: list[tuple[KeyCache, Array]]) -> Array:
        """Sparse attention with a sink: the value is the key.

        q [T, H, D]; sink [H]; parts: (cache, places int32 [T, n]); place −1 = absent. Keys are visited part by part
        and in the order of the places. o_h = Σ e^{s_i} k_i / (Σ e^{s_i} + e^{sink_h}), s_i = (q_h · k_i) · D^−½ → [T, H, D].
        A row with no key at all gives zeros.
        """
        raise NotImplementedError

    def grouped_linear(self, o: Array, w: Any, groups: int) -> Array:
        """o [T, groups · K], w [groups · r, K] → [T, groups · r]: group g's rows of w times group g's slice of o."""
        raise NotImplementedError

    # ------------------------------------------------------------------ compressor
    def compress_store(self, kv: Array, gate: Array, ape: Array, positions: Array, ring: Ring, where: Array) -> None:
        """ring.kv[where] = kv;  ring.gate[where] = gate + ape[position mod ratio]. kv, gate [T, c·D]; ape [ratio, c·D]."""
        raise NotImplementedError

    def compress_pool(self, ring: Ring, slots: Array, entries: Array, ratio: int, capacity: int) -> Array:
        """Softmax-pool completed entries: slots, entries int32 [n] → [n, D].

        Position p of slot s lies at ring place s · capacity + p mod capacity. Entry j pools positions
        j·ratio .. j·ratio+ratio−1; with ratio 4 also the block before (its first D channels, the block's own last D;
        there is none before entry 0). Per channel Σ softmax(gate) · kv, rows in ascending position.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ indexer
    def index_query(self, q: Array, rope: Rope) -> Array:
        """q [T, Hi, Di] → rotated, Hadamard (Sylvester order, · Di^−½), rounded to e2m1 per 32 and decoded."""
        raise NotImplementedError

    def encode_index(self, k: Array, cache: IndexCache, where: Array) -> None:
        """k [n, Di] (normed, rotated) → Hadamard, e2m1 per 32, stored at places where int32 [n]."""
        raise NotImplementedError

    def decode_index(self, cache: IndexCache, where: Array) -> Array:
        """The stored index keys at places where int32 [n], as float32 [n, Di]."""
        raise NotImplementedError

    def index_select(
        self, q: Array, w: Array, cache: IndexCache, slots: Array, visible: Array, pages: Array, page_entries: int, k: int
    ) -> Array:
        """The k best entries of every row: int32 [T, k], ascending entry numbers, then −1.

        q [T, Hi, Di] (from index_query); w [T, Hi] (unscaled projection); visible int32 [T]: row t may see entries
        0 .. visible[t]−1; entry j of slot s lies at pages[s, j div page_entries] · page_entries + j mod page_entries
        (pages int32 [slots, n]). score_j = Σ_h w_h · Di^−½ · Hi^−½ · max(0, q_h · k_j); equal scores (−0 = 0): lower j.
        """
        raise NotImplementedError

    def entry_places(self, entries: Array, slots: Array, pages: Array, page_entries: int) -> Array:
        """entries int32 [T, n] (−1 = none) → their cache places int32 [T, n] (−1 stays)."""
        raise NotImplementedError

    # ------------------------------------------------------------------ places, from what is known of the rows
    def ring_places(self, slots: Array, positions: Array, span: int, capacity: int) -> Array:
        """int32 [T, span]: where each row's last `span` positions lie, its own included, ascending; −1 before position 0.

        Position p of slot s lies at s · capacity + p mod capacity. slots, positions int32 [T].
        """
        raise NotImplementedError

    def visible_places(self, visible: Array, n: int, slots: Array, pages: Array, page_entries: int) -> Array:
        """int32 [T, n]: the cache places of entries 0 .. visible[t] − 1 (see entry_places), then −1. visible int32 [T], ≤ n."""
        raise NotImplementedError

    # ------------------------------------------------------------------ experts
    def gate(
        self, x: Array, w: Any, bias: Array | None, fixed: Array | None, tokens: Array, k: int, scale: float
    ) -> tuple[Array, Array]:
        """Routing: x [T, d] → ids int32 [T, k] ascending, weights [T, k].

        score = sqrt(softplus(w x)); ids = fixed[token] (int64 [vocab, k]) when given, else the k largest score + bias
        (ties: lower id); weight = score / Σ score · scale, the sum in ascending id.
        """
        raise NotImplementedError

    def swiglu(self, g: Array, u: Array, weight: Array | None, limit: float) -> Array:
        """g = min(g, limit), u = clamp(u, ±limit); silu(g) · u · weight. g, u [n, inter]; weight [n]; limit 0: no clamp."""
        raise NotImplementedError

    def moe(self, x: Array, ids: Array, weights: Array, bank: Any, limit: float, slices: int) -> Array:
        """Σ over a row's experts in ascending id, then the shared expert → [T, d].

        x [T, d] not yet quantised. The inner dimension is cut into `slices` equal slices; each slice sums over all
        experts, and the slices are added as a binary tree.
        """
        sums = self.moe_begin(len(x), 1, slices, x.shape[1])
        self.moe_add(sums, self.table(np.arange(len(x), dtype=np.int32)), x, ids, weights, bank, limit, True)
        return self.moe_end(sums)

    # moe in several calls, as experts come: begin, add …, end. The bits are those of one call
    def moe_begin(self, rows: int, lanes: int, slices: int, d: int) -> Array:
        """Sums of nothing: [rows, lanes, slices, d].

        lanes 1: a row's experts are added to one sum, so they must come in ascending id, the shared one last.
        lanes k + 1: each choice has its own, the shared expert the last; they may come in any order.
        """
        return self.zeros((rows, lanes, slices, d), np.float32)

    def moe_add(
        self, sums: Array, where: Array, x: Array, ids: Array, weights: Array, bank: Any, limit: float, shared: bool
    ) -> None:
        """Add what some experts give to some rows; in place.

        x [n, d], ids int32 [n, k] (−1: not now) and weights [n, k] as of moe, for the rows where int32 [n] of sums, all
        different. shared: the shared expert too. A choice is added once over all calls.
        """
        raise NotImplementedError

    def moe_end(self, sums: Array) -> Array:
        """[rows, lanes, slices, d] → [rows, d]: lanes in order, then the slices as a binary tree."""
        raise NotImplementedError

    def has_nonfinite(self, x: Array) -> bool:
        """Whether x holds a NaN or an infinity."""
        raise NotImplementedError

    def to_host(self, x: Array) -> Array:
        """x as a NumPy array."""
        raise NotImplementedError


def open_ops(name: str, *, threads: int = 1, device: int = 0) -> Ops:
    """The backend called `name`: "cpu" (compiled kernels), "cuda" (a GPU, number `device`) or "reference" (NumPy; slow,
    what every op means).

    Raises ConfigError for an unknown name, BackendError where the backend cannot run.
    """
    if name == "reference":
        from .reference import ReferenceOps

        return ReferenceOps()
    if name == "cpu":
        try:
            from .cpu import CpuOps
        except ImportError as error:
            raise BackendError(
                f"backend cpu: the compiled module is missing ({error}); install with `pip install -e .` in a checkout "
                "(a plain `pip install .` must be run from outside the checkout: here Python imports the sources)"
            ) from error
        except ValueError as error:  # numpy.dtype size changed
            raise BackendError(
                f"backend cpu: the compiled module was built with another NumPy ({error}); install it again"
            ) from error
        return CpuOps(threads=threads)
    if name == "cuda":
        from .cuda import CudaOps
        from .kernels import DeviceLauncher

        return CudaOps(DeviceLauncher(device))
    raise ConfigError(f"backend: expected one of cpu, cuda, reference; found {name!r}")

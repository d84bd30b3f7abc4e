"""The forward pass: rows and state in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .comm import Communicator
from .config import ModelConfig
from .errors import BackendError, InputError
from .ops import KeyCache, Ops
from .parameters import Attention, Block, Compressor, Indexer, MoE, Weights
from .state import LayerState, Pool
from .step import Step


class Output(NamedTuple):
    """What a forward returns for its n wanted rows; logits and best on the host."""

    logits: np.ndarray | None  # float32 [n, vocab]; None on ranks other than 0, as is best
    best: list[int] | None  # the token of each row's largest logit, the lowest where equal; −1 where one is not finite
    places: Any  # int32 [n]: where the pool keeps the rows' main hidden
    kept: Any | None  # the pool's main hidden; None where the checkpoint has no draft

    @property
    def main_hidden(self) -> Any | None:
        """float32 [n, targets · d], where the backend computes; None without a draft. To be read while the pool keeps these
        positions, as nothing is copied before: no step of a generation asks for it."""
        return None if self.kept is None else self.kept[self.places]


@dataclass(frozen=True)
class Model:
    """The network: weights, the backend that computes and the communicator between ranks.

    Raises BackendError where the weights are a rank's part and the communicator is not that rank's.
    """

    config: ModelConfig
    weights: Weights
    ops: Ops
    comm: Communicator
    debug: bool = False

    def __post_init__(self) -> None:
        held, here = self.weights.split, self.comm
        if (held.rank, held.size) != (here.rank, here.size):
            raise BackendError(
                f"model: expected the communicator of rank {held.rank} of {held.size}, as the weights were cut; "
                f"found rank {here.rank} of {here.size}"
            )

    def forward(self, step: Step, pool: Pool) -> Output:
        """All layers over the rows of `step`; keys and compressor rows go to `pool`."""
        c, ops, w = self.config, self.ops, self.weights
        for file in w.files:
            file.check_whole()
        if w.store:
            w.store.begin(step.rows.tokens)
        h = ops.embed(w.embed, step.tokens, c.hc_mult)
        for number, (layer, state) in enumerate(zip(w.blocks, pool.layers)):
            h = self.block(layer, h, step, state)
            if self.debug and self.comm.rank == 0 and ops.has_nonfinite(h):
                raise InputError(f"layer {number}: expected finite values; found NaN or infinity in its output")
            if w.draft and number in c.dspark.target_layer_ids:
                self.capture(h, c.dspark.target_layer_ids.index(number), step, pool)
        places, kept = step.window_where, pool.hidden if w.draft else None
        if len(step.rows.wanted) < len(step):
            wanted = ops.table(np.array(step.rows.wanted, np.int64))
            h, places = h[wanted], places[wanted]
        y = ops.hc_head(h, w.hc_head)
        logits = self.logits(ops.rmsnorm(y, w.norm, c.rms_norm_eps))
        if logits is None:
            return Output(None, None, places, kept)
        best, lead = (ops.to_host(x) for x in ops.best(logits))
        return Output(ops.to_host(logits), np.where(np.isnan(lead), np.int32(-1), best).tolist(), places, kept)

    def logits(self, x: Any) -> Any | None:
        """x [n, d] → [n, vocab] on rank 0; None elsewhere."""
        return self.comm.join(self.ops.linear(x, self.weights.head))

    def capture(self, h: Any, target: int, step: Step, pool: Pool) -> None:
        """Keep a target layer's part of the rows' main hidden, which the draft's windows are made from."""
        d = self.config.hidden_size
        part = pool.hidden[:, target * d : (target + 1) * d]
        part[step.window_where] = self.ops.mean_streams(h)

    def block(self, w: Block, h: Any, step: Step, state: LayerState) -> Any:
        """One layer. h [T, m, d] → the same."""
        ops, eps = self.ops, self.config.rms_norm_eps
        x, mix = ops.hc_pre_norm(h, w.hc_attn, w.attn_norm, eps)
        h = ops.hc_post(self.attention(w.attn, x, step, state), h, mix)
        x, mix = ops.hc_pre_norm(h, w.hc_ffn, w.ffn_norm, eps)
        return ops.hc_post(self.moe(w.ffn, x, step), h, mix)

    def attention(self, w: Attention, x: Any, step: Step, state: LayerState) -> Any:
        """x [T, d] → [T, d]. Heads, groups and slices are this rank's; all ranks' where attention is not split."""
        c, ops, split = self.config, self.ops, self.weights.split
        eps, rope = c.rms_norm_eps, step.rope(w.ratio)
        xq = ops.act_quant(x)
        qr = ops.act_quant(ops.rmsnorm(ops.linear(xq, w.wq_a), w.q_norm, eps))
        q = ops.linear(qr, w.wq_b).reshape(len(step), split.heads, c.head_dim)
        q = ops.query(q, rope, eps)
        o = ops.attend(q, w.sink, self.keys(w, x, xq, qr, step, state))
        o = ops.rotate(o, rope, inverse=True)
        z = ops.grouped_linear(o.reshape(len(step), -1), w.wo_a, split.groups)
        out = ops.linear(ops.act_quant(z), w.wo_b, split.attention_slices)
        return self.comm.sum_parts(out, split.attention)

    def keys(self, w: Attention, x: Any, xq: Any, qr: Any, step: Step, state: LayerState) -> list[tuple[KeyCache, Any]]:
        """Store the rows' keys → what each row attends to, in ascending position: chosen entries, then the window."""
        ops = self.ops
        kv = ops.linear(xq, w.wkv)
        ops.store_keys(
            kv, w.kv_norm, step.rope(w.ratio), state.window, step.window_where, self.config.rms_norm_eps
        )
        window = (state.window, step.window_places)
        if w.compressor is None:
            return [window]
        self.compress(w.compressor, x, step, state)
        return [(state.entries, self.select(w, x, qr, step, state)), window]

    def compress(self, w: Compressor, x: Any, step: Step, state: LayerState) -> None:
        """Keep the rows' compressor inputs; pool and store the entries that these rows complete."""
        ops = self.ops
        at = step.compression(w.ratio)
        e = self.pooled(w, x, step, state.ring)
        ops.encode_keys(e, state.entries, at.done_places)

    def pooled(self, w: Compressor, x: Any, step: Step, ring: Any) -> Any:
        """x [T, d] into the ring → the completed entries [n, D], normed and rotated to position entry · ratio."""
        ops = self.ops
        at = step.compression(w.ratio)
        ops.compress_store(ops.linear(x, w.wkv), ops.linear(x, w.wgate), w.ape, step.positions, ring, at.where)
        e = ops.compress_pool(ring, at.done_slots, at.done, w.ratio, step.pool.ring_capacity(w.ratio))
        e = ops.rmsnorm(e, w.norm, self.config.rms_norm_eps)
        return ops.rotate(e[:, None, :], at.done_rope)[:, 0]

    def select(self, w: Attention, x: Any, qr: Any, step: Step, state: LayerState) -> Any:
        """Places of the compressed entries each row attends to: int32 [T, n], −1 = none."""
        if w.indexer is None:
            return step.all_places(w.ratio)
        chosen = self.index(w.indexer, x, qr, step, state)
        return step.pool.entry_places(chosen, step.slots, w.ratio)

    def index(self, w: Indexer, x: Any, qr: Any, step: Step, state: LayerState) -> Any:
        """The index_topk best entries of every row: int32 [T, k], ascending, −1 padded."""
        c, ops, pool = self.config, self.ops, step.pool
        ratio = w.compressor.ratio
        at = step.compression(ratio)
        ops.encode_index(self.pooled(w.compressor, x, step, state.index_ring), state.index, at.done_places)
        q = ops.linear(qr, w.wq_b).reshape(len(step), w.heads, w.dim)
        q = ops.index_query(q, step.rope(ratio))
        weight = ops.linear(x, w.weights_proj)
        return ops.index_select(
            q, weight, state.index, step.slots, at.visible, pool.pages, pool.page_entries(ratio), c.index_topk
        )

    def moe(self, w: MoE, x: Any, step: Step) -> Any:
        """x [T, d] → routed and shared experts [T, d]."""
        c, ops, split = self.config, self.ops, self.weights.split
        ids, weights = ops.gate(
            x, w.gate, w.bias, w.fixed, step.tokens, c.num_experts_per_tok, c.routed_scaling_factor
        )
        moe = self.weights.store.moe if self.weights.store else ops.moe
        y = moe(x, ids, weights, w.bank, c.swiglu_limit, split.moe_slices)
        return self.comm.sum_parts(y, split.experts)

"""The DSpark draft module: stages over the main model's hidden states, a markov chain and a confidence head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, NamedTuple

import numpy as np

from .errors import InputError
from .model import Model
from .ops import KeyCache
from .parameters import Attention
from .rows import Rows
from .state import LayerState, Pool
from .step import Step


class Drafted(NamedTuple):
    """A drafted block: token ids int32 [B], the logits float32 [B, vocab] they were chosen from, confidence [B]."""

    ids: np.ndarray
    logits: np.ndarray
    confidence: np.ndarray  # the logit of "this token will be accepted"


class BlockStep(Step):
    """The rows of one drafted block: they see the committed positions before the block, and all of the block."""

    @cached_property
    def window_places(self):
        """int32 [B, W]: the last W committed positions, the same for every row."""
        seen = self.rows.positions[:1, None] + np.arange(-self.pool.window, 0, dtype=np.int32)
        places = self.pool.window_place(self.rows.slots[:1, None], seen)
        places[seen < 0] = -1
        return self.ops.table(np.repeat(places, len(self), 0))

    @cached_property
    def block_where(self):
        """int32 [B]: where the block's own keys go."""
        n = len(self)
        return self.ops.table(self.rows.slots * np.int32(n) + np.arange(n, dtype=np.int32))


@dataclass(frozen=True)
class Draft(Model):
    """The draft stages: layers without compression whose keys come from the main hidden and from the block itself."""

    def keys(self, w: Attention, x: Any, xq: Any, qr: Any, step: Step, state: LayerState) -> list[tuple[KeyCache, Any]]:
        """The stage's window of committed positions, then the block's own keys, all of them for every row."""
        ops, block = self.ops, step.pool.block
        kv = ops.linear(xq, w.wkv)
        ops.store_keys(kv, w.kv_norm, step.rope(0), block, step.block_where, self.config.rms_norm_eps)
        own = np.repeat(step.block_where[None], len(step), 0)
        return [(state.window, step.window_places), (block, own)]

    def prime(self, pool: Pool, slot: int, start: int, stop: int) -> None:
        """Write every stage's keys of the committed positions start .. stop−1 from their kept main hidden."""
        ops, draft, eps = self.ops, self.weights.draft, self.config.rms_norm_eps
        step = Step(ops, pool, Rows.of(slot, start, np.zeros(stop - start, np.int32)))
        x = ops.linear(ops.act_quant(pool.hidden[step.window_where]), draft.main_proj)
        xq = ops.act_quant(ops.rmsnorm(x, draft.main_norm, eps))
        for stage, state in zip(draft.stages, pool.stages):
            kv = ops.linear(xq, stage.attn.wkv)
            ops.store_keys(kv, stage.attn.kv_norm, step.rope(0), state.window, step.window_where, eps)

    def draft(
        self, pool: Pool, slot: int, position: int, token: int, choose: Callable[[np.ndarray, int], int]
    ) -> Drafted | None:
        """A block after the committed `token` at `position`; windows primed up to position − 1. On rank 0; else None.

        choose(logits [vocab], position the token is for) → token: how each drafted token is picked.
        """
        c, ops, w = self.config, self.ops, self.weights
        draft, size = w.draft, c.dspark.block_size
        tokens = [token] + [c.dspark.noise_token_id] * (size - 1)
        step = BlockStep(ops, pool, Rows.of(slot, position, tokens))
        h = ops.embed(w.embed, step.tokens, c.hc_mult)
        for stage, state in zip(draft.stages, pool.stages):
            h = self.block(stage, h, step, state)
        y = ops.hc_head(h, draft.hc_head)
        logits = self.logits(ops.rmsnorm(y, draft.norm, c.rms_norm_eps))
        return None if logits is None else self.chain(y, logits, token, position, choose)

    def chain(self, y: Any, logits: Any, token: int, position: int, choose: Callable[[np.ndarray, int], int]) -> Drafted:
        """The markov chain: each slot's logits and confidence depend on the token drafted before it.

        y [B, d], logits [B, vocab]: the stages' output and its head; token: the committed one, at `position`.
        """
        ops, draft = self.ops, self.weights.draft
        ids, out, confidence = [], [], []
        for slot in range(len(logits)):
            previous = ops.embed(draft.markov_w1, ops.table(np.array([token], np.int32)), 1)[:, 0]
            scores = ops.to_host(logits[slot : slot + 1] + ops.linear(previous, draft.markov_w2))[0]
            joined = np.concatenate([y[slot : slot + 1], previous], axis=1)
            confidence.append(float(ops.to_host(ops.linear(joined, draft.confidence))[0, 0]))
            token = choose(scores, position + 1 + slot)
            if not 0 <= token < len(scores):
                raise InputError(f"choose: expected a token id within 0..{len(scores) - 1}, found {token}")
            ids.append(token)
            out.append(scores)
        return Drafted(np.array(ids, np.int32), np.stack(out), np.array(confidence, np.float32))

"""The DSpark draft module: stages over the main model's hidden states, a markov chain and a confidence head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, NamedTuple, Sequence

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


class Ask(NamedTuple):
    """A draft that is wanted: a block after the committed `token` at `position`; windows primed up to position − 1.

    choose(logits [vocab], position the token is for) → token: how each drafted token is picked. None on ranks other than 0.
    """

    slot: int
    position: int
    token: int
    choose: Callable[[np.ndarray, int], int] | None = None


class Span(NamedTuple):
    """Committed positions start .. stop−1 of a slot."""

    slot: int
    start: int
    stop: int


class BlockStep(Step):
    """The rows of drafted blocks, one after another: they see the committed positions before their block, and all of it."""

    @property
    def size(self) -> int:
        """B, the rows of one block."""
        return self.pool.config.dspark.block_size

    @cached_property
    def window_places(self):
        """int32 [T, W]: the last W committed positions, the same for every row of a block."""
        seen = self.rows.positions[:: self.size, None] + np.arange(-self.pool.window, 0, dtype=np.int32)
        places = self.pool.window_place(self.rows.slots[:: self.size, None], seen)
        places[seen < 0] = -1
        return self.ops.table(np.repeat(places, self.size, 0))

    @cached_property
    def _where(self) -> np.ndarray:
        first = self.rows.slots[:: self.size, None] * np.int32(self.size)
        return first + np.arange(self.size, dtype=np.int32)

    @cached_property
    def block_where(self):
        """int32 [T]: where the blocks' own keys go."""
        return self.ops.table(self._where.ravel())

    @cached_property
    def block_places(self):
        """int32 [T, B]: the keys of a row's own block, all of them."""
        return self.ops.table(np.repeat(self._where, self.size, 0))


@dataclass(frozen=True)
class Draft(Model):
    """The draft stages: layers without compression whose keys come from the main hidden and from the block itself."""

    def keys(self, w: Attention, x: Any, xq: Any, qr: Any, step: Step, state: LayerState) -> list[tuple[KeyCache, Any]]:
        """The stage's window of committed positions, then the block's own keys, all of them for every row."""
        ops, block = self.ops, step.pool.block
        kv = ops.linear(xq, w.wkv)
        ops.store_keys(kv, w.kv_norm, step.rope(0), block, step.block_where, self.config.rms_norm_eps)
        return [(state.window, step.window_places), (block, step.block_places)]

    def prime(self, pool: Pool, spans: Sequence[Span]) -> None:
        """Write every stage's keys of committed positions from their kept main hidden. Each slot in one span only."""
        ops, draft, eps = self.ops, self.weights.draft, self.config.rms_norm_eps
        parts = [Rows.of(slot, start, np.zeros(stop - start, np.int32), "none") for slot, start, stop in spans]
        step = Step(ops, pool, Rows.pack(parts))
        x = ops.linear(ops.act_quant(pool.hidden[step.window_where]), draft.main_proj)
        xq = ops.act_quant(ops.rmsnorm(x, draft.main_norm, eps))
        for stage, state in zip(draft.stages, pool.stages):
            kv = ops.linear(xq, stage.attn.wkv)
            ops.store_keys(kv, stage.attn.kv_norm, step.rope(0), state.window, step.window_where, eps)

    def draft(self, pool: Pool, asks: Sequence[Ask]) -> list[Drafted] | None:
        """The blocks that are asked for, each slot once, in one pass. On rank 0; else None."""
        c, ops, w = self.config, self.ops, self.weights
        draft, noise = w.draft, [c.dspark.noise_token_id] * (c.dspark.block_size - 1)
        step = BlockStep(ops, pool, Rows.pack([Rows.of(ask.slot, ask.position, [ask.token, *noise]) for ask in asks]))
        h = ops.embed(w.embed, step.tokens, c.hc_mult)
        for stage, state in zip(draft.stages, pool.stages):
            h = self.block(stage, h, step, state)
        y = ops.hc_head(h, draft.hc_head)
        logits = self.logits(ops.rmsnorm(y, draft.norm, c.rms_norm_eps))
        return None if logits is None else self.chain(y, logits, asks)

    def chain(self, y: Any, logits: Any, asks: Sequence[Ask]) -> list[Drafted]:
        """The markov chain: each place's logits and confidence depend on the token drafted before it.

        y [n · B, d], logits [n · B, vocab]: the stages' output and its head, for n blocks.
        """
        ops, draft, size = self.ops, self.weights.draft, self.config.dspark.block_size
        tokens = [ask.token for ask in asks]
        ids, out, confidence = [], [], []
        for place in range(size):
            rows = ops.table(np.arange(place, size * len(asks), size))
            previous = ops.embed(draft.markov_w1, ops.table(np.array(tokens, np.int32)), 1)[:, 0]
            scores = ops.to_host(logits[rows] + ops.linear(previous, draft.markov_w2))
            joined = np.concatenate([y[rows], previous], axis=1)
            confidence.append(ops.to_host(ops.linear(joined, draft.confidence))[:, 0])
            tokens = [ask.choose(row, ask.position + 1 + place) for ask, row in zip(asks, scores)]
            for token in tokens:
                if not 0 <= token < scores.shape[1]:
                    raise InputError(f"choose: expected a token id within 0..{scores.shape[1] - 1}, found {token}")
            ids.append(tokens)
            out.append(scores)
        drafted = zip(np.array(ids, np.int32).T, np.stack(out, 1), np.stack(confidence, 1).astype(np.float32))
        return [Drafted(*block) for block in drafted]

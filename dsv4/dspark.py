"""The DSpark draft module: stages over the main model's hidden states, a markov chain and a confidence head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Sequence

import numpy as np

from .errors import InputError
from .model import Model
from .ops import KeyCache
from .parameters import Attention
from .rows import Rows, Span, cut
from .sampling import Choose, greedy
from .state import LayerState, Pool
from .step import Step


class Drafted(NamedTuple):
    """A drafted block: token ids int32 [B], the logits float32 [B, vocab] they were chosen from, confidence float32 [B]."""

    ids: np.ndarray
    logits: np.ndarray | None  # None where they were not asked for
    confidence: np.ndarray  # the logit of "this token will be accepted"


class Ask(NamedTuple):
    """A draft that is wanted: a block after the committed `token` at `position`; windows primed up to position − 1.

    choose: how each drafted token is picked. None on ranks other than 0. logits: whether they are wanted as well.
    """

    slot: int
    position: int
    token: int
    choose: Choose | None = None
    logits: bool = False


class BlockStep(Step):
    """The rows of drafted blocks, one after another: they see the committed positions before their block, and all of it."""

    @property
    def size(self) -> int:
        """B, the rows of one block."""
        return self.pool.config.dspark.block_size

    @cached_property
    def _last(self) -> np.ndarray:
        """int32 [T], on the host: the last position of each row's block."""
        return np.repeat(self.rows.positions[self.size - 1 :: self.size], self.size)

    @cached_property
    def window_places(self):
        """int32 [T, W]: the last W committed positions, the same for every row of a block."""
        before = self.ops.table(self._last - np.int32(self.size))
        return self.ops.ring_places(self.slots, before, self.pool.window, self.pool.window_capacity)

    @cached_property
    def block_where(self):
        """int32 [T]: where the blocks' own keys go, a ring of one block in each slot."""
        return self._ring_places(1, self.size).reshape(-1)

    @cached_property
    def block_places(self):
        """int32 [T, B]: the keys of a row's own block, all of them."""
        return self.ops.ring_places(self.slots, self.ops.table(self._last), self.size, self.size)


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
        for part in cut(spans, pool.headroom):
            tokens = np.zeros(sum(stop - start for _, start, stop in part), np.int32)  # any: only the main hidden counts
            self._prime(pool, Step(self.ops, pool, Rows(tokens, part)))

    def _prime(self, pool: Pool, step: Step) -> None:
        ops, draft, eps = self.ops, self.weights.draft, self.config.rms_norm_eps
        x = ops.linear(ops.act_quant(pool.hidden[step.window_where]), draft.main_proj)
        xq = ops.act_quant(ops.rmsnorm(x, draft.main_norm, eps))
        for stage, state in zip(draft.stages, pool.stages):
            kv = ops.linear(xq, stage.attn.wkv)
            ops.store_keys(kv, stage.attn.kv_norm, step.rope(0), state.window, step.window_where, eps)

    def draft(self, pool: Pool, asks: Sequence[Ask]) -> list[Drafted | Exception] | None:
        """The blocks that are asked for, each slot once, in one pass; where an ask's own choice failed, what it raised.

        On rank 0; None elsewhere.
        """
        c, ops, w = self.config, self.ops, self.weights
        draft, size = w.draft, c.dspark.block_size
        tokens = np.full(len(asks) * size, c.dspark.noise_token_id, np.int32)
        tokens[::size] = [ask.token for ask in asks]
        spans = [Span(ask.slot, ask.position, ask.position + size) for ask in asks]
        step = BlockStep(ops, pool, Rows(tokens, spans))
        h = ops.embed(w.embed, step.tokens, c.hc_mult)
        for stage, state in zip(draft.stages, pool.stages):
            h = self.block(stage, h, step, state)
        by_place = ops.table(np.arange(len(tokens)).reshape(-1, size).T.ravel())  # as the chain goes
        y = ops.hc_head(h, draft.hc_head)[by_place]
        logits = self.logits(ops.rmsnorm(y, draft.norm, c.rms_norm_eps))
        return None if logits is None else self.chain(y, logits, asks)

    def chain(self, y: Any, logits: Any, asks: Sequence[Ask]) -> list[Drafted | Exception]:
        """The markov chain: each place's logits and confidence depend on the token drafted before it.

        y [B · n, d], logits [B · n, vocab]: the stages' output and its head for n blocks, all first places first; logits
        become those the tokens are chosen from. Tokens stay where the backend computes, and nothing waits for it before
        the end, but for those that a sampling choose must see the logits of.
        """
        ops, draft, size = self.ops, self.weights.draft, self.config.dspark.block_size
        tokens, lead = ops.zeros((1 + size, len(asks)), np.int32), ops.zeros((size, len(asks)), np.float32)
        tokens[0] = ops.table(np.array([ask.token for ask in asks], np.int32))
        choices = {i: _Choice(ask, logits.shape[1]) for i, ask in enumerate(asks) if ask.choose is not greedy}
        sampled = ops.table(np.array(list(choices), np.int64))
        logits = logits.reshape(size, len(asks), -1)
        for place in range(size):
            previous = ops.embed(draft.markov_w1, tokens[place], 1)[:, 0]
            scores = logits[place]
            scores += ops.linear(previous, draft.markov_w2)
            tokens[place + 1], lead[place] = ops.best(scores)
            if choices:
                chosen = [one.token(row, place) for one, row in zip(choices.values(), ops.to_host(scores[sampled]))]
                tokens[place + 1][sampled] = ops.table(np.array(chosen, np.int32))
        previous = ops.embed(draft.markov_w1, tokens[:-1].reshape(-1), 1)[:, 0]
        confidence = ops.linear(np.concatenate([y, previous], axis=1), draft.confidence).reshape(size, -1)
        ids, lead, confidence = (ops.to_host(array).T for array in (tokens[1:], lead, confidence))
        for i, place in zip(*np.isnan(lead).nonzero()):
            if asks[i].choose is greedy:  # and says what is wrong with the first such logits
                choices.setdefault(i, _Choice(asks[i], logits.shape[2])).token(ops.to_host(logits[place, i]), place)
        wanted = [ops.to_host(logits[:, i]) if ask.logits else None for i, ask in enumerate(asks)]
        blocks = list(map(Drafted, ids, wanted, confidence))
        return [choices[i].error or block if i in choices else block for i, block in enumerate(blocks)]


class _Choice:
    """An ask's choice of tokens on the host; what it raises is this ask's alone, and its other tokens are then 0."""

    def __init__(self, ask: Ask, vocab: int):
        self.ask, self.vocab, self.error = ask, vocab, None

    def token(self, scores: np.ndarray, place: int) -> int:
        """The block's token number `place` from scores [vocab]."""
        try:
            token = 0 if self.error else self.ask.choose(scores, self.ask.position + 1 + place)
            if not 0 <= token < self.vocab:
                raise InputError(f"choose: expected a token id within 0..{self.vocab - 1}, found {token}")
        except Exception as error:
            self.error, token = error, 0
        return token

"""Speculation: draft, choose a length, verify, keep what plain decoding would have said.

A token is chosen from its row's logits by choose(logits, position), which knows nothing of the draft. A drafted token is
accepted when it is the token that would have been chosen anyway, so the output cannot change, greedy or sampled:
drafting decides how many rows a forward has, and a row's bits do not depend on that.

What a sequence wants next is said by a plan, a generator that yields wishes and is sent the answers. drive() grants the
wishes of one plan by themselves; the scheduler grants those of many sequences in one draft and one forward.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, Generator, Iterator, NamedTuple, Sequence

import numpy as np

from .errors import InputError
from .gate import make_rule, rule_of
from .sampling import Choose, greedy

if TYPE_CHECKING:
    from .dspark import Drafted
    from .engine import Engine
    from .gate import Rule
    from .model import Output
    from .session import Session

MODES = ("batched", "sequential")


@dataclass(slots=True)
class WantsDraft:
    """A block after the committed `token`. Answer: Drafted, without logits; or what a choice of its tokens raised."""

    token: int
    choose: Choose


@dataclass(slots=True)
class WantsRows:
    """These tokens in one forward. Answer: the model.Output of every one."""

    tokens: list[int]


def granting(session: Session, plan: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """A plan whose wishes for drafts and rows the session grants by itself; the others are left to the caller."""
    answer, error = None, None
    while True:
        try:
            wish = plan.throw(error) if error else plan.send(answer)
        except StopIteration as end:
            return end.value
        answer, error = None, None
        try:
            if isinstance(wish, WantsDraft):
                answer = session.try_draft(wish.token, wish.choose)
            elif isinstance(wish, WantsRows):
                answer = session.forward(wish.tokens, "all")
            else:
                answer = yield wish
        except BaseException as found:
            error = found


def drive(session: Session, plan: Generator[Any, Any, Any]) -> Any:
    """What a plan that wants drafts and rows alone returns."""
    try:
        next(granting(session, plan))
    except StopIteration as end:
        return end.value


class Verified(NamedTuple):
    """What plain decoding says after a committed token: the accepted drafts and one token more."""

    tokens: list[int]
    logits: np.ndarray  # float32 [len(tokens), vocab], a row per token
    accepted: int


def verify(session: Session, tokens: Sequence[int], mode: str = "batched", choose: Choose = greedy) -> Verified:
    """Run the committed tokens[0] and as many of the drafted tokens[1:] as are what `choose` says.

    The session has then consumed tokens[0] and the accepted drafts, and nothing else. batched: one forward over all
    rows; sequential: row by row, to the first mismatch. The same tokens, logits and state, bit for bit.
    Raises what `choose` raises for tokens[0]'s row; a later row that it raises for counts as not run, so that what came
    before is settled, as in plain decoding.
    """
    return Verified(*drive(session, verifying(session, tokens, mode, choose)))


def verifying(session: Session, tokens: Sequence[int], mode: str, choose: Choose) -> Generator[Any, Any, tuple]:
    """The plan of verify(); it returns the fields of Verified."""
    if mode not in MODES:
        raise InputError(f"verify mode: expected one of {', '.join(MODES)}; found {mode!r}")
    if mode == "sequential":
        session.check(tokens)  # all of them can run, as in one forward
    start = session.position
    parts = [tokens] if mode == "batched" else [[token] for token in tokens]
    drafted = iter([*tokens[1:], None])
    settled, rows = [], []
    try:
        for part in parts:
            output = yield WantsRows(part)
            rows.append(output.logits)
            if not _settle(settled, output, drafted, choose, start + 1):
                break
    except BaseException:
        session.rewind(start)
        raise
    count = len(settled)
    logits = (rows[0] if len(rows) == 1 else np.concatenate(rows))[:count]
    if count < len(tokens):
        session.rewind(start + count)
    session.logits = logits[-1]
    return settled, logits, count - 1


def _settle(settled: list[int], output: Output, drafted: Iterator[int | None], choose: Choose, position: int) -> bool:
    """Append what `choose` says row by row, settled[0] for `position`; False once a token is not the drafted one."""
    first, made = len(settled), choose is greedy  # greedy's choices were made where the backend computes
    for token, draft in zip(output.best, drafted):
        if not made or token < 0:
            row = len(settled)
            try:
                token = choose(output.logits[row - first], position + row)
            except Exception:
                if not settled:
                    raise
                return False  # this row is the next round's first, which raises it
        settled.append(token)
        if token != draft:
            return False
    return True


@dataclass
class Round:
    """One step of a generation: what it settled, what was drafted for it, and how long it took."""

    before: np.ndarray  # [vocab]: what the committed token was chosen from
    tokens: Sequence[int] = ()
    logits: np.ndarray | None = None  # float32 [len(tokens), vocab]
    drafted: Sequence[int] = ()  # the whole block; empty: nothing was drafted
    confidence: Sequence[float] = ()  # a logit for each of its tokens
    length: int = 0  # drafted tokens that were verified
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @cached_property
    def margin(self) -> float:
        """How far the committed token's logit was ahead of the second."""
        return margin(self.before)


@dataclass
class Counters:
    """What a generation drafted, verified and kept. skipped_rounds: the gate wanted no drafted token verified, of which
    margin_skipped_rounds for the committed token's margin, before drafting."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    skipped_rounds: int = 0
    margin_skipped_rounds: int = 0

    def as_dict(self) -> dict:
        rate = self.accepted / self.drafted if self.drafted else 0.0
        return {**self.__dict__, "accept_rate": rate}


@dataclass
class Speculator:
    """Rounds of one sequence. gate: a rule of gate/, or None to decode plainly.

    mode: how blocks are verified. on_round: sees every round, for records.
    """

    gate: Rule | None = None
    choose: Choose = greedy
    mode: str = "batched"
    on_round: Callable[[Round], None] | None = None
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def default(cls, engine: Engine) -> Speculator:
        """Greedy, gated as the engine's settings say where it has a draft."""
        if engine.draft is None:
            return cls()
        return cls(make_rule(rule_of(engine.gate), engine.config.dspark.block_size, engine.gate, costs=engine.costs))

    def step(self, session: Session, token: int, logits: np.ndarray, room: int = 1 << 30) -> Round:
        """Settle 1 .. room tokens after the committed `token`, which was chosen from `logits` and not yet consumed."""
        return drive(session, self.round(session, token, logits, room))

    def round(self, session: Session, token: int, logits: np.ndarray, room: int) -> Generator[Any, Any, Round]:
        """The plan of step()."""
        if room < 1:
            raise InputError(f"room: expected at least 1 token to settle, found {room}")
        left = session.engine.max_context - len(session.tokens)
        if left < room:
            room = max(1, left)  # at the very end the forward refuses
        gate, counters = self.gate, self.counters
        drafted, confidence, length, draft_s = (), (), 0, 0.0
        if gate is not None and room > 1:
            if gate.before_draft(margin(logits) if gate.reads_margin else None):
                start = time.perf_counter()
                block: Drafted | Exception = yield WantsDraft(token, self.choose)
                if isinstance(block, Exception):  # a block of no tokens: plain decoding may never make that choice
                    what = type(block).__name__  # its text may have numbers in it, and Python says each text once
                    warnings.warn(f"speculation: a draft failed and counts as none: {what}", RuntimeWarning, stacklevel=2)
                else:
                    drafted, confidence = block.ids.tolist(), block.confidence.tolist()
                length = gate.choose(confidence)
                draft_s = time.perf_counter() - start
            else:
                counters.margin_skipped_rounds += gate.skipped_by_margin
            counters.skipped_rounds += length == 0
        if length >= room:
            length = room - 1
        start = time.perf_counter()
        tokens, rows, accepted = yield from verifying(session, [token, *drafted[:length]], self.mode, self.choose)
        verify_s = time.perf_counter() - start
        found = Round(logits, tokens, rows, drafted, confidence, length, accepted, draft_s, verify_s)
        self._learn(found)
        return found

    def _learn(self, found: Round) -> None:
        counters, gate = self.counters, self.gate
        counters.rounds += 1
        counters.drafted += found.length
        counters.accepted += found.accepted
        if gate is not None:
            gate.observe(1e3 * found.draft_s or None, found.length, 1e3 * found.verify_s)
            if found.draft_s:
                gate.record(found.confidence, found.length, found.accepted)
            else:
                gate.record_skip()
        if self.on_round:
            self.on_round(found)

    def drop(self, session: Session, found: Round, kept: int) -> None:
        """The sequence ended with the round's first `kept` tokens: the others never were."""
        dropped = len(found.tokens) - kept
        session.rewind(session.position - dropped)
        self.counters.accepted -= found.accepted - min(found.accepted, kept)


def margin(logits: np.ndarray) -> float:
    """Largest minus second largest logit: how sure the model was of the committed token."""
    best = int(logits.argmax())
    second = max(logits[:best].max(initial=-np.inf), logits[best + 1 :].max(initial=-np.inf))
    return float(logits[best] - second)

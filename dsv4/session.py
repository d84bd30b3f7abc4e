"""Session: one sequence on a loaded engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Sequence
from weakref import finalize

import numpy as np

from .dspark import Ask
from .errors import CapacityError, ConfigError, InputError, StateError
from .model import Output
from .rows import Rows, Span
from .sampling import Choose, greedy
from .snapshot import Snapshot
from .speculate import Round, Speculator, Verified, verify

if TYPE_CHECKING:
    from .dspark import Drafted
    from .engine import Engine


class Session:
    """The tokens of one sequence and the state that follows from them. Use as a context manager, or close()."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.slot: int | None = engine.pool.take_slot()
        self._dropped = finalize(self, engine.pool.abandon, self.slot)  # without close(): the slot is given back all the same
        self._dropped.atexit = False
        self.tokens: list[int] = []
        self._oldest = 0  # the earliest position, 0 apart, that rewind can still reach
        self._primed = (0, 0)  # the draft's windows hold the positions from the first to before the second
        self._speculator: Speculator | None = None  # of speculative_step, once it was called without one
        self.logits: np.ndarray | None = None  # [vocab] after the last token, where that row was wanted

    @property
    def position(self) -> int:
        """Tokens consumed: the next token goes to this position."""
        return len(self.tokens)

    def check(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        """The next tokens, if they can run in one forward.

        Raises InputError for token ids out of range or too many of them, CapacityError beyond the context.
        """
        engine = self._open()
        ids = check_tokens(tokens, engine.config.vocab_size)
        count, here = len(ids), len(self.tokens)
        if not 0 < count <= engine.pool.headroom:
            raise InputError(
                f"forward: expected 1..{engine.pool.headroom} tokens at once, found {count}; prefill() cuts longer ones"
            )
        if here + count > engine.max_context:
            raise CapacityError(
                f"context: expected at most {engine.max_context} positions, found {here} used and {count} more; "
                + remedy(engine, "begin a new session")
            )
        return ids

    def _open(self) -> Engine:
        if self.slot is None:
            raise StateError("session: expected an open session, found a closed one")
        return self.engine

    def forward(self, tokens: Sequence[int] | np.ndarray, wanted="last") -> Output:
        """Run the next tokens through the model → what is known of the n wanted rows: "last", "all", "none" or row numbers.

        Raises what check() does, and InputError for rows that are not there.
        """
        return forward_all([(self, tokens, wanted)])[0]

    def prefill(self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """Run a prompt in chunks → logits [vocab] after its last token. progress(done, total) after every chunk.

        Raises InputError for no tokens or ids outside the vocabulary, CapacityError where they do not fit the context,
        StateError once closed.
        """
        tokens = check_tokens(tokens, self.engine.config.vocab_size)
        if not tokens:
            raise InputError("prompt: expected at least one token, found none")
        if self.position + len(tokens) > self.engine.max_context:
            raise CapacityError(
                f"prompt: expected at most {self.engine.max_context - self.position} tokens in a context of "
                f"{self.engine.max_context}, found {len(tokens)}; {remedy(self.engine, 'shorten it')}"
            )
        chunk = self.engine.chunk
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            output = self.forward(part, "last" if start + chunk >= len(tokens) else "none")
            if progress:
                progress(start + len(part), len(tokens))
        return output.logits[0]

    def decode(self, token: int) -> np.ndarray:
        """Run one token → logits [vocab] for the next."""
        return self.forward([token]).logits[0]

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on, as if they had never been run.

        Any position within the head-room (the chunk length) of the furthest one is reachable, and 0 always is.
        """
        self._open()
        here = len(self.tokens)
        if type(position) is not int or not 0 <= position <= here:
            raise StateError(f"rewind: expected a position within 0..{here}, found {position}")
        if position and position < self._oldest:
            raise StateError(f"rewind: expected 0 or a position of at least {self._oldest}, found {position}")
        if position == 0:
            self._oldest = 0
        if position < here:
            self._primed = min(self._primed[0], position), min(self._primed[1], position)
            self.logits = None
            del self.tokens[position:]

    # ------------------------------------------------------------------ speculation
    def prime(self) -> None:
        """Bring the draft's windows up to date with the last positions consumed. Nothing to do without a draft."""
        prime_all([self])

    def unprimed(self) -> Span:
        """The last positions consumed that the draft's windows do not hold."""
        first, primed = self._primed
        stop = len(self.tokens)
        start = max(0, stop - self._open().pool.window)
        if first <= start < primed:  # where first is later, a rewind uncovered positions that were never primed
            start = primed
        return Span(self.slot, start, stop)

    def primed(self, span: Span) -> None:
        """Count what unprimed() said as held."""
        first, primed = self._primed
        self._primed = min(first, span.start) if span.start <= primed else span.start, span.stop

    def draft(self, token: int | None = None, choose: Choose = greedy, *, logits: bool = True) -> Drafted:
        """Draft a block after `token`, which is committed but not yet consumed. The session stays as it is.

        token: by default what `choose` says of the last row's logits. choose(logits [vocab], position) also picks each
        drafted token. logits: whether those are wanted. Raises StateError before the first token was consumed,
        ConfigError without a draft module, and what `choose` raises.
        """
        block = self.try_draft(token, choose, logits)
        if isinstance(block, Exception):
            raise block
        return block

    def try_draft(self, token: int | None, choose: Choose, logits: bool = False) -> Drafted | Exception:
        """draft(), but what `choose` raises for a drafted token is returned."""
        engine = self._open()
        if engine.draft is None:
            raise ConfigError("draft: expected a checkpoint with mtp.* tensors, found one without a draft module")
        if not self.tokens:
            raise StateError("draft: expected at least one token consumed, found none")
        token = choose(self._last(), self.position) if token is None else token
        check_tokens([token], engine.config.vocab_size)
        (block,) = draft_all([(self, token, choose)], logits)
        return block

    def _last(self) -> np.ndarray:
        if self.logits is None:
            raise StateError("session: expected the last token's logits to go on from, found none; name the token")
        return self.logits

    def verify(self, tokens: Sequence[int], mode: str = "batched", choose: Choose = greedy) -> Verified:
        """Run a committed token and the drafted ones after it, keep what plain decoding would say: speculate.verify."""
        return verify(self, tokens, mode, choose)

    def speculative_step(
        self, token: int | None = None, speculator: Speculator | None = None, *, logits=None, room: int = 1 << 30
    ) -> Round:
        """One round after the committed `token`: draft, choose a length, verify, commit. Settles at most `room` tokens.

        token, logits: the committed token and what it was chosen from, by default the greedy choice from the last
        row's logits. speculator: by default greedy and gated as the engine's settings say, the same for the session's life;
        without a gate it decodes plainly.
        """
        engine = self._open()
        logits = self._last() if logits is None else logits
        if speculator is None:
            speculator = self._speculator = self._speculator or Speculator.default(engine)
        token = speculator.choose(logits, self.position) if token is None else token
        return speculator.step(self, token, logits, room)

    # ------------------------------------------------------------------ copies
    def fork(self) -> Session:
        """A second session in the same state; the two go on independently."""
        other = Session(self._open())
        self.engine.pool.copy(self.slot, other.slot, self.position)
        other.tokens, other._oldest, other._primed = list(self.tokens), self._oldest, self._primed
        other.logits = self.logits
        return other

    def snapshot(self) -> Snapshot:
        """This state on its own, to restore later, elsewhere or from a file. Raises StateError once closed."""
        self.prime()
        arrays = self.engine.pool.export(self.slot, self.position)
        return Snapshot(self.engine.identity, np.array(self.tokens, np.int32), arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds. Raises StateError for another checkpoint's, CapacityError for a longer one."""
        engine = self._open()
        if snapshot.identity != engine.identity:
            raise StateError(
                f"snapshot: expected one of checkpoint {engine.identity[:12]}, found {snapshot.identity[:12]}"
            )
        tokens = check_tokens(snapshot.tokens, engine.config.vocab_size)
        length = len(tokens)
        if length > engine.max_context:
            raise CapacityError(
                f"snapshot: expected at most {self.engine.max_context} positions, found {length}; "
                "load with a larger max_context"
            )
        engine.pool.check_export(length, snapshot.arrays)
        engine.pool.restore(self.slot, length, snapshot.arrays)
        self.tokens, self.logits = tokens, None
        self._oldest = length  # a snapshot holds the last window only
        self._primed = max(0, length - engine.pool.window), length

    def close(self) -> None:
        """Give the slot back. Closing twice is fine."""
        if self.slot is not None:
            self._dropped.detach()
            self.engine.pool.free_slot(self.slot)
            self.slot = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


# ---------------------------------------------------------------------- several sessions of one engine at once
def forward_all(parts: Sequence[tuple[Session, Sequence[int] | np.ndarray, object]]) -> list[Output]:
    """One forward over the next tokens of some sessions: (session, tokens, wanted) → its Output. What one row says does
    not depend on the others. Raises what Session.forward does, before anything has run."""
    engine = parts[0][0].engine
    pool, runs = engine.pool, []
    for session, tokens, wanted in parts:
        ids = session.check(tokens)
        runs.append((session.slot, len(session.tokens), ids, Rows.named(wanted, len(ids))))
    rows = Rows.join(runs)
    for (session, _, _), (slot, _, stop) in zip(parts, rows.spans):
        # Before the forward: one that is cut short may have written over what a deeper rewind would need.
        if stop - pool.headroom > session._oldest:
            session._oldest = stop - pool.headroom
        pool.reserve(slot, stop)
    logits, best, places, kept = engine.forward(rows)
    found, at = [], 0
    for (session, _, _), (_, _, ids, wanted) in zip(parts, runs):
        end = at + len(wanted)
        found.append(Output(logits[at:end], best[at:end], places[at:end], kept))
        session.tokens += ids
        session.logits = logits[end - 1] if wanted and wanted[-1] == len(ids) - 1 else None
        at = end
    return found


def prime_all(sessions: Sequence[Session]) -> None:
    """Session.prime of some sessions in one pass."""
    spans = [session.unprimed() for session in sessions]
    missing = [span for span in spans if span.start < span.stop]
    if missing and sessions[0].engine.draft is not None:
        sessions[0].engine.prime(missing)
    for session, span in zip(sessions, spans):
        session.primed(span)


def draft_all(parts: Sequence[tuple[Session, int, Choose]], logits: bool = False) -> list[Drafted | Exception]:
    """Session.draft of some sessions in one pass: (session, token, choose) → its block, or what its choice raised.

    In several where the blocks have more rows than the pool's head-room.
    """
    prime_all([session for session, _, _ in parts])
    asks = [Ask(session.slot, len(session.tokens), token, choose, logits) for session, token, choose in parts]
    engine = parts[0][0].engine
    most = max(1, engine.pool.headroom // engine.config.dspark.block_size)  # no more rows than a forward has
    return [block for start in range(0, len(asks), most) for block in engine.draft_blocks(asks[start : start + most])]


def remedy(engine: Engine, otherwise: str, larger: str = " or load with a larger max_context") -> str:
    """The end of a message about too short a context: what to do. A larger one is possible up to the model's limit."""
    limit = engine.config.max_position_embeddings
    return otherwise + (larger if engine.max_context < limit else f" (this model has {limit} positions)")


def check_tokens(tokens: Sequence[int] | np.ndarray, vocab: int) -> list[int]:
    """tokens as a list (maybe the very one); raises InputError for anything that is not a list of ids within the vocabulary."""
    if type(tokens) is list and tokens:  # the usual few: several times as fast as what follows
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocab:
                break
        else:
            return tokens
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise InputError("tokens: expected a flat list of token ids, found lists of several lengths") from error
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"tokens: expected a flat list of token ids, found {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocab:
        bad = ids[(ids < 0) | (ids >= vocab)][0]
        raise InputError(f"tokens: expected ids within 0..{vocab - 1}, found {bad}")
    return ids.tolist()

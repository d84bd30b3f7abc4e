"""A running request: its session, the plan that says what it wants next, and the answer it makes of what it gets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..generate import Answer, Settles, Step, WantsPrompt, settling
from ..speculate import WantsDraft, WantsRows

if TYPE_CHECKING:
    from ..engine import Engine
    from ..prefix import PrefixStore
    from .tickets import Ticket


class Sequence:
    """One of those that run side by side. `wish` is what it wants next; None once it has ended."""

    def __init__(self, engine: Engine, ticket: Ticket, prefixes: PrefixStore | None):
        self.ticket, self.prefixes = ticket, prefixes
        self.queue_s = time.perf_counter() - ticket.submitted
        self.session = engine.session()
        self.wish: WantsDraft | WantsRows | WantsPrompt | None = None
        self.waited = 0  # the step in which rows of it last ran
        self.reason: str | None = None
        self.error: BaseException | None = None
        self._consumed = 0  # of the prompt that is wanted
        try:
            self.cached = prefixes.restore(self.session, ticket.prompt) if prefixes is not None else 0
            shared = prefixes.shared(ticket.prompt) if prefixes is not None else 0
            self._keep_at = shared if shared > self.cached else 0
            self.answer = Answer(engine, ticket.prompt, ticket.params, ticket.rounds, ticket.spec)
            self._plan = settling(self.session, ticket.prompt, self.answer.limit, ticket.rounds)
            self.advance(None)
        except BaseException:
            self.session.close()
            raise

    # ------------------------------------------------------------------ what it wants
    def left(self) -> int:
        """Tokens of its prompt that have not run."""
        return len(self.wish.tokens) - self._consumed

    def part(self, rows: int) -> tuple[Any, list[int], str]:
        """(session, tokens, wanted) of the next rows of its prompt, at most so many."""
        stop = self._consumed + rows
        before_cut = self._keep_at - self.session.position
        if 0 < before_cut < rows:
            stop = self._consumed + before_cut
        return self.session, self.wish.tokens[self._consumed : stop], "last" if stop == len(self.wish.tokens) else "none"

    # ------------------------------------------------------------------ what it gets
    def prompted(self, tokens: int, logits) -> None:
        """So many tokens of its prompt ran; logits [n, vocab] of the last one, if that was the prompt's."""
        self._consumed += tokens
        done = not self.left()
        if done:
            self._consumed = 0
            self.advance(logits[0])
        if self.prefixes is not None and (done or self.session.position == self._keep_at):
            self.prefixes.keep(self.session)  # after the first token is out: the session still is where the prompt left it

    def advance(self, answer: Any) -> None:
        """Answer the wish, hand on what that settled, and have the next wish; or end, in this sequence's own error."""
        steps: list[Step] = []
        plan = self._plan
        try:
            wish = plan.send(answer)
            while isinstance(wish, Settles):
                kept = self.answer.push(wish.tokens, wish.logits, wish.round)
                steps += kept
                wish = plan.send((len(kept), kept[-1].finish_reason is None))
            self.wish = wish
        except StopIteration:
            self.wish, self.reason = None, steps[-1].finish_reason
            steps[-1] = steps[-1]._replace(**self.numbers())
        except Exception as found:
            self.wish, self.error = None, found
        if steps:
            self.ticket.put(steps)
        if self.reason and self.prefixes is not None:
            self.prefixes.keep(self.session)

    def counts(self) -> dict[str, int]:
        """What it generated, drafted and had accepted so far."""
        done = self.ticket.rounds.counters
        return {
            "generated_tokens": self.answer.count, "rounds": done.rounds, "drafted": done.drafted,
            "accepted": done.accepted, "skipped_rounds": done.skipped_rounds,
        }  # fmt: skip

    # ------------------------------------------------------------------ its end
    def numbers(self) -> dict[str, dict]:
        """Answer.numbers with the tokens that came from the prefix store and the seconds in the queue."""
        found = self.answer.numbers()
        found["usage"]["cached_tokens"] = self.cached
        found["timings"] = {"queue_s": self.queue_s, **found["timings"]}
        return found

    def close(self) -> None:
        """Free the slot, then tell the ticket: reason and error say how it ended, "cancelled" if neither is known."""
        self._plan.close()
        self.session.close()
        self.ticket.end(self.reason or "cancelled", self.numbers(), self.error)

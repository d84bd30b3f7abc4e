"""Scheduler: many sequences on one engine. Every step packs rows of several of them into one draft and one forward.

A sequence's tokens, logits and drafts do not depend on its neighbours: rows are only put beside each other, and what is
done with their outputs is the plan of the sequence alone (generate.settling), the same that generates without a
scheduler.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter, deque
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CapacityError, ConfigError, StateError
from .generate import WantsPrompt, checked, speculator, timings
from .prefix import PrefixStore
from .scheduling.budget import divide
from .scheduling.costs import BatchCosts
from .scheduling.sequence import Sequence
from .scheduling.tickets import Request, Ticket
from .session import draft_all, forward_all
from .speculate import WantsDraft, WantsRows

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Request", "Scheduler", "Ticket"]
WAITED = attrgetter("waited")
COUNTED = (
    "requests finished failed cancelled prompt_tokens generated_tokens steps rows max_rows rounds drafted accepted "
    "skipped_rounds prefix_hits prefix_misses prefix_tokens queue_s step_s draft_s"
).split()


class Scheduler:
    """Runs the requests of any number of threads on one engine, which is its worker's alone while it lives.

    token_budget: rows of one forward at most; by default the engine's chunk. Decoding and verification go first, and
    prompts share what is left (scheduling.budget). max_running: sequences at once, by default as many as the engine has
    sessions. max_waiting: requests that may wait beside them. prefix_bytes: memory for states of common prefixes;
    prefix_dir: where they also outlive the process. spec: how requests speculate that do not say.
    Raises ConfigError, and StateError where another one runs on the engine.
    """

    def __init__(
        self, engine: Engine, *, token_budget: int | None = None, max_running: int | None = None, max_waiting: int = 64,
        prefix_bytes: int = 0, prefix_dir: str | Path | None = None, spec: str = "gate",
    ):  # fmt: skip
        block = 1 + (engine.config.dspark.block_size if engine.draft is not None else 0)
        self.engine, self.spec = engine, spec
        self.token_budget = max(engine.chunk, block + 1) if token_budget is None else token_budget
        self.max_running = engine.pool.slots if max_running is None else max_running
        self.max_waiting = max_waiting
        for name, value, low, high in (
            ("token_budget", self.token_budget, block + 1, None), ("max_running", self.max_running, 1, engine.pool.slots),
            ("max_waiting", max_waiting, 1, None), ("prefix_bytes", prefix_bytes, 0, None),
        ):  # fmt: skip
            if type(value) is not int or value < low or (high is not None and value > high):
                expected = f"an integer, at least {low}" if high is None else f"an integer, {low} to {high}"
                raise ConfigError(f"scheduler: {name}: expected {expected}; found {value!r}")
        if prefix_dir is not None and not prefix_bytes:
            raise ConfigError("scheduler: prefix_dir: expected prefix_bytes above 0 beside it, found 0")
        if engine.owner is not None:
            raise StateError("scheduler: expected an engine of its own, found one that runs another; close that first")
        self._prefixes = PrefixStore(engine, prefix_bytes, prefix_dir) if prefix_bytes else None
        self._costs = BatchCosts(engine.costs)
        self._changed = threading.Condition()  # guards the three that follow, and who leaves _running
        self._waiting: deque[Ticket] = deque()
        self._closed = False
        self._error: BaseException | None = None
        self._running: list[Sequence] = []  # the worker's own, as is all that follows
        self._cancelled: set[Ticket] = set()
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self._worker = threading.Thread(target=self._work, name="dsv4-scheduler", daemon=True)
        engine.owner = self
        atexit.register(self.close)
        self._worker.start()

    # ------------------------------------------------------------------ any thread
    def submit(self, request: Request) -> Ticket:
        """Queue a request. Raises InputError and ConfigError for one that cannot be served, CapacityError where too many
        wait, StateError after close(), and what ended the worker."""
        tokens, params = checked(self.engine, request.tokens, request.sampling)
        spec = request.spec or self.spec
        rounds = speculator(self.engine, params, spec, costs=self._costs)
        ticket = Ticket(tokens, params, rounds, spec, self._cancel)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StateError("scheduler: expected an open one, found it closed")
            if len(self._waiting) >= self.max_waiting:
                raise CapacityError(
                    f"queue: expected at most {self.max_waiting} waiting requests, found as many; try again later"
                )
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    @property
    def broken(self) -> bool:
        """Did an error end the worker? Nothing is answered any more."""
        return self._error is not None

    def stats(self) -> dict:
        """What is running, waiting and kept now; and counts and seconds since the start."""
        store = self._prefixes
        with self._changed:
            running, counts = self._running, self._counts.copy()
            for one in running:
                counts.update(one.counts())
        return {
            "running": len(running), "waiting": len(self._waiting), **counts,
            "prefix_entries": 0 if store is None else len(store), "prefix_bytes": 0 if store is None else store.bytes,
        }  # fmt: skip

    def close(self) -> None:
        """End what runs and waits, and the worker. Closing twice is fine; the engine stays open."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join()
        if self.engine.owner is self:
            self.engine.owner = None

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket.done:
                return
            self._cancelled.add(ticket)
            self._changed.notify()

    # ------------------------------------------------------------------ the worker
    def _work(self) -> None:
        error: BaseException = StateError("scheduler: closed before the request was answered")
        try:
            while self._wait():
                self._sort_out()
                self._costs.share(len(self._running))
                self._draft()
                self._forward()
        except BaseException as found:
            error = found
            self._error = found
        finally:
            self._end_all(error)

    def _wait(self) -> bool:
        """Until there is something to do; False once closed."""
        if not self._running:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting or self._cancelled)
        return not self._closed

    def _sort_out(self) -> None:
        """Free the slots of what has ended or was cancelled, then let in who waited longest."""
        cancelled, gone = set(), []
        if self._cancelled:  # without the lock: what comes now is in time for the next step
            with self._changed:
                cancelled, self._cancelled = self._cancelled, set()
                gone = [ticket for ticket in self._waiting if ticket in cancelled]
                for ticket in gone:
                    self._waiting.remove(ticket)
        for ticket in gone:
            self._counts.update(cancelled=1)
            ticket.end("cancelled", _nothing(ticket))
        self._retire(cancelled)
        while self._waiting and len(self._running) < self.max_running and self.engine.pool.free_slots:
            with self._changed:
                ticket = self._waiting.popleft()
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        try:
            sequence = Sequence(self.engine, ticket, self._prefixes)
        except BaseException as error:
            ticket.end(None, _nothing(ticket), error)
            raise
        self._running.append(sequence)
        self._counts.update(
            requests=1, queue_s=sequence.queue_s, prefix_tokens=sequence.cached, prefix_hits=bool(sequence.cached),
            prefix_misses=self._prefixes is not None and not sequence.cached,
        )  # fmt: skip
        if sequence.wish is None:  # a token was enough, and the prefix store had it
            self._retire(set())

    def _retire(self, cancelled: set[Ticket]) -> None:
        ended = [one for one in self._running if one.wish is None or one.ticket in cancelled]
        if not ended:
            return
        with self._changed:
            self._running = [one for one in self._running if one not in ended]
            for one in ended:
                kind = "failed" if one.error else "finished" if one.reason else "cancelled"
                self._counts.update(**{kind: 1}, **one.counts())
        for one in ended:
            one.close()

    def _draft(self) -> None:
        """One draft for all that want a block."""
        asking, decoding = [], len(self._running)
        for one in self._running:
            if isinstance(one.wish, WantsDraft):
                asking.append(one)
            elif isinstance(one.wish, WantsPrompt):
                decoding -= 1
        if not asking:
            return
        prompts = any([one.answer.count == 1 for one in asking])  # the first draft after a prompt
        start = time.perf_counter()
        blocks = draft_all([(one.session, one.wish.token, one.wish.choose) for one in asking])
        self._counts["draft_s"] += time.perf_counter() - start
        for one, block in zip(asking, blocks):
            one.advance(block)
        taken = 1e3 * (time.perf_counter() - start)  # with choosing the lengths
        self._costs.drafted(len(asking), decoding, taken, prompts)

    def _forward(self) -> None:
        """One forward for as many as the budget has room for."""
        blocks, prompts = [], []
        for one in self._running:
            if isinstance(one.wish, WantsRows):
                blocks.append(one)
            elif isinstance(one.wish, WantsPrompt):
                prompts.append(one)
        if not blocks and not prompts:
            return
        start = time.perf_counter()
        blocks.sort(key=WAITED)
        lengths = [len(one.wish.tokens) for one in blocks]
        count, shares = divide(lengths, [one.left() for one in prompts], self.token_budget, self.engine.chunk)
        blocks = blocks[:count]
        prompts = [(one, one.part(n)) for one, n in zip(prompts, shares) if n]
        outputs = forward_all([(one.session, one.wish.tokens, "all") for one in blocks] + [part for _, part in prompts])
        taken = time.perf_counter() - start
        prompted = sum([len(tokens) for _, (_, tokens, _) in prompts])
        decoded = sum(lengths[:count])
        rows = prompted + decoded
        counts, costs = self._counts, self._costs
        counts["steps"] = step = counts["steps"] + 1
        counts["rows"] += rows
        counts["max_rows"] = max(counts["max_rows"], rows)
        counts["prompt_tokens"] += prompted
        counts["step_s"] += taken
        plain = 0 < count == decoded
        if step == 1:  # before the first gate weighs anything by costs of another machine
            costs.forwarded(rows, 1e3 * taken, plain, bool(prompts))
        for one, output in zip(blocks, outputs):
            one.waited = step
            one.advance(output)
        for (one, part), output in zip(prompts, outputs[count:]):
            one.prompted(len(part[1]), output.logits)
        # With what was done with the outputs: that, too, takes longer for more rows.
        costs.forwarded(rows, 1e3 * (time.perf_counter() - start), plain, bool(prompts))

    def _end_all(self, error: BaseException) -> None:
        """Nobody is left waiting, whatever happened."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for one in self._running:
            one.error = one.error or (None if one.reason else error)
        for ticket in waiting:
            ticket.end(None, _nothing(ticket), error)
        for one in self._running:
            one.ticket.end(one.reason, one.numbers(), one.error)
        try:
            for one in self._running:
                one.close()
        finally:
            with self._changed:
                for one in self._running:
                    self._counts.update(**one.counts())
                self._running = []
            if self._prefixes is not None:
                self._prefixes.close()


def _nothing(ticket: Ticket) -> dict[str, dict]:
    """The numbers of a request that never ran."""
    return {
        "usage": {"prompt_tokens": len(ticket.prompt), "completion_tokens": 0, "cached_tokens": 0},
        "timings": {"queue_s": time.perf_counter() - ticket.submitted, **timings(len(ticket.prompt), 0, 0.0, 0.0)},
        "speculation": {"mode": ticket.spec, **ticket.rounds.counters.as_dict()},
    }

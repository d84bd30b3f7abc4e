"""A request, and the ticket by which its answer is had."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

from ..generate import Completion, Step, completion
from ..sampling import SamplingParams

if TYPE_CHECKING:
    from ..speculate import Speculator


@dataclass(frozen=True)
class Request:
    """A prompt (token ids, or text as dsv4.generate takes it) and how to continue it. spec None: the scheduler's."""

    tokens: Sequence[int] | str
    sampling: SamplingParams | None = None
    spec: str | None = None


class Ticket:
    """The answer to one request, as it comes. Any thread may use it; as a context manager it cancels on leaving.

    Iterating gives the steps from the first on, waiting for each; it ends after the last one or with cancel(), and
    raises what the request failed with.
    """

    def __init__(
        self, prompt: list[int], params: SamplingParams, rounds: Speculator, spec: str, cancel: Callable[[Ticket], None]
    ):
        self.prompt, self.params, self.rounds, self.spec = prompt, params, rounds, spec
        self.submitted = time.perf_counter()
        self._cancel = cancel
        self._changed = threading.Condition()
        self._steps: list[Step] = []
        self._awaited = False  # may somebody be waiting for more of them?
        self._over = threading.Event()
        self._reason: str | None = None
        self._numbers: dict[str, dict] = {}
        self._error: BaseException | None = None

    # ------------------------------------------------------------------ for whoever asked
    @property
    def done(self) -> bool:
        """Has it ended: answered, failed or cancelled?"""
        return self._over.is_set()

    def __iter__(self) -> Iterator[Step]:
        seen = 0
        while True:
            with self._changed:
                self._awaited = True  # before the look at the steps: put looks at it after it has added some
                self._changed.wait_for(lambda: len(self._steps) > seen or self.done)
                new = self._steps[seen:]
                error = self._error
            if not new:
                if error is not None:
                    raise error
                return
            yield from new
            seen += len(new)

    def result(self, timeout: float | None = None) -> Completion:
        """The whole answer; a cancelled one has finish_reason "cancelled" and what there was. Raises TimeoutError, and
        what the request failed with."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"ticket: expected an answer within {timeout} s, found {len(self._steps)} tokens of it")
        if self._error is not None:
            raise self._error
        return completion(self._steps, self._reason, self._numbers)

    def cancel(self) -> None:
        """Stop: the sequence's slot is free before the next step. Nothing to do where it has ended."""
        self._cancel(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exc) -> None:
        self.cancel()

    # ------------------------------------------------------------------ for the scheduler
    def put(self, steps: list[Step]) -> None:
        """More of the answer."""
        self._steps += steps
        if self._awaited:
            with self._changed:
                self._changed.notify_all()

    def end(self, reason: str | None, numbers: dict[str, dict], error: BaseException | None = None) -> None:
        """No more comes. The first end counts."""
        with self._changed:
            if not self.done:
                self._reason, self._numbers, self._error = reason, numbers, error
                self._over.set()
                self._changed.notify_all()

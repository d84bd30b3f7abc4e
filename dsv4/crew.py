"""Crew: several ranks as one engine. Rank 0 leads, the others follow: they repeat what it does to model and pool.

A command carries the rows, so that every rank runs the same forward over the same places; what happened to the pool
since the last command (pages reserved, slots copied) travels with it. Sessions, sampling and rewinds are rank 0's alone.
"""

from __future__ import annotations

import atexit
import os
import pickle
import platform
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Iterator

import numpy as np

from .comm import Communicator, RankError
from .errors import ConfigError, Dsv4Error, StateError
from .state import Pool

if TYPE_CHECKING:
    from .engine import Engine

STOP = "stop"
GRACE = 1.0  # seconds in which rank 0 may report a mistake that every rank finds in the same files and settings


class Crew:
    """One rank's place among the others. On a single rank nothing is ever sent."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.leads = comm.size > 1 and comm.rank == 0
        self.over = False  # the engine is closed
        self._journal: list[tuple[str, tuple]] = []  # what the pool did since the last command

    # ------------------------------------------------------------------ start
    def greet(self, path: Any, settings: dict) -> tuple[Any, dict]:
        """(path, settings) to load: as given; where path is None rank 0's, with the settings given here before rank 0's."""
        lead, theirs = pickle.loads(self.comm.broadcast(pickle.dumps((path, settings))))
        return (lead, {**theirs, **settings}) if path is None else (path, settings)

    def neighbours(self) -> tuple[int, int, int]:
        """(ranks on this host, how many of them may use the same cores, this rank's place among the first); both counts include it."""
        cores = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset([0])
        everyone = enumerate(self.comm.everyone((platform.node(), cores)))
        here = {rank: theirs for rank, (host, theirs) in everyone if host == platform.node()}
        sharing = sum(not cores.isdisjoint(theirs) for theirs in here.values())
        self.comm.crowded = sharing > len(cores)
        return len(here), sharing, list(here).index(self.comm.rank)

    def agree(self, **facts: Any) -> None:
        """Raises ConfigError, on every rank, where the ranks' facts differ."""
        first, *others = self.comm.everyone(facts)
        for rank, theirs in enumerate(others, 1):
            for name, value in first.items():
                if theirs[name] != value:
                    raise ConfigError(
                        f"ranks: expected the same {name} on all, found {value} on rank 0 and {theirs[name]} on rank {rank}"
                    )

    def ready(self) -> None:
        """Wait until all have loaded."""
        self.comm.everyone(None)
        self.comm.idle = self.leads
        if self.leads:
            atexit.register(self.stop)  # however rank 0 ends, the others do too

    # ------------------------------------------------------------------ lead
    @contextmanager
    def command(self, name: str, *arguments: Any) -> Iterator[None]:
        """The others do the same as the body. Raises StateError once the engine is closed and they have ended."""
        if self.over:
            raise StateError("engine: expected an open one, found a closed one")
        if not self.leads:
            yield
            return
        with self.together():
            self.comm.idle = False
            self._tell(name, *arguments)
            yield
            self.comm.idle = True

    def note(self, operation: str, *arguments: Any) -> None:
        """The others repeat an operation of the pool before the next command."""
        if self.leads:
            self._journal.append((operation, arguments))

    def stop(self) -> None:
        """End the other ranks. Twice is fine."""
        if self.over:
            return
        self.over = True
        atexit.unregister(self.stop)
        if self.leads:
            self._tell(STOP)
        self.comm.close()

    def _tell(self, name: str, *arguments: Any) -> None:
        journal, self._journal = self._journal, []
        self.comm.broadcast(pickle.dumps((name, arguments, journal), pickle.HIGHEST_PROTOCOL))

    # ------------------------------------------------------------------ follow
    def follow(self, engine: Engine) -> None:
        """Repeat rank 0's commands until it stops."""
        with self.together():
            while True:
                name, arguments, journal = pickle.loads(self.comm.broadcast())
                for operation, values in journal:
                    getattr(engine.pool, operation)(*values)
                if name == STOP:
                    break
                getattr(engine, name)(*arguments)
        self.comm.close()

    # ------------------------------------------------------------------ failure
    @contextmanager
    def together(self, grace: float = 0.0) -> Iterator[None]:
        """An exception inside ends the job on all ranks: they would be out of step, or wait forever."""
        try:
            yield
        except BaseException as error:
            if self.comm.size > 1:
                self.comm.fail(*self._report(error), grace)
            raise

    def _report(self, error: BaseException) -> tuple[str, int]:
        """(what to say, exit status) for an exception."""
        who = f"rank {self.comm.rank}: " if self.comm.rank else ""
        if isinstance(error, KeyboardInterrupt):
            return f"dsv4: {who}interrupted", 130
        if isinstance(error, (Dsv4Error, RankError)):
            return f"dsv4: error: {who}{error}", 2 if isinstance(error, Dsv4Error) else 1
        return f"{''.join(traceback.format_exception(error))}dsv4: error: {who}{type(error).__name__}: {error}", 1


class CrewPool(Pool):
    """A pool whose operations the other ranks repeat."""

    def __init__(self, crew: Crew, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.crew = crew

    def take_slot(self) -> int:
        slot = super().take_slot()
        self.crew.note("take_slot")
        return slot

    def free_slot(self, slot: int) -> None:
        super().free_slot(slot)
        self.crew.note("free_slot", slot)

    def _take_pages(self, slot: int, length: int) -> None:
        super()._take_pages(slot, length)
        self.crew.note("reserve", slot, length)

    def restore(self, slot: int, length: int, arrays: dict[str, np.ndarray]) -> None:
        super().restore(slot, length, arrays)
        self.crew.note("restore", slot, length, arrays)

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self.crew.note("copy", source, target, length)

"""Store: the experts a forward needs, staged in the background while those that are there compute.

The model's thread decides: which rows go next, which experts they need, which slots those get. One thread of the store
reads and copies, in the order it was asked to. So a slot that is given away twice ends with the last one's bytes, and
whoever computes has waited for the load of his own.

Rows are cut into groups whose experts fit. A row's bits do not depend on the other rows of a call, so neither do they
depend on the groups, on what is resident, or on when it came.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from ..ops import Ops
from .cache import Cache
from .sources import Source, read_expert


@dataclass
class Counters:
    """hits, misses: different experts of a layer's forward that were resident or on their way, and the others.

    prefetched: experts sent for before their layer's turn; bytes_staged: read and copied; stall_s: seconds that the model
    waited for experts.
    """

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    bytes_staged: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True)
class StagedBank:
    """The experts of one layer in the store: Ops.moe's bank. fixed: a hash layer's experts by token, on the host."""

    number: int
    prefix: str
    shared: tuple[Any, Any, Any]
    fixed: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Load:
    """Experts on their way to their slots."""

    bank: int
    prefix: str
    experts: np.ndarray
    slots: np.ndarray
    mark: Any  # Stage.mark: the slots' former experts are not read after it
    done: Future = field(default_factory=Future)


class Group(NamedTuple):
    """Rows whose experts have slots. experts: ascending ids; slots: one each, pinned."""

    rows: np.ndarray
    experts: np.ndarray
    slots: np.ndarray


def slots_for(budget: int, slot_bytes: int, per_token: int, experts: int) -> int:
    """How many experts a budget of bytes holds, at most all. Raises ConfigError for fewer than one row's."""
    if budget < per_token * slot_bytes:
        raise ConfigError(
            f"expert cache: expected at least {per_token * slot_bytes} bytes, the {per_token} experts of one row at "
            f"{slot_bytes} bytes each on this rank; found {budget}"
        )
    return min(budget // slot_bytes, experts)


class Store:
    """The routed experts of a model, some of them in slots where the backend computes.

    moe() is Ops.moe for banks of the store. One thread uses a store at a time.
    """

    def __init__(self, ops: Ops, source: Source, slots: int, per_token: int, threads: int):
        """slots: of slots_for; per_token: experts a row chooses; threads: that read."""
        self._ops, self._source, self._per_token, self._threads = ops, source, per_token, threads
        self.slots = slots
        self.counters = Counters()
        self._numbers = {prefix: number for number, prefix in enumerate(source.banks)}
        self._cache = Cache(slots, list(source.banks.values()))
        self._stage = ops.stage(slots, source.layout.nbytes)
        self._matrices: list[Any] = [None] * slots
        self._loads: dict[int, Load] = {}  # by slot, until somebody has waited for it
        self._hashed: list[StagedBank] = []
        self._ahead: dict[int, np.ndarray] = {}  # slots pinned for a hash layer, by the number of its bank
        self._reader = ThreadPoolExecutor(1, "experts")
        self._held: list[tuple[int, np.ndarray, np.ndarray]] = []  # bank, experts, slots: of hold
        self._busy = False  # within begin or moe; at their start: the last one did not come to its end
        self._half = 0

    def bank(self, prefix: str, shared: tuple[Any, Any, Any], fixed: Any) -> StagedBank:
        """The bank of a layer or draft stage: weights.MakeBank."""
        made = StagedBank(self._numbers[prefix], prefix, shared, None if fixed is None else self._ops.to_host(fixed))
        if fixed is not None:
            self._hashed.append(made)
        return made

    def hold(self, banks: list[StagedBank]) -> None:
        """Make these banks resident for good, as far as half of the slots go. The draft's, when a model is loaded."""
        left = max(0, min(self.slots // 2, self.slots - 2 * self._per_token))
        for bank in banks:
            experts = np.arange(min(left, self._source.banks[bank.prefix]))
            left -= len(experts)
            slots, _ = self._send(bank, experts)
            self._wait(slots)
            self._held.append((bank.number, experts, slots))

    # ------------------------------------------------------------------ forward
    def begin(self, tokens: np.ndarray) -> None:
        """A forward of these tokens begins: send for the experts of hash layers, which follow from the token."""
        self._enter(clean=not self._ahead)  # else the last forward failed outside
        self._cache.age()
        for bank in self._hashed:
            room = self._cache.room() - 2 * self._per_token
            needed = np.unique(bank.fixed[tokens])
            experts = needed[self._cache.unpinned(bank.number, needed)][: max(0, room)]
            self._ahead[bank.number], sent = self._send(bank, experts)
            self.counters.prefetched += sent
        self._busy = False

    def moe(self, x: Any, ids: Any, weights: Any, bank: StagedBank, limit: float, slices: int) -> Any:
        """Ops.moe, of experts in the store."""
        self._enter()
        ops, chosen = self._ops, self._ops.to_host(ids)
        needed = np.unique(chosen)
        hits = self._cache.count(bank.number, needed)
        self.counters.hits += hits
        self.counters.misses += len(needed) - hits
        y = None
        with closing(self._groups(bank, chosen, needed)) as groups:
            for group in groups:
                matrices = ops.bank([self._matrices[slot] for slot in group.slots], bank.shared)
                places = ops.table(np.searchsorted(group.experts, chosen[group.rows]).astype(np.int32))
                rows = ops.table(group.rows)
                if len(group.rows) == len(chosen):
                    y = ops.moe(x, places, weights, matrices, limit, slices)
                    break  # in one piece
                y = ops.zeros(x.shape, np.float32) if y is None else y
                y[rows] = ops.moe(x[rows], places, weights[rows], matrices, limit, slices)
        self._release(bank.number)
        self._busy = False
        return ops.zeros(x.shape, np.float32) if y is None else y

    def _enter(self, clean: bool = True) -> None:
        """What begin and moe start with. After an error or an interrupt, at whatever place, nothing is taken for resident:
        loads still on their way come before those that are sent for from now on."""
        if self._busy or not clean:
            self._cache.clear(self._held)
            self._loads.clear()
            self._ahead.clear()
        self._busy = True

    def _groups(self, bank: StagedBank, chosen: np.ndarray, needed: np.ndarray) -> Iterator[Group]:
        """The rows of chosen int32 [T, k] in groups, each when its experts are there; the next one's are on their way.

        needed: the experts chosen, ascending.
        """
        slots = self._cache.place[bank.number, needed]
        if (slots >= 0).all() and self._loads.keys().isdisjoint(slots.tolist()):
            yield Group(np.arange(len(chosen)), needed, slots)  # all there, and none will go for another
            return
        room = self._cache.room()
        overlap = room >= 2 * self._per_token
        most = room // 2 if overlap else room
        loose = self._cache.unpinned(bank.number, np.arange(self._source.banks[bank.prefix]))
        rows, pinned = np.arange(len(chosen)), []
        try:
            while len(rows) or pinned:
                while len(rows) and len(pinned) < 1 + overlap:
                    group, rows = self._next(bank, chosen, rows, loose, most)
                    pinned.append(group)
                self._wait(pinned[0].slots)
                yield pinned[0]
                self._cache.unpin(pinned.pop(0).slots)
        finally:
            for group in pinned:
                self._cache.unpin(group.slots)

    def _next(
        self, bank: StagedBank, chosen: np.ndarray, rows: np.ndarray, loose: np.ndarray, most: int
    ) -> tuple[Group, np.ndarray]:
        """The next group of the rows left, and the rows after it.

        loose bool [experts]: those that take up one of the slots that groups share; a group has at most `most` of these.
        Rows whose experts are all there come first, by themselves. Of others at most two rows' worth of missing experts,
        so that these compute while the next ones are read.
        """
        slots = self._cache.place[bank.number, chosen[rows]]
        there = (slots >= 0).all(axis=1) & ~np.isin(slots, list(self._loads)).any(axis=1)
        rows, resident = rows[np.argsort(~there, kind="stable")], int(there.sum())
        taken: set[int] = set()
        length = 0
        for row in rows[: resident or None]:
            more = taken.union(chosen[row].tolist())
            experts = np.array(sorted(more))
            missing = np.count_nonzero(self._cache.place[bank.number, experts] < 0)
            if length and (np.count_nonzero(loose[experts]) > most or missing > 2 * self._per_token):
                break
            taken, length = more, length + 1
        experts = np.array(sorted(taken))
        group = Group(np.sort(rows[:length]), experts, self._send(bank, experts)[0])
        return group, np.sort(rows[length:])

    # ------------------------------------------------------------------ loads
    def _send(self, bank: StagedBank, experts: np.ndarray) -> tuple[np.ndarray, int]:
        """Pin the experts' slots and send for those that are missing → (slots, how many were)."""
        slots, missing = self._cache.pin(bank.number, experts)
        new = slots[missing]
        if len(new):
            load = Load(bank.number, bank.prefix, experts[missing], new, self._stage.mark())
            for slot in new.tolist():
                self._matrices[slot] = self._source.layout.matrices(self._ops, self._stage.slot(slot))
                self._loads[slot] = load
            self._reader.submit(self._fill, load)
        return slots, len(new)

    def _fill(self, load: Load) -> None:
        """Read a load's experts and have them copied. In the store's own thread."""
        try:
            for expert, slot in zip(load.experts.tolist(), load.slots.tolist()):
                half, self._half = self._half, 1 - self._half
                self._stage.free(half)
                read_expert(self._source, load.prefix, expert, self._stage.buffers[half], self._threads)
                self._stage.send(half, slot, load.mark)
                self.counters.bytes_staged += self._source.layout.nbytes
        except BaseException as error:
            load.done.set_exception(error)
        else:
            load.done.set_result(None)

    def _wait(self, slots: np.ndarray) -> None:
        """Return when these slots are filled. Raises what their loads raised; such experts are missing again."""
        loads = {id(load): load for slot in slots.tolist() if (load := self._loads.get(slot))}
        start = time.perf_counter()
        for load in loads.values():
            failed = load.done.exception()
            for slot in load.slots.tolist():
                if self._loads.get(slot) is load:
                    del self._loads[slot]
            if failed:
                self._cache.forget(load.slots, load.bank, load.experts)
                raise failed
        if loads:
            self._stage.settle()
            self.counters.stall_s += time.perf_counter() - start

    def _release(self, number: int) -> None:
        """Slots pinned ahead for a hash layer may go again."""
        if number in self._ahead:
            self._cache.unpin(self._ahead.pop(number))

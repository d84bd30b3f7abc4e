"""Store: the experts a forward needs, staged in the background while those that are there compute.

The model's thread decides: which experts go next, and which slots they get. One thread of the store reads and copies, in
the order it was asked to. So a slot that is given away twice ends with the last load's bytes, and whoever computes has
waited for the loads it needs.

Experts compute as they come, each for all rows that chose it, and a row's sum is made in several calls. Its order is
fixed (Ops.moe_begin), so no bit depends on which experts were there, or on when the others came.
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

SUMS = 64 << 20  # bytes up to which every choice of a row has a sum of its own while experts come


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
    """An expert on its way to its slot."""

    bank: int
    prefix: str
    expert: int
    slot: int
    mark: Any  # Stage.mark: the slot's former expert is not read after it
    done: Future = field(default_factory=Future)  # Stage.send's copy


class Layer(NamedTuple):
    """The arguments of Ops.moe for one layer. chosen: the ids, on the host."""

    x: Any
    chosen: np.ndarray
    weights: Any
    bank: StagedBank
    limit: float


def slots_for(budget: int, slot_bytes: int, per_token: int, experts: int) -> int:
    """How many experts a budget of bytes holds, at most all. Raises ConfigError where it does not hold those of one row."""
    if budget < per_token * slot_bytes:
        raise ConfigError(
            f"expert cache: expected at least {per_token * slot_bytes} bytes, the {per_token} experts of one row at "
            f"{slot_bytes} bytes each on this rank; found {budget}"
        )
    return min(budget // slot_bytes, experts)


def sum_bytes(rows: int, per_token: int, slices: int, d: int) -> int:
    """Bytes that the sums of a forward of at most `rows` rows take while its experts come."""
    row = slices * d * 4
    return min(rows * (per_token + 1) * row, max(SUMS, rows * row))


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
        self._busy = False  # within begin or moe; still set when the next one starts where the last one failed
        self._half = 0

    def bank(self, prefix: str, shared: tuple[Any, Any, Any], fixed: Any) -> StagedBank:
        """The bank of a layer or draft stage: weights.MakeBank."""
        made = StagedBank(self._numbers[prefix], prefix, shared, None if fixed is None else self._ops.to_host(fixed))
        if fixed is not None:
            self._hashed.append(made)
        return made

    def hold(self, banks: list[StagedBank]) -> None:
        """Make these banks resident for good, in at most half of the slots. For the draft's, when a model is loaded."""
        left = max(0, min(self.slots // 2, self.slots - 2 * self._per_token))
        for bank in banks:
            experts = np.arange(min(left, self._source.banks[bank.prefix]))
            left -= len(experts)
            slots, _ = self._send(bank, experts)
            self._wait(slots)
            self._held.append((bank.number, experts, slots))

    # ------------------------------------------------------------------ forward
    def begin(self, tokens: np.ndarray) -> None:
        """A forward of these tokens begins: send for the experts of the hash layers, which follow from the token alone."""
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
        """Ops.moe with experts of the store."""
        self._enter()
        layer = Layer(x, self._ops.to_host(ids), weights, bank, limit)
        needed = np.unique(layer.chosen)
        hits = self._cache.count(bank.number, needed)
        self.counters.hits += hits
        self.counters.misses += len(needed) - hits
        slots = self._cache.place[bank.number, needed]
        if all(map(self._there, slots.tolist())):
            self._wait(slots)
            matrices, places = self._choices(layer.chosen, bank, needed, slots)
            y = self._ops.moe(x, self._ops.table(places), weights, matrices, limit, slices)
        else:
            y = self._as_they_come(layer, slices)
        self._release(bank.number)
        self._busy = False
        return y

    def _enter(self, clean: bool = True) -> None:
        """What begin and moe start with. After an error or an interrupt, wherever it was, no expert counts as resident; loads that
        are still on their way are made before those sent for from now on."""
        if self._busy or not clean:
            self._cache.clear(self._held)
            self._loads.clear()
            self._ahead.clear()
        self._busy = True

    def _there(self, slot: int) -> bool:
        """Whether a slot (−1: none) holds its expert, or its load has come to an end."""
        load = self._loads.get(slot)
        return slot >= 0 and (load is None or load.done.done())

    def _choices(self, chosen: np.ndarray, bank: StagedBank, experts: np.ndarray, slots: np.ndarray) -> tuple[Any, np.ndarray]:
        """A bank of some experts (ascending), and `chosen` in its numbers: int32, −1 where it is none of them."""
        numbers = np.full(self._source.banks[bank.prefix], -1, np.int32)
        numbers[experts] = np.arange(len(experts))
        return self._ops.bank([self._matrices[slot] for slot in slots], bank.shared), numbers[chosen]

    def _as_they_come(self, layer: Layer, slices: int) -> Any:
        """Each expert once, for all rows. Where every choice can have a sum of its own, those that are there compute while the
        rest travels."""
        (t, k), d = layer.chosen.shape, layer.x.shape[1]
        ascending = t * (k + 1) * slices * d * 4 > SUMS
        sums = self._ops.moe_begin(t, 1 if ascending else k + 1, slices, d)
        nobody, shared = np.zeros(0, np.int64), not ascending
        with closing(self._arrivals(layer.bank, np.unique(layer.chosen), ascending)) as arrivals:
            for experts, slots in arrivals:
                self._add(sums, layer, experts, slots, shared)
                shared = False
        if ascending:
            self._add(sums, layer, nobody, nobody, True)
        return self._ops.moe_end(sums)

    def _add(self, sums: Any, layer: Layer, experts: np.ndarray, slots: np.ndarray, shared: bool) -> None:
        """Ops.moe_add of the rows that chose one of these experts; with `shared` of all rows."""
        order = np.argsort(experts)
        x, weights, table = layer.x, layer.weights, self._ops.table
        matrices, ids = self._choices(layer.chosen, layer.bank, experts[order], slots[order])
        rows = np.arange(len(ids), dtype=np.int32)
        where = table(rows)
        if not shared and len(used := rows[(ids >= 0).any(axis=1)]) < len(rows):
            ids, where = ids[used], table(used)
            x, weights = x[where], weights[where]
        self._ops.moe_add(sums, where, x, table(ids), weights, matrices, layer.limit, shared)

    def _arrivals(self, bank: StagedBank, needed: np.ndarray, ascending: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The experts needed (ascending) in batches that are there, with their slots; the next ones are on their way.

        ascending: in this order. Else those that are there come first, and the first batch waits for nobody, so that it may
        be empty.
        """
        slots = self._cache.place[bank.number, needed]
        there = np.array([self._there(slot) for slot in slots.tolist()])
        room = self._cache.room()
        if ascending:  # what is there must not be replaced by what comes before it, as far as there is room for both
            kept = slots[there][: max(0, room - 2 * self._per_token)]
            self._cache.pin(bank.number, needed[there][: len(kept)])
            queue = needed
        else:
            kept = slots[:0]
            queue = needed[np.lexsort((slots < 0, ~there))]
        experts, pinned, wait = queue[:0], slots[:0], ascending
        try:
            while len(queue) or len(pinned):
                loose = np.cumsum(self._cache.unpinned(bank.number, queue))
                fit = int(np.searchsorted(loose, self._cache.room(), "right"))
                sent = self._send(bank, queue[:fit])[0]
                experts, pinned, queue = np.append(experts, queue[:fit]), np.append(pinned, sent), queue[fit:]
                count = self._ready(pinned, most=len(pinned) - len(pinned) // 2 if len(queue) else len(pinned), wait=wait)
                yield experts[:count], pinned[:count]
                self._cache.unpin(pinned[:count])
                experts, pinned, wait = experts[count:], pinned[count:], True
        finally:
            for some in (kept, pinned):
                self._cache.unpin(some)

    def _ready(self, slots: np.ndarray, most: int, wait: bool) -> int:
        """How many of these slots are filled, counted from the first one, at most `most`. wait: until there is one."""
        if wait:
            self._wait(slots[:1])
        count = next((i for i, slot in enumerate(slots.tolist()) if i == most or not self._there(slot)), len(slots))
        self._wait(slots[:count])
        return count

    # ------------------------------------------------------------------ loads
    def _send(self, bank: StagedBank, experts: np.ndarray) -> tuple[np.ndarray, int]:
        """Pin the experts' slots and send for those that are missing → (slots, how many were missing)."""
        slots, missing = self._cache.pin(bank.number, experts)
        new = slots[missing]
        if len(new):
            mark = self._stage.mark()
            for expert, slot in zip(experts[missing].tolist(), new.tolist()):
                self._matrices[slot] = self._source.layout.matrices(self._ops, self._stage.slot(slot))
                self._loads[slot] = load = Load(bank.number, bank.prefix, expert, slot, mark)
                self._reader.submit(self._fill, load)
        return slots, len(new)

    def _fill(self, load: Load) -> None:
        """Read a load's expert and have it copied. In the store's own thread."""
        try:
            half, self._half = self._half, 1 - self._half
            self._stage.free(half)
            read_expert(self._source, load.prefix, load.expert, self._stage.buffers[half], self._threads)
            copied = self._stage.send(half, load.slot, load.mark)
            self.counters.bytes_staged += self._source.layout.nbytes
        except BaseException as error:
            load.done.set_exception(error)
        else:
            load.done.set_result(copied)

    def _wait(self, slots: np.ndarray) -> None:
        """Return when these slots are filled. Raises what their loads raised; such experts are missing again."""
        loads = [load for slot in slots.tolist() if (load := self._loads.get(slot))]
        start = time.perf_counter()
        for load in loads:
            failed = load.done.exception()
            del self._loads[load.slot]
            if failed:
                self._cache.forget(np.array([load.slot]), load.bank, np.array([load.expert]))
                raise failed
            self._stage.settle(load.done.result())
        if loads:
            self.counters.stall_s += time.perf_counter() - start

    def _release(self, number: int) -> None:
        """Slots pinned ahead for a hash layer may go again."""
        if number in self._ahead:
            self._cache.unpin(self._ahead.pop(number))

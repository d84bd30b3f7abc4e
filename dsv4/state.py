"""The pool: what all sequences keep, found by position.

A position's key lies in a ring at position mod capacity, a completed entry in a page at position div ratio. Rows are
visible by their position alone, so undoing a step means setting a length: nothing is ever shifted or erased.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, Iterator, NamedTuple

import numpy as np

from .config import INDEXED_RATIO, ModelConfig, pooled_blocks
from .errors import CapacityError, InputError, StateError
from .ops import IndexCache, KeyCache, Ops, Ring
from .plan import page_positions
from .rope import rope_thetas
from .rows import Rows


@dataclass
class LayerState:
    """What one layer keeps for all slots; the compressed parts are None where the layer has none."""

    ratio: int
    window: KeyCache  # ring: slots · window_capacity keys
    ring: Ring | None = None  # slots · ring_capacity(ratio) compressor rows
    entries: KeyCache | None = None  # pages · page_entries(ratio) keys
    index_ring: Ring | None = None
    index: IndexCache | None = None

    def caches(self) -> dict[str, NamedTuple]:
        """The parts that exist, by field name."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "ratio"}
        return {name: part for name, part in parts.items() if part is not None}


class Pool:
    """State of up to `slots` sequences of up to `max_context` positions.

    headroom: rows a sequence may forward at once, and positions it may be rewound by. Every ring holds its look-back
    plus the head-room, so that rows past an accepted prefix overwrite nothing that is still in sight.
    stages: draft stages, each with a window of its own; with any, the rows' main hidden is kept beside the windows.
    """

    def __init__(self, ops: Ops, config: ModelConfig, *, slots: int, max_context: int, headroom: int, stages: int = 0):
        self.ops, self.config = ops, config
        self.slots, self.max_context, self.headroom = slots, max_context, headroom
        self.window = config.sliding_window
        self.window_capacity = self.window + headroom
        self.page_positions = page_positions(config)
        self.thetas = dict(zip((False, True), map(ops.vector, rope_thetas(config))))
        pages_per_slot = ceil(max_context / self.page_positions)
        self.pages = ops.table(np.zeros((slots, pages_per_slot), np.int32))
        self._held = [0] * slots  # pages a slot holds
        self._free_pages = list(range(slots * pages_per_slot - 1, -1, -1))
        self._free_slots = list(range(slots - 1, -1, -1))
        self._abandoned: deque[int] = deque()  # slots of sessions that were dropped, in whatever thread
        self.layers = [self._layer(ratio) for ratio in config.compress_ratios]
        self.stages = [self._layer(0) for _ in range(stages)]
        if stages:
            self.hidden = ops.zeros((slots * self.window_capacity, config.main_hidden_size), np.float32)
            self.block = ops.key_cache(slots * config.dspark.block_size, config.head_dim, config.qk_rope_head_dim)

    def _layer(self, ratio: int) -> LayerState:
        c, ops = self.config, self.ops
        state = LayerState(ratio, ops.key_cache(self.slots * self.window_capacity, c.head_dim, c.qk_rope_head_dim))
        if ratio:
            entries = self.pages.size * self.page_entries(ratio)
            state.ring = self._ring(ratio, c.head_dim)
            state.entries = ops.key_cache(entries, c.head_dim, c.qk_rope_head_dim)
            if ratio == INDEXED_RATIO:
                state.index_ring = self._ring(ratio, c.index_head_dim)
                state.index = ops.index_cache(entries, c.index_head_dim)
        return state

    def _ring(self, ratio: int, dim: int) -> Ring:
        shape = (self.slots * self.ring_capacity(ratio), dim * pooled_blocks(ratio))
        return Ring(self.ops.zeros(shape, np.float32), self.ops.zeros(shape, np.float32))

    # ------------------------------------------------------------------ places
    def look_back(self, ratio: int) -> int:
        """Positions, its own included, that an entry's last row pools over."""
        return ratio * pooled_blocks(ratio)

    def ring_capacity(self, ratio: int) -> int:
        return self.look_back(ratio) + self.headroom

    def page_entries(self, ratio: int) -> int:
        return self.page_positions // ratio

    def window_place(self, slots: Any, positions: Any) -> Any:
        return slots * np.int32(self.window_capacity) + positions % np.int32(self.window_capacity)

    def ring_place(self, ratio: int, slots: Any, positions: Any) -> Any:
        capacity = np.int32(self.ring_capacity(ratio))
        return slots * capacity + positions % capacity

    def entry_places(self, entries: Any, slots: Any, ratio: int) -> Any:
        """entries int32 [T, n] of slots int32 [T] → cache places int32 [T, n]; −1 stays."""
        return self.ops.entry_places(entries, slots, self.pages, self.page_entries(ratio))

    def visible_places(self, visible: Any, n: int, slots: Any, ratio: int) -> Any:
        """Cache places of entries 0 .. visible[t] − 1 of slots int32 [T], then −1: int32 [T, n]."""
        return self.ops.visible_places(visible, n, slots, self.pages, self.page_entries(ratio))

    # ------------------------------------------------------------------ slots and pages
    def take_slot(self) -> int:
        """A free slot. Raises CapacityError when all are in use."""
        while self._abandoned:
            self.free_slot(self._abandoned.popleft())
        if not self._free_slots:
            raise CapacityError(
                f"sessions: expected at most {self.slots} open at once, all are in use; "
                "close one or load with a larger max_sessions"
            )
        return self._free_slots.pop()

    @property
    def free_slots(self) -> int:
        """How many can be taken."""
        return len(self._free_slots) + len(self._abandoned)

    def abandon(self, slot: int) -> None:
        """Have a slot given back when the next one is taken. From any thread, at any time."""
        self._abandoned.append(slot)

    def free_slot(self, slot: int) -> None:
        """Give back a slot and its pages."""
        held, self._held[slot] = self._held[slot], 0
        self._free_pages.extend(int(page) for page in self.ops.to_host(self.pages[slot])[:held][::-1])
        self._free_slots.append(slot)

    def reserve(self, slot: int, length: int) -> None:
        """Have pages for `length` positions of a slot. length ≤ max_context."""
        if self._held[slot] * self.page_positions < length:
            self._take_pages(slot, length)

    def _take_pages(self, slot: int, length: int) -> None:
        """reserve() where pages are missing."""
        while self._held[slot] * self.page_positions < length:
            self.pages[slot, self._held[slot]] = self._free_pages.pop()
            self._held[slot] += 1

    # ------------------------------------------------------------------ copies
    def _live(self, state: LayerState, part: str, slot: int, length: int) -> Any:
        """Cache places of what a sequence of `length` positions can still see of one part, ascending positions."""
        if part in ("entries", "index"):
            entries = np.arange(length // state.ratio, dtype=np.int32)[None]
            return self.entry_places(self.ops.table(entries), self.ops.table(np.array([slot], np.int32)), state.ratio)[0]
        back = self.window if part == "window" else self.look_back(state.ratio)
        positions = np.arange(max(0, length - back), length, dtype=np.int32)
        slots = np.int32(slot)
        window = part == "window"
        return self.ops.table(self.window_place(slots, positions) if window else self.ring_place(state.ratio, slots, positions))

    def _live_count(self, state: LayerState, part: str, length: int) -> int:
        """How many places _live() gives."""
        if part in ("entries", "index"):
            return length // state.ratio
        return min(length, self.window if part == "window" else self.look_back(state.ratio))

    def export_bytes(self, length: int) -> int:
        """Size of export() of so many positions."""
        return sum(
            self._live_count(state, part, length) * array.itemsize * int(np.prod(array.shape[1:]))
            for _, state, part, cache in self._parts()
            for array in cache
        )

    def _parts(self) -> Iterator[tuple[str, LayerState, str, NamedTuple]]:
        """(name, state, part, arrays) of every cache that a sequence keeps."""
        for kind, states in (("layer", self.layers), ("stage", self.stages)):
            for number, state in enumerate(states):
                for part, cache in state.caches().items():
                    yield f"{kind}.{number}.{part}", state, part, cache

    def export(self, slot: int, length: int) -> dict[str, np.ndarray]:
        """What a sequence of `length` positions keeps, by "layer.N.part.array"; independent of where it lay."""
        out = {}
        for name, state, part, cache in self._parts():
            where = self._live(state, part, slot, length)
            for field, array in zip(cache._fields, cache):
                out[f"{name}.{field}"] = self.ops.to_host(array[where])
        return out

    def restore(self, slot: int, length: int, arrays: dict[str, np.ndarray]) -> None:
        """Put an export of the same length into a slot."""
        self.reserve(slot, length)
        for name, state, part, cache in self._parts():
            where = self._live(state, part, slot, length)
            for field, array in zip(cache._fields, cache):
                array[where] = self.ops.table(arrays[f"{name}.{field}"])

    def check_export(self, length: int, arrays: dict[str, np.ndarray]) -> None:
        """Raise StateError unless arrays are what export() of `length` positions gives, by name, type and shape."""
        for name, state, part, cache in self._parts():
            places = self._live_count(state, part, length)
            for field, array in zip(cache._fields, cache):
                found = arrays.get(f"{name}.{field}")
                expected = (places, *array.shape[1:])
                if found is None or found.shape != expected or found.dtype != array.dtype:
                    what = "none" if found is None else f"{found.dtype} {list(found.shape)}"
                    raise StateError(
                        f"snapshot: {name}.{field}: expected {array.dtype} {list(expected)} for {length} positions, found {what}"
                    )

    def check(self, rows: Rows) -> None:
        """Raise InputError for rows that do not lie in slots in use, each once, at positions with pages."""
        if not len(rows):
            raise InputError("rows: expected at least one, found none")
        tokens, spans, vocab = rows.tokens.tolist(), rows.spans, self.config.vocab_size
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= vocab:
            raise InputError(f"rows: expected token ids within 0..{vocab - 1}, found {low} .. {high}")
        positions, slots = 0, set()
        for slot, start, stop in spans:
            if not 0 <= slot < self.slots or slot in self._free_slots:
                raise InputError(f"rows: expected a slot in use, found slot {slot}")
            if not start < stop <= start + self.headroom:
                raise InputError(f"rows: expected 1 to {self.headroom} positions in slot {slot}, found {start} .. {stop - 1}")
            if start < 0 or stop > self._held[slot] * self.page_positions:
                raise InputError(f"rows: expected positions with pages reserved in slot {slot}, found {start} .. {stop - 1}")
            positions += stop - start
            slots.add(slot)
        if len(slots) < len(spans):
            raise InputError(f"rows: expected each slot once; found slots {[slot for slot, _, _ in spans]}")
        if positions != len(tokens):
            raise InputError(f"rows: expected a token for each of {positions} positions, found {len(tokens)}")

    def copy(self, source: int, target: int, length: int) -> None:
        """Make slot `target` equal to slot `source`: whole rings, head-room included, and the entries so far."""
        self.reserve(target, length)
        for _, state, part, cache in self._parts():
            if part in ("entries", "index"):
                to, of = (self._live(state, part, slot, length) for slot in (target, source))
            else:
                to, of = (self._ring_of(slot, len(cache[0])) for slot in (target, source))
            for array in cache:
                array[to] = array[of]
        if self.stages:
            self.hidden[self._ring_of(target, len(self.hidden))] = self.hidden[self._ring_of(source, len(self.hidden))]

    def _ring_of(self, slot: int, places: int) -> slice:
        """A slot's share of a ring of all slots."""
        n = places // self.slots
        return slice(slot * n, (slot + 1) * n)

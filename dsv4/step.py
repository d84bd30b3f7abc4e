"""Step: what one forward needs to know about its rows, worked out once for all layers."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .ops import Ops, Rope
from .rows import Rows


class Compression(NamedTuple):
    """The rows of a step as a compressor of one ratio sees them."""

    where: Any  # int32 [T]    place of each row in the compressor's ring
    done_slots: Any  # int32 [n]    the entries these rows complete: slot,
    done: Any  # int32 [n]    entry number,
    done_places: Any  # int32 [n]    cache place,
    done_rope: Rope  # rotation at the entry's position, entry · ratio
    visible: Any  # int32 [T]    row t sees entries 0 .. visible[t]−1


class Step:
    """Rows with their places in the pool and their rotations.

    tokens, slots, positions: int32 [T]; window_where int32 [T]: where each row's key goes; window_places
    int32 [T, W]: the keys each row sees, ascending positions, −1 before the sequence's start.
    """

    def __init__(self, ops: Ops, pool, rows: Rows):
        self.ops, self.pool, self.rows = ops, pool, rows
        self.tokens = ops.table(rows.tokens)
        self.slots = ops.table(rows.slots)
        self.positions = ops.table(rows.positions)
        self._ropes: dict[bool, Rope] = {}
        self._compression: dict[int, Compression] = {}
        self._all_places: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def window_where(self):
        return self._ring_places(1, self.pool.window_capacity).reshape(-1)

    @cached_property
    def window_places(self):
        return self._ring_places(self.pool.window, self.pool.window_capacity)

    def _ring_places(self, span: int, capacity: int):
        """int32 [T, span]: where the rows' last `span` positions lie in rings of this capacity, their own included."""
        return self.ops.ring_places(self.slots, self.positions, span, capacity)

    def rope(self, ratio: int) -> Rope:
        """Rotation of the rows in a layer of this ratio: plain in window-only layers, YaRN in compressed ones."""
        kind = ratio > 0
        if kind not in self._ropes:
            self._ropes[kind] = self.ops.rope_angles(self.positions, self.pool.thetas[kind])
        return self._ropes[kind]

    def compression(self, ratio: int) -> Compression:
        if ratio not in self._compression:
            self._compression[ratio] = self._compress(ratio)
        return self._compression[ratio]

    def _compress(self, ratio: int) -> Compression:
        ops, pool, rows = self.ops, self.pool, self.rows
        after = rows.positions + np.int32(1)
        visible = after // np.int32(ratio)
        complete = (visible * np.int32(ratio) == after).nonzero()
        slots = ops.table(rows.slots[complete])
        done = visible[complete] - np.int32(1)
        return Compression(
            where=self._ring_places(1, pool.ring_capacity(ratio)).reshape(-1),
            done_slots=slots,
            done=ops.table(done),
            done_places=pool.entry_places(ops.table(done[:, None]), slots, ratio)[:, 0],
            done_rope=ops.rope_angles(ops.table(done * np.int32(ratio)), pool.thetas[True]),
            visible=ops.table(visible),
        )

    def all_places(self, ratio: int):
        """Places of every entry each row may see: int32 [T, n], ascending entries, −1 beyond the visible ones."""
        if ratio not in self._all_places:
            most = (int(self.rows.positions.max(initial=-1)) + 1) // ratio
            visible = self.compression(ratio).visible
            self._all_places[ratio] = self.pool.visible_places(visible, most, self.slots, ratio)
        return self._all_places[ratio]

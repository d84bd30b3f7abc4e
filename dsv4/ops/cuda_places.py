"""The CUDA backend's bookkeeping: where the rows' keys and entries lie, worked out on the device by numba-CUDA.

A function of one index without cooperation is plain Python here, compiled by numba where there is a device: a step uploads
what is known of its rows, a few numbers each, and never a list of places.
"""

from __future__ import annotations

import numpy as np

from .cuda_base import Array, CudaBase

i32 = np.int32


class PlacesMixin(CudaBase):
    """Ops of this family; what they compute is said in Ops."""

    def ring_places(self, slots: Array, positions: Array, span: int, capacity: int) -> Array:
        places = self.empty((len(slots), span), i32)
        self.each(ring_place, places.size, slots, positions, places.reshape(-1), i32(span), i32(capacity))
        return places

    def entry_places(self, entries: Array, slots: Array, pages: Array, page_entries: int) -> Array:
        t, n = entries.shape
        places = self.empty((t, n), i32)
        self.each(entry_place, t * n, entries.reshape(-1), slots, pages, places.reshape(-1), i32(n), i32(page_entries))
        return places

    def visible_places(self, visible: Array, n: int, slots: Array, pages: Array, page_entries: int) -> Array:
        places = self.empty((len(slots), n), i32)
        self.each(visible_place, places.size, visible, slots, pages, places.reshape(-1), i32(n), i32(page_entries))
        return places


def ring_place(i: int, slots: Array, positions: Array, places: Array, span: int, capacity: int) -> None:
    """slots, positions [T] → places [T · span]: of the last `span` positions, the row's own included."""
    row = i // span
    position = positions[row] - span + 1 + i % span
    places[i] = slots[row] * capacity + position % capacity if position >= 0 else -1


def entry_place(i: int, entries: Array, slots: Array, pages: Array, places: Array, n: int, page_entries: int) -> None:
    """entries [T · n] of slots [T] → places [T · n]: through the slot's pages [slots, pages]; −1 stays."""
    entry = entries[i]
    places[i] = pages[slots[i // n], entry // page_entries] * page_entries + entry % page_entries if entry >= 0 else -1


def visible_place(i: int, visible: Array, slots: Array, pages: Array, places: Array, n: int, page_entries: int) -> None:
    """visible, slots [T] → places [T · n]: of entries 0 .. visible − 1; −1 from there on."""
    row, entry = i // n, i % n
    there = entry < visible[row]
    places[i] = pages[slots[row], entry // page_entries] * page_entries + entry % page_entries if there else -1


# What `each` runs, with numba's types of the arguments after i.
INDEX_KERNELS = {
    ring_place: "int32[::1], int32[::1], int32[::1], int32, int32",
    entry_place: "int32[::1], int32[::1], int32[:,::1], int32[::1], int32, int32",
    visible_place: "int32[::1], int32[::1], int32[:,::1], int32[::1], int32, int32",
}

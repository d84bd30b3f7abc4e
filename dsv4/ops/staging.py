"""Stage: the memory that experts are staged through, and the copies. The part of staging that a backend implements.

The store (dsv4/experts/store.py) reads an expert into one of two buffers on the host and has it copied to a slot where
the backend computes, while it reads the next one into the other. Here: for backends whose arrays are NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class HostStage:
    """Slots and buffers in plain memory; a copy is made where it is asked for.

    `send` and `free` are called by one thread of the store, the rest by the thread that runs the model, both at the
    same time. A device does the same with pinned buffers, a copy stream and events: each method says what there.
    """

    def __init__(self, slots: int, slot_bytes: int):
        self._slots = np.empty((slots, slot_bytes), np.uint8)  # pages that are never written take no memory
        self.buffers = np.empty((2, slot_bytes), np.uint8)  # where experts are read to

    def slot(self, n: int) -> Any:
        """Slot n: uint8 [slot_bytes] where the backend computes."""
        return self._slots[n]

    def mark(self) -> Any:
        """A point in the backend's work: all that was given to it so far. On a device: an event of its stream."""
        return None

    def send(self, half: int, slot: int, mark: Any) -> Any:
        """Copy buffers[half] to a slot, after the work before `mark`, which may still read what the slot held → the copy,
        for settle. On a device: an event of the stream for copies, and the copy may go on after this returns.
        """
        self._slots[slot] = self.buffers[half]

    def free(self, half: int) -> None:
        """Return when buffers[half] may be written: the copy from it, if there was one, has been made."""

    def settle(self, copied: Any) -> None:
        """Work given to the backend from now on comes after this copy. On a device without waiting."""

"""Experts staged to a device: what HostStage does in plain memory, with pinned buffers, a copy stream and events."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda_base import Array
from .kernels import Launcher


class DeviceStage:
    """Slots in one device array, two pinned buffers; see staging.HostStage. The host waits in free() only."""

    def __init__(self, launcher: Launcher, slots: int, slot_bytes: int):
        self._launcher = launcher
        self._slots = launcher.empty((slots, slot_bytes), np.uint8)
        self.buffers = (launcher.pinned(slot_bytes), launcher.pinned(slot_bytes))
        self._copied: list[Any] = [None, None]  # by buffer: the event of the last copy from it

    def slot(self, n: int) -> Array:
        return self._slots[n]

    def mark(self) -> Any:
        return self._launcher.mark()

    def send(self, half: int, slot: int, mark: Any) -> Any:
        self._copied[half] = event = self._launcher.copy(self.buffers[half], self._slots[slot], mark)
        return event

    def free(self, half: int) -> None:
        if self._copied[half] is not None:
            self._launcher.host_wait(self._copied[half])

    def settle(self, copied: Any) -> None:
        self._launcher.wait(copied)

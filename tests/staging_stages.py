"""Experts in files of random bytes, and stages that copy late: what shows a wait that is missing."""

import queue
import threading
import time

import numpy as np

from dsv4.experts.layout import ExpertLayout
from dsv4.ops.staging import HostStage

D, INNER, SLICES = 128, 256, 2
SHAPES = ((INNER, D // 2), (INNER, D // 32), (D, INNER // 2), (D, INNER // 32), (INNER, D // 2), (INNER, D // 32))
POISON = 0x5A


class FileExperts:
    """A sources.Source over a file: every expert in one run, banks as asked."""

    def __init__(self, path, banks: dict[str, int], seed: int = 0):
        self.path, self.banks, self.layout = path, banks, ExpertLayout(SHAPES)
        rng, size = np.random.default_rng(seed), self.layout.nbytes
        self.bytes = rng.integers(0, 255, (sum(banks.values()), size), np.uint8)
        for one in self.bytes:
            for scale in self.layout.arrays(one)[1::2]:
                scale[:] = rng.integers(118, 124, scale.shape, np.uint8)
        self.bytes.tofile(path)
        self.file = open(path, "rb")
        self.first = dict(zip(banks, np.cumsum([0, *banks.values()]).tolist()))

    def pieces(self, prefix, expert):
        begin = (self.first[prefix] + expert) * self.layout.nbytes
        return np.array([(self.file.fileno(), begin + to, k, n, k, to, i % 2)
                         for i, (to, (n, k)) in enumerate(zip(self.layout.starts, SHAPES))], np.int64)  # fmt: skip

    def where(self, prefix, expert, piece):
        return f"{self.path}: {prefix}{expert}.{piece}"

    def matrices(self, ops, prefix):
        """All experts of a bank, where nothing is staged."""
        first = self.first[prefix]
        return [self.layout.matrices(ops, one) for one in self.bytes[first : first + self.banks[prefix]]]


class LateStage(HostStage):
    """Copies are made later, by a thread of the stage, after a random while, as a device makes them.

    A buffer is poisoned when it becomes free and a slot when its copy begins. waits: "free" and "settle", of which one
    can be left out to see that it matters. clock(): how much work the model has given out; used [slots]: its value when
    each slot was last read, by which send knows whether its mark came after that.
    """

    def __init__(self, slots, slot_bytes, seed=0, delay=3e-4, waits=("free", "settle"), clock=lambda: 0):
        super().__init__(slots, slot_bytes)
        self._slots[:] = self.buffers[:] = POISON
        self.rng, self.delay, self.waits, self.clock = np.random.default_rng(seed), delay, waits, clock
        self.used = np.zeros(slots, int)
        self.early, self.queue = [], queue.Queue()
        self.pending = [threading.Event(), threading.Event()]
        for event in self.pending:
            event.set()
        threading.Thread(target=self._copy, daemon=True).start()

    def mark(self):
        return self.clock()

    def send(self, half, slot, mark):
        if mark < self.used[slot]:
            self.early.append(slot)
        self.pending[half].clear()
        copied = threading.Event()
        self.queue.put((half, slot, copied))
        return copied

    def _copy(self):
        while True:
            half, slot, copied = self.queue.get()
            self._slots[slot] = POISON
            time.sleep(self.rng.random() * self.delay)
            self._slots[slot] = self.buffers[half]
            self.pending[half].set()
            copied.set()
            self.queue.task_done()

    def free(self, half):
        if "free" in self.waits:
            self.pending[half].wait()
            self.buffers[half] = POISON

    def settle(self, copied):
        if "settle" in self.waits:
            copied.wait()

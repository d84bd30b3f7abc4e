"""Watch: notices a rank that stopped answering.

Every rank has a thread that tells rank 0, and rank 0's tells the others, that it lives and for how long its work has stood
still. Computing and reading files is work, and so is waiting for another rank or for a command, however long it takes.
A process that is stopped says nothing; one that hangs reports its own standstill.
"""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import Any

BEAT = 0.5  # seconds between two signs of life
LIMIT = 4.0  # seconds without one, or of standstill, after which the job ends
WORK = 0.1  # seconds of processor time that count as work
_STATUS = Path("/proc/self/stat")  # Linux


def waits_for_disk() -> bool:
    """Whether the main thread sleeps in the kernel until a file has been read."""
    return _STATUS.exists() and _STATUS.read_text().rpartition(")")[2].split()[0] == "D"


class Watch(threading.Thread):
    """comm: what comm.Mpi offers: post_beat, beats, failures, turns, idle, patience, fail, end."""

    def __init__(self, comm: Any):
        super().__init__(name="dsv4-watch", daemon=True)
        self.comm = comm
        self.over = threading.Event()
        self._turns, self._read, self._used = -1, (), 0.0
        self._turned = self._worked = time.monotonic()

    def standstill(self) -> float:
        """Seconds since this rank's work was last seen to go on.

        turns go up whenever the rank exchanges something, waits or reports progress: one that only computes for longer
        than `patience` has lost its way.
        """
        now, turns, usage = time.monotonic(), self.comm.turns, resource.getrusage(resource.RUSAGE_SELF)
        read = usage.ru_majflt, usage.ru_inblock
        used = usage.ru_utime + usage.ru_stime - time.thread_time()  # this thread, which calls here, is no sign of work
        if self.comm.idle or turns != self._turns:
            self._turns, self._turned = turns, now
        if self._turned == now or read != self._read or used - self._used > WORK or waits_for_disk():
            self._read, self._used, self._worked = read, used, now
        return now - (self._worked if now - self._turned < self.comm.patience else self._turned)

    def run(self) -> None:
        peers = range(1, self.comm.size) if self.comm.rank == 0 else (0,)
        heard = dict.fromkeys(peers, time.monotonic())
        last = time.monotonic()
        while not self.over.wait(BEAT):
            now = time.monotonic()
            if now - last > LIMIT / 2:  # this process was held up itself: what was sent meanwhile is still to be read
                heard = dict.fromkeys(peers, now)
            last, ages = now, dict.fromkeys(peers, 0.0)
            own = self.standstill()
            for peer in peers:
                self.comm.post_beat(peer, own)
            for rank, age in self.comm.beats():
                heard[rank], ages[rank] = now, age
            for text, status in self.comm.failures():
                self.comm.end(text, status)
            for rank in peers:
                silence = max(now - heard[rank], ages[rank])
                if silence > LIMIT:
                    time.sleep(BEAT * max(0, self.comm.rank - 1))  # one rank is enough to say it
                    self.comm.end(f"dsv4: error: rank {rank} stopped answering {silence:.0f} s ago", 1)

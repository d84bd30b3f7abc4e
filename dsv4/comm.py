"""Communicators: the only seam between ranks.

What ranks add up is finished as one binary tree over the ranks, in the same order on every rank, so that the number of
ranks changes no bit. Rank 0 leads: it sends commands, and only it gets logits.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from .config import World, init_timeout
from .errors import BackendError, ConfigError, install
from .watch import Watch


@dataclass
class Traffic:
    """What a rank has sent: messages and their bytes; and sums it took part in."""

    messages: int = 0
    bytes: int = 0
    sums: int = 0


class RankError(Exception):
    """The job is ending: another rank failed, or did not answer."""


class Communicator:
    """Rank `rank` of `size`. A transport implements send and receive; arrays are float32 where the backend computes."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.patience = 600.0  # seconds that ranks wait for each other at the start
        self.idle = False  # nothing is asked of this rank: whether it stands still does not matter
        self.crowded = False  # there are more ranks than cores for them
        self.turns = 0  # goes up with every exchange and wait: signs of work, see Watch

    # ------------------------------------------------------------------ what the model asks for
    def sum_parts(self, y: Any, parts: int) -> Any:
        """y [T, d]: this rank's part of a sum over `parts` ranks → the whole; parts 1: it is whole already.

        Each of log2(size) turns adds the sums of two neighbouring halves, lower ranks first.
        """
        if parts == 1:
            return y
        self.traffic.sums += 1
        step = 1
        while step < self.size:
            other = self.swap(y, self.rank ^ step)
            y = other + y if self.rank & step else y + other
            step *= 2
        return y

    def join(self, y: Any) -> Any | None:
        """y [n, v]: this rank's columns → all ranks' [n, Σ v] on rank 0; None elsewhere."""
        if self.rank:
            if len(y):
                self.send(np.ascontiguousarray(y), 0)
            return None
        if self.size == 1 or not len(y):
            return y
        others = [np.frombuffer(self.receive(rank), np.float32).reshape(len(y), -1) for rank in range(1, self.size)]
        return np.concatenate([y, *others], axis=1)

    def swap(self, y: Any, peer: int) -> Any:
        """Send y to a rank and return that rank's array of the same shape."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what leading and following ask for
    def broadcast(self, message: bytes | None = None) -> bytes:
        """Rank 0's message to all. The others wait for it as long as it takes."""
        if self.rank:
            return self.receive(0, idle=True)
        for rank in range(1, self.size):
            self.send(message, rank)
        return message

    def everyone(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank. Raises RankError for one that does not come within `patience`."""
        if self.rank:
            self.send(pickle.dumps(value), 0)
            return pickle.loads(self.receive(0, patience=self.patience))
        values = [value] + [pickle.loads(self.receive(rank, patience=self.patience)) for rank in range(1, self.size)]
        for rank in range(1, self.size):
            self.send(pickle.dumps(values), rank)
        return values

    def send(self, data: Any, to: int) -> None:
        """Send bytes, or a contiguous array, to a rank."""
        raise NotImplementedError

    def receive(self, source: int, idle: bool = False, patience: float | None = None) -> Any:
        """The next message of a rank, as a buffer of bytes. idle: no hurry. Raises RankError after `patience` seconds."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the end
    def fail(self, text: str, status: int, grace: float = 0.0) -> None:
        """End the job on all ranks, with `text`, if any, on standard error once. grace: seconds in which rank 0 may say it."""

    def close(self) -> None:
        """Leave the job, when the other ranks do."""

    def _count(self, nbytes: int) -> None:
        self.traffic.messages += 1
        self.traffic.bytes += nbytes


class Single(Communicator):
    """One rank: what the ranks would add up is already whole."""


class Threads(Communicator):
    """Ranks that are threads of one process: for tests."""

    def __init__(self, rank: int, boxes: list[list[queue.SimpleQueue]], failures: list[str]) -> None:
        super().__init__()
        self.rank, self.size, self._boxes, self.failures = rank, len(boxes), boxes, failures

    @classmethod
    def group(cls, size: int) -> list[Threads]:
        """A communicator for each of `size` threads. A message lies in boxes[to][source] until it is taken."""
        boxes = [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]
        failures: list[str] = []
        return [cls(rank, boxes, failures) for rank in range(size)]

    def swap(self, y: np.ndarray, peer: int) -> np.ndarray:
        self.send(y, peer)
        return np.frombuffer(self.receive(peer), y.dtype).reshape(y.shape)

    def send(self, data: Any, to: int) -> None:
        data = bytes(data)
        self._count(len(data))
        self._boxes[to][self.rank].put(data)

    def receive(self, source: int, idle: bool = False, patience: float | None = None) -> bytes:
        end = time.monotonic() + (patience or 1e9)
        while time.monotonic() < end:
            if self.failures:
                raise RankError(self.failures[0])
            try:
                return self._boxes[self.rank][source].get(timeout=0.05)
            except queue.Empty:
                continue
        raise RankError(f"rank {source} did not answer within {patience:.0f} s")

    def fail(self, text: str, status: int, grace: float = 0.0) -> None:
        self.failures.append(text)


class Mpi(Communicator):
    """Ranks that are processes started by mpirun. Data lies in host memory.

    Every wait is a loop of tests, so that signals are heard, an idle rank leaves its core alone, and MPI is never entered
    by two threads at once.
    """

    DATA, BEAT, FAILURE = 1, 2, 3  # tags
    opened = False  # whether this process has met the others, which happens once
    EAGER, PATIENT = 2000, 100  # tests before a waiting rank sleeps between them; and where cores are shared

    def __init__(self, world: World) -> None:
        """Raises BackendError where mpi4py is missing, or belongs to another MPI than the launcher."""
        super().__init__()
        with suppress(ConfigError):  # a wrong value is an error of the settings, and reported with them
            self.patience = float(init_timeout())
        # MPI starts when all ranks have come, and holds the interpreter meanwhile: only this can end a wait in vain.
        faulthandler.dump_traceback_later(self.patience, exit=True, file=2)
        try:
            self.mpi = _import_mpi(world)
            self.comm = self.mpi.COMM_WORLD.Dup()
        finally:
            faulthandler.cancel_dump_traceback_later()
        Mpi.opened = True
        self.rank, self.size = world.rank, world.size
        self._lock = threading.Lock()  # around every call of MPI
        self._said = threading.Lock()  # taken by the one thread that ends the job
        self._posted: list[tuple[Any, Any]] = []  # requests in flight, and the buffers they read
        self.watch = Watch(self)
        self.watch.start()

    # ------------------------------------------------------------------ transport
    def swap(self, y: np.ndarray, peer: int) -> np.ndarray:
        y, other = np.ascontiguousarray(y), np.empty_like(y)
        self._count(y.nbytes)
        with self._lock:
            requests = [self.comm.Irecv(other, peer, self.DATA), self.comm.Isend(y, peer, self.DATA)]
        self._wait(lambda: self.mpi.Request.Testall(requests))
        return other

    def send(self, data: Any, to: int) -> None:
        nbytes = memoryview(data).nbytes
        self._count(nbytes)
        with self._lock:
            request = self.comm.Isend([data, nbytes, self.mpi.BYTE], to, self.DATA)
        self._wait(request.Test)

    def receive(self, source: int, idle: bool = False, patience: float | None = None) -> bytearray:
        status = self.mpi.Status()
        found = self._wait(lambda: self.comm.Iprobe(source, self.DATA, status), idle, patience)
        if not found:
            raise RankError(f"rank {source} did not answer within {patience:.0f} s (DSV4_INIT_TIMEOUT)")
        data = bytearray(status.Get_count(self.mpi.BYTE))
        with self._lock:
            request = self.comm.Irecv([data, self.mpi.BYTE], source, self.DATA)
        self._wait(request.Test)
        return data

    def _wait(self, done: Callable[[], bool], idle: bool = False, patience: float | None = None) -> bool:
        """Until done() is true, or `patience` seconds have passed: then False."""
        tests, start, nap = 0, time.monotonic(), 20e-6
        while True:
            with self._lock:
                if done():
                    return True
            tests += 1
            self.turns += 1
            if tests > (self.PATIENT if self.crowded else self.EAGER):
                time.sleep(nap)
                nap = min(nap * 1.01, 1e-3 if idle else 50e-6)
                if patience is not None and time.monotonic() - start > patience:
                    return False
            else:
                os.sched_yield()

    # ------------------------------------------------------------------ signs of life, and the end
    def post_beat(self, to: int, age: float) -> None:
        """Tell a rank that this one lives, and for how many seconds its work has stood still."""
        self._post(np.array([age]), to, self.BEAT)

    def _post(self, data: Any, to: int, tag: int) -> None:
        with self._lock:
            self._posted = [(request, kept) for request, kept in self._posted if not request.Test()]
            self._posted.append((self.comm.Isend([data, self.mpi.BYTE], to, tag), data))

    def beats(self) -> list[tuple[int, float]]:
        """(rank, standstill) of the signs of life that have come."""
        return [(source, float(np.frombuffer(data)[0])) for source, data in self._arrived(self.BEAT)]

    def failures(self) -> list[tuple[str, int]]:
        """(text, exit status) of other ranks that want the job ended."""
        return [pickle.loads(data) for _, data in self._arrived(self.FAILURE)]

    def _arrived(self, tag: int) -> list[tuple[int, bytearray]]:
        found, status = [], self.mpi.Status()
        with self._lock:
            while self.comm.Iprobe(self.mpi.ANY_SOURCE, tag, status):
                data = bytearray(status.Get_count(self.mpi.BYTE))
                self.comm.Recv([data, self.mpi.BYTE], status.Get_source(), tag)
                found.append((status.Get_source(), data))
        return found

    def fail(self, text: str, status: int, grace: float = 0.0) -> None:
        if self.rank:
            time.sleep(grace)
            self._post(pickle.dumps((text, status)), 0, self.FAILURE)
            time.sleep(2)  # rank 0 ends the job, and this process with it; unless it cannot
        self.end(text, status)

    def end(self, text: str, status: int) -> None:
        """Print the text, if any, once, and end all processes."""
        if not self._said.acquire(blocking=False):
            time.sleep(5)  # another thread is doing it
        if text:
            print(text, file=sys.__stderr__, flush=True)
        time.sleep(0.3)  # a launcher may drop what it has not read when the job is aborted
        if self._lock.acquire(timeout=1):
            self.mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    def close(self) -> None:
        self.idle = True
        self.everyone(None)
        self.watch.over.set()
        self.watch.join()
        self.everyone(None)  # no beat is sent after this; those that were are taken before MPI closes
        self.beats()


def _import_mpi(world: World) -> Any:
    """mpi4py's MPI, which starts MPI. Raises BackendError where it is missing or sees another number of processes."""
    try:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"ranks: {world.size} processes were started, but mpi4py cannot be loaded ({error}); "
            f"{install('mpi')}, an MPI too; or install mpi4py for the MPI of this machine"
        ) from error
    if MPI.COMM_WORLD.Get_size() != world.size:
        raise BackendError(
            f"ranks: the launcher started {world.size} processes, but mpi4py sees {MPI.COMM_WORLD.Get_size()}: it belongs "
            f"to another MPI ({MPI.Get_library_version().split(',')[0]}); start with that one's mpirun"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise BackendError("ranks: expected an MPI that several threads may call in turn, found one for a single thread")
    return MPI


class Nccl(Communicator):
    """Ranks with a CUDA device each. Arrays travel by NCCL; commands, and the unique id at the start, by `control`.

    All parts are gathered and then added as the same tree: ncclAllReduce would add in an order of its own.
    """

    def __init__(self, control: Communicator, cupy: Any = None) -> None:
        """cupy: the module, imported when not given. Raises BackendError where it, or NCCL, is not there."""
        super().__init__()
        self._widths: dict[int, list[int]] = {}  # all ranks' columns, by this rank's
        try:
            if cupy is None:
                import cupy
            nccl = cupy.cuda.nccl
            self.rank, self.size, self.control, self.cupy, self.nccl = control.rank, control.size, control, cupy, nccl
            unique = control.broadcast(pickle.dumps(nccl.get_unique_id()) if self.rank == 0 else None)
            self.comm = nccl.NcclCommunicator(self.size, pickle.loads(unique), self.rank)
        except (ImportError, AttributeError) as error:
            raise BackendError(f"NCCL: expected CuPy with NCCL, found none ({error}); {install('cuda12', 'cuda13')}") from error

    def sum_parts(self, y: Any, parts: int) -> Any:
        if parts == 1:
            return y
        self.traffic.sums += 1
        all_parts = self.cupy.empty((self.size, *y.shape), y.dtype)
        self.comm.allGather(y.data.ptr, all_parts.data.ptr, y.size, self.nccl.NCCL_FLOAT32, self._stream())
        self._count(y.nbytes)
        sums = list(all_parts)
        while len(sums) > 1:
            sums = [low + high for low, high in zip(sums[0::2], sums[1::2])]
        return sums[0]

    def join(self, y: Any) -> Any | None:
        """As in Communicator. Widths may differ between ranks; they exchange them once."""
        if self.size == 1 or not len(y):
            return None if self.rank else y
        if y.shape[1] not in self._widths:
            self._widths[y.shape[1]] = self.control.everyone(y.shape[1])
        widths = self._widths[y.shape[1]]
        if self.rank:
            self.comm.send(y.data.ptr, y.size, self.nccl.NCCL_FLOAT32, 0, self._stream())
            self._count(y.nbytes)
            return None
        others = [self.cupy.empty((len(y), width), y.dtype) for width in widths[1:]]
        self.nccl.groupStart()
        for rank, part in enumerate(others, 1):
            self.comm.recv(part.data.ptr, part.size, self.nccl.NCCL_FLOAT32, rank, self._stream())
        self.nccl.groupEnd()
        return self.cupy.concatenate([y, *others], axis=1)

    def _stream(self) -> int:
        return self.cupy.cuda.get_current_stream().ptr

    def send(self, data: Any, to: int) -> None:
        self.control.send(data, to)

    def receive(self, source: int, idle: bool = False, patience: float | None = None) -> Any:
        return self.control.receive(source, idle, patience)

    def fail(self, text: str, status: int, grace: float = 0.0) -> None:
        self.control.fail(text, status, grace)

    def close(self) -> None:
        self.control.close()


def open_communicator(world: World) -> Communicator:
    """The communicator between the processes that a launcher started; Single where there is only one.

    Raises ConfigError where a job opens a second one, and BackendError where MPI is missing.
    """
    if Mpi.opened:
        raise ConfigError("ranks: expected one engine in a job, found a second one; keep the first, or start another job")
    return Mpi(world) if world.size > 1 else Single()

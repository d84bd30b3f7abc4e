"""Communicators: the only seam between ranks.

What ranks add up is finished as one binary tree over the ranks, in the same order on every rank, so that the number of
ranks changes no bit. Rank 0 leads: it sends commands, and only it gets logits.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import World
from .errors import BackendError


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
        """Give y to a rank and get its array of the same shape."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what leading and following ask for
    def broadcast(self, message: bytes | None = None) -> bytes:
        """Rank 0's message to all. The others wait for it as long as it takes."""
        if self.rank:
            return self.receive(0, idle=True)
        for rank in range(1, self.size):
            self.send(message, rank)
        return message

    def everyone(self, value: Any, patience: float | None = None) -> list[Any]:
        """Every rank's value, by rank, on every rank. Raises RankError for one that is not there in so many seconds."""
        if self.rank:
            self.send(pickle.dumps(value), 0)
            return pickle.loads(self.receive(0, patience=patience))
        values = [value] + [pickle.loads(self.receive(rank, patience=patience)) for rank in range(1, self.size)]
        for rank in range(1, self.size):
            self.send(pickle.dumps(values), rank)
        return values

    def send(self, data: Any, to: int) -> None:
        """Hand bytes, or a contiguous array, to a rank."""
        raise NotImplementedError

    def receive(self, source: int, idle: bool = False, patience: float | None = None) -> Any:
        """The next message of a rank, as a buffer of bytes. idle: no hurry. Raises RankError after `patience` seconds."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the end
    def fail(self, text: str, status: int, grace: float = 0.0) -> None:
        """End the job on all ranks, with `text` on standard error once. grace: seconds in which rank 0 may say it."""

    def close(self) -> None:
        """Take leave of the other ranks, which do the same."""

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


class Nccl(Communicator):
    """Ranks with a CUDA device each. Arrays travel by NCCL; commands, and the unique id at the start, by `control`.

    All parts are gathered and then added as the same tree: ncclAllReduce would add in an order of its own.
    """

    def __init__(self, control: Communicator, cupy: Any = None) -> None:
        """cupy: the module, imported when not given. Raises BackendError where it, or NCCL, is not there."""
        super().__init__()
        try:
            if cupy is None:
                import cupy
            nccl = cupy.cuda.nccl
            self.rank, self.size, self.control, self.cupy, self.nccl = control.rank, control.size, control, cupy, nccl
            unique = control.broadcast(pickle.dumps(nccl.get_unique_id()) if self.rank == 0 else None)
            self.comm = nccl.NcclCommunicator(self.size, pickle.loads(unique), self.rank)
        except (ImportError, AttributeError) as error:
            raise BackendError(f"NCCL: expected CuPy with NCCL, found none ({error}); install dsv4[cuda12]") from error

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
        """Widths may differ by one column: the wider are cut after travelling in rows of equal length."""
        if self.size == 1 or not len(y):
            return None if self.rank else y
        widths = self.control.everyone(y.shape[1])
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
    """The communicator between the processes of a launcher; Single where there is only this one."""
    return Single()

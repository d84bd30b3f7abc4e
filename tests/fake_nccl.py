"""Stands in for CuPy with NCCL: ranks are threads, device arrays NumPy arrays at real addresses. Records every call."""

import ctypes
import pickle
from types import SimpleNamespace

import numpy as np


class Pointed(np.ndarray):
    """An array with CuPy's .data.ptr."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def on_device(array):
    return np.ascontiguousarray(array).view(Pointed)


def cupy_with_nccl(threads, calls):
    """The module for one rank. threads: its dsv4.comm.Threads, which carries the bytes; calls: (name, …) are added."""

    def read(pointer, count):
        return ctypes.string_at(pointer, 4 * count)

    class NcclCommunicator:
        def __init__(self, size, unique, rank):
            calls.append(("init", size, unique, rank))

        def allGather(self, source, target, count, kind, stream):
            calls.append(("allGather", count, kind, stream))
            everything = b"".join(threads.everyone(read(source, count)))
            ctypes.memmove(target, everything, len(everything))

        def send(self, source, count, kind, to, stream):
            calls.append(("send", count, kind, to, stream))
            threads.send(pickle.dumps(read(source, count)), to)

        def recv(self, target, count, kind, source, stream):
            calls.append(("recv", count, kind, source, stream))
            ctypes.memmove(target, pickle.loads(threads.receive(source)), 4 * count)

    def unique_id():
        calls.append(("id",))
        return ("unique", 7)

    nccl = SimpleNamespace(
        NCCL_FLOAT32=7, NcclCommunicator=NcclCommunicator, get_unique_id=unique_id,
        groupStart=lambda: calls.append(("start",)), groupEnd=lambda: calls.append(("end",)),
    )  # fmt: skip
    return SimpleNamespace(
        cuda=SimpleNamespace(nccl=nccl, get_current_stream=lambda: SimpleNamespace(ptr=99)),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Pointed),
        concatenate=np.concatenate,
    )

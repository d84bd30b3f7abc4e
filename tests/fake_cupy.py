"""Stands in for CuPy where there is no device: what dsv4.ops.kernels asks of it, with every call recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


@dataclass
class Card:
    """What the device is, and all that was asked of it. no_device, broken: texts of the errors that counting the devices,
    and waiting for one, raise."""

    driver: int = 12080
    built: int = 12090
    devices: int = 1
    capability: str = "90"
    memory: int = 1 << 30
    no_device: str | None = None
    broken: str | None = None
    calls: list = field(default_factory=list)
    allocators: list = field(default_factory=list)

    def count(self):
        if self.no_device:
            raise CUDARuntimeError(self.no_device)
        return self.devices

    def module(self, path):
        assert Path(path).read_bytes()[:4] == b"\x7fELF"
        self.calls.append(("module", Path(path).name))
        return SimpleNamespace(get_function=lambda name: FakeFunction(self.calls, name))

    def array(self, host, order):
        assert order == "C" and self.allocators, "expected the launcher's allocator"
        out = FakeArray(self, host.shape, host.dtype, self.allocators[-1](max(1, host.nbytes)))
        out.set(host)
        self.calls.append(("array", host.nbytes))
        return out


class FakeFunction:
    def __init__(self, calls: list, name: str):
        self.calls, self.name, self.max_dynamic_shared_size_bytes = calls, name, 0

    def __call__(self, grid, block, args, shared_mem=0):
        self.calls.append(("launch", self.name, grid, block, args, shared_mem, self.max_dynamic_shared_size_bytes))


class FakeEvent:
    def __init__(self, calls: list, disable_timing: bool):
        self.calls, self.timed = calls, not disable_timing

    def record(self, stream):
        self.calls.append(("record", stream.name))

    def synchronize(self):
        self.calls.append(("synchronize",))


def elapsed(start: FakeEvent, end: FakeEvent) -> float:
    assert start.timed and end.timed, "an event made without timing has no time"
    return 250.0


class FakeStream:
    def __init__(self, calls: list, name: str):
        self.calls, self.name, self.ptr = calls, name, 7

    def wait_event(self, event):
        self.calls.append(("wait", self.name))


class FakeDevice:
    def __init__(self, card: Card, index: int):
        self.calls, self.id, self.compute_capability = card.calls, index, card.capability

    def use(self):
        self.calls.append(("use", self.id))

    def __enter__(self):
        self.calls.append(("enter", self.id))

    def __exit__(self, *_):
        pass


class FakePool:
    def __init__(self, card: Card):
        self.card = card

    def malloc(self, nbytes):
        if nbytes > self.card.memory:
            raise OutOfMemoryError(f"Out of memory allocating {nbytes} bytes")
        self.card.calls.append(("malloc", nbytes))
        return FakePointer(self.card.calls, np.full(nbytes, 0xFF, np.uint8))

    def free_bytes(self):
        return 1000


class FakePointer:
    def __init__(self, calls: list, host: np.ndarray):
        self.calls, self.host, self.ptr = calls, host, host.ctypes.data

    def memset_async(self, value, nbytes):
        self.host[:nbytes] = value

    def copy_from_host_async(self, address, nbytes, stream):
        self.calls.append(("copy", nbytes, stream.name))

    def copy_from_device_async(self, source, nbytes, stream):
        assert source.host.nbytes >= nbytes
        self.calls.append(("duplicate", nbytes, stream.name))


class FakeArray:
    def __init__(self, card: Card, shape, dtype, memptr: FakePointer):
        self.card = card
        self.host = memptr.host[: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
        self.data, self.dtype, self.shape = memptr, np.dtype(dtype), self.host.shape
        self.flags, self.nbytes, self.strides = SimpleNamespace(c_contiguous=True), self.host.nbytes, self.host.strides

    def set(self, array):
        self.card.calls.append(("set", array.nbytes))
        self.host[...] = array

    def get(self):
        self.card.calls.append(("get",))
        if self.card.broken:
            raise CUDARuntimeError(self.card.broken)
        return self.host.copy()


def fake_cupy(**facts) -> tuple[SimpleNamespace, list]:
    """The module of a card with these facts (fields of Card), and the list of calls."""
    card = Card(**facts)
    calls, memory, compute = card.calls, card.memory, FakeStream(card.calls, "compute")
    runtime = SimpleNamespace(
        getDeviceProperties=lambda index: {"name": b"Card", "totalGlobalMem": memory}, getDeviceCount=card.count,
        driverGetVersion=lambda: card.driver, runtimeGetVersion=lambda: card.built,
        memGetInfo=lambda: (memory // 2, memory), CUDARuntimeError=CUDARuntimeError,
    )  # fmt: skip
    cuda = SimpleNamespace(
        runtime=runtime, Device=partial(FakeDevice, card), MemoryPool=partial(FakePool, card),
        Stream=lambda non_blocking: FakeStream(calls, "copies"),
        Event=lambda disable_timing=False: FakeEvent(calls, disable_timing), get_elapsed_time=elapsed,
        get_current_stream=lambda: compute, memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        alloc_pinned_memory=lambda nbytes: bytearray(nbytes), set_allocator=card.allocators.append,
    )  # fmt: skip
    module = SimpleNamespace(
        cuda=cuda, ndarray=partial(FakeArray, card), array=card.array, RawModule=card.module,
        matmul=lambda a, b: ("product", a, b),
    )  # fmt: skip
    return module, calls

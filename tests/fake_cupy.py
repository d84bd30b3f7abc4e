"""Stands in for CuPy where there is no device: what dsv4.ops.kernels asks of it, with every call recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


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


class FakeStream:
    def __init__(self, calls: list, name: str):
        self.calls, self.name, self.ptr = calls, name, 7

    def wait_event(self, event):
        self.calls.append(("wait", self.name))


def fake_cupy(
    *, driver=12080, built=12090, devices=1, capability="90", memory=1 << 30, no_device=None, broken=None
) -> tuple[SimpleNamespace, list]:
    """The module, and the list of calls. no_device, broken: texts of the errors that counting the devices, and waiting for one,
    raise."""
    calls: list = []
    allocators: list = []
    compute = FakeStream(calls, "compute")

    def count():
        if no_device:
            raise CUDARuntimeError(no_device)
        return devices

    class Device:
        def __init__(self, index):
            self.id, self.compute_capability = index, capability

        def use(self):
            calls.append(("use", self.id))

        def __enter__(self):
            calls.append(("enter", self.id))

        def __exit__(self, *_):
            pass

    class Pool:
        used = 0

        def malloc(self, nbytes):
            if nbytes > memory:
                raise OutOfMemoryError(f"Out of memory allocating {nbytes} bytes")
            calls.append(("malloc", nbytes))
            return Pointer(np.full(nbytes, 0xFF, np.uint8))

        def free_bytes(self):
            return 1000

    class Pointer:
        def __init__(self, host):
            self.host, self.ptr = host, host.ctypes.data

        def memset_async(self, value, nbytes):
            self.host[:nbytes] = value

        def copy_from_host_async(self, address, nbytes, stream):
            calls.append(("copy", nbytes, stream.name))

        def copy_from_device_async(self, source, nbytes, stream):
            assert source.host.nbytes >= nbytes
            calls.append(("duplicate", nbytes, stream.name))

    class Array:
        def __init__(self, shape, dtype, memptr):
            self.host = memptr.host[: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            self.data, self.dtype, self.shape = memptr, np.dtype(dtype), self.host.shape
            self.flags, self.nbytes, self.strides = SimpleNamespace(c_contiguous=True), self.host.nbytes, self.host.strides

        def set(self, array):
            calls.append(("set", array.nbytes))
            self.host[...] = array

        def get(self):
            calls.append(("get",))
            if broken:
                raise CUDARuntimeError(broken)
            return self.host.copy()

    def array(host, order):
        assert order == "C" and allocators, "expected the launcher's allocator"
        out = Array(host.shape, host.dtype, allocators[-1](max(1, host.nbytes)))
        out.set(host)
        calls.append(("array", host.nbytes))
        return out

    def module(path):
        assert Path(path).read_bytes()[:4] == b"\x7fELF"
        calls.append(("module", Path(path).name))
        return SimpleNamespace(get_function=lambda name: FakeFunction(calls, name))

    def elapsed(start, end):
        assert start.timed and end.timed, "an event made without timing has no time"
        return 250.0

    runtime = SimpleNamespace(
        getDeviceProperties=lambda index: {"name": b"Card", "totalGlobalMem": memory},
        driverGetVersion=lambda: driver, runtimeGetVersion=lambda: built, getDeviceCount=count,
        memGetInfo=lambda: (memory // 2, memory), CUDARuntimeError=CUDARuntimeError,
    )  # fmt: skip
    cuda = SimpleNamespace(
        runtime=runtime, Device=Device, MemoryPool=Pool, Stream=lambda non_blocking: FakeStream(calls, "copies"),
        Event=lambda disable_timing=False: FakeEvent(calls, disable_timing), get_current_stream=lambda: compute, get_elapsed_time=elapsed,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        alloc_pinned_memory=lambda nbytes: bytearray(nbytes), set_allocator=allocators.append,
    )  # fmt: skip
    return SimpleNamespace(cuda=cuda, ndarray=Array, array=array, RawModule=module, matmul=lambda a, b: ("product", a, b)), calls

"""The launcher that runs kernels on the CPU: the same methods as dsv4.ops.kernels.DeviceLauncher."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

from dsv4.ops.kernels import check_arguments, define_lines, inline, kernel_names

from . import build
from .arrays import DeviceArray

FORWARD, REVERSE = 0, 1  # orders of the fibers; any larger number is the seed of a shuffled one


class EmulationError(Exception):
    """What a kernel did wrong: where, in which thread."""


_CODES = {  # dtype → what a kernel's signature calls it
    np.dtype(np.float32): "f4", np.dtype(np.float64): "f8", np.dtype(np.int8): "i1", np.dtype(np.uint8): "u1",
    np.dtype(np.int16): "i2", np.dtype(np.uint16): "u2", np.dtype(np.int32): "i4", np.dtype(np.uint32): "u4",
    np.dtype(np.int64): "i8", np.dtype(np.uint64): "u8", np.dtype(np.bool_): "u1",
}  # fmt: skip


@functools.cache
def _library(text: str, sanitizer: str) -> ctypes.CDLL:
    return build.load(build.build(text, sanitizer))


class EmulatedKernel:
    """One kernel of a compiled file."""

    def __init__(self, launcher: EmulatedLauncher, library: ctypes.CDLL, name: str):
        self.launcher, self.name = launcher, name
        self.run = getattr(library, f"dsv4_launch_{name}")
        self.run.restype = ctypes.c_void_p
        signature = getattr(library, f"dsv4_signature_{name}")
        signature.restype = ctypes.c_char_p
        self.signature = signature().decode().split()
        self.free = ctypes.CDLL(None).free
        self.free.argtypes = [ctypes.c_void_p]

    def __call__(self, grid, block, args: tuple, shared: int = 0) -> None:
        """As Kernel in dsv4/ops/kernels.py. Types are checked against the kernel's own. Raises EmulationError."""
        grid, block = ((*map(int, size), 1, 1)[:3] for size in (grid, block))
        threads = math.prod(block)
        if threads % 32 or not 0 < threads <= 1024 or block[2] > 64:
            raise EmulationError(f"{self.name}: expected a block of 32 to 1024 threads, whole warps; found {block}")
        if grid[1] > 65535 or grid[2] > 65535 or min(grid) < 0:
            raise EmulationError(f"{self.name}: expected at most 65535 blocks in y and z; found {grid}")
        check_arguments(self.name, args)
        if len(args) != len(self.signature):
            raise EmulationError(f"{self.name}: expected {len(self.signature)} arguments, found {len(args)}")
        values = [self._value(number, arg) for number, arg in enumerate(args)]
        if not math.prod(grid):
            return
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(v.ctypes.data for v in values))
        geometry = (ctypes.c_uint * 6)(*grid, *block)
        launcher = self.launcher
        launcher.launches += 1
        launcher.kernels_run.add(self.name)
        error = self.run(geometry, ctypes.c_size_t(shared), launcher.order, launcher.threads, pointers)
        if error:
            text = ctypes.string_at(error).decode()
            self.free(error)
            raise EmulationError(f"{self.name}: {text}")

    def _value(self, number: int, arg) -> np.ndarray:
        """A kernel argument as an array of one: a pointer or a number."""
        expected = self.signature[number]
        if isinstance(arg, np.generic):
            if _CODES.get(arg.dtype) != expected:
                raise EmulationError(f"{self.name}: argument {number}: expected {expected}, found {arg.dtype}")
            return np.array([arg])
        if expected[0] != "p":
            raise EmulationError(f"{self.name}: argument {number}: expected {expected}, found an array")
        if arg is None:
            return np.zeros(1, np.uint64)
        array = self.launcher.memory(arg)
        if expected != "p*" and expected[1:] != _CODES[array.dtype]:
            raise EmulationError(f"{self.name}: argument {number}: expected {expected[1:]}, found an array of {array.dtype}")
        return np.array([array.ctypes.data], np.uint64)


class EmulatedModule:
    def __init__(self, launcher: EmulatedLauncher, library: ctypes.CDLL, names: list[str]):
        self.kernels = {name: EmulatedKernel(launcher, library, name) for name in names}

    def kernel(self, name: str) -> EmulatedKernel:
        return self.kernels[name]


class Event:
    """A point in the copies' order; `number` copies have been given before it."""

    def __init__(self, number: int):
        self.number = number


class EmulatedLauncher:
    """Runs kernels on the CPU, on device-array stand-ins or NumPy arrays.

    order: FORWARD or REVERSE: warp by warp, each as far as it goes; a seed > 1: all threads of a block in turn, shuffled.
    Copies by cp.async are made as late as they may be (FORWARD), else at once. sanitizer: a key of build.SANITIZERS.
    edit(file, text) → text: changes a kernel file's text, includes inlined, before it is compiled: how bugs are planted.
    launches, kernels_run, synchronisations: what has been launched, and how often the host waited for the device.
    live, peak: bytes of the arrays that there are, and the most there ever were at once.
    """

    name = "emulated"

    def __init__(
        self, order: int = FORWARD, sanitizer: str = "", threads: int | None = None, edit: Callable | None = None
    ):
        self.order, self.sanitizer, self.edit = order, sanitizer, edit
        cores = len(os.sched_getaffinity(0))
        self.threads = threads or min(cores, int(os.environ.get("OMP_NUM_THREADS") or cores))
        self.launches = self.synchronisations = self.live = self.peak = 0
        self._counted: dict[int, int] = {}  # bytes of an array by its id
        self.kernels_run: set[str] = set()
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        self._done, self._lock = 0, threading.Lock()
        self._modules: dict = {}

    def compile(self, source: str, defines=None) -> EmulatedModule:
        key = (source, *sorted((defines or {}).items()))
        if key not in self._modules:
            text = inline(source)
            text = self.edit(source, text) if self.edit else text
            self._modules[key] = self.compile_text(define_lines(defines) + text)
        return self._modules[key]

    def compile_text(self, text: str) -> EmulatedModule:
        """The kernels of a text whose includes are inlined already."""
        return EmulatedModule(self, _library(text, self.sanitizer), kernel_names(text))

    def each(self, function, n: int, args: tuple) -> None:
        check_arguments(function.__name__, args)
        self.launches += bool(n)
        plain = [self.memory(a) for a in args]
        for i in range(n):
            function(i, *plain)

    def memory(self, array):
        """The memory behind an array that a kernel is given; numbers as they are."""
        return array.host if isinstance(array, DeviceArray) else array

    def count(self, array: np.ndarray) -> None:
        """An array that holds memory of its own, from now on until nobody has it."""
        if id(array) not in self._counted:
            self._counted[id(array)] = array.nbytes
            weakref.finalize(array, self._forget, id(array))
            self.live += array.nbytes
            self.peak = max(self.peak, self.live)

    def _forget(self, number: int) -> None:
        self.live -= self._counted.pop(number)

    def reserve(self, nbytes: int) -> None:
        """Arrays come from the host's memory."""

    # ------------------------------------------------------------------ arrays; new ones hold NaN, and whole numbers that lie far outside of anything
    def empty(self, shape, dtype) -> DeviceArray:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return DeviceArray(array, self)

    def zeros(self, shape, dtype) -> DeviceArray:
        return DeviceArray(np.zeros(shape, dtype), self)

    def upload(self, array: np.ndarray) -> DeviceArray:
        return DeviceArray(np.array(array, order="C", copy=True), self)

    def download(self, array: DeviceArray) -> np.ndarray:
        self.synchronisations += 1
        return array.host.copy()

    # ------------------------------------------------------------------ copies beside the compute stream: made as late as somebody waits
    def free_bytes(self) -> int:
        return 1 << 40

    def address(self, array: DeviceArray) -> int:
        return array.host.ctypes.data

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0xFF, np.uint8)

    def mark(self) -> Event:
        return Event(0)  # kernels have run when their launch returns

    def copy(self, source: np.ndarray, target: DeviceArray, after: Event) -> Event:
        with self._lock:
            self._copies.append((source, target.host))
            return Event(self._done + len(self._copies))

    def wait(self, event: Event) -> None:
        """Before anything that is launched from now on."""
        self.host_wait(event)

    def host_wait(self, event: Event) -> None:
        with self._lock:
            while self._done < event.number:
                source, target = self._copies.pop(0)
                target[...] = source
                self._done += 1

    # ------------------------------------------------------------------ measurements: of the wall's time
    def about(self) -> dict:
        return {"device": "emulated", "memory_bytes": 0, "capability": 0.0, "driver_cuda": "none"}

    def clock(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start

    def duplicate(self, source: DeviceArray, target: DeviceArray) -> None:
        target.host[...] = source.host

    def multiply(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        return self.upload((a.host.astype(np.float32) @ b.host.astype(np.float32)).astype(np.float16))

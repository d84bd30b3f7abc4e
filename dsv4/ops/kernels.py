"""Kernel sources and what runs them.

A kernel file (`cuda/*.cu`) is found by path and its own headers are put into its text, so that a change in a header is
a change of the text. A launcher compiles such a text and runs its kernels: DeviceLauncher on a GPU, through NVRTC and
CuPy; the tests have one that runs them on the CPU. Both have the methods of Launcher.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import BackendError, install
from ..files import replacing
from . import nvrtc

OLDEST = 75  # compute capability: the first with the tensor-core instructions that mma.cuh uses
_PLAIN_SHARED = 48 << 10  # bytes of dynamic shared memory that a kernel may have without asking
_SMALL = 1 << 20  # bytes of a step's tables at most; larger arrays are weights
_NULL = np.uint64(0)
_EXTRAS = (12, 13)  # CUDA versions with an extra: cuda12, cuda13
_CPU = "use --backend cpu"

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')


def source_directory() -> Path:
    """Where the kernel files are: beside the installed package's modules, or at the top of a checkout."""
    here = Path(__file__).resolve().parents[1]
    for directory in (here / "cuda", here.parent / "cuda"):
        if directory.is_dir():
            return directory
    raise BackendError(f"kernels: expected the directory {here / 'cuda'}, found none; install dsv4 again")


def inline(name: str, directory: Path | None = None) -> str:
    """The text of a kernel file with every `#include "x.cuh"` replaced by that file, each once.

    Lines keep their numbers by #line. Raises BackendError for a file that is not there.
    """
    directory = directory or source_directory()
    seen: set[str] = set()

    def text_of(file: str) -> str:
        seen.add(file)
        path = directory / file
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BackendError(f"kernels: expected the file {path}; {error.strerror}") from error
        out = [f'#line 1 "{file}"']
        for number, line in enumerate(lines, 1):
            found = _INCLUDE.match(line)
            if not found:
                out.append("" if line.strip() == "#pragma once" else line)
            elif found[1] not in seen:
                out += [text_of(found[1]), f'#line {number + 1} "{file}"']
            else:
                out.append("")
        return "\n".join(out)

    return text_of(name) + "\n"


def kernel_names(text: str) -> list[str]:
    """The kernels (extern "C" __global__ void ...) of a source text."""
    return _KERNEL.findall(text)


def define_lines(defines: Mapping[str, int] | None) -> str:
    """`#define` lines, by name, so that equal defines give equal texts."""
    return "".join(f"#define {name} {value}\n" for name, value in sorted((defines or {}).items()))


def check_arguments(name: str, args: tuple) -> None:
    """Arguments are contiguous arrays, NumPy scalars, or None for a null pointer; Python numbers have no size."""
    for number, arg in enumerate(args):
        if arg is None or isinstance(arg, np.generic):
            continue
        if not hasattr(arg, "dtype"):
            raise TypeError(f"{name}: argument {number}: expected an array, a NumPy scalar or None; found {type(arg).__name__}")
        if not arg.flags.c_contiguous:
            raise ValueError(f"{name}: argument {number}: expected a C-contiguous array; found strides {arg.strides}")


class Kernel(Protocol):
    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple, shared: int = 0) -> None:
        """Run `grid` blocks of `block` threads with `shared` bytes of dynamic shared memory. An empty grid: nothing."""


class Module(Protocol):
    def kernel(self, name: str) -> Kernel:
        """A kernel of the compiled file by name."""


class Launcher(Protocol):
    """What compiles and runs kernels, and the memory they work on. Work is done in order, on one compute stream."""

    name: str

    def compile(self, source: str, defines: Mapping[str, int] | None = None) -> Module:
        """The kernels of `source`, a file of cuda/, with these macros defined. Compiled once per process and content."""

    def each(self, function: Callable, n: int, args: tuple) -> None:
        """function(i, *args) for i in 0 .. n−1, in no order, without cooperation (numba-CUDA)."""

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """An uninitialised device array."""

    def zeros(self, shape: tuple[int, ...] | int, dtype: Any) -> Any: ...

    def upload(self, array: np.ndarray) -> Any:
        """A device copy of a host array; the host array may change as soon as this returns."""

    def download(self, array: Any) -> np.ndarray:
        """A host copy. Waits for all work so far: the only method that does."""

    def free_bytes(self) -> int:
        """Device memory that can still be had."""

    def reserve(self, nbytes: int) -> None:
        """Take so many bytes of the device now, for arrays to come. Raises BackendError where it has not got them."""

    def address(self, array: Any) -> int:
        """Where a device array begins, for tables of pointers. Whoever puts it into one keeps the array."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, uint8."""

    def mark(self) -> Any:
        """An event: all work given to the compute stream so far."""

    def copy(self, source: np.ndarray, target: Any, after: Any) -> Any:
        """Start copying pinned memory to the device on the copy stream, after the event → the copy's event. Any thread."""

    def wait(self, event: Any) -> None:
        """What the compute stream is given from now on comes after the event. The host goes on."""

    def host_wait(self, event: Any) -> None:
        """Return when the event has happened. Any thread."""

    # What only measurements ask for.
    def about(self) -> dict:
        """The device: name, bytes of memory, capability, driver."""

    def clock(self) -> Any:
        """A moment of the compute stream, for `between`."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to a later one. Waits for it."""

    def duplicate(self, source: Any, target: Any) -> None:
        """Copy a device array to another of its size, on the compute stream."""

    def multiply(self, a: Any, b: Any) -> Any:
        """a [n, k] · b [k, m], both float16, by the device's own library."""


def open_cupy(index: int, cupy: Any = None) -> Any:
    """CuPy with device `index` made current. Raises BackendError: no CuPy, driver or device, or too old a one."""
    try:
        if cupy is None:
            import cupy
        runtime = cupy.cuda.runtime
    except ImportError as error:
        raise BackendError(f"backend cuda: CuPy cannot be loaded ({error}); {install('cuda12', 'cuda13')}; or {_CPU}") from error
    driver, built = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not driver:
        raise BackendError(f"backend cuda: expected an NVIDIA driver, found none; install one, or {_CPU}")
    if driver // 1000 < built // 1000:
        fitting = f"`pip install -e '.[cuda{driver // 1000}]'` in a checkout, or " if driver // 1000 in _EXTRAS else ""
        raise BackendError(
            f"backend cuda: CuPy is made for CUDA {built // 1000}, the driver knows up to {driver // 1000}."
            f"{driver % 1000 // 10}; {fitting}install a newer driver, or {_CPU}"
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise BackendError(f"backend cuda: expected a CUDA device; {error}; {_CPU}") from error
    if index >= count:
        raise BackendError(
            f"backend cuda: expected a device for each rank, found {count} and need number {index} (from 0); start fewer "
            f"ranks on this host, or {_CPU}"
        )
    device = cupy.cuda.Device(index)
    if int(device.compute_capability) < OLDEST:
        raise BackendError(
            f"backend cuda: expected compute capability {OLDEST / 10} or newer, device {index} has "
            f"{int(device.compute_capability) / 10}; {_CPU}"
        )
    device.use()
    return cupy


class DeviceKernel:
    """A kernel on the device; see Kernel."""

    def __init__(self, name: str, function: Any):
        self.name, self.function, self.raised = name, function, 0

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple, shared: int = 0) -> None:
        check_arguments(self.name, args)
        if not min(grid):
            return
        if shared > max(self.raised, _PLAIN_SHARED):
            self.function.max_dynamic_shared_size_bytes = self.raised = shared
        self.function(grid, block, tuple(_NULL if a is None else a for a in args), shared_mem=shared)


class DeviceModule:
    def __init__(self, module: Any, names: list[str]):
        self.kernels = {name: DeviceKernel(name, module.get_function(name)) for name in names}

    def kernel(self, name: str) -> DeviceKernel:
        return self.kernels[name]


class DeviceLauncher:
    """Kernels on a GPU through NVRTC and CuPy; see Launcher.

    Arrays come from a pool that keeps what it was ever given: after `reserve` a step asks the driver for nothing. Raises
    BackendError as open_cupy does, and where the device's memory is full.
    """

    name = "cuda"

    def __init__(self, index: int = 0, cache: Path | None = None, cupy: Any = None):
        """index: the device; cache: where compiled kernels are kept, by content."""
        self.cupy = open_cupy(index, cupy)
        self.device = self.cupy.cuda.Device(index)
        self.architecture = int(self.device.compute_capability)
        self.nvrtc = nvrtc.library(self.cupy.cuda.runtime.runtimeGetVersion() // 1000)
        self.cache = cache or Path(tempfile.gettempdir(), f"dsv4-kernels-{os.getuid()}")
        self.pool = self.cupy.cuda.MemoryPool()
        self.copies = self.cupy.cuda.Stream(non_blocking=True)
        self._modules: dict[tuple, DeviceModule] = {}
        self._numba: dict[Callable, Any] = {}
        self.cupy.cuda.set_allocator(self._allocate)  # also for what CuPy makes by itself: sums, rows taken

    # ------------------------------------------------------------------ kernels
    def compile(self, source: str, defines: Mapping[str, int] | None = None) -> DeviceModule:
        key = (source, *sorted((defines or {}).items()))
        if key not in self._modules:
            self._modules[key] = self.compile_text(define_lines(defines) + inline(source), source)
        return self._modules[key]

    def compile_text(self, text: str, source: str = "text.cu") -> DeviceModule:
        """The kernels of a text whose includes are inlined already; source: what the compiler calls it."""
        return DeviceModule(self.cupy.RawModule(path=str(self._cubin(source, text))), kernel_names(text))

    def _cubin(self, source: str, text: str) -> Path:
        """The file of a text's machine code, from the cache where it has been compiled before."""
        parts = (text, self.architecture, nvrtc.version(self.nvrtc), nvrtc.FLAGS)
        path = self.cache / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.cubin"
        try:
            self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.cache.stat().st_uid != os.getuid():  # whoever made it could have put any code there
                raise BackendError(f"kernels: expected {self.cache} to be one's own, found another user's; remove it or set TMPDIR")
            if not path.exists():
                compiled = nvrtc.compile_text(self.nvrtc, text, source, self.architecture)
                with replacing(path) as file:
                    file.write(compiled.cubin)
        except OSError as error:
            raise BackendError(f"kernels: expected to write to {self.cache}: {error.strerror or error}; set TMPDIR") from error
        return path

    def each(self, function: Callable, n: int, args: tuple) -> None:
        check_arguments(function.__name__, args)
        if n:
            from numba import cuda

            if function not in self._numba:
                self._numba[function] = cuda.jit(index_kernel(function, len(args)))
            number = self.cupy.cuda.get_current_stream().ptr
            stream = number and cuda.external_stream(number)  # as a number numba knows 0 only, the default stream
            # given CuPy's arrays themselves, numba has the host wait for the stream
            args = tuple(a if isinstance(a, np.generic) else cuda.as_cuda_array(a, sync=False) for a in args)
            self._numba[function][-(-n // 128), 128, stream](n, *args)

    # ------------------------------------------------------------------ arrays
    def _allocate(self, nbytes: int) -> Any:
        try:
            return self.pool.malloc(nbytes)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            free, total = self.cupy.cuda.runtime.memGetInfo()
            raise BackendError(
                f"backend cuda: device {self.device.id} is out of memory: {nbytes / 1e6:.0f} MB asked for, "
                f"{free / 1e6:.0f} of {total / 1e6:.0f} MB free; ask for a shorter context (--max-context), smaller chunks "
                f"(--chunk) or more ranks, or {_CPU}"
            ) from error

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        shape = (shape,) if isinstance(shape, int) else shape
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self.cupy.ndarray(shape, dtype, memptr=self._allocate(max(1, nbytes)))

    def zeros(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        array = self.empty(shape, dtype)
        array.data.memset_async(0, array.nbytes)
        return array

    def upload(self, array: np.ndarray) -> Any:
        if array.nbytes <= _SMALL:  # CuPy copies it to pinned memory and from there on the stream: the host does not wait
            return self.cupy.array(array, order="C")
        out = self.empty(array.shape, array.dtype)
        out.set(np.ascontiguousarray(array))
        return out

    def download(self, array: Any) -> np.ndarray:
        try:
            return array.get()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise BackendError(
                f"backend cuda: device {self.device.id} failed: {error}; set CUDA_LAUNCH_BLOCKING=1 to learn in which kernel, "
                f"and report it; meanwhile {_CPU}"
            ) from error

    def free_bytes(self) -> int:
        return self.cupy.cuda.runtime.memGetInfo()[0] + self.pool.free_bytes()

    def reserve(self, nbytes: int) -> None:
        self._allocate(nbytes)  # freed at once, and kept by the pool

    def address(self, array: Any) -> int:
        return array.data.ptr

    # ------------------------------------------------------------------ copies beside the compute stream
    def pinned(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self.cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def mark(self) -> Any:
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(self.cupy.cuda.get_current_stream())
        return event

    def copy(self, source: np.ndarray, target: Any, after: Any) -> Any:
        with self.device:
            self.copies.wait_event(after)
            target.data.copy_from_host_async(source.ctypes.data, source.nbytes, self.copies)
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(self.copies)
            return event

    def wait(self, event: Any) -> None:
        self.cupy.cuda.get_current_stream().wait_event(event)

    def host_wait(self, event: Any) -> None:
        event.synchronize()

    # ------------------------------------------------------------------ measurements
    def about(self) -> dict:
        runtime = self.cupy.cuda.runtime
        found, driver = runtime.getDeviceProperties(self.device.id), runtime.driverGetVersion()
        return {
            "device": found["name"].decode(), "memory_bytes": int(found["totalGlobalMem"]), "capability": self.architecture / 10,
            "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        }  # fmt: skip

    def clock(self) -> Any:
        event = self.cupy.cuda.Event()
        event.record(self.cupy.cuda.get_current_stream())
        return event

    def between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(start, end) / 1000

    def duplicate(self, source: Any, target: Any) -> None:
        target.data.copy_from_device_async(source.data, source.nbytes, self.cupy.cuda.get_current_stream())

    def multiply(self, a: Any, b: Any) -> Any:
        return self.cupy.matmul(a, b)


def index_kernel(function: Callable, count: int) -> Any:
    """function(i, *count arguments) as a plain Python function for numba-CUDA over (n, *arguments): one thread an index.

    numba compiles neither a call with *arguments nor, without a device, one that is not inlined: the text names each.
    """
    from numba import cuda

    names = ", ".join(f"a{i}" for i in range(count))
    source = f"def {function.__name__}(n, {names}):\n    i = cuda.grid(1)\n    if i < n:\n        body(i, {names})\n"
    made: dict[str, Any] = {"cuda": cuda, "body": cuda.jit(function, device=True, inline="always")}
    exec(source, made)
    return made[function.__name__]

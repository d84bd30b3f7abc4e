"""NVRTC, NVIDIA's run-time compiler: a kernel's text → machine code. Needs the library, no driver and no device.

CuPy compiles too, but puts `-ftz=true` behind every list of flags; the flags here are all there are.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import NamedTuple

from ..errors import BackendError, install

# No contraction and no flushing of denormals: a*b + c is two roundings and a fused multiply-add is written fmaf(), so
# that bits are decided by the text. Division and square root rounded correctly (the default; said because bits depend on it).
FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "--ptxas-options=-v")
_PLACES = ("nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "nvidia/cu13/lib/libnvrtc.so.13")


class Compiled(NamedTuple):
    """Machine code of one architecture, and the assembler's report of registers, spills and shared memory."""

    cubin: bytes
    log: str


@functools.cache
def library(major: int | None = None) -> ctypes.CDLL:
    """NVRTC of this CUDA major version, from the wheels or the system; None: the first found. Raises BackendError."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p).parent for p in (spec.submodule_search_locations or [])] if spec else []
    names = [name for name in _PLACES if major is None or name.endswith(f".{major}")]
    tried = [root / name for root in roots for name in names if (root / name).exists()] + [Path(n).name for n in names]
    for path in tried:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise BackendError(
        f"NVRTC: expected {' or '.join(Path(n).name for n in names)}, found none; {install('cuda12', 'cuda13')}; "
        "or use --backend cpu"
    )


def version(lib: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_text(lib: ctypes.CDLL, text: str, name: str, arch: int, flags: tuple[str, ...] = FLAGS) -> Compiled:
    """Compile a text (includes inlined) for sm_`arch`. Raises BackendError with the compiler's message."""
    program = ctypes.c_void_p()
    _check(lib, lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        options = [flag.encode() for flag in (*flags, f"-arch=sm_{arch}")]
        status = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _bytes(lib, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise BackendError(f"NVRTC: {name} for sm_{arch}: {log.strip() or _error(lib, status)}")
        return Compiled(_bytes(lib, program, "CUBIN"), log)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(lib: ctypes.CDLL, status: int) -> None:
    if status:
        raise BackendError(f"NVRTC: {_error(lib, status)}")


def _error(lib: ctypes.CDLL, status: int) -> str:
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    return lib.nvrtcGetErrorString(status).decode()

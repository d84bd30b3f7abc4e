"""Kernel sources and what runs them.

A kernel file (`cuda/*.cu`) is found by path and its own headers are put into its text, so that a change in a header is
a change of the text. A launcher compiles such a text and runs its kernels: DeviceLauncher on a GPU, through NVRTC and
CuPy; the tests have one that runs them on the CPU. Both have the methods of Launcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import BackendError

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
    """What compiles and runs kernels. xp: the array module (cupy, or what stands for it)."""

    xp: Any

    def compile(self, source: str, defines: Mapping[str, int] | None = None) -> Module:
        """The kernels of `source`, a file of cuda/, with these macros defined. Compiled once per process and content."""

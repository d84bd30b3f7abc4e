"""Every CUDA kernel for every supported architecture, compiled without a GPU: registers, spills, shared memory.

    python tests/tools/compile_gate.py [--write FILE]     prints the table (and writes it); exit code 1 where a kernel spills

A kernel file may name the macros it is compiled with, one set a line: `// variants: HEAD_DIM=512 ROPE_DIM=64`.
"""

from __future__ import annotations

import argparse
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dsv4.ops import kernels, nvrtc

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
_VARIANT = re.compile(r"^//\s*variants:\s*(.+)$", re.MULTILINE)
_NUMBERS = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.DOTALL,
)


class Usage(NamedTuple):
    """What one kernel takes on one architecture; bytes, registers a thread."""

    file: str
    defines: str
    kernel: str
    arch: int
    registers: int
    stack: int
    spills: int
    shared: int


def variants(text: str) -> list[dict[str, int]]:
    """The sets of macros that a kernel file names; one empty set where it names none."""
    lines = _VARIANT.findall(text) or [""]
    return [{k: int(v) for k, v in (item.split("=") for item in line.split())} for line in lines]


def parse(log: str) -> list[tuple[str, int, int, int, int]]:
    """The assembler's report → (kernel, registers, stack, spills, shared) per kernel."""
    return [
        (name, int(registers), int(stack), int(stores) + int(loads), int(shared or 0))
        for name, stack, stores, loads, registers, shared in _NUMBERS.findall(log)
    ]


def compile_file(path: Path, arch: int) -> list[Usage]:
    """One kernel file for one architecture, all its variants. Raises BackendError where it does not compile."""
    usages, lib = [], nvrtc.library()
    text = kernels.inline(path.name, path.parent)
    for defines in variants(text):
        log = nvrtc.compile_text(lib, kernels.define_lines(defines) + text, path.name, arch).log
        said = " ".join(f"{k}={v}" for k, v in defines.items())
        found = [Usage(path.name, said, name, arch, *numbers) for name, *numbers in parse(log)]
        expected = set(kernels.kernel_names(text))
        if {u.kernel for u in found} != expected:
            raise AssertionError(f"{path.name}: expected a report on {sorted(expected)}; found:\n{log}")
        usages += found
    return usages


def run(directory: Path | None = None, architectures=ARCHITECTURES) -> list[Usage]:
    """All kernel files for all architectures."""
    files = sorted((directory or kernels.source_directory()).glob("*.cu"))
    jobs = [(path, arch) for path in files for arch in architectures]
    with ThreadPoolExecutor(2) as pool:
        return [usage for part in pool.map(lambda job: compile_file(*job), jobs) for usage in part]


def table(usages: list[Usage]) -> str:
    """Markdown: a line per kernel, a column of registers per architecture, the largest of the rest."""
    archs = sorted({u.arch for u in usages})
    lines = [
        "| file | kernel | macros | " + " | ".join(f"sm_{a}" for a in archs) + " | spilled bytes | stack bytes | static shared bytes |",
        "| --- " * (len(archs) + 6) + "|",
    ]
    for key in dict.fromkeys((u.file, u.kernel, u.defines) for u in usages):
        rows = {u.arch: u for u in usages if (u.file, u.kernel, u.defines) == key}
        cells = [*key, *(rows[a].registers for a in archs)]
        cells += [max(getattr(u, what) for u in rows.values()) for what in ("spills", "stack", "shared")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


HEAD = """# Registers of the CUDA kernels

Registers a thread by architecture; the largest of all architectures for the rest. Made by
`.venv/bin/python tests/tools/compile_gate.py --write docs/measurements/cuda-registers.md` with NVRTC {version} and the flags of
`dsv4/ops/nvrtc.py`; no GPU is needed. CI compiles the same and fails where a kernel spills.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="write the table to this file")
    out = parser.parse_args().write
    usages = run()
    text = table(usages)
    print(text)
    if out:
        out.write_text(HEAD.format(version="{}.{}".format(*nvrtc.version(nvrtc.library()))) + text, encoding="utf-8")
    spilling = [u for u in usages if u.spills]
    for u in spilling:
        print(f"{u.file}: {u.kernel} spills {u.spills} bytes on sm_{u.arch}", file=sys.stderr)
    return bool(spilling)


if __name__ == "__main__":
    sys.exit(main())

"""Kernel files → shared objects that run on the CPU: the text is adapted, g++ compiles it against cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from dsv4.ops.kernels import kernel_names

HERE = Path(__file__).resolve().parent
HEADERS = ("fibers.h", "switch.h", "cuda_on_cpu.h")
COMMON = ["-std=c++17", "-g1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-Wall",
          "-fno-gnu-unique", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable", "-pthread"]  # fmt: skip
# With "" the checks of alignment and array bounds report through our own handlers; the others need their runtime preloaded.
SANITIZERS = {
    "": (["-O2", "-fsanitize=alignment,bounds", "-DEMU_OWN_CHECKS"], []),
    "portable": (["-O2", "-DEMU_PORTABLE"], []),  # threads switch as on other processors than x86-64
    "address": (["-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],) * 2,
    "thread": (["-O1", "-fsanitize=thread"],) * 2,
}
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s*)?([\w:]+(?:\s+[\w:]+)?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"__shared__\s+(?:__align__\(\d+\)\s*)?([\w:]+(?:\s+[\w:]+)?)\s+(\w+)\s*((?:\[[^\]]*\]\s*)*);")


class BuildError(Exception):
    """g++ did not take a kernel's text."""


def adapt(text: str) -> str:
    """Shared variables become references into the block's memory; each kernel gets a launch function."""
    text = _DYNAMIC.sub(r"\1* \2 = (\1*)emu::dynamic_shared();", text)
    count = iter(range(1 << 30))
    text = _STATIC.sub(lambda m: f"auto& {m[2]} = emu::shared<{m[1]} {m[3].strip()}>({next(count)});", text)
    left = re.search(r"^.*__shared__.*$", re.sub(r"//.*", "", text), re.MULTILINE)
    if left:
        raise BuildError(f"__shared__: expected one variable a line, `__shared__ type name[..];`; found {left[0].strip()}")
    entries = [
        f'extern "C" const char* dsv4_signature_{k}() {{ return emu::Kernel<{k}>::signature(); }}\n'
        f'extern "C" char* dsv4_launch_{k}(const unsigned* geometry, size_t shared, unsigned order, unsigned threads, void** args)'
        f" {{ return emu::launch(geometry, shared, order, threads, emu::Kernel<{k}>::call, args); }}\n"
        for k in kernel_names(text)
    ]
    return '#include "cuda_on_cpu.h"\n' + text + '#line 1 "entries"\n' + "".join(entries)


def cache_directory() -> Path:
    path = Path(tempfile.gettempdir(), f"dsv4-emulation-{getpass.getuser()}")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _instructions() -> list[str]:
    """What makes fmaf an instruction, where the processor has it; its result is the same either way."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return ["-mavx2", "-mfma"] if {"avx2", "fma"} <= set(flags) else []


def _compile(source: str, compile_flags: list[str], link_flags: list[str], objects: tuple[Path, ...], suffix: str) -> Path:
    """A C++ text → shared object (with `objects`) or object file, from the cache where it has been made."""
    compiler = os.environ.get("CXX", "g++")
    parts = [source, *compile_flags, *link_flags, compiler, suffix, *map(str, objects), *((HERE / h).read_text() for h in HEADERS)]
    path = cache_directory() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}{suffix}"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=cache_directory()) as work:
        text, made, linked = (Path(work, name) for name in ("kernel.cpp", "kernel.o", "kernel.so"))
        text.write_text(source, encoding="utf-8")
        commands = [[compiler, *compile_flags, "-c", str(text), "-o", str(made)]]
        if suffix == ".so":
            link = [compiler, "-shared", "-Wl,-Bsymbolic", "-pthread", *link_flags]
            commands.append([*link, str(made), *map(str, objects), "-o", str(linked)])
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError as error:
                raise BuildError(f"expected the C++ compiler {compiler}, found none; install g++ or set CXX") from error
            if done.returncode:
                raise BuildError(f"{' '.join(command[:2])} …:\n{done.stderr[:4000]}")
        (linked if suffix == ".so" else made).replace(path)
    return path


def build(text: str, sanitizer: str = "") -> Path:
    """Compile a kernel text (includes inlined) → path of the shared object."""
    compile_flags, link_flags = SANITIZERS[sanitizer]
    compile_flags = [*COMMON, *compile_flags, *_instructions(), f"-I{HERE}"]
    # The fibers are not instrumented by what reports through them, nor by what would take their own work for the kernels'.
    plain = [flag for flag in compile_flags if sanitizer == "address" or not flag.startswith("-fsanitize")]
    plain += ["-DEMU_TSAN"] if sanitizer == "thread" else []
    fibers = _compile((HERE / "fibers.cpp").read_text(encoding="utf-8"), plain, [], (), ".o")
    return _compile(adapt(text), compile_flags, link_flags, (fibers,), ".so")


def load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))

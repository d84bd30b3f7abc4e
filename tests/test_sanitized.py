"""The compiled kernels under the address and undefined-behaviour sanitizers: all row counts, no rows, operands at odd
addresses, poisoned outputs, and the same bits from every instruction set on one thread and on three
(tests/sanitized*.c say what they call)."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4 import _cpu

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "pyx" / "cpu"
FLAGS = ["-std=gnu11", "-g1", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{SOURCES}"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
CASES = 1135


def commands(folder: Path) -> dict[Path, list[str]]:
    """How every object file is compiled, the slowest first."""
    files = sorted([*SOURCES.glob("*.c"), *TESTS.glob("sanitized*.c")], key=lambda f: "avx512" not in f.name)
    level = {"kernels_scalar": "-O0"}  # ten times faster to compile; the others' intrinsics want constants
    return {
        (made := folder / f"{file.stem}.o"): ["gcc", *FLAGS, *SANITIZE, level.get(file.stem, "-O1"), "-c", str(file), "-o", str(made)]
        for file in files
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="gcc's sanitizers on Linux")
def test_nothing_is_touched_that_should_not_be(tmp_path):
    lines = commands(tmp_path)
    built = subprocess.run(
        ["xargs", "-d", "\n", f"-P{os.cpu_count() or 1}", "-I{}", "sh", "-c", "{}"],
        input="\n".join(map(shlex.join, lines.values())), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    program = tmp_path / "sanitized"
    subprocess.run(["gcc", *SANITIZE, "-pthread", *lines, "-lm", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    found = f"status {done.returncode}: {done.stderr}"
    assert done.stdout == f"{CASES * len(_cpu.instruction_sets())} agree\n", found

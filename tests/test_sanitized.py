"""The compiled kernels under the address and undefined-behaviour sanitizers: odd addresses, all row counts, poisoned
outputs, and the same bits from every instruction set (tests/sanitized.c says what it calls)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4 import _cpu

SOURCES = Path(__file__).parent.parent / "pyx" / "cpu"
FLAGS = ["-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{SOURCES}"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="gcc's sanitizers on Linux")
def test_nothing_is_touched_that_should_not_be(tmp_path):
    files = [*sorted(SOURCES.glob("*.c"), key=lambda f: "avx" not in f.name), Path(__file__).parent / "sanitized.c"]
    objects = [tmp_path / f"{file.stem}.o" for file in files]
    script = "\0".join(f"{file}\0{made}" for file, made in zip(files, objects))
    compiler = ["gcc", *FLAGS, *SANITIZE, "-c", "-o"]
    built = subprocess.run(
        ["xargs", "-0", f"-P{os.cpu_count() or 1}", "-n2", "sh", "-c", f'{" ".join(compiler)} "$1" "$0"'],
        input=script, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    program = tmp_path / "sanitized"
    subprocess.run(["gcc", *SANITIZE, "-pthread", *objects, "-lm", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    cases = 252
    assert done.stdout == f"{cases * len(_cpu.instruction_sets())} agree\n", f"status {done.returncode}: {done.stderr}"

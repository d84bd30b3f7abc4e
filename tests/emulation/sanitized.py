"""Run in a process of its own with a sanitizer's runtime preloaded: `python -m emulation.sanitized address [mutant]`.

Runs the cases of sanitizer_cases.py on kernels built with the sanitizer, and prints the kernels that ran, one a line. The
sanitizer ends the process where it finds an error.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=77",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=77",
    "TSAN_OPTIONS": "exitcode=77:halt_on_error=1:report_signal_unsafe=0:ignore_noninstrumented_modules=1:history_size=1",
}


def start(sanitizer: str, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess:
    """This module in a process with the runtime preloaded."""
    compiler = os.environ.get("CXX", "g++")
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in RUNTIMES[sanitizer]
    ]
    environment = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(found), "PYTHONPATH": str(TESTS), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "emulation.sanitized", sanitizer, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=environment, cwd=TESTS)


def main() -> None:
    import sanitizer_cases

    sanitizer, *mutant = sys.argv[1:]
    print("\n".join(sorted(sanitizer_cases.run(sanitizer, *mutant))))


if __name__ == "__main__":
    main()

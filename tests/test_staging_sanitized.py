"""The gather under the thread, address and undefined-behaviour sanitizers, and planted faults that they catch."""

import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parent / "pyx/staging"
FLAGS = {"thread": ["-fsanitize=thread"], "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]}
# kind, what is taken out, what is put in, what the sanitizer or the stress test says of it
PLANTED = [
    ("thread", "_Atomic int64_t next;", "int64_t next;", "data race"),
    ("address", "uint8_t *scratch = malloc(UNIT);", "uint8_t *scratch = malloc(UNIT / 2);", "AddressSanitizer"),
    ("address", "free(scratch);", "", "LeakSanitizer"),
    ("address", "at + r * p->pitch", "at + r * p->bytes", "other bytes"),
]

pytestmark = [
    pytest.mark.skipif(not SOURCES.exists() or not shutil.which("cc"), reason="needs a checkout and a C compiler"),
]


def run(tmp_path, kind, source):
    """(exit status, output) of the stress test over a gather.c."""
    (tmp_path / "gather.c").write_text(source)
    program = tmp_path / "stress"
    command = ["cc", "-std=gnu11", "-g", "-O1", *FLAGS[kind], f"-I{SOURCES}", str(tmp_path / "gather.c"),
               str(TESTS / "gather_stress.c"), "-o", str(program), "-pthread"]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip(f"this compiler has no {kind} sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", FLAGS)
def test_nothing_is_found(tmp_path, kind):
    assert run(tmp_path, kind, (SOURCES / "gather.c").read_text()) == (0, "")


@pytest.mark.parametrize("kind, old, new, words", PLANTED, ids=[f"{p[0]}-{i}" for i, p in enumerate(PLANTED)])
def test_a_planted_fault_is_found(tmp_path, kind, old, new, words):
    source = (SOURCES / "gather.c").read_text()
    assert source.count(old) == 1
    source = source.replace(old, new)
    if "next" in old:
        source = source.replace("atomic_fetch_add(&job->next, 1)", "job->next++")
    status, text = run(tmp_path, kind, source)
    assert status != 0 and words in text, text[-2000:]

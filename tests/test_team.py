"""The team of threads (pyx/cpu/team.c) under stress and sanitizers, and planted faults that this finds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parent / "pyx/cpu"
FLAGS = {
    "plain": [],
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
SHORT = [("#define SPINS 2000", "#define SPINS 20"), ("#define YIELDS 1000", "#define YIELDS 2")]
LOOK = "if (atomic_load_explicit(&share->at.value, memory_order_relaxed) != round) continue;"
CLAIM = "if (!atomic_compare_exchange_strong(&share->at.value, &open, round | BEGUN)) continue;"
OPEN = "uint64_t open = round;"
CALL = "        share->fn(share->args, which, n);\n"
WAIT = "    event_wait(&team.done, last - 1);\n"
FORGET = "    memset(&team, 0, sizeof team);\n    pthread_mutex_init(&team.turn, NULL);\n"
WAKE = "event_wake(&team.done);\n"
# kind, (what is taken out, what is put in).., what is said then
PLANTED = {
    "claimed by several": ("plain", [(CLAIM, "be_late(), atomic_store(&share->at.value, open | BEGUN);")], "begun twice"),
    "claimed in a later run": ("plain", [
        (LOOK, ""), (OPEN, "uint64_t open = atomic_load(&share->at.value) & ~(uint64_t)BEGUN;"),
        (CLAIM, CLAIM.replace("round |", "open |")),
    ], "another run's n"),
    "arguments read before the claim": ("thread", [(OPEN, OPEN + " void *args = share->args;"),
                                                   (CALL, CALL.replace("share->args", "args"))], "data race"),
    "nobody waits": ("plain", [(WAIT, "")], "before"),
    "done before it is": ("plain", [(CALL, ""), (WAKE, WAKE + CALL)], "before"),
    "the caller is not woken": ("plain", [("+ 1 == last)", "+ 1 == 0)"), *SHORT], "no end"),
    "nobody helps": ("plain", [("take_shares(round, tid);", "")], "computed anything"),
    "a child keeps the lock": ("plain", [(FORGET, "")], "a forked child failed"),
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not SOURCES.exists() or not shutil.which("cc") or sys.platform != "linux", reason="a checkout, a C compiler and Linux"
)


def run(tmp_path, kind, changes=(), fork=False, seconds=60):
    """(exit status, output) of the stress test over a team.c with something else in it."""
    source = (SOURCES / "team.c").read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "team.c").write_text(source)
    program = tmp_path / "stress"
    command = ["cc", "-std=gnu11", "-g", "-O1", "-pthread", *FLAGS[kind], f"-I{tmp_path}", f"-I{SOURCES}",
               str(TESTS / "team_stress.c"), "-o", str(program)]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "sanitize" in built.stderr:
        pytest.skip(f"this compiler has no {kind} sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, str(seconds), *["fork"] * fork], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("short", [False, True], ids=["spins", "sleeps"])
@pytest.mark.parametrize("kind", FLAGS)
def test_every_share_is_computed_once_and_in_its_phase(tmp_path, kind, short):
    assert run(tmp_path, kind, SHORT if short else (), fork=kind != "thread") == (0, "")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(tmp_path, name):
    kind, changes, words = PLANTED[name]
    status, text = run(tmp_path, kind, changes, fork="child" in name, seconds=4 if "child" in name or "woken" in name else 60)
    assert status != 0 and words in text, text[-2000:]

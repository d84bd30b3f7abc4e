"""python -m dsv4 chat as a person meets it: in a terminal, and as a script."""

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prompt_toolkit")
COMMAND = [sys.executable, "-m", "dsv4", "chat", "--temperature", "0"]
READS = "\x1b[?2004h"  # bracketed paste is switched on where a line is read


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *options):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "120"}
            os.execve(sys.executable, [*COMMAND, *options], env)
        self.text = ""

    def read(self, seconds=60):
        """What was written next; "" at the end."""
        ready, _, _ = select.select([self.fd], [], [], seconds)
        assert ready, f"silent after {self.text!r}"
        try:
            return os.read(self.fd, 4096).decode("utf-8", "replace")
        except OSError:  # what Linux says at the end
            return ""

    def expect(self, words):
        """All that was written up to `words`, which are taken off."""
        while words not in self.text:
            more = self.read()
            assert more, f"ended without {words!r}: {self.text!r}"
            self.text += more
        before, _, self.text = self.text.partition(words)
        return before

    def send(self, text):
        os.write(self.fd, text.encode())

    def status(self):
        """The exit status, after the end."""
        while self.read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self):
        os.close(self.fd)


@pytest.fixture
def terminal():
    made = []

    def start(*options):
        made.append(Terminal(*options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_talk_in_a_terminal(terminal):
    talk = terminal("--max-tokens", "30")
    talk.expect("/help lists the commands")
    talk.expect(READS)
    talk.send("Write a short story about Elsa.\r")
    assert "Once upon a time, Elsa lived near the mill." in talk.expect("tok/s")
    talk.expect(READS)
    talk.send("/think on\r")
    talk.expect("thinking: on")
    talk.expect(READS)
    talk.send("Hello\r")
    talk.expect("\x1b[2m")  # dimmed
    talk.expect("tok/s")
    talk.expect(READS)
    talk.send("given up\x03")
    talk.expect(READS)
    talk.send("/sing\r")
    talk.expect("error: /sing: expected a command")
    talk.expect(READS)
    talk.send("\x04")
    assert talk.status() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_talk(terminal):
    talk = terminal("--backend", "reference", "--spec", "off")  # slow: an answer takes minutes
    talk.expect(READS)
    talk.send("Hello\r")
    talk.expect("Solve 3x")  # what nano says
    talk.send("\x03")
    talk.expect("stopped")
    talk.expect(READS)
    talk.send("/quit\r")
    assert talk.status() == 0


def run(lines, *options):
    return subprocess.run([*COMMAND, *options], input=lines, capture_output=True, text=True)


def test_a_script():
    done = run("Write a short story about Elsa.\nHello\n", "--max-tokens", "12", "--system", "Be brief.")
    assert done.returncode == 0 and done.stdout.count("\n") >= 2
    assert done.stderr.count("tok/s") == 2 and "\x1b" not in done.stdout + done.stderr


def test_a_script_ends_at_its_first_mistake():
    done = run("/nothing\nHello\n")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "dsv4: error: /nothing: expected a command, found none of that name; /help lists them\n"


@pytest.mark.parametrize("options, words", [
    (["--effort", "medium"], "Invalid value for '--effort'"),
    (["--load", "/nowhere/a.json"], "dsv4: error: /nowhere/a.json: expected a readable file; No such file or directory"),
    (["--temperature", "-1"], "temperature"),
])  # fmt: skip
def test_wrong_options(options, words):
    done = run("", *options)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.mpi
def test_two_ranks_say_what_one_says():
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun")
    lines, options = "Write a short story about Elsa.\n/think on\nHello\n/quit\n", ["--max-tokens", "20", "--threads", "1"]
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}  # fmt: skip
    done = subprocess.run([mpirun, "-n", "2", *COMMAND, *options], input=lines, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(lines, *options).stdout and "Once upon a time" in done.stdout

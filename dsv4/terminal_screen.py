"""The chat's screen: lines in, text out, commands between them. A terminal, or plain lines where there is none."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .cli_support import printable
from .errors import ConfigError, Dsv4Error, InputError, install
from .terminal import Chat, Stopped

HELP = """\
  /help          this
  /reset         forget the conversation, keep the system text
  /system TEXT   set the system text; without TEXT: show it
  /think on|off  reason before answering, or not
  /save FILE     write the conversation, a JSON list of messages
  /load FILE     go on from one
  /quit          leave (also Ctrl-D)
Ctrl-C stops an answer. Alt-Enter begins a new line. A space in front of / makes it a message."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def is_terminal() -> bool:
    """Do we read from a terminal and write to one?"""
    return sys.stdin.isatty() and sys.stdout.isatty()


def open_reader(terminal: bool) -> Callable[[], str]:
    """A function that returns the next line; EOFError at the end. Raises ConfigError without prompt_toolkit."""
    if not terminal:
        return _plain_line
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        raise ConfigError(
            f"chat: expected the package prompt_toolkit, for a terminal; found none; {install('chat')}, or pipe the lines in"
        ) from None
    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return PromptSession("> ", multiline=True, key_bindings=keys).prompt


def _plain_line() -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: expected UTF-8 text; {error}") from error
    if not line:
        raise EOFError
    return line.rstrip("\n")


class Screen:
    """Runs a chat until /quit or the end of input.

    On a terminal reasoning is dimmed and a dim status line follows each answer. Else reasoning stands between <think>
    and </think>, status and errors go to stderr, and an error ends the run.
    """

    def __init__(self, chat: Chat, read: Callable[[], str], terminal: bool):
        self.chat, self.read, self.terminal = chat, read, terminal
        self.commands = {
            "help": self._help, "reset": self._reset, "system": self._system, "think": self._think,
            "save": self._save, "load": self._load,
        }  # fmt: skip

    def greet(self, model: str) -> None:
        self._note(f"{model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")

    def run(self) -> None:
        while True:
            try:
                line = self.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                continue  # the line is given up
            if line.strip() == "/quit":
                return
            try:
                self._take(line)
            except KeyboardInterrupt:  # just before or after an answer, or in a command
                if not self.terminal:
                    raise
            except Dsv4Error as error:
                if not self.terminal:
                    raise
                self._note(f"error: {error}")

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name not in self.commands:
                raise InputError(f"/{name}: expected a command, found none of that name; /help lists them")
            self.commands[name](rest.strip())
        elif line.strip():
            self._answer(line.strip())

    # ------------------------------------------------------------------ an answer
    def _answer(self, text: str) -> None:
        with self._interruptible():
            try:
                thinking = self._print(self.chat.ask(text))
            except Stopped:
                self._note("stopped before the answer began; the message is taken back")
                return
        self._write(f"{self._mark(False) if thinking else ''}\n")
        self._note(self.chat.stats.render())

    def _print(self, deltas: Iterator[dict]) -> bool:
        """Print deltas as they come → did the answer end inside its reasoning?"""
        thinking = False
        for delta in deltas:
            reasoning = "reasoning_content" in delta
            if reasoning != thinking:
                thinking = reasoning
                self._write(self._mark(thinking))
            ((_, value),) = delta.items()
            if isinstance(value, str):
                self._write(self._printable(value))
            else:
                for call in value:
                    name, arguments = map(self._printable, (call["function"]["name"], call["function"]["arguments"]))
                    self._write(f"\n[{name} {arguments}]")
        return thinking

    def _mark(self, thinking: bool) -> str:
        """What begins reasoning, or ends it."""
        if self.terminal:
            return DIM if thinking else f"{PLAIN}\n"
        return "<think>" if thinking else "</think>\n"

    def _printable(self, text: str) -> str:
        """What others said, for standard output, which may be a terminal also where the lines come from elsewhere."""
        return printable(text) if self.terminal or sys.stdout.isatty() else text

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C stops the answer, not the program."""
        before = signal.signal(signal.SIGINT, lambda *_: self.chat.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _write(self, text: str) -> None:
        print(text, end="", flush=True)

    def _note(self, text: str) -> None:
        if self.terminal:
            self._write(f"{DIM}{printable(text)}{PLAIN}\n")
        else:
            print(text, file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ commands
    def _help(self, rest: str) -> None:
        self._note(HELP)

    def _reset(self, rest: str) -> None:
        self.chat.reset()
        self._note("the conversation is forgotten")

    def _system(self, rest: str) -> None:
        if rest:
            self.chat.set_system(rest)
        self._note(f"system: {self.chat.system}")

    def _think(self, rest: str) -> None:
        if rest not in ("on", "off"):
            raise InputError(f"/think: expected on or off, found {rest!r}")
        self.chat.thinking = rest == "on"
        self._note(f"thinking: {rest}")

    def _save(self, rest: str) -> None:
        self.chat.save(_path("save", rest))
        self._note(f"{rest}: {len(self.chat.messages)} messages written")

    def _load(self, rest: str) -> None:
        self.chat.load(_path("load", rest))
        self._note(f"{rest}: {len(self.chat.messages)} messages")


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise InputError(f"/{command}: expected the name of a file, found none")
    try:
        return Path(rest).expanduser()
    except RuntimeError as error:
        raise InputError(f"/{command}: expected the name of a file, found {rest!r}; {error}") from error

"""What several commands share: options, the prompt, loading with progress, output."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Callable

import click
from click.core import ParameterSource

from .config import CONTEXT, RunConfig, World
from .errors import BackendError, InputError
from .files import replaceable
from .sizes import parse_size


class FiniteRange(click.FloatRange):
    """A number within bounds, which NaN and infinity are not."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


ENGINE_OPTIONS = (
    click.option(
        "--backend",
        metavar="NAME",
        help="cpu: compiled kernels (default); cuda: an NVIDIA GPU; reference: plain NumPy, very slow.",
    ),
    click.option(
        "--threads", type=int, metavar="N", help="Threads to compute with. Default: OMP_NUM_THREADS, else all cores this process may use."
    ),
    click.option(
        "--max-context", type=int, metavar="N",
        help=f"Longest prompt and answer together, in tokens. Default: as many as the model can, up to {CONTEXT}.",
    ),
    click.option(
        "--chunk", type=int, metavar="N",
        help=f"Tokens of a prompt to run at once, {RunConfig.chunk} by default. Changes speed and memory, not results.",
    ),
    click.option(
        "--expert-cache",
        callback=lambda ctx, param, text: None if text is None else parse_size("--expert-cache", text),
        metavar="SIZE",
        help="Keep at most this much of the experts where the model computes (2GiB, 500MB) and read the others when they "
        "are needed. Default: no limit.",
    ),
    click.option("--packed", metavar="FILE", help="Read experts from this file, which `pack` made from the checkpoint."),
    click.option("--debug", is_flag=True, default=None, help="Name the first layer whose output holds NaN or infinity (slower)."),
)  # fmt: skip


def engine_options(command):
    """Options that say how to run; the command gets them as a dict `settings`, None where not given."""
    names = ("backend", "threads", "max_context", "chunk", "expert_cache", "packed", "debug")

    @wraps(command)
    def collect(*arguments, **options):
        settings = {name: options.pop(name) for name in names}
        return command(*arguments, settings=settings, **options)

    for option in reversed(ENGINE_OPTIONS):
        collect = option(collect)
    return collect


def model_option(command):
    return click.option(
        "--model", default="nano", show_default=True, metavar="DIR|nano", help="Checkpoint directory, or the embedded model."
    )(command)


def given(ctx: click.Context) -> list[str]:
    """The options that were given on the command line."""
    return [p.opts[0] for p in ctx.command.params if ctx.get_parameter_source(p.name) is ParameterSource.COMMANDLINE]


def spec_option(command):
    return click.option(
        "--spec", type=click.Choice(["off", "always", "gate"]), default="gate", show_default=True,
        help="Speculation: never, always the whole block, or as much as pays. Changes speed, never the tokens.",
    )(command)  # fmt: skip


def draw_options(command):
    """--temperature, --top-p and --seed: what every command that samples has, by the names of SamplingParams."""
    for option in (
        click.option("--seed", type=int, metavar="N", help="Same seed, same tokens. Default: a new one each run."),
        click.option("--top-p", type=float, default=1.0, show_default=True, metavar="P",
                     help="Choose among the fewest tokens that together have this probability; 1: all."),
        click.option("--temperature", type=float, default=1.0, show_default=True, metavar="X",
                     help="0 always takes the most likely token; higher is more varied."),
    ):  # fmt: skip
        command = option(command)
    return command


def prompt_options(command):
    """--model, and the three ways to give a prompt; read_prompt picks the one that was given."""
    for option in (
        click.option("--tokens", metavar="IDS", help="The prompt as token ids: 1,2,3"),
        click.option("--prompt-file", metavar="FILE", help="A file with the prompt, UTF-8; - is standard input."),
        click.option("--prompt", metavar="TEXT", help="The prompt."),
        model_option,
    ):
        command = option(command)
    return command


def read_prompt(prompt: str | None, prompt_file: str | None, tokens: str | None) -> str | list[int]:
    """The one prompt that was given: text or token ids. Only rank 0 reads it."""
    if World.from_env().rank:
        return []
    if sum(one is not None for one in (prompt, prompt_file, tokens)) != 1:
        raise click.UsageError("expected exactly one of --prompt, --prompt-file, --tokens")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return _read_text(prompt_file)
    try:
        return [int(part) for part in tokens.split(",")] if tokens.strip() else []
    except ValueError as error:
        raise click.BadParameter(
            f"expected ids separated by commas, such as 1,2,3; found {tokens!r}", param_hint="--tokens"
        ) from error


def _read_text(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{name}: expected a readable file; {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: expected UTF-8 text; found byte {data[error.start]:#04x} at {error.start}"
        ) from error


def check_place(path: Path | None, what: str) -> None:
    """Raise InputError for a file that could not be written, before a load that may take minutes. Only rank 0 writes."""
    if path is not None and not World.from_env().rank and not replaceable(path):
        raise InputError(f"{path}: expected a place to write {what} to, found none")


def load_engine(model: str, settings: dict, progress):
    """The engine and the seconds it took to load."""
    from .engine import Engine

    if find_spec("dsv4._staging"):  # compiled, then
        from ._staging import guard_mapped_files

        guard_mapped_files()
    start = time.perf_counter()
    engine = Engine.load(model, progress=progress, **settings)
    return engine, time.perf_counter() - start


def as_rank(run: Callable[[], int], meets: bool) -> int:
    """run() → its exit status. Of several ranks started together only rank 0 prints. meets: the command makes an engine,
    for which the ranks meet.

    A rank that fails before that waits until the ranks have met and then ends the job, with its own words unless rank 0
    failed too and has said so. It cannot end the job at once: a launcher may hang when it ends a process that is just
    starting MPI.
    """
    world, words = World.from_env(), io.StringIO()
    with _overheard(world, words):
        status = run()
        if status and meets and world.size > 1:
            _meet_and_end(world, words.getvalue().rstrip(), status)
    return status


def _meet_and_end(world: World, words: str, status: int) -> None:
    """Meet the other ranks, then end the job, with a follower's words. Nothing where they have met already, or cannot."""
    from .comm import Mpi, open_communicator
    from .crew import GRACE

    if not Mpi.opened:
        with suppress(BackendError):
            open_communicator(world).fail(f"rank {world.rank}: {words}" if world.rank else "", status, GRACE)


@contextmanager
def _overheard(world: World, words: io.StringIO):
    """Ranks other than 0 print nothing, and their standard error goes to `words`. In the end the first rank of another host
    prints its words all the same: they may say why it cannot start."""
    if world.rank == 0:
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(words):
        try:
            yield
        finally:
            if words.getvalue():
                time.sleep(2)  # a process that ends in error ends the others: rank 0 should have said why by then
                if world.local_rank == 0:
                    print(words.getvalue(), end="", file=sys.__stderr__, flush=True)


def say(text: str, end: str = "\n") -> None:
    """Print to standard output, unbuffered."""
    print(text, end=end, flush=True)


def console():
    """A rich console for tables. Without colours: mpirun gives a rank's output a terminal of its own, so nothing tells
    whether it ends up on a screen or in a file. 120 columns wide where no terminal says how wide it is."""
    from rich.console import Console

    return Console(color_system=None, markup=False, emoji=False, width=get_terminal_size((120, 25)).columns)


def printable(text: str) -> str:
    """`text` with its control characters shown as escapes: a terminal would obey them, and a model may generate any."""
    return "".join(c if c in "\n\t" or not _controls(c) else f"\\x{ord(c):02x}" for c in text)


def _controls(letter: str) -> bool:
    return ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0


class Bars:
    """progress(stage, done, total) as bars on stderr, none where stderr is no terminal. They vanish when stopped."""

    def __init__(self):
        self._bars = None
        self._tasks: dict[str, int] = {}
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True), transient=True)
            self._bars.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(self._tasks[stage], completed=done, total=total)

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

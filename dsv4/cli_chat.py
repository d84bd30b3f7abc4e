"""python -m dsv4 chat"""

from __future__ import annotations

from pathlib import Path

import click

from .chat import EFFORTS
from .cli_support import Bars, draw_options, engine_options, load_engine, model_option, spec_option


@click.command()
@model_option
@click.option("--system", default="", metavar="TEXT", help="The system message.")
@click.option("--load", type=click.Path(path_type=Path), metavar="FILE", help="Continue a saved conversation.")
@click.option("--think", is_flag=True, help="Reason before answering.")
@click.option(
    "--effort", type=click.Choice(list(EFFORTS)), default="low", show_default=True, help="How hard to reason, with --think."
)
@click.option("--max-tokens", type=int, metavar="N", help="Longest answer. Default: a quarter of the context.")
@draw_options
@spec_option
@engine_options
def chat(model, system, load, think, effort, max_tokens, spec, settings, **sampling):
    """Talk with a model in the terminal.

    Reasoning is dimmed, and each answer is followed by its speed. /help lists the commands; Ctrl-C stops an answer.
    Where standard input is no terminal, each of its lines is a message or a command: answers go to standard output,
    everything else to standard error, and the first error ends the run.

    \b
    Examples:
      python -m dsv4 chat --seed 3
      python -m dsv4 chat --model DIR --think --effort high
      printf 'Hello\\n/save talk.json\\n' | python -m dsv4 chat --seed 1
    """
    from .sampling import SamplingParams
    from .terminal import Chat
    from .terminal_screen import Screen, is_terminal, open_reader

    terminal = is_terminal()
    read = open_reader(terminal)
    SamplingParams(max_tokens=1 if max_tokens is None else max_tokens, **sampling)  # wrong values are refused before the load
    with Bars() as bars:
        engine, _ = load_engine(model, {**settings, "max_sessions": 1}, bars)
    params = SamplingParams(max_tokens=max(engine.max_context // 4, 1) if max_tokens is None else max_tokens, **sampling)
    with engine, Chat(engine, params, system=system, thinking=think, effort=effort, spec=spec) as talk:
        if load is not None:
            talk.load(load)
        screen = Screen(talk, read, terminal)
        if terminal:
            screen.greet(model)
        screen.run()

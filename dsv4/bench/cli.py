"""python -m dsv4 bench"""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..cli_support import Bars, engine_options, model_option, say


def _lengths(ctx, param, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected lengths separated by commas, such as 128,512; found {value!r}") from error


@click.group(invoke_without_command=True)
@model_option
@click.option(
    "--contexts",
    callback=_lengths,
    metavar="N,N,…",
    help="Prompt and context lengths in tokens. Default: those of 128,512,2048,8000 that fit.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Prefills per length.")
@click.option("--steps", type=click.IntRange(min=1), default=64, show_default=True, help="Decoded tokens per length.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of records instead of tables.")
@engine_options
@click.pass_context
def bench(ctx, model, contexts, repeats, steps, as_json, settings):
    """Measure speed and memory on this machine.

    Without a further command: loading, prefill and decoding (medians; the prompts are random token ids).

    \b
    Examples:
      python -m dsv4 bench
      python -m dsv4 bench --threads 1 --contexts 128,2048 --json
    """
    if ctx.invoked_subcommand is not None:
        return
    from .engine import measure

    with Bars() as bars:
        records = measure(model, settings, contexts, repeats, steps, bars)
    if as_json:
        say(json.dumps(records, indent=1))
    else:
        _tables(records)


@bench.command("speculate")
@model_option
@click.option("--tokens", type=click.IntRange(min=8), default=200, show_default=True, help="Tokens per text.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs per text and mode.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), metavar="FILE.png", help="Also draw a picture.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of records instead of tables.")
@engine_options
def speculate(model, tokens, repeats, picture, as_json, settings):
    """What drafting and verifying cost here, and what speculation is worth on four kinds of text.

    Plain, always the whole block, and gated, in turn on the same engine; then how honest the confidence was.

    
    Example:
      python -m dsv4 bench speculate --model nano
    """
    from .speculate import measure, plot, render

    with Bars() as bars:
        records = measure(model, settings, tokens, repeats, bars)
    if picture:
        plot(records, picture)
    if as_json:
        say(json.dumps(records, indent=1))
    else:
        render(records)


def _tables(records: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    first = {record["name"]: record for record in reversed(records)}
    about, memory = first["load"], first["memory"]
    console.print(f"{about['model']}: backend {about['backend']} ({about['isa']}), {about['threads']} threads")
    console.print(f"{about['cpu']}, {about['cores']} cores; Python {about['python']}, NumPy {about['numpy']}")
    console.print(f"load {about['seconds']:.2f} s, peak memory {memory['peak_bytes'] / 1e6:.0f} MB")
    table = Table("context", "prefill tok/s", "prefill s", "decode tok/s", "ms per token", "p90 ms")
    for column in table.columns:
        column.justify = "right"
    decoded = {record["tokens"]: record for record in records if record["name"] == "decode"}
    for record in (record for record in records if record["name"] == "prefill"):
        step = decoded[record["tokens"]]
        table.add_row(
            f"{record['tokens']:,}",
            f"{record['tokens_per_s']:,.0f}",
            f"{record['seconds']:.3f}",
            f"{step['tokens_per_s']:,.0f}",
            f"{1e3 * step['seconds']:.2f}",
            f"{1e3 * step['seconds_p90']:.2f}",
        )
    console.print(table)

"""Options and commands about speculation: --spec, the gate's settings, recorded rounds, determinism."""

from __future__ import annotations

import json
import os
from functools import wraps
from pathlib import Path

import click

from .cli_support import Bars, engine_options, load_engine, model_option, say
from .errors import InputError
from .gate.records import RecordedRound, Recording, write_rounds

GATE_OPTIONS = {
    "margin_threshold": (float, "Draft nothing after a token whose logit led by less than this; 0: off."),
    "margin": (float, "How many times the whole block's rate a shorter draft must reach to be preferred."),
    "min_draft": (int, "Never verify fewer drafted tokens."),
    "decay": (float, "Weight of what was learned, one round later."),
    "draft_ms": (float, "Costs to start from (only their ratios matter): drafting a block,"),
    "verify_base_ms": (float, "verifying, before the first drafted token,"),
    "verify_slope_ms": (float, "and per drafted token,"),
    "plain_ms": (float, "and decoding one token plainly."),
}


def spec_options(command):
    """--spec, --record-rounds and the gate's settings; the command gets spec, record_rounds and a dict `gate`."""

    @wraps(command)
    def collect(*arguments, **options):
        gate = {name: options.pop(f"gate_{name}") for name in GATE_OPTIONS}
        return command(*arguments, gate=gate, **options)

    for name, (kind, text) in reversed(GATE_OPTIONS.items()):
        flag = "--gate-" + name.replace("_", "-")
        variable = "DEEPSEEK_DSPARK_GATE_" + name.upper()
        collect = click.option(flag, f"gate_{name}", type=kind, metavar="X", help=f"{text} (or {variable})")(collect)
    collect = click.option(
        "--record-rounds", type=click.Path(path_type=Path), metavar="FILE",
        help="Write the rounds of this run, for `gate replay`. Record with --spec always.",
    )(collect)  # fmt: skip
    return click.option(
        "--spec", type=click.Choice(["off", "always", "gate"]), default="gate", show_default=True,
        help="Speculation: never, always the whole block, or as much as pays. Changes speed, never the tokens.",
    )(collect)  # fmt: skip


class Recorder:
    """Sees every round of a run and writes them as a recording. Raises InputError at once for a place it cannot write to."""

    def __init__(self, name: str, path: Path, engine, source: str):
        self.name, self.path, self.source, self.rounds = name, path, source, []
        self.block = engine.config.dspark.block_size if engine.draft else 1
        try:
            place = path if path.exists() else path.parent
            fits = path.parent.is_dir() and not path.is_dir() and os.access(place, os.W_OK)
        except OSError:  # a name that no file can have
            fits = False
        if not fits:
            raise InputError(f"{path}: expected a place to write rounds to, found none")

    def __call__(self, found) -> None:
        self.rounds.append(
            RecordedRound(
                conf=tuple(found.draft.confidence.tolist()) if found.draft else (),
                k=found.length,
                accept=found.accepted,
                margin=found.margin,
                draft_ms=1e3 * found.draft_s if found.draft else None,
                verify_ms=1e3 * found.verify_s if found.length else None,
                plain_ms=None if found.length else 1e3 * found.verify_s,
            )
        )

    def write(self) -> None:
        """The recording; nothing where there was no round, as of an answer of one token."""
        if self.rounds:
            write_rounds(self.path, Recording(self.block, {self.name: self.rounds}, source=self.source))


@click.command()
@model_option
@click.option("--max-tokens", type=click.IntRange(min=2), default=100, show_default=True, help="Tokens per prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record instead of a table.")
@engine_options
@click.pass_context
def determinism(ctx, model, max_tokens, as_json, settings):
    """Show that speculation changes nothing: generate in several ways, compare every token and every logit's bits.

    For prompts of four kinds: plain against plain, always against always, gated against always, always against plain.
    The exit status is 0 if all are identical, else 1, and the first difference is printed.

    \b
    Example:
      python -m dsv4 determinism --model nano
    """
    from .determinism import matrix, render

    with Bars() as bars:
        engine, _ = load_engine(model, settings, bars)
        report = matrix(engine, max_tokens, bars)
    say(json.dumps(report, ensure_ascii=False) if as_json else render(report))
    ctx.exit(0 if report["identical"] else 1)

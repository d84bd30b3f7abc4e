"""Options and commands about speculation: --spec, the gate's settings, recorded rounds, determinism."""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path

import click

from .cli_support import Bars, engine_options, load_engine, model_option, say, spec_option
from .gate import GateSettings
from .gate.records import RecordedRound, Recording, write_rounds

GATE_OPTIONS = {
    "margin_threshold": (float, "X", "Draft nothing after a token whose logit was less than this above the second best; 0: off."),
    "margin": (float, "X", "Verify only a part of the block where that promises at least X times the speed of the whole."),
    "min_draft": (int, "N", "Verify at least N drafted tokens in every round."),
    "decay": (float, "X", "Weight that what was learned keeps from one round to the next."),
    "draft_ms": (float, "MS", "Time of drafting a block. The gate starts from these four times and then measures its own; "
                              "only their ratios matter."),
    "verify_base_ms": (float, "MS", "Time of verifying, apart from what each drafted token adds."),
    "verify_slope_ms": (float, "MS", "What each drafted token adds to the time of verifying."),
    "plain_ms": (float, "MS", "Time of decoding one token without a draft."),
}  # fmt: skip


def spec_options(command):
    """--spec, --record-rounds and the gate's settings; the command gets spec, record_rounds and a dict `gate`."""

    @wraps(command)
    def collect(*arguments, **options):
        gate = {name: options.pop(f"gate_{name}") for name in GATE_OPTIONS}
        return command(*arguments, gate=gate, **options)

    for name, (kind, shown, text) in reversed(GATE_OPTIONS.items()):
        flag = "--gate-" + name.replace("_", "-")
        default = f"Default: {getattr(GateSettings, name):g}, or DEEPSEEK_DSPARK_GATE_{name.upper()}."
        collect = click.option(flag, f"gate_{name}", type=kind, metavar=shown, help=f"{text} {default}")(collect)
    collect = click.option(
        "--record-rounds", type=click.Path(path_type=Path), metavar="FILE",
        help="Write the rounds of this run, for `gate replay`. Record with --spec always.",
    )(collect)  # fmt: skip
    return spec_option(collect)


class Recorder:
    """Collects every round of a run and writes them as a recording."""

    def __init__(self, name: str, path: Path, engine, source: str):
        self.name, self.path, self.source, self.rounds = name, path, source, []
        self.block = engine.config.dspark.block_size if engine.draft else 1

    def __call__(self, found) -> None:
        self.rounds.append(
            RecordedRound(
                conf=tuple(found.confidence),
                k=found.length,
                accept=found.accepted,
                margin=found.margin,
                draft_ms=1e3 * found.draft_s if found.drafted else None,
                verify_ms=1e3 * found.verify_s if found.length else None,
                plain_ms=None if found.length else 1e3 * found.verify_s,
            )
        )

    def write(self) -> None:
        """Write the recording. Nothing where there was no round, as in an answer of one token."""
        if self.rounds:
            write_rounds(self.path, Recording(self.block, {self.name: self.rounds}, source=self.source))


@click.command()
@model_option
@click.option("--max-tokens", type=click.IntRange(min=2), default=100, show_default=True, help="Tokens per prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record instead of a table.")
@engine_options
@click.pass_context
def determinism(ctx, model, max_tokens, as_json, settings):
    """Show that speculation changes nothing.

    Generates in several ways and compares every token and every logit's bits. For prompts of four kinds: plain against
    plain, always against always, gated against always, always against plain. The exit status is 0 if all are
    identical, else 1, and the first difference is printed.

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

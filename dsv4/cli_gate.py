"""python -m dsv4 gate: replay recorded rounds under a rule of the gate. No model is needed."""

from __future__ import annotations

import json
from dataclasses import astuple

import click
import numpy as np

from .cli_support import say
from .gate import DEFAULT, RULES, Costs, GateSettings
from .gate.fit import fit_prior, outcomes
from .gate.records import read_rounds
from .gate.replay import ACCOUNTINGS, Report, replay, vary

accounting_option = click.option(
    "--accounting", type=click.Choice(ACCOUNTINGS), default="honest", show_default=True,
    help="What a round is charged that drafts but verifies nothing. honest: draft and plain step; published: plain step.",
)  # fmt: skip
costs_option = click.option(
    "--costs", nargs=4, type=float, metavar="DRAFT BASE SLOPE PLAIN", default=astuple(Costs()), show_default=True,
    callback=lambda context, option, given: _costs(*given),
    help="Milliseconds charged for a draft, for verifying n tokens (BASE + n SLOPE) and for a plain step. Default: those at "
    "which the published rule was measured.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON record instead of a table.")


def _costs(draft: float, base: float, slope: float, plain: float) -> Costs:
    """Raises ConfigError for one that is out of range."""
    return Costs.of(GateSettings(draft_ms=draft, verify_base_ms=base, verify_slope_ms=slope, plain_ms=plain))


@click.group()
def gate():
    """Try rules of the speculation gate on recorded rounds.

    FILE is what `generate --record-rounds FILE` writes; record with --spec always, so that every rule has something to
    choose from. Settings come from the environment: DEEPSEEK_DSPARK_GATE_DECAY and so on. The costs among them are what
    the rule starts from (calibrated) or believes (bucket); what a replay charges is --costs.
    """


@gate.command("replay", short_help="The speed of a rule on recorded rounds.")
@click.argument("file")
@click.option("--rule", default=DEFAULT, show_default=True, metavar="RULE", help=f"One of {RULES}.")
@accounting_option
@costs_option
@json_option
def replay_command(file, rule, accounting, costs, as_json):
    """Compute the speed of a rule that starts anew with every prompt of FILE.

    \b
    Examples:
      python -m dsv4 gate replay rounds.json
      python -m dsv4 gate replay rounds.json --rule bucket --accounting published --json

    \b
    JSON: rule; accounting; per_prompt {name: tok/s}; round_weighted tok/s (rounds over the sum of rounds times seconds
    per token); total tok/s; plain tok/s, of plain decoding at these costs; ratio_to_plain {round_weighted, total}; lengths
    {name: [tokens verified, per round]}; undrafted {name: [rounds without a draft]}.
    """
    report = replay(read_rounds(file), rule, accounting, GateSettings.from_env(), costs)
    overall = {"round_weighted": report.round_weighted, "total": report.total}
    if as_json:
        record = {
            "rule": rule,
            "accounting": accounting,
            "per_prompt": {name: one.rate for name, one in report.played.items()},
            **overall,
            "plain": report.plain,
            "ratio_to_plain": {name: rate / report.plain for name, rate in overall.items()},
            "lengths": {name: one.lengths for name, one in report.played.items()},
            "undrafted": {name: one.undrafted for name, one in report.played.items()},
        }
        say(json.dumps(record, ensure_ascii=False))
        return
    say(f"{'prompt':14s} {'speed':>12s}   {'ratio':12s}   tokens verified, round by round (-: nothing drafted)")
    for name, one in report.played.items():
        skipped = set(one.undrafted)
        lengths = " ".join("-" if i in skipped else str(n) for i, n in enumerate(one.lengths))
        say(f"{_rate(name, one.rate, report)}   {lengths}")
    say(_rate("round-weighted", report.round_weighted, report))
    say(_rate("total", report.total, report))
    say(f"{'plain':14s} {report.plain:6.2f} tok/s")


def _rate(name: str, rate: float, report: Report) -> str:
    return f"{name:14s} {rate:6.2f} tok/s   {rate / report.plain:.2f} x plain"


@gate.command("vary", short_help="The default rule with other settings.")
@click.argument("file")
@accounting_option
@costs_option
@json_option
def vary_command(file, accounting, costs, as_json):
    """Compute the speed of the default rule with each of its settings halved and doubled, one at a time.

    decay is varied by its memory, 1 / (1 - decay) rounds, margin by its excess over 1. Of a cost only what the rule starts
    from is varied; what is charged stays.
    """
    recording = read_rounds(file)
    rows = vary(recording, GateSettings.from_env(), accounting, costs)
    if as_json:
        records = [
            {"setting": setting, "value": value, "round_weighted": report.round_weighted,
             "per_prompt": {name: one.rate for name, one in report.played.items()}}
            for setting, value, report in rows
        ]  # fmt: skip
        say(json.dumps(records, ensure_ascii=False))
        return
    say(f"{'setting':18s} {'value':>6s}  {'all':>5s}  " + "  ".join(f"{name:>6s}" for name in recording.prompts))
    for setting, value, report in rows:
        rates = "  ".join(f"{one.rate:{max(6, len(name))}.2f}" for name, one in report.played.items())
        say(f"{setting:18s} {value:>6s}  {report.round_weighted:5.2f}  {rates}")


@gate.command("fit", short_help="The calibration that recorded rounds suggest.")
@click.argument("file")
@json_option
def fit_command(file, as_json):
    """Fit the calibration to the rounds of FILE: P(accepted) = sigmoid(a * confidence + b).

    For all prompts and, where there are several, for all but each one.
    """
    known = {name: outcomes(rounds) for name, rounds in read_rounds(file).prompts.items()}

    def fit(left_out: str | None) -> tuple[float, float]:
        a, b, *_ = fit_prior(np.concatenate([found for name, found in known.items() if name != left_out]))
        return a, b

    fits = {"all": fit(None)}
    if len(known) > 1:
        fits |= {f"without {name}": fit(name) for name in known}
    if as_json:
        say(json.dumps({name: dict(zip("ab", found)) for name, found in fits.items()}, ensure_ascii=False))
        return
    for name, (a, b) in fits.items():
        say(f"{name:20s} a = {a:.4f}  b = {b:.4f}")

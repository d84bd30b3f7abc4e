"""What a rule would have made of recorded rounds, and how much that depends on its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable, Iterator, Mapping

from ..errors import InputError
from .calibration import Prior, prior_for
from .costs import Costs
from .records import RecordedRound, Recording
from .rules import DEFAULT, OWN, Calibrated, Rule, make_rule
from .settings import GateSettings

ACCOUNTINGS = ("honest", "published")


@dataclass
class Played:
    """One prompt's rounds under a rule."""

    lengths: list[int] = field(default_factory=list)  # tokens verified, a number per round
    undrafted: list[int] = field(default_factory=list)  # rounds that did not even draft
    tokens: int = 0
    ms: float = 0.0

    @property
    def rate(self) -> float:
        """tok/s"""
        return 1000.0 * self.tokens / self.ms


def play(rule: Rule, rounds: Iterable[RecordedRound], costs: Costs, accounting: str = "honest") -> Played:
    """Play recorded rounds to a rule, which sees of each only what it would have seen.

    A round yields one token more than are accepted of those verified, and is charged costs.cost(n); the rule is told
    these times as a running engine would tell it. One that drafts and verifies nothing is charged draft and plain
    decoding (honest) or plain decoding only (published). One that does not draft is charged plain decoding, yields a
    token and tells the rule nothing else; so is one that was recorded without a draft. What
    was not verified when recorded has no known outcome, so n is at most the recorded k.
    """
    if accounting not in ACCOUNTINGS:
        raise InputError(f"accounting: expected one of {', '.join(ACCOUNTINGS)}; found {accounting!r}")
    found = Played()
    wasted = costs.wasted() if accounting == "honest" else costs.plain_ms
    for i, one in enumerate(rounds):
        n = accepted = 0
        if one.conf and rule.before_draft(one.margin):
            n = min(rule.choose(one.conf), one.k)
            accepted = min(n, one.accept)
            rule.observe(costs.draft_ms, n, costs.verify(n))
            rule.record(one.conf, n, accepted)
            found.ms += costs.cost(n) if n else wasted
        else:
            rule.observe(None, 0, costs.plain_ms)
            rule.record_skip()
            found.undrafted.append(i)
            found.ms += costs.plain_ms
        found.tokens += 1 + accepted
        found.lengths.append(n)
    return found


@dataclass
class Report:
    """plain: tok/s of plain decoding at what was charged, which every rate is to be held against."""

    played: Mapping[str, Played]
    plain: float

    @property
    def round_weighted(self) -> float:
        """tok/s: rounds ÷ Σ over prompts of rounds · seconds per token."""
        rounds = [len(one.lengths) for one in self.played.values()]
        return sum(rounds) / sum(n / one.rate for n, one in zip(rounds, self.played.values()))

    @property
    def total(self) -> float:
        """tok/s: all tokens ÷ all time."""
        return 1000.0 * sum(p.tokens for p in self.played.values()) / sum(p.ms for p in self.played.values())


def replay(
    recording: Recording, rule: str = DEFAULT, accounting: str = "honest", settings: GateSettings | None = None,
    costs: Costs | None = None,
) -> Report:  # fmt: skip
    """Play a recording to a rule that starts anew with every prompt, and with the settings' costs.

    costs: what is charged (default: those of the measured machine), whatever the rule believes.
    """

    def fresh(prompt: str) -> Rule:
        return make_rule(rule, recording.block_size, settings, prior_for(recording.source, prompt))

    return _report(recording, fresh, costs or Costs(), accounting)


def _report(recording: Recording, fresh: Callable[[str], Rule], costs: Costs, accounting: str) -> Report:
    played = {name: play(fresh(name), rounds, costs, accounting) for name, rounds in recording.prompts.items()}
    return Report(played, 1000.0 / costs.plain_ms)


def variations(settings: GateSettings) -> Iterator[tuple[str, str, dict]]:
    """(setting, value, arguments that change it) with every setting of `calibrated` halved and doubled.

    decay by the memory it gives, 1 / (1 - decay) rounds; margin by its excess over 1. The costs are those the rule
    starts from. A threshold and a floor of 0 stay 0 and are left out.
    """
    memory = 1.0 / (1.0 - settings.decay) if settings.decay < 1 else math.inf
    for factor in (0.5, 2.0):
        changed = {
            "decay": max(1.0 - 1.0 / (memory * factor), 0.01),
            "margin": 1.0 + (settings.margin - 1.0) * factor,
            **{name: getattr(settings, name) * factor for name in Costs.__dataclass_fields__},
        }
        for name, value in changed.items():
            yield name, f"{value:g}", {"settings": replace(settings, **{name: value})}
        for name, value in OWN.items():
            yield name, f"{value * factor:g}", {name: value * factor}
        for name in Prior._fields:
            yield f"prior {name}", f"x {factor:g}", {"scale": (name, factor)}


def vary(
    recording: Recording, settings: GateSettings, accounting: str = "honest", costs: Costs | None = None
) -> list[tuple[str, str, Report]]:
    """(setting, value, report) of `calibrated` with one setting at a time halved and doubled. The charge stays."""

    def run(changed: dict) -> Report:
        scale = changed.pop("scale", None)
        arguments = {"settings": settings, **changed}

        def fresh(prompt: str) -> Rule:
            prior = prior_for(recording.source, prompt)
            if scale:
                prior = prior._replace(**{scale[0]: getattr(prior, scale[0]) * scale[1]})
            return Calibrated(recording.block_size, prior=prior, **arguments)

        return _report(recording, fresh, costs or Costs(), accounting)

    rows = [(name, value, run(changed)) for name, value, changed in variations(settings)]
    return [("(as set)", "", run({})), *sorted(rows, key=lambda row: row[0])]

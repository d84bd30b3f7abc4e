"""Long streams that change: stretches of rounds drawn from the measured ones, kind after kind, one rule throughout.

python tests/gate_drift.py prints, for each stretch, the gate's tok/s over the better of plain decoding's and
always-5's: the mean over 100 seeds, the least, and the mean from the stretch's 61st round on.
"""

from __future__ import annotations

import random
from pathlib import Path

from dsv4.gate import Costs, Fixed, make_rule
from dsv4.gate.records import read_rounds
from dsv4.gate.replay import play

MEASURED = read_rounds(Path(__file__).parent / "golden" / "dspark_rounds_tp4.json").prompts
KINDS = {
    **MEASURED,
    "easy": [*MEASURED["repeat"], *MEASURED["code"]],
    "hard": [*MEASURED["prose"], *MEASURED["math"]],
    "hopeless": [one for rounds in MEASURED.values() for one in rounds if one.accept == 0],
}
COSTS = Costs()
PLAIN = 1000.0 / COSTS.plain_ms


def stream(kinds, length: int, seed: int):
    """A stretch of `length` rounds per kind, drawn with replacement."""
    draw = random.Random(seed)
    return [[draw.choice(KINDS[kind]) for _ in range(length)] for kind in kinds]


def ratios(stretches, rule: str = "calibrated", skip: int = 0) -> list[float]:
    """Per stretch: tok/s of one rule that lives through all of them ÷ the better of plain and always-5 there.

    skip: rounds at the beginning of each stretch that are played and not counted.
    """
    gate, found = make_rule(rule, 5), []
    for rounds in stretches:
        play(gate, rounds[:skip], COSTS)
        counted = rounds[skip:]
        found.append(play(gate, counted, COSTS).rate / max(PLAIN, play(Fixed(5, 5), counted, COSTS).rate))
    return found


def mean_ratios(kinds, length: int, seeds: int, rule: str = "calibrated", skip: int = 0):
    """(means, least) per stretch over the seeds."""
    rows = [ratios(stream(kinds, length, seed), rule, skip) for seed in range(seeds)]
    columns = list(zip(*rows))
    return [sum(column) / seeds for column in columns], [min(column) for column in columns]


if __name__ == "__main__":
    for kinds in (
        ("easy", "hard", "easy"), ("repeat", "prose", "repeat"), ("code", "prose", "code"),
        ("repeat", "math", "repeat"), ("code", "math", "code"), ("repeat", "hopeless", "repeat"),
    ):  # fmt: skip
        for length in (61, 120, 240):
            means, least = mean_ratios(kinds, length, 100)
            tails = mean_ratios(kinds, length, 100, skip=60)[0] if length > 61 else [None] * 3
            cells = "  ".join(
                f"{m:.3f} ({low:.2f})" + (f" then {tail:.3f}" if tail else "")
                for m, low, tail in zip(means, least, tails)
            )
            print(f"{' → '.join(kinds):28s} {length:4d} rounds each   {cells}")

"""Parity: do two recordings of the most likely tokens agree?

A recording is what `dsv4 logits --topk K --json` prints: {"prompt": [ids], "topk": [[{"token", "logit"}, …], …]}, one
list per position. A single flat list is also read: the candidates after the last token of the prompt.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import InputError

MARGIN = 0.3  # how close A's two best must be for another choice to be a tie and not a difference
VERDICTS = ("argmax_agree", "near_tie", "diverged")


@dataclass(frozen=True)
class Row:
    """One position: what A and B chose, by how much A preferred its choice to its second (logits), the verdict."""

    position: int
    a: int
    b: int
    margin: float | None
    verdict: str


@dataclass(frozen=True)
class Report:
    rows: list[Row]
    margin: float
    max_difference: float  # largest |logit difference| over tokens that both recorded at a position

    def count(self, verdict: str) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    def as_dict(self) -> dict:
        counts = {verdict: self.count(verdict) for verdict in VERDICTS}
        disagreements = [asdict(row) for row in self.rows if row.verdict != "argmax_agree"]
        return {
            "positions": len(self.rows),
            **counts,
            "margin": self.margin,
            "max_difference": self.max_difference,
            "disagreements": disagreements,
        }


def read(path: str | Path) -> tuple[object, list[list[tuple[int, float]]], bool]:
    """A recording: its prompt, its rows of (token, logit) best first, and whether it has the last position only."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: expected a readable file; {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON; {error}") from error
    if not isinstance(data, dict) or not {"prompt", "topk"} <= data.keys():
        raise InputError(
            f'{path}: expected one record with keys "prompt" and "topk", as `logits --topk K --json` prints'
        )
    topk = data["topk"]
    flat = isinstance(topk, list) and bool(topk) and isinstance(topk[0], dict)
    rows = [topk] if flat else topk
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path}: topk: expected a list of candidates per position; found {str(topk)[:60]}")
    if isinstance(data["prompt"], list) and not flat and len(rows) != len(data["prompt"]):
        raise InputError(
            f"{path}: topk: expected {len(data['prompt'])} positions, one per prompt token; found {len(rows)}"
        )
    return data["prompt"], [_candidates(path, number, row) for number, row in enumerate(rows)], flat


def _candidates(path, number: int, row) -> list[tuple[int, float]]:
    """One position's candidates, best first, equal ones by ascending id."""
    found = []
    for item in row if isinstance(row, list) else [None]:
        token, logit = (item.get("token"), item.get("logit")) if isinstance(item, dict) else (None, None)
        good = isinstance(token, int) and isinstance(logit, (int, float)) and math.isfinite(logit)
        if not good or isinstance(token, bool) or isinstance(logit, bool):
            raise InputError(
                f'{path}: topk[{number}]: expected {{"token": id, "logit": finite number}}; found {str(item)[:60]}'
            )
        found.append((token, float(logit)))
    if not found or len({token for token, _ in found}) != len(found):
        raise InputError(
            f"{path}: topk[{number}]: expected at least one candidate, each token once; found {str(row)[:60]}"
        )
    return sorted(found, key=lambda candidate: (-candidate[1], candidate[0]))


def compare(a: str | Path, b: str | Path, margin: float = MARGIN) -> Report:
    """Position by position: the same best token, another one where A was nearly undecided, or diverged.

    A position with a single candidate has no second to be close to: another choice there is diverged.
    Raises InputError for files that are no recordings, of different prompts, or of different length.
    """
    prompt_a, rows_a, flat_a = read(a)
    prompt_b, rows_b, flat_b = read(b)
    if prompt_a != prompt_b:
        raise InputError(f"{b}: expected the prompt of {a}, {_brief(prompt_a)}; found {_brief(prompt_b)}")
    if flat_a or flat_b:
        rows_a, rows_b = rows_a[-1:], rows_b[-1:]
    if len(rows_a) != len(rows_b):
        raise InputError(f"{b}: expected {len(rows_a)} positions as in {a}; found {len(rows_b)}")
    first = len(prompt_a) - len(rows_a) if isinstance(prompt_a, list) else 0
    rows = [_judge(first + i, ra, rb, margin) for i, (ra, rb) in enumerate(zip(rows_a, rows_b))]
    shared = [
        abs(logit - dict(rb)[token]) for ra, rb in zip(rows_a, rows_b) for token, logit in ra if token in dict(rb)
    ]
    return Report(rows, margin, max(shared, default=0.0))


def _judge(position: int, a: list[tuple[int, float]], b: list[tuple[int, float]], margin: float) -> Row:
    gap = a[0][1] - a[1][1] if len(a) > 1 else None
    if a[0][0] == b[0][0]:
        verdict = "argmax_agree"
    else:
        verdict = "near_tie" if gap is not None and gap < margin else "diverged"
    return Row(position, a[0][0], b[0][0], gap, verdict)


def _brief(prompt) -> str:
    text = str(prompt)
    return text if len(text) <= 60 else f"{text[:57]}…"


def render(report: Report) -> str:
    """The counts, and a line for each position that does not agree."""
    lines = [f"{len(report.rows)} positions, largest logit difference {report.max_difference:.3g}"]
    lines += [f"{verdict:>12}  {report.count(verdict)}" for verdict in VERDICTS]
    for row in report.rows:
        if row.verdict != "argmax_agree":
            gap = "unknown" if row.margin is None else f"{row.margin:.4g}"
            lines.append(f"position {row.position}: A {row.a}, B {row.b}, A's margin {gap}: {row.verdict}")
    return "\n".join(lines)

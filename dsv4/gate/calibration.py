"""From a confidence to the chance that the drafted token is accepted, learned from the first rounds of a text on."""

from __future__ import annotations

import math
from math import exp
from typing import Iterable, Iterator, NamedTuple, Sequence

LIMIT = 30.0  # beyond it a sigmoid is 0 or 1 in float64
LOWEST_SLOPE = 0.05  # more confidence never means less acceptance


class Prior(NamedTuple):
    """What is believed of a text before its first round: slope and offset, each with its precision (1 / variance).

    Precisions: between the measured prompts the offset moves by about 0.7 (1/0.7² = 2), the slope by about 0.2.
    """

    a: float
    b: float
    a_precision: float = 20.0
    b_precision: float = 2.0


# Maximum a posteriori fits (fit.fit_prior) to the 31 rounds that were measured on four kinds of prompt; `python -m
# dsv4 gate fit FILE` prints them. PRIOR is all four. HELD_OUT[kind] leaves that kind out: it is what a replay of these
# very rounds must use, so that no prompt is scored with what was learned from it.
PRIOR = Prior(1.0407, 0.2670)
MEASURED = "TP=4 FP4 active, 4x2080Ti, DeepSeek-V4-Flash-0731, 2026-08-05"
HELD_OUT = {
    "prose": Prior(0.9079, 0.3791),
    "math": Prior(1.0989, 0.5970),
    "repeat": Prior(1.1347, 0.0210),
    "code": Prior(1.0031, 0.1080),
}


def prior_for(source: str, prompt: str) -> Prior:
    """The prior for a recorded prompt: PRIOR, unless its rounds are among those that PRIOR was fitted to."""
    return HELD_OUT.get(prompt, PRIOR) if source == MEASURED else PRIOR


def sigmoid(x: float) -> float:
    if not -LIMIT < x < LIMIT:
        x = min(max(x, -LIMIT), LIMIT)
    return 1.0 / (1.0 + math.exp(-x))


def known_outcomes(confidences: Sequence[float], n: int, accepted: int) -> Iterator[tuple[float, bool]]:
    """(confidence, accepted?) of the tokens a round tells about: behind the first rejected one nothing is known."""
    return zip(confidences[:n], (True,) * accepted + (False,))


def stepped(a: float, b: float, aa: float, ab: float, bb: float, pull_a: float, pull_b: float) -> tuple[float, float]:
    """(a, b) + precision⁻¹ · pull"""
    det = aa * bb - ab * ab
    a += (bb * pull_a - ab * pull_b) / det
    return LOWEST_SLOPE if a < LOWEST_SLOPE else a, b + (aa * pull_b - ab * pull_a) / det


class Calibration:
    """P(accepted | confidence c) = sigmoid(a·c + b), with a Gaussian belief about (a, b).

    Each outcome is one Newton step from the belief so far (as in online Bayesian logistic regression); each round,
    what was learned weighs `decay` times less against the prior, so a change of text is followed.
    """

    __slots__ = ("prior", "decay", "a", "b", "_aa", "_ab", "_bb")

    def __init__(self, prior: Prior = PRIOR, decay: float = 0.9):
        self.prior, self.decay = prior, decay
        self.a, self.b = prior.a, prior.b
        self._aa, self._ab, self._bb = prior.a_precision, 0.0, prior.b_precision  # the belief's precision matrix

    def chances(self, confidences: Sequence[float]) -> list[float]:
        a, b, low, high, chances = self.a, self.b, -LIMIT, LIMIT, []
        for confidence in confidences:
            x = a * confidence + b
            chances.append(1.0 / (1.0 + exp(-x)) if low < x < high else sigmoid(x))
        return chances

    def forget(self, rounds: int = 1) -> None:
        """Rounds pass: the evidence (belief minus prior) is scaled by decay with each."""
        a, b, a_precision, b_precision = self.prior
        aa, ab, bb, keep = self._aa, self._ab, self._bb, self.decay
        if rounds > 1:
            keep **= rounds
        da, db = self.a - a, self.b - b
        pull_a = keep * (aa * da + ab * db)
        pull_b = keep * (ab * da + bb * db)
        self._aa = aa = a_precision + keep * (aa - a_precision)
        self._bb = bb = b_precision + keep * (bb - b_precision)
        self._ab = ab = ab * keep
        self.a, self.b = stepped(a, b, aa, ab, bb, pull_a, pull_b)

    def learn(self, outcomes: Iterable[tuple[float, bool]]) -> None:
        """(confidence, accepted?) of some tokens, one after the other."""
        a, b, aa, ab, bb = self.a, self.b, self._aa, self._ab, self._bb
        low, high = -LIMIT, LIMIT
        for confidence, accepted in outcomes:
            x = a * confidence + b
            p = 1.0 / (1.0 + exp(-x)) if low < x < high else sigmoid(x)
            error, weight = (1.0 if accepted else 0.0) - p, p * (1.0 - p)
            weighted = weight * confidence
            aa += weighted * confidence
            ab += weighted
            bb += weight
            pull, det = error * confidence, aa * bb - ab * ab
            a += (bb * pull - ab * error) / det  # as stepped() does; a call would take as long again
            b += (aa * error - ab * pull) / det
            if a < LOWEST_SLOPE:
                a = LOWEST_SLOPE
        self.a, self.b, self._aa, self._ab, self._bb = a, b, aa, ab, bb


class MarginModel:
    """What drafting gains over plain decoding, in tokens, by the margin of the committed token.

    Level: means of the gain and of log(1 + margin) over the recent drafts. Slope: ridge regression of the gain on
    log(1 + margin), both about their recent means, with ten times the memory, as it outlives a change of text.
    """

    __slots__ = ("decay", "_weight", "_x", "_gain", "_xx", "_xg")
    NOISE = 2.0  # variance of one round's gain in tokens²: with five drafts it lies between about -2.5 and +2.5

    def __init__(self, decay: float = 0.9):
        self.decay = decay
        self._weight = self._x = self._gain = self._xg = 0.0
        self._xx = 1.0  # the ridge: one unit in favour of no slope

    def learn(self, margin: float, gain: float) -> None:
        x = math.log1p(max(margin, 0.0))
        keep = 1.0 - (1.0 - self.decay) / 10.0
        if self._weight:
            dx = x - self._x
            self._xx = 1.0 + keep * (self._xx - 1.0) + dx * dx
            self._xg = keep * self._xg + dx * (gain - self._gain)
        self._weight = self.decay * self._weight + 1.0
        self._x += (x - self._x) / self._weight
        self._gain += (gain - self._gain) / self._weight

    def verdict(self, margin: float, losing: bool) -> bool | None:
        """Would drafting gain? None: the slope is not yet twice its standard error, so the margin says nothing.

        losing: recent drafts lost, so the level counts as no better than plain decoding's.
        """
        slope = self._xg / self._xx
        if slope * slope * self._xx < 4.0 * self.NOISE:
            return None
        level = min(self._gain, 0.0) if losing else self._gain
        return level + slope * (math.log1p(max(margin, 0.0)) - self._x) > 0.0

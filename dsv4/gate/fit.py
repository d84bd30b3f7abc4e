"""The prior that rounds suggest, all outcomes at once. A running gate learns one by one (calibration)."""

from __future__ import annotations

from typing import Iterable

import numpy as np

from .calibration import LIMIT, Prior, known_outcomes, stepped
from .records import RecordedRound

STEPS = 50  # of Newton, at the most; some ten suffice
NEAR = 1e-12  # a step that moves neither a nor b by so much is the last


def outcomes(rounds: Iterable[RecordedRound]) -> np.ndarray:
    """What rounds tell: float64 [outcomes, 2], a confidence and whether the token was accepted (1) or not (0)."""
    pairs = [pair for one in rounds for pair in known_outcomes(one.conf, one.k, one.accept)]
    return np.array(pairs, np.float64).reshape(-1, 2)


def fit_prior(known: np.ndarray) -> Prior:
    """The most likely (a, b) for outcomes [n, 2], given that a head's logit is about right.

    "About right" is a unit Gaussian around a = 1, b = 0; without it a few rounds that were all accepted have no fit.
    """
    confidence, accepted = known.T
    a, b = 1.0, 0.0
    for _ in range(STEPS):
        before = a, b
        p = 1.0 / (1.0 + np.exp(-np.clip(a * confidence + b, -LIMIT, LIMIT)))
        weight, error = p * (1.0 - p), accepted - p
        aa = 1.0 + float(np.sum(weight * confidence * confidence))
        ab = float(np.sum(weight * confidence))
        bb = 1.0 + float(np.sum(weight))
        a, b = stepped(a, b, aa, ab, bb, 1.0 - a + float(np.sum(error * confidence)), float(np.sum(error)) - b)
        if max(abs(a - before[0]), abs(b - before[1])) < NEAR:
            break
    return Prior(a, b)

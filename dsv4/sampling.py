"""Sampling: from a row of logits to a token, reproducible by seed and position alone."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .errors import Dsv4Error, InputError

MAX_LOGPROBS = 20
SEED_LIMIT = 2**64
Choose = Callable[[np.ndarray, int], int]  # (logits [vocab], position the token is for) → token


def _integer(name: str, value, low: int, high: int | None = None) -> int:
    """`value` as an int within low..high, or InputError naming the field."""
    expected = f"at least {low}" if high is None else f"{low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low or (high is not None and number > high):
        raise InputError(f"{name}: expected an integer, {expected}; found {value!r}")
    return number


def _fraction(name: str, value, low: float, high: float, expected: str, open_low: bool = False) -> float:
    """`value` as a finite float within low..high (low itself excluded if open_low), or InputError."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (low <= number <= high) or math.isinf(number) or (open_low and number == low):
        raise InputError(f"{name}: expected {expected}; found {value!r}")
    return number


def _items(value) -> Sequence:
    if isinstance(value, (str, bytes)):
        return (value,)
    try:
        return tuple(value)
    except TypeError:
        return (value,)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to end. Raises InputError naming the field that is wrong.

    temperature  0 takes the most likely token; above 0 the logits are divided by it
    top_k        keep the k most likely tokens (0 = all)
    top_p        then the fewest of those whose share reaches top_p (1 = all)
    min_p        then those at least min_p times as likely as the most likely one (0 = all)
    seed         0 .. 2^64−1; None draws a new one for each request
    stop         texts that end the answer and are not part of it (a single string is taken as one text)
    stop_ids     token ids that end the answer, beside the model's own end tokens
    ignore_eos   treat the model's end tokens as any other
    logprobs     None: off; 0: of the chosen token; n ≤ 20: also of the n most likely
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        put("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        put("temperature", _fraction("temperature", self.temperature, 0, math.inf, "a number, 0 or more"))
        put("top_k", _integer("top_k", self.top_k, 0))
        put("top_p", _fraction("top_p", self.top_p, 0, 1, "a number above 0, at most 1", open_low=True))
        put("min_p", _fraction("min_p", self.min_p, 0, 1, "a number from 0 to 1"))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, 0, SEED_LIMIT - 1))
        put("stop", _items(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop: expected non-empty texts; found {text!r}")
        put("stop_ids", tuple(_integer("stop_ids", i, 0) for i in _items(self.stop_ids)))
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos: expected true or false; found {self.ignore_eos!r}")
        if self.logprobs is not None:
            put("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: their own, or one drawn now."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))


def _best(logits: np.ndarray) -> int | None:
    """The largest of logits [vocab], the lower id where equal; None if one of them is NaN or infinite."""
    # Both return a NaN's place where there is one; min() and max() take several times as long for a row.
    best = int(logits.argmax())
    return best if math.isfinite(logits[best]) and math.isfinite(logits[logits.argmin()]) else None


def _finite(logits: np.ndarray) -> np.ndarray:
    """logits [vocab]; raises Dsv4Error if one of them is NaN or infinite."""
    if _best(logits) is not None:
        return logits
    good = np.isfinite(logits)
    bad = int(np.argmin(good))
    raise Dsv4Error(
        f"logits: expected finite numbers; found {np.count_nonzero(~good)} of {good.size} that are not, the first "
        f"{logits[bad]} at token {bad} (debug mode names the layer that made it)"
    )


def descending(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest values [n], largest first, equal ones by ascending index."""
    k = min(k, values.size)
    least = np.partition(values, values.size - k)[values.size - k]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")][:k]


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """logits [vocab] → float64 distribution [vocab] after temperature, top-k, top-p and min-p, in that order.

    Each filter sees what the one before left, renormalised; the most likely token always stays. Where a cut falls
    between equal probabilities the lower token id stays. Temperature 0 puts everything on the most likely token.
    """
    logits = _finite(np.asarray(logits)).astype(np.float64)
    if params.temperature == 0:
        p = np.zeros(logits.size)
        p[np.argmax(logits)] = 1.0
        return p
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends the losers to exp(−inf) = 0
        p = np.exp((logits - logits.max()) / params.temperature)  # weights: the most likely token's is 1
    if 0 < params.top_k < p.size:
        p = _keep(p, descending(p, params.top_k))
    if params.top_p < 1:
        order = descending(p, p.size)
        share = np.cumsum(p[order])
        p = _keep(p, order[: 1 + np.searchsorted(share, params.top_p * share[-1])])
    if params.min_p > 0:
        p[p < params.min_p] = 0.0
    return p / p.sum()


def _keep(p: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(p)
    kept[tokens] = p[tokens]
    return kept


def generator(seed: int, position: int) -> np.random.Generator:
    """Random numbers of one position: Philox with the seed as key and the position in the upper half of its counter.

    What is drawn for one position therefore never depends on how much was drawn for others.
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, position, 0]))


def greedy(logits: np.ndarray, position: int) -> int:
    """The largest of logits [vocab], the lower id where equal; whatever the position. Raises Dsv4Error for non-finite ones.

    Where this very function is to choose, speculation takes Ops.best's answer from where the backend computes instead.
    """
    best = _best(logits)
    if best is None:
        _finite(logits)  # raises
    return best


def chooser(params: SamplingParams) -> Choose:
    """The function that chooses a token as these parameters say."""
    return greedy if params.temperature == 0 else lambda logits, position: sample(logits, params, position)


def sample(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """The token for `position` (its index in the sequence) from logits [vocab]. Without a seed a new one is drawn.

    An exponential race: token i arrives at time E_i / p_i, E_i ~ Exp(1), and the first to arrive is i with probability
    p_i. The E_i depend on seed and position alone, so two distributions that are alike mostly agree on the winner:
    a draft sampled by this rule is accepted about as often as the distributions overlap, and never changes the draw.
    """
    if params.temperature == 0:
        return greedy(logits, position)
    p = probabilities(logits, params)
    kept = np.flatnonzero(p)
    draws = generator(params.seeded().seed, position).standard_exponential(p.size)
    with np.errstate(over="ignore"):  # a token of hardly any weight never arrives
        times = draws[kept] / p[kept]
    return int(kept[np.argmin(times)])


def token_logprobs(logits: np.ndarray, token: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Natural logarithms of the model's own probabilities (before temperature and filters), float64.

    Returns that of `token`, and (token, logprob) of the n most likely, best first, equal ones by ascending id.
    """
    logits = _finite(np.asarray(logits)).astype(np.float64)
    shifted = logits - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = descending(logprobs, n) if n else ()
    return float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best)

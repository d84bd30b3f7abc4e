"""Rules of the gate, one object per sequence.

A round asks before_draft, and if that says yes, choose; then it tells record, or record_skip where nothing was drafted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Sequence

from ..errors import ConfigError
from .calibration import PRIOR, Calibration, MarginModel, Prior, known_outcomes
from .costs import Costs, Evidence, MeasuredCosts
from .settings import GateSettings

RULES = "calibrated, bucket, always, fixed:N"
DEFAULT = "calibrated"
OWN = {"patience": 1.0, "first_wait": 5.0, "probe_share": 0.0275}  # settings of `calibrated` that no other rule has


class Rule:
    """What the engine calls, round by round. `block` is how many tokens a draft has."""

    def __init__(self, block: int, settings: GateSettings | None = None):
        if block < 1:
            raise ConfigError(f"gate: expected a block of at least one token; found {block}")
        self.block = block
        self.settings = settings if settings is not None else GateSettings()
        self.costs = Costs.of(self.settings)
        self.skipped_by_margin = False  # was it the margin, when before_draft last said no?
        self.reads_margin = self.settings.margin_threshold > 0.0  # does before_draft? It takes a while to compute

    def before_draft(self, margin: float | None = None) -> bool:
        """Draft this round? margin: top1 - top2 logit of the token just committed, where known."""
        self.skipped_by_margin = margin is not None and margin < self.settings.margin_threshold
        return not self.skipped_by_margin

    def choose(self, confidences: Sequence[float]) -> int:
        """How many of the drafted tokens to verify, 0 .. len(confidences)."""
        raise NotImplementedError

    def record(self, confidences: Sequence[float], n: int, accepted: int) -> None:
        """A round that drafted and verified n tokens, of which the first `accepted` were right."""

    def record_skip(self) -> None:
        """A round that drafted nothing."""

    def observe(self, draft_ms: float | None, n: int, verify_ms: float) -> None:
        """What the round took: draft_ms (None: no draft), and verify_ms for n drafted tokens (0: a plain step)."""

    def _pick(self, chances: Sequence[float], unspeculated: float) -> int:
        """The best n for these chances of acceptance, no less than the floor."""
        best, floor = self._best(chances, unspeculated), self.settings.min_draft
        return best if best >= floor else min(floor, len(chances))

    def _best(self, chances: Sequence[float], unspeculated: float) -> int:
        """The n of the highest rate, (1 + Σ_{i≤n} Π_{j≤i} chance_j) / cost(n): the tokens to expect per millisecond.

        unspeculated: milliseconds of a round with n = 0. The whole block unless another n is `margin` times as good;
        the shortest of equals.
        """
        costs = self.costs
        tokens = reached = 1.0
        ms, slope = costs.draft_ms + costs.verify_base_ms, costs.verify_slope_ms
        best, best_rate, rate = 0, 1.0 / unspeculated, 0.0
        for n, chance in enumerate(chances, 1):
            reached *= chance
            tokens += reached
            ms += slope
            rate = tokens / ms
            if rate > best_rate:
                best, best_rate = n, rate
        return len(chances) if best_rate < self.settings.margin * rate else best


class Fixed(Rule):
    """Always n tokens, whatever the confidence and the margin."""

    def __init__(self, n: int, block: int, settings: GateSettings | None = None):
        super().__init__(block, settings)
        self.n = n

    def before_draft(self, margin: float | None = None) -> bool:
        return self.n > 0

    def choose(self, confidences: Sequence[float]) -> int:
        return min(self.n, len(confidences))


class Bucket(Rule):
    """The published rule: acceptance counted in buckets of confidence, with two pseudo-counts at 0.75 in each.

    It decides as if a draft that is not verified cost nothing. Counts decay before a recorded round; a round with
    n = 0 changes nothing.
    """

    EDGES = (-0.5, 0.5, 1.5, 3.0, 6.0)
    PRIOR_COUNT, PRIOR_MATCH = 2.0, 0.75

    def __init__(self, block: int, settings: GateSettings | None = None):
        super().__init__(block, settings)
        self.seen = [0.0] * (len(self.EDGES) + 1)
        self.matched = [0.0] * (len(self.EDGES) + 1)

    def chances(self, confidences: Sequence[float]) -> list[float]:
        prior = self.PRIOR_COUNT * self.PRIOR_MATCH
        bins = [bisect_right(self.EDGES, confidence) for confidence in confidences]
        return [(self.matched[i] + prior) / (self.seen[i] + self.PRIOR_COUNT) for i in bins]

    def choose(self, confidences: Sequence[float]) -> int:
        return self._pick(self.chances(confidences), self.costs.plain_ms)

    def record(self, confidences: Sequence[float], n: int, accepted: int) -> None:
        if n == 0:
            return
        decay = self.settings.decay
        self.seen = [x * decay for x in self.seen]
        self.matched = [x * decay for x in self.matched]
        for confidence, match in known_outcomes(confidences, n, accepted):
            i = bisect_right(self.EDGES, confidence)
            self.seen[i] += 1.0
            self.matched[i] += match


class Calibrated(Rule):
    """Our rule: a learned sigmoid per sequence, and a balance that says whether to draft at all.

    The balance is what drafting gained over plain decoding, in tokens: it starts at `patience`, never exceeds it, and
    a round moves it by its tokens minus its time / plain_ms. Once overdrawn, nothing is drafted for `first_wait`
    rounds, then one draft is tried, a probe. A probe that gains pays off all debts; after one that does not, the wait
    doubles, up to where the probes' drafts take `probe_share` of plain decoding's time. Where the margin of the
    committed token has proved to tell rounds that gain from others, it decides instead, and probes go on. A floor
    (min_draft) means that every round speculates. Costs are measured as rounds go, for which a plain step is due at
    times. Where several sequences share their forwards, their costs say whether to draft (Costs.pays), by what drafts
    brought to this one and to all; balance and margin then say nothing.
    """

    MEMORY = 0.95  # weight of what a draft brought, one draft later

    def __init__(
        self, block: int, settings: GateSettings | None = None, prior: Prior = PRIOR, costs: Costs | None = None,
        patience: float = OWN["patience"], first_wait: float = OWN["first_wait"],
        probe_share: float = OWN["probe_share"],
    ):  # fmt: skip
        super().__init__(block, settings)
        for name, value in (("patience", patience), ("first_wait", first_wait), ("probe_share", probe_share)):
            if not 0 < value < math.inf:
                raise ConfigError(f"gate: {name}: expected a number > 0; found {value!r}")
        self.costs = costs if costs is not None else MeasuredCosts(self.costs)
        self.observe = self.costs.observe
        self.reads_margin |= not self.costs.shared
        self.calibration = Calibration(prior, self.settings.decay)
        self.margins = MarginModel(self.settings.decay)
        self.patience, self.first_wait, self.probe_share = patience, first_wait, probe_share
        self._wait = first_wait  # rounds without a draft before a probe
        self._skipped = 0  # rounds since the last draft
        self._own = Evidence()
        self._margin: float | None = None
        self._start, self._tokens, self._ms = patience, 0, 0.0  # the balance: as it was, and what came since

    @property
    def balance(self) -> float:
        """Tokens; what is learned about plain decoding's time corrects it at once."""
        return min(self._start + self._tokens - self._ms / self.costs.plain_ms, self.patience)

    @property
    def wait(self) -> float:
        return min(self._wait, self.costs.draft_ms / (self.probe_share * self.costs.plain_ms))

    def before_draft(self, margin: float | None = None) -> bool:
        self._margin, self.skipped_by_margin = margin, False
        if margin is not None and not super().before_draft(margin):
            return False
        if self.settings.min_draft:
            return True
        if self.costs.shared:
            return self.costs.pays(self._own)
        if self._skipped >= self.wait:
            return True
        balance = self.balance
        if self.costs.plain_is_due(balance < self.patience / 2.0):
            return False
        verdict = None if margin is None else self.margins.verdict(margin, balance < 0.0)
        self.skipped_by_margin = verdict is False
        return balance >= 0.0 if verdict is None else verdict

    def choose(self, confidences: Sequence[float]) -> int:
        # The draft is paid for, so n = 0 costs it too. A probe is careful: it verifies only what beats plain decoding.
        costs = self.costs
        careful = not costs.shared and self.balance < 0.0
        unspeculated = costs.plain_ms if careful else costs.wasted()
        if self._skipped:
            self.calibration.forget(self._skipped)
            self._skipped = 0
        return self._pick(self.calibration.chances(confidences), unspeculated)

    def record(self, confidences: Sequence[float], n: int, accepted: int) -> None:
        costs, calibration = self.costs, self.calibration
        costs.learn(n, accepted)
        self._own.add(self.MEMORY, n, accepted)
        calibration.forget()
        calibration.learn(known_outcomes(confidences, n, accepted))
        if not costs.shared:
            self._weigh(n, accepted)

    def _weigh(self, n: int, accepted: int) -> None:
        """What the round says of balance, wait and margins."""
        ms = self.costs.cost(n) if n else self.costs.wasted()
        probed = self.balance < 0.0
        if probed:
            self._start, self._tokens, self._ms = 0.0, 0, 0.0
        self._tokens += 1 + accepted
        self._ms += ms
        balance = self.balance
        if balance >= self.patience:
            self._start, self._tokens, self._ms = self.patience, 0, 0.0
        if balance >= 0.0:
            self._wait = self.first_wait
        elif probed:
            self._wait = 2.0 * self.wait
        if self._margin is not None:
            self.margins.learn(self._margin, 1 + accepted - ms / self.costs.plain_ms)

    def record_skip(self) -> None:
        self._skipped += 1  # choose forgets for all of them


def rule_of(settings: GateSettings) -> str:
    """The rule of spec "gate": the default one, or always where the settings turn the gate off."""
    return DEFAULT if settings.on else "always"


def make_rule(
    name: str, block: int, settings: GateSettings | None = None, prior: Prior = PRIOR, costs: Costs | None = None
) -> Rule:
    """A new rule for one sequence by its name: calibrated, bucket, always, fixed:N. Raises ConfigError.

    For `calibrated`: prior, what it believes before the first round; costs, which all sequences of an engine share
    (default: new ones that start from the settings'). `bucket` keeps the settings' costs, as published.
    """
    kind, colon, count = name.partition(":")
    if kind == "fixed" and count.isascii() and count.isdecimal() and int(count) <= block:
        return Fixed(int(count), block, settings)
    if kind == "fixed":
        raise ConfigError(f"gate rule: expected fixed:N with N from 0 to the block's {block}; found {name!r}")
    if not colon and kind == "always":
        return Fixed(block, block, settings)
    if not colon and kind == "bucket":
        return Bucket(block, settings)
    if not colon and kind == DEFAULT:
        return Calibrated(block, settings, prior, costs)
    raise ConfigError(f"gate rule: expected one of {RULES}; found {name!r}")

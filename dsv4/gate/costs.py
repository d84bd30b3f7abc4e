"""What the parts of a round cost: as given, or as measured round by round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

from .settings import LEAST_MS, MOST_MS, GateSettings


class Evidence:
    """What rounds that drafted brought: means of tokens verified and accepted, the older ones counting less."""

    __slots__ = ("weight", "verified", "accepted")

    def __init__(self) -> None:
        self.weight = self.verified = self.accepted = 0.0

    def add(self, keep: float, verified: int, accepted: int) -> None:
        """One round more; those before it now count `keep` times what they did."""
        self.weight = weight = keep * self.weight + 1.0
        self.verified += (verified - self.verified) / weight
        self.accepted += (accepted - self.accepted) / weight


@dataclass
class Costs:
    """Milliseconds of a round's parts; only ratios matter. A verify takes verify_base_ms + n · verify_slope_ms."""

    draft_ms: float = GateSettings.draft_ms
    verify_base_ms: float = GateSettings.verify_base_ms
    verify_slope_ms: float = GateSettings.verify_slope_ms
    plain_ms: float = GateSettings.plain_ms

    shared = False  # of a batch: `pays` says whether to draft

    @classmethod
    def of(cls, settings: GateSettings) -> Costs:
        return cls(settings.draft_ms, settings.verify_base_ms, settings.verify_slope_ms, settings.plain_ms)

    def verify(self, n: int) -> float:
        """Verifying n drafted tokens; n = 0: a plain step."""
        return self.verify_base_ms + self.verify_slope_ms * n if n else self.plain_ms

    def cost(self, n: int) -> float:
        """A round that verifies n drafted tokens; n = 0: plain decoding, without a draft."""
        return self.draft_ms + self.verify(n) if n else self.plain_ms

    def wasted(self) -> float:
        """A round that drafted and then decoded plainly."""
        return self.draft_ms + self.plain_ms

    def observe(self, draft_ms: float | None, n: int, verify_ms: float) -> None:
        """A round took draft_ms (None: no draft), then verify_ms for n drafted tokens (0: a plain step)."""

    def plain_is_due(self, lost: bool) -> bool:
        """Should a plain step be taken to learn how long it takes? lost: lately drafting seemed to lose."""
        return False

    def learn(self, n: int, accepted: int) -> None:
        """A draft of some sequence had so many of its n verified tokens accepted."""

    def pays(self, own: Evidence) -> bool:
        """Where shared: draft now? own: what the sequence's drafts brought."""
        raise NotImplementedError


class Mean:
    """A mean of milliseconds that follows changes, and that one slow sample does not upset."""

    __slots__ = ("ms", "weight")
    DECAY = 0.95  # weight of a sample, one sample later
    CLIP = 2.0

    def __init__(self) -> None:
        self.ms = self.weight = 0.0

    def add(self, ms: float) -> None:
        """Nothing is fast by accident: of a sample and the mean so far, the larger is cut to CLIP times the other."""
        ms = min(max(ms, LEAST_MS), MOST_MS)
        if self.ms > 0.0:
            ms = min(ms, self.CLIP * self.ms)
            self.ms = min(self.ms, self.CLIP * ms)
        self.weight = self.DECAY * self.weight + 1.0
        self.ms += (ms - self.ms) / self.weight

    def towards(self, ms: float, weight: float) -> float:
        """The mean with `weight` samples of `ms` among it."""
        return (self.weight * self.ms + weight * ms) / (self.weight + weight)


class MeasuredCosts(Costs):
    """Costs of one machine, which follow what rounds took. All its sequences share them.

    The given costs are a start: they scale with the machine's speed, and count as GIVEN samples of each part. Plain
    decoding is the verify of no drafted token, so it is one sample of the line base + n · slope; until it has been
    measured, it counts as no longer than the verify of one token, and at least half as long.
    """

    GIVEN = 0.2  # a given ratio may be wrong by half or more, a sample by a tenth or two
    POINTS = (1, 5)  # the line counts as given at these n
    REMEASURE = 64  # rounds without a plain step until one is due
    REMEASURE_LOST = 16  # where drafting seems to lose; where not, until the first is due

    def __init__(self, given: Costs | None = None):
        given = given or Costs()
        super().__init__(given.draft_ms, given.verify_base_ms, given.verify_slope_ms, given.plain_ms)
        self._given = given
        self._draft = Mean()
        self._verified: dict[int, Mean] = {}
        self._age = self.REMEASURE - self.REMEASURE_LOST  # rounds since a plain step

    def observe(self, draft_ms: float | None, n: int, verify_ms: float) -> None:
        self._age = self._age + 1 if n else 0
        if draft_ms is not None:
            self._draft.add(draft_ms)
        if n not in self._verified:
            self._verified[n] = Mean()
        self._verified[n].add(verify_ms)
        self._estimate()

    def plain_is_due(self, lost: bool) -> bool:
        return self._age >= (self.REMEASURE_LOST if lost else self.REMEASURE)

    def _estimate(self) -> None:
        given, weight, draft = self._given, self.GIVEN, self._draft
        took = draft.weight * draft.ms + sum(one.weight * one.ms for one in self._verified.values())
        expected = draft.weight * given.draft_ms + sum(m.weight * given.verify(n) for n, m in self._verified.items())
        speed = took / expected if expected else 1.0
        self.draft_ms = draft.towards(speed * given.draft_ms, weight)
        points = [(n, speed * given.verify(n), weight) for n in self.POINTS]
        points += [(n, one.ms, one.weight) for n, one in self._verified.items() if n]
        plain = self._verified.get(0)
        if plain:
            points.append((0, plain.ms, 1.0))
        self.verify_base_ms, self.verify_slope_ms = line(points)
        one = self.verify(1)
        start = min(max(speed * given.plain_ms, one / 2), one)
        self.plain_ms = plain.towards(start, weight) if plain else start


def line(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """(base, slope) of the least squares line through (n, ms, weight), n not all equal; neither is negative."""
    weight = x = y = xx = xy = 0.0
    for n, ms, w in points:
        weight, x, y, xx, xy = weight + w, x + w * n, y + w * ms, xx + w * n * n, xy + w * n * ms
    slope = (weight * xy - x * y) / (weight * xx - x * x)
    if slope < 0.0:
        return y / weight, 0.0
    base = (y - slope * x) / weight
    return (base, slope) if base > 0.0 else (0.0, xy / xx)

"""What a sequence's rounds cost where several share every draft and every forward, and whether drafting pays there."""

from __future__ import annotations

from math import sqrt

from ..gate import Costs, Evidence
from ..gate.costs import line
from ..gate.settings import LEAST_MS, MOST_MS


class Line:
    """ms = base + slope · x, fitted to samples as they come; a few slow ones, where the machine stumbles, do not count.

    x are sorted by their power of two, and each such group counts by its recent means: what many samples of one x say of
    it does not make the others forgotten. given: a line to start from, scaled to the speed of the samples.
    """

    DECAY = 0.95  # weight of a sample, one sample of its group later
    CLIP = 2.0  # of a sample and the line, the larger is cut to so many times the other
    KNOWN = 2.0  # weight of a group whose samples are looked at for slow ones: more than CLIP times as slow
    STUMBLE = 8  # slow ones in a row in a group that do not count: with the next the machine is slower
    GIVEN = 0.005  # weight of the given line at each of two x; that of a group is below 1

    def __init__(self, base: float, slope: float, at: tuple[float, float]):
        self._given, self._at = (base, slope), at
        self.base, self.slope = base, slope
        self._groups: dict[int, tuple[float, float, float]] = {}  # (weight, mean x, mean ms)
        self._slow: dict[int, int] = {}  # of each group: slow samples until now, in a row

    def __call__(self, x: float) -> float:
        return self.base + self.slope * x

    def near(self, x: float) -> float:
        """ms at x, where the samples of its group count before the line: a machine is not quite a line."""
        weight, mean_x, mean_ms = self._groups.get(int(x).bit_length(), (0.0, 1.0, 0.0))
        ms = self(x)
        return ms * (1.0 + (mean_ms / self(mean_x) - 1.0) * weight / (weight + 0.5)) if weight else ms

    def add(self, x: int, ms: float) -> None:
        ms = min(max(ms, LEAST_MS), MOST_MS)  # a clock may stand, or jump
        group, groups = x.bit_length(), self._groups
        weight, mean_x, mean_ms = groups.get(group, (0.0, 0.0, 0.0))
        slow = weight > self.KNOWN and ms > self.CLIP * self.near(x)
        self._slow[group] = self._slow.get(group, 0) + 1 if slow else 0
        if 0 < self._slow[group] <= self.STUMBLE:
            return
        if groups:
            ms = min(ms, self.CLIP * self(x))
            if weight:
                mean_ms = min(mean_ms, self.CLIP * ms * mean_x / min(x, mean_x))
        weight = self.DECAY * weight + 1.0
        groups[group] = weight, mean_x + (x - mean_x) / weight, mean_ms + (ms - mean_ms) / weight
        self._fit()

    def _fit(self) -> None:
        base, slope = self._given
        points, took, expected = [], 0.0, 0.0
        for weight, x, ms in self._groups.values():
            w = weight / (weight + 1.0)
            points.append((x, ms, w))
            took, expected = took + ms * w, expected + (base + slope * x) * w
        speed = took / expected
        points += [(at, speed * (base + slope * at), self.GIVEN) for at in self._at]
        self.base, self.slope = line(points)


class BatchCosts(Costs):
    """Costs for the gates of all running sequences: a share of what the whole batch takes, and what drafting brings.

    A forward takes base + slope · rows, a drafting base + slope · sequences; both are measured. What does not depend on
    how many take part is divided among them, so a sequence weighs its own rows at full price: where many share a
    forward, a row more costs almost what a token less is worth. All decode plainly at times, IN_A_ROW forwards, first
    after FIRST and later after REMEASURE: if everybody always speculated, nobody would learn what that takes.

    A sequence drafts where its drafts bring more than plain steps in their time. What they bring is the mean of its own
    and of everybody's recent ones, which count as SHARED of its own: alone it would know too little. Those that do not
    draft all try again in the same forward, to share the draft: after so many that what they expect to lose by it is
    PROBE of their time, and sooner at first.
    """

    shared = True
    REMEASURE = 128
    FIRST = 4
    IN_A_ROW = 4
    COLD = 2  # the first of them are slower, as caches hold what drafting needs, and do not count
    SHARED = 20.0
    MEMORY = 0.998  # weight of a round of anybody, one such round later
    PROBE = 0.015
    EAGER = 16.0  # times as much at first, a quarter of it with every try: what was measured first may mislead
    ENOUGH = 7.5  # rounds that draft whatever they bring
    ROUGH = 8  # drafts after which those that prompts were part of say what a draft takes, where there was no other
    DOUBT = 2.0  # tokens a round varies by: what drafts bring counts as higher by so much / sqrt(how many are known)

    def __init__(self, given: Costs):
        super().__init__(given.draft_ms, given.verify_base_ms, given.verify_slope_ms, given.plain_ms)
        slope = given.verify_slope_ms
        self._start = (max(given.plain_ms - slope, 0.0), slope, (1.0, 6.0))
        self._forward, self._rough = Line(*self._start), True  # rough: nothing but forwards with prompts was seen
        draft = max(given.draft_ms, LEAST_MS) / 2  # which may be given as 0
        self._start_draft = (draft, draft, (1.0, 4.0))
        self._draft, self._rough_draft, self._drafts = Line(*self._start_draft), True, 0  # rough, too: with prompts alone
        self._drafting = 1.0  # share of those that decode that also draft
        self._plain = 0  # forwards since the last that was not plain
        self._wait = self._due = self.FIRST  # forwards until the next that nobody drafts for
        self._all = Evidence()
        self._lost = 0.0  # plain steps that a try now is expected to lose, of those that do not draft
        self._saved, self._eager = 0.0, self.EAGER  # plain steps that they may lose; how many times as fast these grow
        self._trying = False

    def share(self, sequences: int) -> None:
        """So many sequences take part in the next step, which goes by what was measured before it."""
        count = max(sequences, 1)
        drafting = max(round(self._drafting * count), 1)
        drafted = count * max(self._all.verified, 1.0)
        plain = self._forward.near(count)
        self.verify_slope_ms = max(self._forward.near(count + drafted) - plain, 0.0) / drafted
        self.plain_ms = self.verify_base_ms = plain / count
        self.draft_ms = self._draft.near(drafting) / drafting

    def forwarded(self, rows: int, ms: float, plain: bool, prompts: bool) -> None:
        """A forward of so many rows took ms. plain: nobody who decodes verified anything in it. prompts: some rows were
        of prompts, which take less than others; such a forward says how fast the machine is, until there is another."""
        self._plain = self._plain + 1 if plain else 0
        self._due -= 1
        if self._plain >= self.IN_A_ROW:
            self._wait = min(2 * self._wait, self.REMEASURE)
            self._due = self._wait
        if self._rough and not prompts:
            self._rough, self._forward = False, Line(*self._start)
        if self._rough or not (prompts or 1 <= self._plain <= self.COLD):
            self._forward.add(rows, ms)
        self._trying = 0.0 < self._lost <= self._saved
        if self._trying:
            self._saved, self._eager = 0.0, max(self._eager / 4.0, 1.0)
        self._lost = 0.0

    def drafted(self, sequences: int, decoding: int, ms: float, prompts: bool) -> None:
        """Drafting a block for so many sequences, of those that decode, took ms. prompts: some had just read theirs, which
        their windows were primed with; such a draft takes longer, and says what others take until there is one."""
        self._drafts += 1
        if self._rough_draft and not prompts:
            self._rough_draft, self._draft = False, Line(*self._start_draft)
        if self._rough_draft or not prompts:
            self._draft.add(sequences, ms)
        if self._due > 0:  # else some knew already that all are to decode plainly
            self._drafting = sequences / decoding

    def observe(self, draft_ms: float | None, n: int, verify_ms: float) -> None:
        """A round's own times are mostly its neighbours', and are not used."""

    def plain_is_due(self, lost: bool) -> bool:
        """Shall the next round of every sequence do without a draft?"""
        return self._due <= 0

    def learn(self, n: int, accepted: int) -> None:
        self._all.add(self.MEMORY, n, accepted)

    def pays(self, own: Evidence) -> bool:
        everybody, weight, shared = self._all, own.weight, self.SHARED
        if everybody.weight < self.ENOUGH or (self._rough_draft and self._drafts < self.ROUGH):
            return True
        if self._due <= 0:
            return False
        both = weight + shared
        verified = (weight * own.verified + shared * everybody.verified) / both
        accepted = (weight * own.accepted + shared * everybody.accepted) / both
        gain = accepted - (self.draft_ms + self.verify_slope_ms * verified) / self.plain_ms
        if self._trying or gain + self.DOUBT / sqrt(everybody.weight) > 0.0:
            return True
        self._lost -= gain
        self._saved += self.PROBE * self._eager
        return False

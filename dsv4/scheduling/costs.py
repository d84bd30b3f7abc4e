"""What a sequence's rounds cost where several share every draft and every forward."""

from __future__ import annotations

from ..gate import Costs


class Line:
    """ms = base + slope · x, fitted to samples as they come; old ones count less, and one slow sample does not upset it.

    given: a line to start from. It is scaled to the speed of the samples and counts as GIVEN of them at each of two x.
    """

    DECAY = 0.98  # weight of a sample, one sample later
    CLIP = 2.0  # of a sample and the line, the larger is cut to so many times the other
    GIVEN = 0.2

    def __init__(self, base: float, slope: float, at: tuple[float, float]):
        self._given, self._at = (base, slope), at
        self.base, self.slope = base, slope
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def __call__(self, x: float) -> float:
        return self.base + self.slope * x

    def add(self, x: float, ms: float, weight: float = 1.0) -> None:
        expected = self(x)
        if self._w:
            ms = min(ms, self.CLIP * expected)
            cut = min(1.0, self.CLIP * ms / expected)
            self._y, self._xy = cut * self._y, cut * self._xy
        keep, w = self.DECAY, weight
        self._w, self._x, self._y = keep * self._w + w, keep * self._x + w * x, keep * self._y + w * ms
        self._xx, self._xy = keep * self._xx + w * x * x, keep * self._xy + w * x * ms
        self._fit()

    def _fit(self) -> None:
        base, slope = self._given
        speed = self._y / (base * self._w + slope * self._x)
        w, x, y, xx, xy = self._w, self._x, self._y, self._xx, self._xy
        for at in self._at:
            ms = speed * (base + slope * at)
            w, x, y = w + self.GIVEN, x + self.GIVEN * at, y + self.GIVEN * ms
            xx, xy = xx + self.GIVEN * at * at, xy + self.GIVEN * at * ms
        self.slope = max((w * xy - x * y) / (w * xx - x * x), 0.0)
        self.base = (y - self.slope * x) / w
        if self.base <= 0.0:
            self.base, self.slope = 0.0, xy / xx


class BatchCosts(Costs):
    """Costs for the gates of all running sequences: a share of what the whole batch takes.

    A forward takes base + slope · rows, a drafting base + slope · sequences; both are measured. What does not depend on
    how many take part is divided among them, so a sequence weighs its own rows at full price: where many share a
    forward, a row more costs almost what a token less is worth. Sequences that all speculate would never learn what a
    forward without it takes. So all of them decode plainly once in REMEASURE forwards, and that one counts WEIGHT times.
    """

    REMEASURE = 48
    FIRST = 8
    WEIGHT = 4.0
    BESIDE = 0.1

    def __init__(self, given: Costs):
        super().__init__(given.draft_ms, given.verify_base_ms, given.verify_slope_ms, given.plain_ms)
        slope = given.verify_slope_ms
        self._forward = Line(max(given.plain_ms - slope, 0.0), slope, (1.0, 6.0))
        self._draft = Line(given.draft_ms / 2, given.draft_ms / 2, (1.0, 4.0))
        self._sequences = 1
        self._due = self.FIRST  # forwards until the next that nobody drafts for

    def share(self, sequences: int) -> None:
        """So many sequences take part from now on."""
        self._sequences = max(sequences, 1)
        self._estimate()

    def _estimate(self) -> None:
        forward, draft = self._forward, self._draft
        self.verify_slope_ms = forward.slope
        self.plain_ms = self.verify_base_ms = forward.base / self._sequences + forward.slope
        self.draft_ms = draft.base / self._sequences + draft.slope

    def forwarded(self, rows: int, ms: float, plain: bool, prompts: bool) -> None:
        """A forward of so many rows took ms. plain: nobody who decodes verified anything in it. prompts: some rows were
        of prompts, which take less than others and so say little."""
        self._due = self.REMEASURE if plain else self._due - 1
        self._forward.add(rows, ms, self.BESIDE if prompts else self.WEIGHT if plain else 1.0)
        self._estimate()

    def drafted(self, sequences: int, ms: float) -> None:
        """Drafting a block for so many sequences took ms."""
        self._draft.add(sequences, ms)
        self._estimate()

    def observe(self, draft_ms: float | None, n: int, verify_ms: float) -> None:
        """A round's own times are mostly its neighbours', and are not used."""

    def plain_is_due(self, lost: bool) -> bool:
        """Shall the next round of every sequence do without a draft?"""
        return self._due <= 0

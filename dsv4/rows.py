"""Rows: the only way tokens enter the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import NamedTuple

import numpy as np

from .errors import InputError


class Span(NamedTuple):
    """Positions start .. stop − 1 of a slot."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """T rows of one forward, sequence after sequence; a row is one token at one position of one of them.

    tokens: int32 [T]; spans: which positions they are, of each slot at most one; wanted: ascending row numbers whose
    logits and main hidden the caller wants.
    """

    tokens: np.ndarray
    spans: Sequence[Span]
    wanted: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def slots(self) -> np.ndarray:
        """int32 [T]: each row's slot."""
        slots: list[int] = []
        for slot, start, stop in self.spans:
            slots += [slot] * (stop - start)
        return np.array(slots, np.int32)

    @cached_property
    def positions(self) -> np.ndarray:
        """int32 [T]: each row's position."""
        positions: list[int] = []
        for _, start, stop in self.spans:
            positions += range(start, stop)
        return np.array(positions, np.int32)

    @classmethod
    def of(cls, slot: int, start: int, tokens, wanted="last") -> Rows:
        """Rows of one sequence from position `start`; tokens: ids [T]; wanted: "last", "all", "none" or ascending row numbers.

        Raises InputError for anything else in `wanted`.
        """
        return cls.join([(slot, start, tokens, cls.named(wanted, len(tokens)))])

    @classmethod
    def join(cls, parts: Sequence[tuple[int, int, Sequence[int], Sequence[int]]]) -> Rows:
        """Rows of several sequences in one forward: (slot, first position, tokens, wanted rows of them) of each."""
        tokens, spans, wanted = [], [], []
        for slot, start, own, rows in parts:
            first, count = len(tokens), len(own)
            wanted += range(first, first + count) if len(rows) == count else [first + row for row in rows]
            tokens.extend(own)
            spans.append(Span(slot, start, start + count))
        return cls(np.array(tokens, np.int32), spans, wanted)

    @staticmethod
    def named(wanted, n: int) -> Sequence[int]:
        """The row numbers, of n rows, that "last", "all" or "none" stands for; or `wanted` itself, checked. Raises InputError."""
        if not isinstance(wanted, str):
            try:
                rows = [index(row) for row in wanted]
            except TypeError:
                raise InputError(f"wanted: expected last, all, none or row numbers; found {wanted!r}") from None
            if any(not a < b for a, b in zip([-1, *rows], [*rows, n])):
                raise InputError(f"wanted: expected ascending row numbers within 0..{n - 1}; found {rows}")
            return rows
        if wanted == "all":
            return range(n)
        if wanted == "last":
            return range(n)[-1:]
        if wanted == "none":
            return ()
        raise InputError(f"wanted: expected last, all, none or row numbers; found {wanted!r}")


def cut(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """The same positions in the same order, in lists of at most so many of them."""
    lists, room = [], 0
    for slot, start, stop in spans:
        while start < stop:
            if not room:
                lists.append([])
                room = most
            end = min(stop, start + room)
            lists[-1].append(Span(slot, start, end))
            start, room = end, room - (end - start)
    return lists

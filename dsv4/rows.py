"""Rows: the only way tokens enter the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import InputError


@dataclass(frozen=True)
class Rows:
    """T rows of one forward; a row is one token at one position of one sequence.

    tokens, slots, positions: int32 [T]; rows of a slot are consecutive and their positions ascend by one.
    wanted: int64 [n], ascending row numbers whose logits and main hidden the caller wants.
    """

    tokens: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, slot: int, start: int, tokens, wanted="last") -> Rows:
        """Rows of one sequence from position `start`; tokens: ids [T]; wanted: "last", "all", "none" or ascending row numbers.

        Raises InputError for anything else in `wanted`.
        """
        return cls.join([(slot, start, tokens, cls.named(wanted, len(tokens)))])

    @classmethod
    def join(cls, parts: Sequence[tuple[int, int, Sequence[int], Sequence[int]]]) -> Rows:
        """Rows of several sequences in one forward: (slot, first position, tokens, wanted rows of them) of each.

        Raises InputError for a slot that is in two of them.
        """
        runs, tokens, wanted = [], [], []
        for slot, start, own, rows in parts:
            runs.append((slot, start, start + len(own)))
            wanted += [len(tokens) + row for row in rows]
            tokens.extend(own)
        if len({slot for slot, _, _ in runs}) != len(runs):
            raise InputError(f"rows: expected each slot once; found slots {[slot for slot, _, _ in runs]}")
        return cls.runs(runs, np.array(tokens, np.int32), wanted)

    @classmethod
    def runs(cls, runs: Sequence[tuple[int, int, int]], tokens: np.ndarray, wanted: Sequence[int] = ()) -> Rows:
        """Rows of several sequences, from (slot, first position, the one after the last) of each; tokens int32 [T]: all of theirs."""
        slots: list[int] = []
        positions: list[int] = []
        for slot, start, stop in runs:
            slots += [slot] * (stop - start)
            positions += range(start, stop)
        return cls(tokens, np.array(slots, np.int32), np.array(positions, np.int32), np.array(wanted, np.int64))

    @staticmethod
    def named(wanted, n: int) -> Sequence[int]:
        """The row numbers, of n rows, that "last", "all" or "none" stands for; or `wanted` itself, checked. Raises InputError."""
        if not isinstance(wanted, str):
            rows = [int(row) for row in wanted]
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

    def cut(self, most: int) -> Iterator[Rows]:
        """These rows, at most so many at a time; none of them wanted."""
        for start in range(0, len(self), most):
            part = slice(start, start + most)
            yield Rows(self.tokens[part], self.slots[part], self.positions[part], np.zeros(0, np.int64))

"""Rows: the only way tokens enter the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        tokens = np.asarray(tokens, np.int32)
        n = len(tokens)
        if isinstance(wanted, str):
            wanted = cls._named(wanted, n)
        else:
            wanted = np.array(list(wanted), np.int64)
            if wanted.size and (wanted.min() < 0 or wanted.max() >= n or np.any(np.diff(wanted) <= 0)):
                raise InputError(f"wanted: expected ascending row numbers within 0..{n - 1}; found {wanted.tolist()}")
        slots = np.empty(n, np.int32)
        slots.fill(slot)
        return cls(tokens, slots, np.arange(start, start + n, dtype=np.int32), wanted)

    @classmethod
    def runs(cls, runs: Sequence[tuple[int, int, int]], tokens: np.ndarray) -> Rows:
        """Rows of several sequences, (slot, first position, the one after the last) of each; none of them is wanted.

        tokens: of all of them, int32 [T].
        """
        slots: list[int] = []
        positions: list[int] = []
        for slot, start, stop in runs:
            slots += [slot] * (stop - start)
            positions += range(start, stop)
        return cls(tokens, np.array(slots, np.int32), np.array(positions, np.int32), np.zeros(0, np.int64))

    @staticmethod
    def _named(wanted: str, n: int) -> np.ndarray:
        """Row numbers, of n rows, that a name stands for."""
        if wanted == "all":
            return np.arange(n)
        if wanted == "last":
            return np.arange(n)[-1:]
        if wanted == "none":
            return np.zeros(0, np.int64)
        raise InputError(f"wanted: expected last, all, none or row numbers; found {wanted!r}")

    def cut(self, most: int) -> Iterator[Rows]:
        """These rows, so many at a time; none of them wanted."""
        for start in range(0, len(self), most):
            part = slice(start, start + most)
            yield Rows(self.tokens[part], self.slots[part], self.positions[part], np.zeros(0, np.int64))

    @classmethod
    def pack(cls, parts: list[Rows]) -> Rows:
        """Rows of several sequences in one forward; each slot appears in one part only, or InputError."""
        if len(parts) == 1:
            return parts[0]
        slots = [int(p.slots[0]) for p in parts if len(p)]
        if len(set(slots)) != len(slots):
            raise InputError(f"rows: expected each slot once; found slots {slots}")
        starts = accumulate(map(len, parts), initial=0)
        return cls(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.slots for p in parts]),
            np.concatenate([p.positions for p in parts]),
            np.concatenate([p.wanted + s for p, s in zip(parts, starts)]),
        )

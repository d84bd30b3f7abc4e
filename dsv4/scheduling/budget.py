"""Whose rows run in the next step."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Sequence

SHARE = 4  # prompts get at least one row in so many while blocks fill the budget


def divide(blocks: Sequence[int], prompts: Sequence[int], budget: int, most: int) -> tuple[int, list[int]]:
    """Rows of one step → (how many of the blocks run, rows of every prompt).

    blocks: rows of decoding steps and verifications, who waited longest first; they run whole and before prompts, but
    leave them a share. prompts: rows that are left of each; what remains of the budget is divided evenly, `most` at
    once. The budget must hold the largest block and a row beside it; so every step runs the first block and a row of
    a prompt, and nobody waits forever.
    """
    if not prompts and sum(blocks) <= budget:
        return len(blocks), []  # as in most steps
    kept = min(sum(prompts), max(budget // SHARE, 1), budget - max(blocks, default=0))
    ends = list(accumulate(blocks))
    count = bisect_right(ends, budget - kept)
    used = ends[count - 1] if count else 0
    return count, fill([min(left, most) for left in prompts], budget - used)


def fill(wanted: Sequence[int], rows: int) -> list[int]:
    """rows divided evenly among those who want them, nobody getting more than wanted; the first get what is odd."""
    given = [0] * len(wanted)
    open_ = [i for i, n in enumerate(wanted) if n]
    while rows and open_:
        share = rows // len(open_)
        for i in open_:
            part = min(wanted[i] - given[i], share or 1, rows)
            given[i] += part
            rows -= part
        open_ = [i for i in open_ if given[i] < wanted[i]]
    return given

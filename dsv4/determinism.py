"""Generate the same prompt in several ways and compare tokens and logits, bit for bit."""

from __future__ import annotations

from itertools import islice
from typing import Callable

import numpy as np

from .errors import InputError
from .generate import prompt_tokens, settled, speculator
from .sampling import SamplingParams

PAIRS = (("off", "off"), ("always", "always"), ("gate", "always"), ("always", "off"))
NAMES = {"off": "plain", "gate": "gated", "always": "always"}

# One per kind of text. The embedded model knows these forms; any model can continue them.
PROMPTS = {
    "repeat": "Repeat: Tobin, Lio, Mira, Juno, Tobin, Lio, Mira, Juno, Tobin, Lio, Mira, Juno,",
    "code": 'def check_lines(lines):\n    """Check lines."""\n    if not lines:\n        return',
    "prose": "Once upon a time, Sana lived near the tower. She had a heavy lantern and a friend named Mira. The snow came",
    "math": "32 * 3 = 30 * 3 + 2 * 3 = 90 + 6 = 96\n66 * 4 = 60 * 4 + 6 * 4 = 240 + 24",
}


def prompts(engine) -> dict[str, list[int]]:
    """PROMPTS as token ids; without a tokenizer, ids drawn at random, the same every time."""
    if engine.tokenizer is not None:
        return {kind: prompt_tokens(engine, text) for kind, text in PROMPTS.items()}
    rng = np.random.default_rng(0)
    return {kind: rng.integers(0, engine.config.vocab_size, 40).tolist() for kind in PROMPTS}


def run(engine, prompt: list[int], spec: str, n: int) -> tuple[list[int], np.ndarray]:
    """n greedy tokens and the logits [n, vocab] they were chosen from; the model's end tokens end nothing here."""
    rounds = speculator(engine, SamplingParams(temperature=0), spec)
    with engine.session() as session:
        tokens, logits, _ = zip(*islice(settled(session, prompt, n, rounds), n))
    return list(tokens), np.stack(logits)


def difference(a: tuple[list[int], np.ndarray], b: tuple[list[int], np.ndarray]) -> dict | None:
    """The first place where two runs differ: {index, tokens, logits: how many differ, largest: by how much}."""
    for index, (tokens, x, y) in enumerate(zip(zip(a[0], b[0]), a[1], b[1])):
        changed = x.view(np.uint32) != y.view(np.uint32)
        if tokens[0] != tokens[1] or changed.any():
            largest = float(np.abs(x.astype(np.float64) - y).max())
            return {"index": index, "tokens": list(tokens), "logits": int(changed.sum()), "largest": largest}
    return None


def matrix(engine, max_tokens: int, progress: Callable[[str, int, int], None] | None = None) -> dict:
    """{identical, tokens, cells: [{prompt, pair, identical, difference}]} over PAIRS × prompts.

    tokens: how many each run generates, at most max_tokens. Raises InputError where the context has no room after the prompts.
    """
    cells, found = [], prompts(engine)
    longest = max(map(len, found.values()))
    if longest >= engine.max_context:
        raise InputError(
            f"determinism: expected a context above {longest} positions, found {engine.max_context}; load with a larger max_context"
        )
    n = min(max_tokens, engine.max_context - longest)
    for done, (kind, prompt) in enumerate(found.items(), 1):
        for pair in PAIRS:
            differs = difference(*(run(engine, prompt, spec, n) for spec in pair))
            name = "/".join(NAMES[spec] for spec in pair)
            cells.append({"prompt": kind, "pair": name, "identical": differs is None, "difference": differs})
        if progress:
            progress("compare", done, len(found))
    return {"identical": all(cell["identical"] for cell in cells), "tokens": n, "cells": cells}


def render(report: dict) -> str:
    """The matrix as text, a line per prompt, and the differences if there are any."""
    pairs = list(dict.fromkeys(cell["pair"] for cell in report["cells"]))
    kinds = list(dict.fromkeys(cell["prompt"] for cell in report["cells"]))
    same = {(cell["prompt"], cell["pair"]): cell["identical"] for cell in report["cells"]}
    lines = [" " * 8 + "".join(f"{pair:>16}" for pair in pairs)]
    for kind in kinds:
        lines.append(f"{kind:8}" + "".join(f"{'identical' if same[kind, pair] else 'DIFFERENT':>16}" for pair in pairs))
    for cell in report["cells"]:
        if not cell["identical"]:
            d = cell["difference"]
            lines.append(
                f"{cell['prompt']} {cell['pair']}: first at token {d['index']}: tokens {d['tokens'][0]} and "
                f"{d['tokens'][1]}; {d['logits']} logits differ, the largest by {d['largest']:.3g}"
            )
    verdict = "every token and every logit the same" if report["identical"] else "NOT the same"
    return "\n".join([*lines, f"{report['tokens']} tokens each: {verdict}"])

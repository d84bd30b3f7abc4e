"""Speculation on the running engine: what drafting and verifying cost, what is accepted, and what that is worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..cli_support import console
from ..determinism import prompts
from ..engine import Engine
from ..errors import ConfigError, InputError, install
from ..files import replacing
from ..gate import Bucket
from ..gate.calibration import known_outcomes
from ..generate import complete
from ..sampling import SamplingParams
from ..session import remedy
from . import machine

SPECS = ("off", "always", "gate")


def texts(engine: Engine, tokens: int) -> dict[str, list[int]]:
    """The prompts by kind of text. Raises InputError where the context has no room for the longest and `tokens` more."""
    found = prompts(engine)
    longest = max(map(len, found.values()))
    if longest + tokens > engine.max_context:
        raise InputError(
            f"context: expected at least {longest + tokens} positions, for a text of {longest} tokens and {tokens} more; found "
            f"{engine.max_context}; {remedy(engine, 'ask for fewer tokens')}"
        )
    return found


def _median_ms(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def costs(engine: Engine, context: list[int], repeats: int) -> list[dict]:
    """Records "draft", "plain" and "verify" for n = 1 .. block drafted tokens (n + 1 rows), and the fit over n."""
    block = engine.config.dspark.block_size
    with engine.session() as session:
        session.prefill(context)
        position = session.position

        def verify(rows: int) -> Callable[[], None]:
            def run() -> None:
                session.forward(context[:rows], "all")
                session.rewind(position)

            return run

        draft_ms = _median_ms(lambda: session.draft(context[0], logits=False), repeats)
        ms = [_median_ms(verify(n + 1), repeats) for n in range(block + 1)]
    n = np.arange(1, block + 1)
    slope, base = np.polyfit(n, ms[1:], 1)
    records = [{"name": "draft", "ms": draft_ms}, {"name": "plain", "ms": ms[0]}]
    records += [{"name": "verify", "n": int(i), "ms": ms[i], "ratio_to_plain": ms[i] / ms[0]} for i in n]
    return [*records, {"name": "fit", "verify_base_ms": float(base), "verify_slope_ms": float(slope)}]


def speeds(engine: Engine, tokens: int, repeats: int, progress: Callable | None) -> tuple[list[dict], list]:
    """Records "text": each kind of prompt plain, always and gated, the median of interleaved runs; all always-rounds."""
    records, rounds = [], []
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = texts(engine, tokens)
    for done, (kind, prompt) in enumerate(found.items(), 1):
        tps: dict[str, list[float]] = {spec: [] for spec in SPECS}
        last = {}
        for repeat in range(repeats):
            for spec in SPECS:
                keep = rounds.append if spec == "always" and repeat == 0 else None
                last[spec] = complete(engine, prompt, params, spec=spec, on_round=keep)
                tps[spec].append(last[spec].timings["decode_tps"])
        plain = statistics.median(tps["off"])
        for spec in SPECS:
            speed = statistics.median(tps[spec])
            records.append(
                {"name": "text", "kind": kind, "tokens": tokens, "tokens_per_s": speed, "ratio_to_plain": speed / plain}
                | last[spec].speculation
            )
        if progress:
            progress("measure", done, len(found))
    return records, rounds


def calibration(rounds: list) -> list[dict]:
    """Records "confidence": drafted tokens whose outcome is known, by bucket of confidence, and how many matched."""
    known = [pair for one in rounds for pair in known_outcomes(one.confidence, one.length, one.accepted)]
    records = []
    for low, high in zip((-np.inf, *Bucket.EDGES), (*Bucket.EDGES, np.inf)):
        matched = [match for confidence, match in known if low <= confidence < high]
        expected = [1 / (1 + np.exp(-c)) for c, _ in known if low <= c < high]
        records.append(
            {
                "name": "confidence",
                "from": None if np.isinf(low) else low,
                "to": None if np.isinf(high) else high,
                "n": len(matched),
                "match_rate": float(np.mean(matched)) if matched else None,
                "expected": float(np.mean(expected)) if expected else None,
            }
        )
    return records


def measure(
    model: str, settings: dict, tokens: int, repeats: int, progress: Callable | None = None, gate: dict | None = None
) -> list[dict]:
    """All records, each with the machine. Raises ConfigError for a checkpoint without a draft module."""
    engine = Engine.load(model, progress=progress, gate=gate, **settings)
    if engine.draft is None:
        raise ConfigError("bench speculate: expected a checkpoint with mtp.* tensors, found one without a draft module")
    context = (texts(engine, tokens)["prose"] * 8)[: min(200, engine.max_context - 8)]
    records = costs(engine, context, 20 * repeats)
    text, rounds = speeds(engine, tokens, repeats, progress)
    where = {"model": str(model), "threads": engine.run.threads, **machine.describe()}
    return [{**record, **where} for record in [*records, *text, *calibration(rounds)]]


def render(records: list[dict]) -> None:
    """Tables on standard output."""
    from rich.table import Table

    out = console()
    named = {name: [r for r in records if r["name"] == name] for name in ("draft", "plain", "verify", "fit", "text", "confidence")}
    about, fit = named["plain"][0], named["fit"][0]
    out.print(f"{about['model']}: {about['threads']} threads, {about['cpu']}")
    verify = "  ".join(f"{r['n']}: {r['ms']:.2f}" for r in named["verify"])
    out.print(f"ms: plain {about['ms']:.2f}, draft {named['draft'][0]['ms']:.2f}, verify by drafted tokens {verify}")
    out.print(f"verify(n) = {fit['verify_base_ms']:.2f} + {fit['verify_slope_ms']:.2f} n ms")
    out.print("to plain: speed as a multiple of plain decoding's; skipped: rounds that verified no draft")
    table = Table("text", "mode", "tok/s", "to plain", "accepted", "rounds", "skipped")
    for r in named["text"]:
        rate = f"{r['accept_rate']:.0%}" if r["drafted"] else "-"
        row = (f"{r['tokens_per_s']:,.0f}", f"{r['ratio_to_plain']:.2f}", rate, r["rounds"], r["skipped_rounds"])
        table.add_row(r["kind"], r["mode"], *map(str, row))
    out.print(table)
    out.print("matched: share of the n drafted tokens that were right; sigmoid: the share that their confidence promised")
    table = Table("confidence", "n", "matched", "sigmoid")
    for r in named["confidence"]:
        span = f"{'' if r['from'] is None else r['from']} .. {'' if r['to'] is None else r['to']}"
        table.add_row(span, str(r["n"]), *("-" if r[k] is None else f"{r[k]:.2f}" for k in ("match_rate", "expected")))
    out.print(table)


def open_pyplot() -> Any:
    """matplotlib's pyplot, for drawing into files. Raises ConfigError where it is missing (the extra `plot`)."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"plot: expected matplotlib, found none; {install('plot')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(pyplot: Any, records: list[dict], path: Path) -> None:
    """Verify cost over n, and expected against measured acceptance, as a picture."""
    cost = [(0, next(r["ms"] for r in records if r["name"] == "plain"))]
    cost += [(r["n"], r["ms"]) for r in records if r["name"] == "verify"]
    fit = next(r for r in records if r["name"] == "fit")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(*zip(*cost), "o", label="measured")
    line = [fit["verify_base_ms"] + fit["verify_slope_ms"] * n for n, _ in cost]
    left.plot([n for n, _ in cost], line, label="base + slope · n")
    left.axhline(cost[0][1], linestyle=":", color="grey", label="plain")
    left.set(xlabel="drafted tokens n", ylabel="ms", ylim=(0, None), title="Verifying a block")
    left.legend()
    seen = [r for r in records if r["name"] == "confidence" and r["n"]]
    right.plot([0, 1], [0, 1], linestyle=":", color="grey")
    right.scatter([r["expected"] for r in seen], [r["match_rate"] for r in seen], s=[10 + r["n"] ** 0.5 * 8 for r in seen])
    right.set(xlabel="sigmoid(confidence)", ylabel="accepted", xlim=(0, 1.02), ylim=(0, 1.02), title="Confidence and acceptance")
    with replacing(path) as file:
        figure.savefig(file, format="png")

"""The engine's own speed: prefill of prompts, and decoding after contexts of several lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..engine import Engine
from ..errors import InputError
from ..sampling import SamplingParams, sample
from . import machine

CONTEXTS = (128, 512, 2048, 8000)
GREEDY = SamplingParams(temperature=0)


def prompt(vocab: int, length: int) -> list[int]:
    """`length` token ids, random but the same on every run: routing and the indexer choose among everything."""
    return np.random.default_rng(length).integers(0, vocab, length).tolist()


def prefill(engine: Engine, length: int, repeats: int) -> dict:
    """Record "prefill": the median time to consume a prompt of `length` tokens and have the logits after it."""
    tokens = prompt(engine.config.vocab_size, length)
    seconds = []
    for _ in range(repeats):
        with engine.session() as session:
            start = time.perf_counter()
            session.prefill(tokens)
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {"name": "prefill", "tokens": length, "seconds": median, "tokens_per_s": length / median}


def decode(engine: Engine, context: int, steps: int) -> dict:
    """Record "decode": the median time of a greedy token, sampling included, over `steps` tokens after `context` others."""
    seconds = []
    with engine.session() as session:
        logits = session.prefill(prompt(engine.config.vocab_size, context))
        for _ in range(steps):
            start = time.perf_counter()
            logits = session.decode(sample(logits, GREEDY, session.position))
            seconds.append(time.perf_counter() - start)
    median, slow = statistics.median(seconds), float(np.quantile(seconds, 0.9))
    return {"name": "decode", "tokens": context, "seconds": median, "seconds_p90": slow, "tokens_per_s": 1 / median}


def exchange(engine: Engine, context: int, steps: int) -> dict:
    """Record "exchange": what each rank sends to decode a token, and the bytes of the weights that rank 0 holds."""
    with engine.session() as session:
        logits = session.prefill(prompt(engine.config.vocab_size, context))
        before = engine.traffic()
        for _ in range(steps):
            logits = session.decode(sample(logits, GREEDY, session.position))
        pairs = list(zip(before, engine.traffic()))
    return {
        "name": "exchange",
        "ranks": len(pairs),
        "weight_bytes": engine.plan.weights,
        "messages_per_token": [(b.messages - a.messages) / steps for a, b in pairs],
        "bytes_per_token": [(b.bytes - a.bytes) / steps for a, b in pairs],
    }


def memory(engine: Engine, context: int) -> dict:
    """Record "memory": the process's peak; own_peak_bytes: without the mapped weights, over one more prompt; the planned state."""
    with machine.OwnPeak() as own:
        prefill(engine, context, 1)
    return {
        "name": "memory",
        "peak_bytes": machine.peak_memory(),
        "own_peak_bytes": own.bytes,
        "planned_state_bytes": engine.plan.state,
    }


def experts(engine: Engine) -> dict:
    """Record "experts": where this rank's routed experts are, what is planned for them, and what was staged so far."""
    plan = engine.plan
    placement = "staged" if plan.staging else "packed" if engine.run.packed else "mapped"
    sizes = {"planned_cache_bytes": plan.expert_cache, "planned_staging_bytes": plan.staging}
    return {"name": "experts", "placement": placement, **sizes, **(engine.experts or {})}


def measure(
    model: str,
    settings: dict,
    contexts: Sequence[int] | None,
    repeats: int,
    steps: int,
    progress: Callable | None = None,
) -> list[dict]:
    """Load a model and measure it: records "load", "prefill" and "decode" per context, "exchange", "memory" and "experts",
    each with the machine.

    contexts: None takes those of CONTEXTS that fit, or the longest context that does. A warm-up goes before. Raises
    InputError for steps or contexts that do not fit.
    """
    start = time.perf_counter()
    engine = Engine.load(model, progress=progress, **settings)
    records = [{"name": "load", "seconds": time.perf_counter() - start}]
    room = engine.max_context - steps
    if room < 1:
        raise InputError(f"steps: expected at most {engine.max_context - 1} in a context of {engine.max_context}; found {steps}")
    for context in contexts or ():
        if not 0 < context <= room:
            raise InputError(
                f"contexts: expected 1 to {room} (the context less {steps} decoded tokens); found {context}"
            )
    contexts = contexts or [context for context in CONTEXTS if context <= room] or [room]
    decode(engine, min(64, room), min(steps, 8))  # warm-up: the first forwards touch the weights for the first time
    for number, context in enumerate(contexts):
        records += [prefill(engine, context, repeats), decode(engine, context, steps)]
        if progress:
            progress("measure", number + 1, len(contexts))
    records.append(exchange(engine, contexts[0], min(steps, 16)))
    records += [memory(engine, max(contexts)), experts(engine)]
    setting = {"model": str(model), "backend": engine.run.backend, "threads": engine.run.threads, "chunk": engine.chunk}
    ops = engine.model.ops
    where = {**setting, "isa": ops.team.isa if ops.name == "cpu" else ops.name, **machine.describe()}
    return [{**record, **where} for record in records]

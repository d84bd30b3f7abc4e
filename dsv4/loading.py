"""Loading: a checkpoint directory → what an engine is made of. The same steps on one rank and on each of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import psutil

from . import __version__
from .checkpoint import Checkpoint
from .comm import Nccl
from .config import ModelConfig, RunConfig
from .crew import Crew, CrewPool
from .experts.placement import Placement, hold_draft
from .model import Model
from .ops import Ops, open_ops
from .plan import MemoryPlan, check_plan, make_plan
from .split import Split
from .tokenizer import Tokenizer
from .weights import check, held_bytes, load_weights


def load_model(
    crew: Crew, directory: Path, progress: Callable[[str, int, int], None] | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of Engine, by name. Whatever ranks could disagree about is compared before the weights are loaded.

    Raises ConfigError, CheckpointError, CapacityError, BackendError.
    """
    comm = crew.comm
    on_host, on_cores, place = crew.neighbours()
    run = RunConfig.from_env(sharing=on_cores, **settings)
    config = ModelConfig.load(directory)
    split = Split.of(config, comm.rank, comm.size)
    checkpoint = Checkpoint(directory)
    layout = check(checkpoint, config)
    stages = len(layout.stages)
    experts = Placement.of(run, checkpoint, config, layout.stages, split)
    # A block and its committed token are one forward, whatever the chunk.
    headroom = max(run.chunk, 1 + config.dspark.block_size) if stages else run.chunk
    ops = open_ops(run.backend, threads=run.threads, device=place)
    held = held_bytes(checkpoint, layout, split)
    plan = _plan(run, config, ops, experts, split, on_host, weights=held, headroom=headroom, stages=stages)
    identity = checkpoint.identity
    alike = {name: getattr(run, name) for name in ("backend", "max_sessions", "chunk", "debug")}
    crew.agree(version=__version__, checkpoint=identity, max_context=plan.max_context, **alike)
    tokenizer = Tokenizer.load(directory, config)
    report = (lambda done, total: progress("load", done, total)) if progress else None
    store, make_bank = experts.open(ops, run.threads) if experts else (None, None)
    weights = load_weights(checkpoint, config, ops, report, split, make_bank)
    weights = replace(weights, store=store, files=(checkpoint, *(experts.packed if experts else ())))
    hold_draft(weights)
    if run.backend == "cuda" and comm.size > 1:
        comm = Nccl(comm)  # arrays from device to device; commands as before
    model = Model(config, weights, ops, comm, run.debug)
    pool = CrewPool(
        crew, ops, config, slots=run.max_sessions, max_context=plan.max_context, headroom=headroom, stages=stages
    )
    ops.reserve(plan.step)
    return {"model": model, "pool": pool, "run": run, "plan": plan, "identity": identity, "tokenizer": tokenizer,
            "crew": crew}  # fmt: skip


def _plan(
    run: RunConfig, config: ModelConfig, ops: Ops, experts: Placement | None, split: Split, on_host: int, *, weights: int,
    headroom: int, stages: int,
) -> MemoryPlan:  # fmt: skip
    """The memory plan of this rank, one of `on_host` that share the host's memory.

    weights: bytes; headroom: rows of a forward at most. Raises CapacityError where the state does not fit.
    """
    room = ops.room(weights - (experts.left_out if experts else 0))
    available = psutil.virtual_memory().available // on_host if room is None else room

    def plan_for(context: int) -> MemoryPlan:
        step = ops.step_bytes(config, split, headroom, context)
        if step and experts:
            step += experts.step_bytes(config, split, headroom)
        return make_plan(
            config, weights=weights, max_context=context, max_sessions=run.max_sessions, headroom=headroom,
            available=available, stages=stages, step=step, **experts.planned if experts else {},
        )  # fmt: skip

    plan = plan_for(run.context(config))
    check_plan(plan, plan_for)
    return plan

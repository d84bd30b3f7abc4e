"""The memory plan: what the state of the asked sessions takes, checked before anything is loaded."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from math import ceil, lcm
from typing import Callable

from .config import INDEXED_RATIO, ModelConfig, pooled_blocks
from .errors import CapacityError
from .formats import FP4_BLOCK, KEY_BLOCK


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part; `available` is the host memory that could be had when the plan was made."""

    weights: int  # mapped from the checkpoint; the system may drop and read them again
    windows: int
    compressor_rows: int
    entries: int
    index_keys: int
    draft: int  # the stages' windows, and the main hidden they are made from
    available: int
    max_context: int
    max_sessions: int
    expert_cache: int = 0  # slots of resident experts, where the backend computes
    staging: int = 0  # buffers on the host that they come through
    step: int = 0  # arrays of one forward, where the backend has memory of its own: Ops.step_bytes

    @property
    def state(self) -> int:
        return self.windows + self.compressor_rows + self.entries + self.index_keys + self.draft

    def as_dict(self) -> dict:
        return asdict(self) | {"state": self.state, "needed": self.needed}

    @property
    def needed(self) -> int:
        """All that is allocated."""
        return self.state + self.expert_cache + self.staging + self.step


PAGE_POSITIONS = 256  # at least


def page_positions(config: ModelConfig) -> int:
    """Positions of a page of compressed entries: a whole number of entries of every ratio."""
    unit = lcm(*(ratio for ratio in config.compress_ratios if ratio))
    return unit * ceil(PAGE_POSITIONS / unit)


def key_bytes(config: ModelConfig) -> int:
    """One stored key: e4m3 codes, a scale per 64, the rope part in bf16."""
    plain = config.head_dim - config.qk_rope_head_dim
    return plain + plain // KEY_BLOCK + 2 * config.qk_rope_head_dim


def index_key_bytes(config: ModelConfig) -> int:
    """One index key: e2m1 codes, a scale per 32."""
    return config.index_head_dim // 2 + config.index_head_dim // FP4_BLOCK


def make_plan(
    config: ModelConfig,
    *,
    weights: int,
    max_context: int,
    max_sessions: int,
    headroom: int,
    available: int,
    stages: int = 0,
    expert_cache: int = 0,
    staging: int = 0,
    step: int = 0,
) -> MemoryPlan:
    """Bytes that `max_sessions` sequences of `max_context` positions take at most, with so many draft stages.

    expert_cache, staging, step: as in MemoryPlan.
    """
    windows = rows = entries = index_keys = draft = 0
    if stages:
        hidden = 4 * config.main_hidden_size
        draft = (config.sliding_window + headroom) * (stages * key_bytes(config) + hidden)
        draft += config.dspark.block_size * key_bytes(config)
    paged = page_positions(config) * ceil(max_context / page_positions(config))
    for ratio in config.compress_ratios:
        windows += (config.sliding_window + headroom) * key_bytes(config)
        if not ratio:
            continue
        indexed, blocks = ratio == INDEXED_RATIO, pooled_blocks(ratio)
        dims = blocks * (config.head_dim + (config.index_head_dim if indexed else 0))
        rows += (blocks * ratio + headroom) * dims * 2 * 4  # value and gate, float32
        entries += paged // ratio * key_bytes(config)
        index_keys += paged // ratio * index_key_bytes(config) if indexed else 0
    parts = (part * max_sessions for part in (windows, rows, entries, index_keys, draft))
    return MemoryPlan(weights, *parts, available, max_context, max_sessions, expert_cache, staging, step)


def check_plan(plan: MemoryPlan, at: Callable[[int], MemoryPlan]) -> None:
    """Raise CapacityError, saying what would fit, when state and experts cannot be held in the available memory.

    at(max_context) → the same plan for another context.
    """
    if plan.needed <= plan.available:
        return
    always = plan.state + plan.step
    what = "state and a step's arrays" if plan.step else "state"
    if always <= plan.available:
        raise CapacityError(
            f"memory: expected at most {(plan.available - always) / 1e9:.2f} GB for experts beside "
            f"{always / 1e9:.2f} GB of {what}, found a need of {(plan.needed - always) / 1e9:.2f} GB "
            "(set a smaller expert cache)"
        )
    fits = bisect_right(range(1, plan.max_context), plan.available, key=lambda context: at(context).needed)
    hint = f"a context of {fits} would fit" if fits else "no context fits with so many sessions of such chunks"
    raise CapacityError(
        f"memory: expected at most {plan.available / 1e9:.2f} GB for the {what} of {plan.max_sessions} session(s) of "
        f"{plan.max_context} positions, found a need of {always / 1e9:.2f} GB; {hint} "
        "(set max_context, max_sessions or chunk)"
    )

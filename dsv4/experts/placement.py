"""Placement: where experts are kept and read from, as the settings say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checkpoint import Checkpoint
from ..config import ModelConfig, RunConfig
from ..ops import Ops
from ..parameters import Weights
from ..split import Split
from ..weights import MakeBank
from .packed import PackedExperts
from .sources import CheckpointExperts
from .store import Store, slots_for, sum_bytes


@dataclass(frozen=True)
class Placement:
    """source: a packed file or the checkpoint; slots: of resident experts, 0 where nothing is staged."""

    source: CheckpointExperts | PackedExperts
    slots: int
    per_token: int

    @classmethod
    def of(
        cls, run: RunConfig, checkpoint: Checkpoint, config: ModelConfig, stages: tuple[int, ...], split: Split
    ) -> Placement | None:
        """None where the backend takes experts where the checkpoint is mapped: nothing was asked for.

        Raises ConfigError for a budget that does not hold one row's experts, CheckpointError for a packed file that is
        not one of this checkpoint and number of ranks.
        """
        if run.expert_cache is None and run.packed is None:
            return None
        source = CheckpointExperts(checkpoint, config, stages, split)
        count, slots = config.num_experts_per_tok, 0
        if run.expert_cache is not None:
            slots = slots_for(run.expert_cache, source.layout.nbytes, count, sum(source.banks.values()))
        if run.packed is not None:
            source = PackedExperts(run.packed, source, checkpoint.identity, split)
        return cls(source, slots, count)

    @property
    def packed(self) -> tuple[PackedExperts, ...]:
        """The packed file, if there is one."""
        return (self.source,) if isinstance(self.source, PackedExperts) else ()

    @property
    def planned(self) -> dict[str, int]:
        """Bytes for plan.make_plan."""
        size = self.source.layout.nbytes
        return {"expert_cache": self.slots * size, "staging": 2 * size if self.slots else 0}

    def step_bytes(self, config: ModelConfig, split: Split, rows: int) -> int:
        """What a forward takes beyond the same one without a store, where the backend computes."""
        return sum_bytes(rows, self.per_token, split.moe_slices, config.hidden_size) if self.slots else 0

    @property
    def left_out(self) -> int:
        """Bytes of routed experts that the backend does not hold, because the store brings them."""
        return sum(self.source.banks.values()) * self.source.layout.nbytes if self.slots else 0

    def open(self, ops: Ops, threads: int) -> tuple[Store | None, MakeBank]:
        """The store, if there is one, and the function that makes the layers' banks."""
        if self.slots:
            store = Store(ops, self.source, self.slots, self.per_token, threads)
            return store, store.bank

        def bank(prefix: str, shared: Any, fixed: Any) -> Any:
            data = (self.source.data(prefix, expert) for expert in range(self.source.banks[prefix]))
            return ops.bank([self.source.layout.matrices(ops, one) for one in data], shared)

        return None, bank


def hold_draft(weights: Weights) -> None:
    """The draft's experts become resident first of all."""
    if weights.store and weights.draft:
        weights.store.hold([stage.ffn.bank for stage in weights.draft.stages])

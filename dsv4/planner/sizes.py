"""Bytes of a model by what reads them, on one of several ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..checkpoint import DTYPES
from ..config import INDEXED_RATIO, ModelConfig
from ..ops.cuda_room import step_bytes
from ..plan import MemoryPlan, index_key_bytes, key_bytes, make_plan
from ..split import Split
from ..weights import ROUTED, expected

_KINDS = ("dense", "embedding", "head", "experts", "draft", "draft experts")


@lru_cache(maxsize=16)
def _groups(config: ModelConfig, stages: int) -> dict[tuple[str, str], int]:
    """Bytes of the whole model by kind, and by what ranks divide them by."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for name, tensor in expected(config, (config.n_routed_experts,) * stages).items():
        if tensor.row.part == ROUTED:
            kind = "draft experts" if name.startswith("mtp.") else "experts"
        elif name.startswith("mtp."):
            kind = "draft"
        else:
            kind = {"embed": "embedding", "head": "head"}.get(tensor.row.field, "dense")
        found[kind, tensor.row.shard] += math.prod(tensor.shape) * np.dtype(DTYPES[tensor.dtype]).itemsize
    return dict(found)


@dataclass(frozen=True)
class Sizes:
    """Of one rank of `split.size`. expert: its share of one routed expert; draft: its share of what every draft reads."""

    config: ModelConfig
    stages: int
    split: Split
    total: int  # the whole checkpoint
    total_experts: int  # the main model's routed experts, of all ranks
    dense: int  # all weights but routed experts, the draft's apart
    read: int  # of these, what every forward reads: all but the embedding's other rows
    head: int
    expert: int
    draft: int

    @classmethod
    def of(cls, config: ModelConfig, stages: int, ranks: int) -> Sizes:
        """Raises ConfigError for a number of ranks over which nothing can be divided."""
        split = Split.of(config, 0, ranks)
        groups = _groups(config, stages)
        held = {kind: 0 for kind in _KINDS}
        for (kind, shard), size in groups.items():
            held[kind] += size // split.parts(shard)
        experts = config.n_routed_experts * (config.num_hidden_layers + stages)
        return cls(
            config, stages, split,
            total=sum(groups.values()),
            total_experts=groups["experts", "moe_inter"],
            dense=held["dense"] + held["embedding"] + held["head"],
            read=held["dense"] + held["head"],
            head=held["head"],
            expert=(held["experts"] + held["draft experts"]) // experts,
            draft=held["draft"],
        )  # fmt: skip

    @property
    def experts(self) -> int:
        """Routed experts of the main model, all layers."""
        return self.config.n_routed_experts * self.config.num_hidden_layers

    def distinct(self, rows: int) -> float:
        """Expected different experts of a layer that `rows` rows choose, if they choose independently and evenly."""
        c = self.config
        return c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** rows)

    def keys(self, context: int, rows: int) -> int:
        """Bytes of keys that `rows` rows at the end of a context read; state is whole on every rank."""
        c, key = self.config, key_bytes(self.config)
        found = 0
        for ratio in c.compress_ratios:
            found += min(context, c.sliding_window + rows) * key
            if ratio == INDEXED_RATIO:
                entries = context // ratio
                found += entries * index_key_bytes(c) + rows * min(entries, c.index_topk) * key
            elif ratio:
                found += context // ratio * key
        return found

    def step(self, context: int, chunk: int) -> int:
        """Bytes of a GPU that the arrays of one forward take at most."""
        return step_bytes(self.config, self.split, chunk, context)

    def state(self, context: int, sessions: int, chunk: int) -> MemoryPlan:
        return make_plan(
            self.config, weights=0, max_context=context, max_sessions=sessions, headroom=chunk, available=0, stages=self.stages
        )

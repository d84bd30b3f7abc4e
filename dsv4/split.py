"""Split: which part of every tensor one of several tensor-parallel ranks holds.

Sums that cross ranks (wo_b over the groups of heads, w2 over the experts' width) are cut into fixed slices, whatever the
number of ranks, and added as one binary tree. A rank that holds a contiguous power-of-two share of the slices computes
exactly one subtree. Where a sum has fewer slices than there are ranks, every rank computes all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import COUNTS, ModelConfig
from .errors import ConfigError


@dataclass(frozen=True)
class Split:
    """Rank `rank` of `size`. attention, experts: over how many ranks these are cut: size, or 1 (whole on every rank).

    heads, groups, attention_slices, moe_slices: this rank's share of the model's.
    """

    rank: int
    size: int
    attention: int
    experts: int
    heads: int
    groups: int
    attention_slices: int
    moe_slices: int

    @classmethod
    def of(cls, config: ModelConfig, rank: int = 0, size: int = 1) -> Split:
        """Raises ConfigError for a number of ranks over which nothing of the model can be divided."""
        attention, experts = divided(config, size)
        if size > 1 and attention == experts == 1:
            raise ConfigError(
                f"ranks: expected one of {', '.join(map(str, counts(config)))}; found {size}: the attention of this model is a sum of "
                f"{config.attention_slices} slices and its experts of {config.moe_slices}"
            )
        return cls(
            rank,
            size,
            attention,
            experts,
            config.num_attention_heads // attention,
            config.o_groups // attention,
            config.attention_slices // attention,
            config.moe_slices // experts,
        )

    def parts(self, shard: str) -> int:
        """Into how many parts a tensor of this shard (weights.TABLE) is cut."""
        return parts_by_shard(self.attention, self.experts, self.size)[shard]

    def share(self, length: int, shard: str) -> slice:
        """This rank's part of a dimension of `length`, in elements, or in blocks of them that one scale covers."""
        parts = self.parts(shard)
        at = self.rank if parts > 1 else 0
        return slice(length * at // parts, length * (at + 1) // parts)

    def index(self, shape: tuple[int, ...], shard: str, axis: int) -> tuple[slice, ...]:
        """This rank's part of a tensor of `shape`, as an index."""
        return tuple(self.share(n, shard) if i == axis else slice(0, n) for i, n in enumerate(shape))


def parts_by_shard(attention: int, experts: int, size: int) -> dict[str, int]:
    """Split.parts of every shard, where attention and experts are cut over so many of `size` ranks."""
    return {"heads": attention, "o_groups": attention, "moe_inter": experts, "vocab": size, "replicated": 1}


def counts(config: ModelConfig) -> list[int]:
    """The numbers of ranks that can run this model."""
    return [n for n in COUNTS if n == 1 or max(divided(config, n)) == n]


def divided(config: ModelConfig, size: int) -> tuple[int, int]:
    """Over how many of `size` ranks (attention, experts) are cut: all, where that makes equal shares of slices; else 1.

    A rank's heads must also be whole rows of scale blocks in wq_b.
    """
    width = config.num_attention_heads * config.head_dim
    attention = config.attention_slices % size == 0 and width % (size * 128) == 0
    return size if attention else 1, size if config.moe_slices % size == 0 else 1

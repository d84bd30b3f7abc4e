"""How much memory the CUDA backend's arrays of one forward take at most, from the sizes alone: for plans, with no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import INDEXED_RATIO
from .cuda_base import ceil
from .cuda_dense import EXPERT_SCRATCH, FEW
from .cuda_rows import SCRATCH, TILE

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..split import Split

_FLOAT = 4


def step_bytes(config: ModelConfig, split: Split, rows: int, context: int) -> int:
    """Bytes of a forward, draft or priming of at most `rows` rows, all of them wanted, at the end of `context` positions.

    The largest of the moments below, and an eighth more for what a pool of blocks of many sizes cannot use.
    """
    moments = _attention(config, split, rows, context), _index(config, split, rows, context), _experts(config, split, rows)
    found = max(*moments, _head(config, split, rows), _prime(config, rows))
    return _FLOAT * (found + rows * _tables(config, context)) * 9 // 8


def _streams(c: ModelConfig) -> int:
    return c.hc_mult * c.hidden_size


def _tables(c: ModelConfig, context: int) -> int:
    """Numbers per row that all layers share: places, angles, what a row is; and the mixes of its streams."""
    entries = sum(context // ratio for ratio in set(c.compress_ratios) if ratio and ratio != INDEXED_RATIO)
    return c.sliding_window + entries + 2 * c.qk_rope_head_dim + c.index_topk + c.hc_mult * (c.hc_mult + 2) + 32


def _queries(c: ModelConfig, split: Split) -> int:
    """Numbers per row while attention runs: streams, its input twice, queries."""
    return _streams(c) + 2 * c.hidden_size + c.q_lora_rank + split.heads * c.head_dim


def _attention(c: ModelConfig, split: Split, rows: int, context: int) -> int:
    """Queries and what they found, beside the largest of: the scratch, the output packed, the output's projections."""
    found, low = split.heads * c.head_dim, split.groups * c.o_lora_rank
    keys = c.sliding_window + max((context // r if r != INDEXED_RATIO else c.index_topk for r in c.compress_ratios if r), default=0)
    tiles, blocks = ceil(keys, TILE), ceil(split.heads, 16)
    row = blocks * (c.head_dim // 64 + 1) * 1024 + tiles * split.heads * (c.head_dim + 2) + keys
    slices = split.attention_slices if rows > FEW else 0  # up to FEW no linear keeps its slices apart
    projected = rows * (3 * low + (slices + 1 + 2 * split.attention) * c.hidden_size)
    return rows * (_queries(c, split) + found) + max(_some(rows, row), rows * (found + low), projected)


def _index(c: ModelConfig, split: Split, rows: int, context: int) -> int:
    """The indexer's queries before and after their rounding, and scores."""
    own = 2 * c.index_n_heads * c.index_head_dim + 4 * c.head_dim
    return rows * (_queries(c, split) + own) + _some(rows, context // INDEXED_RATIO)


def _some(rows: int, row: int) -> int:
    """Scratch memory for as many rows at once as it has room for, at least one."""
    return min(rows * row, max(SCRATCH, row))


def _experts(c: ModelConfig, split: Split, rows: int) -> int:
    """Streams before and after attention, products, activations, and sums of some outputs; then the streams after them."""
    inner, entries, d = c.moe_intermediate_size // split.experts, rows * (c.num_experts_per_tok + 1), c.hidden_size
    one = entries * split.moe_slices * 128
    sums = min(entries * split.moe_slices * d, max(EXPERT_SCRATCH // _FLOAT, one))
    during = rows * (2 * _streams(c) + 3 * d + c.n_routed_experts) + entries * 3 * inner + sums
    return max(during, rows * (3 * _streams(c) + (2 + 2 * split.experts) * d))


def _head(c: ModelConfig, split: Split, rows: int) -> int:
    """Logits of all rows, joined from all ranks; or a draft's, with what one place adds to them."""
    drafts = ceil(rows, c.dspark.block_size) if c.dspark else 1
    joined = rows if split.size > 1 else 0
    row = _streams(c) + 2 * c.hidden_size + c.vocab_size
    return rows * row + max(joined, drafts) * c.vocab_size


def _prime(c: ModelConfig, rows: int) -> int:
    return rows * 2 * (c.main_hidden_size + c.hidden_size)

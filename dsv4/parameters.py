"""What the model computes with: matrices, vectors and tables, by layer. weights.py fills these from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .split import Split


@dataclass(frozen=True)
class HyperConnection:
    """fn matrix [(2+m)m, m·d], base [(2+m)m], scale [3]; of a head: [m, m·d], [m], [1]."""

    fn: Any
    base: Any
    scale: Any
    streams: int
    iterations: int
    eps: float  # hc_eps
    norm_eps: float  # rms_norm_eps


@dataclass(frozen=True)
class Compressor:
    """wkv, wgate [c·D, d], ape [ratio, c·D], norm [D]; c = 2 where ratio is 4, else 1."""

    wkv: Any
    wgate: Any
    ape: Any
    norm: Any
    ratio: int
    dim: int


@dataclass(frozen=True)
class Indexer:
    """wq_b [Hi·Di, q_lora_rank], weights_proj [Hi, d] and a compressor of dimension Di."""

    wq_b: Any
    weights_proj: Any
    compressor: Compressor
    heads: int
    dim: int


@dataclass(frozen=True)
class Attention:
    """Matrices as in the table; sink [H]; ratio 0: window only, 4: indexed, else all compressed entries."""

    wq_a: Any
    wq_b: Any
    wkv: Any
    wo_a: Any
    wo_b: Any
    q_norm: Any
    kv_norm: Any
    sink: Any
    ratio: int
    compressor: Compressor | None
    indexer: Indexer | None


@dataclass(frozen=True)
class MoE:
    """gate [experts, d]; bias [experts] (score-routed layers) or fixed [vocab, top_k] (hash layers); the experts."""

    gate: Any
    bias: Any | None
    fixed: Any | None
    bank: Any


@dataclass(frozen=True)
class Block:
    """One layer, or one draft stage."""

    attn_norm: Any
    ffn_norm: Any
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn: Attention
    ffn: MoE


@dataclass(frozen=True)
class Draft:
    """The draft module. markov_w1 is a table [vocab, rank], markov_w2 a matrix; confidence [1, d + rank]."""

    stages: tuple[Block, ...]
    main_proj: Any
    main_norm: Any
    norm: Any
    hc_head: HyperConnection
    markov_w1: Any
    markov_w2: Any
    confidence: Any


@dataclass(frozen=True)
class Weights:
    """The whole model, or a rank's part; draft is None where the checkpoint has no mtp.* tensors."""

    split: Split

    embed: Any
    blocks: tuple[Block, ...]
    norm: Any
    hc_head: HyperConnection
    head: Any
    draft: Draft | None
    files: tuple[Any, ...] = ()  # mapped ones, with check_whole(): some of the above lies in them
    store: Any = None  # experts.store.Store, where routed experts are staged: it made the banks and computes them

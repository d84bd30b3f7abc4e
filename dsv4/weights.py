"""The model's weights: one table of every tensor of a checkpoint, checks against the files, and loading.

Checkpoint names appear here and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

from .checkpoint import Checkpoint
from .config import INDEXED_RATIO, ModelConfig, pooled_blocks
from .errors import CheckpointError, ConfigError
from .ops import Ops
from .parameters import Attention, Block, Compressor, Draft, HyperConnection, Indexer, MoE, Weights
from .split import Split

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
MakeBank = Callable[[str, tuple[Any, Any, Any], Any], Any]  # (prefix, shared expert, table of a hash layer) → bank


class Row(NamedTuple):
    """One tensor, or pair of weight and scale, of the table.

    name: in the checkpoint, after the prefix of its layer and expert; fp8 and fp4 add .weight and .scale
    field: where it goes in the dataclasses of parameters.py
    form: stored format, and what becomes of it: matrix (of a linear), vector (float32) or table (kept as it is)
    shape: names in _dims; of an fp4 matrix, before two codes are packed in a byte
    shard: what ranks split it by. heads, o_groups, moe_inter, vocab: rows of wq_b, wo_a, w1, w3, head; columns of
        wo_b (o_groups) and w2 (moe_inter); replicated: whole on every rank
    part: what it is counted as in reports;  where: which layers have it (_kinds)
    """

    name: str
    field: str
    form: str
    shape: str
    shard: str
    part: str
    where: str

    @property
    def format(self) -> str:
        return self.form.split()[0]

    @property
    def axis(self) -> int:
        """What ranks cut: the columns of a sum into the residual stream (d outputs), the rows of anything else."""
        return int(self.shape.split()[0] == "d")


WHOLE = "replicated"
EMBED, NORMS, DENSE, SPARSE = "embedding and head", "norms and hyper-connections", "attention", "compressor and indexer"
ROUTER, SHARED, ROUTED, HEADS = "router", "shared experts", "routed experts", "draft projections and heads"


def _hyper(name: str, field: str, rows: str, scales: str, where: str) -> tuple[tuple[str, ...], ...]:
    return (
        (name + "_fn", field + ".fn", "f32 matrix", rows + " md", WHOLE, NORMS, where),
        (name + "_base", field + ".base", "f32 vector", rows, WHOLE, NORMS, where),
        (name + "_scale", field + ".scale", "f32 vector", scales, WHOLE, NORMS, where),
    )


def _compressor(at: str, dim: str, where: str) -> tuple[tuple[str, ...], ...]:
    return (
        (at + ".wkv.weight", at + ".wkv", "bf16 matrix", f"c{dim} d", WHOLE, SPARSE, where),
        (at + ".wgate.weight", at + ".wgate", "bf16 matrix", f"c{dim} d", WHOLE, SPARSE, where),
        (at + ".ape", at + ".ape", "f32 vector", f"ratio c{dim}", WHOLE, SPARSE, where),
        (at + ".norm.weight", at + ".norm", "bf16 vector", dim, WHOLE, SPARSE, where),
    )


TABLE = tuple(
    Row(*row)
    for row in (
        ("embed.weight", "embed", "bf16 table", "vocab d", WHOLE, EMBED, "model"),
        ("head.weight", "head", "bf16 matrix", "vocab d", "vocab", EMBED, "model"),
        ("norm.weight", "norm", "bf16 vector", "d", WHOLE, NORMS, "model, last stage"),
        *_hyper("hc_head", "hc_head", "m", "1", "model, last stage"),
        ("attn_norm.weight", "attn_norm", "bf16 vector", "d", WHOLE, NORMS, "block"),
        ("ffn_norm.weight", "ffn_norm", "bf16 vector", "d", WHOLE, NORMS, "block"),
        *_hyper("hc_attn", "hc_attn", "mix", "3", "block"),
        *_hyper("hc_ffn", "hc_ffn", "mix", "3", "block"),
        ("attn.wq_a", "attn.wq_a", "fp8 matrix", "q_rank d", WHOLE, DENSE, "block"),
        ("attn.wq_b", "attn.wq_b", "fp8 matrix", "HD q_rank", "heads", DENSE, "block"),
        ("attn.wkv", "attn.wkv", "fp8 matrix", "D d", WHOLE, DENSE, "block"),
        ("attn.wo_a", "attn.wo_a", "fp8 matrix", "o_rank o_in", "o_groups", DENSE, "block"),
        ("attn.wo_b", "attn.wo_b", "fp8 matrix", "d o_rank", "o_groups", DENSE, "block"),
        ("attn.q_norm.weight", "attn.q_norm", "bf16 vector", "q_rank", WHOLE, NORMS, "block"),
        ("attn.kv_norm.weight", "attn.kv_norm", "bf16 vector", "D", WHOLE, NORMS, "block"),
        ("attn.attn_sink", "attn.sink", "f32 vector", "H", "heads", DENSE, "block"),
        *_compressor("attn.compressor", "D", "compressed"),
        ("attn.indexer.wq_b", "attn.indexer.wq_b", "fp8 matrix", "HiDi q_rank", WHOLE, SPARSE, "indexed"),
        ("attn.indexer.weights_proj.weight", "attn.indexer.weights_proj", "bf16 matrix", "Hi d", WHOLE, SPARSE,
         "indexed"),
        *_compressor("attn.indexer.compressor", "Di", "indexed"),
        ("ffn.gate.weight", "ffn.gate", "bf16 matrix", "experts d", WHOLE, ROUTER, "block"),
        ("ffn.gate.bias", "ffn.bias", "f32 vector", "experts", WHOLE, ROUTER, "scored"),
        ("ffn.gate.tid2eid", "ffn.fixed", "i64 table", "vocab top_k", WHOLE, ROUTER, "hashed"),
        ("ffn.shared_experts.w1", "ffn.shared.w1", "fp8 matrix", "inter d", "moe_inter", SHARED, "block"),
        ("ffn.shared_experts.w2", "ffn.shared.w2", "fp8 matrix", "d inter", "moe_inter", SHARED, "block"),
        ("ffn.shared_experts.w3", "ffn.shared.w3", "fp8 matrix", "inter d", "moe_inter", SHARED, "block"),
        ("w1", "w1", "fp4 matrix", "inter d", "moe_inter", ROUTED, "expert"),
        ("w2", "w2", "fp4 matrix", "d inter", "moe_inter", ROUTED, "expert"),
        ("w3", "w3", "fp4 matrix", "inter d", "moe_inter", ROUTED, "expert"),
        ("main_proj", "main_proj", "fp8 matrix", "d targets_d", WHOLE, HEADS, "first stage"),
        ("main_norm.weight", "main_norm", "bf16 vector", "d", WHOLE, HEADS, "first stage"),
        ("markov_head.markov_w1.weight", "markov_w1", "bf16 table", "vocab rank", WHOLE, HEADS, "last stage"),
        ("markov_head.markov_w2.weight", "markov_w2", "bf16 matrix", "vocab rank", WHOLE, HEADS, "last stage"),
        ("confidence_head.proj.weight", "confidence", "bf16 matrix", "1 d_rank", WHOLE, HEADS, "last stage"),
    )
)
_STORED = {"bf16": "BF16", "f32": "F32", "i64": "I64", "fp8": "F8_E4M3", "fp4": "I8"}
_ROOTS = {"layers", "mtp"} | {row.name.split(".")[0] for row in TABLE if "model" in row.where}
_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.)ffn\.experts\.(\d+)\.")
_STAGE = re.compile(r"mtp\.(\d+)\.")
DEEP_LIMIT = 4 << 30  # bytes: a checkpoint below this has every value checked when it is loaded


# ---------------------------------------------------------------------- what must be in the files
class Expected(NamedTuple):
    """A tensor that the config asks for; experts: how many its layer has."""

    dtype: str
    shape: tuple[int, ...]
    row: Row
    experts: int


@dataclass(frozen=True)
class Layout:
    """Every tensor by name, the number of experts of each draft stage, and tensors of the files that nothing uses."""

    tensors: dict[str, Expected]
    stages: tuple[int, ...]
    unused: tuple[str, ...]


def _dims(config: ModelConfig, ratio: int = 0, experts: int = 0) -> dict[str, int]:
    """The sizes by the names that the table's shapes use."""
    c, m, d, heads = config, config.hc_mult, config.hidden_size, config.num_attention_heads
    wide = pooled_blocks(ratio)
    rank = c.dspark.markov_rank if c.dspark else 0
    return {
        "1": 1, "3": 3, "m": m, "d": d, "md": m * d, "mix": (2 + m) * m, "vocab": c.vocab_size,
        "q_rank": c.q_lora_rank, "H": heads, "D": c.head_dim, "HD": heads * c.head_dim,
        "o_rank": c.o_groups * c.o_lora_rank, "o_in": heads * c.head_dim // c.o_groups,
        "ratio": ratio, "cD": wide * c.head_dim, "Di": c.index_head_dim, "cDi": wide * c.index_head_dim,
        "Hi": c.index_n_heads, "HiDi": c.index_n_heads * c.index_head_dim,
        "experts": experts, "top_k": c.num_experts_per_tok, "inter": c.moe_intermediate_size,
        "targets_d": c.main_hidden_size, "rank": rank, "d_rank": d + rank,
    }  # fmt: skip


def _kinds(ratio: int = 0, hashed: bool = False) -> tuple[str, ...]:
    """Which rows of the table a layer has."""
    compressed = ("compressed", "indexed") if ratio == INDEXED_RATIO else ("compressed",) if ratio else ()
    return ("block", "hashed" if hashed else "scored", *compressed)


def _rows(*kinds: str) -> list[Row]:
    return [row for row in TABLE if any(kind in row.where.split(", ") for kind in kinds)]


def _stored(row: Row, dims: dict[str, int]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the row's tensors on disk."""
    shape = tuple(dims[name] for name in row.shape.split())
    if row.format not in ("fp8", "fp4"):
        yield row.name, _STORED[row.format], shape
        return
    n, k = shape
    fp4 = row.format == "fp4"
    yield row.name + ".weight", _STORED[row.format], (n, k // 2) if fp4 else shape
    yield row.name + ".scale", "F8_E8M0", (n, k // 32) if fp4 else (-(-n // 128), -(-k // 128))


def expected(config: ModelConfig, stages: tuple[int, ...]) -> dict[str, Expected]:
    """Every tensor of a checkpoint with these draft stages (experts of each), by name."""
    found: dict[str, Expected] = {}

    def add(prefix: str, rows: list[Row], ratio: int = 0, experts: int = 0) -> None:
        dims = _dims(config, ratio, experts)
        stored = [(name, Expected(dtype, shape, row, experts))
                  for row in rows for name, dtype, shape in _stored(row, dims)]  # fmt: skip
        found.update((prefix + name, tensor) for name, tensor in stored)

    def add_block(prefix: str, kinds: tuple[str, ...], ratio: int, experts: int) -> None:
        add(prefix, _rows(*kinds), ratio, experts)
        for e in range(experts):
            add(f"{prefix}ffn.experts.{e}.", _rows("expert"), ratio, experts)

    add("", _rows("model"))
    for i, ratio in enumerate(config.compress_ratios):
        add_block(f"layers.{i}.", _kinds(ratio, i < config.num_hash_layers), ratio, config.n_routed_experts)
    for s, experts in enumerate(stages):
        add_block(f"mtp.{s}.", _kinds() + _stage_kinds(s, len(stages)), 0, experts)
    return found


def _stage_kinds(stage: int, stages: int) -> tuple[str, ...]:
    return ("first stage",) * (stage == 0) + ("last stage",) * (stage == stages - 1)


def banks(config: ModelConfig, stages: tuple[int, ...]) -> dict[str, int]:
    """Routed experts of every layer and draft stage, by the prefix of their tensors' names."""
    main = {f"layers.{i}.": config.n_routed_experts for i in range(config.num_hidden_layers)}
    return main | {f"mtp.{s}.": experts for s, experts in enumerate(stages)}


def expert_tensors(checkpoint: Checkpoint, prefix: str, expert: int, split: Split) -> list[tuple[str, tuple[slice, ...]]]:
    """(name, a rank's part) of an expert's w1, w2 and w3: of each the codes, then the scales."""
    names = [(f"{prefix}ffn.experts.{expert}.{row.name}{kind}", row)
             for row in _rows("expert") for kind in (".weight", ".scale")]  # fmt: skip
    return [(name, part_of(checkpoint, name, row, split)) for name, row in names]


# ---------------------------------------------------------------------- checks
def check(checkpoint: Checkpoint, config: ModelConfig) -> Layout:
    """Compare names, dtypes and shapes with the table; reads headers only.

    Raises CheckpointError with counts and the first names. A tensor under a known root (layers, mtp, embed, ...) that
    the table does not have is an error: a weight that silently does nothing is a fault. Others are listed as unused.
    """
    stages = _count_experts(checkpoint, config)
    tensors = expected(config, stages)
    missing = [name for name in tensors if name not in checkpoint]
    extra = [name for name in checkpoint.names() if name not in tensors]
    known = [name for name in extra if name.split(".")[0] in _ROOTS]
    wrong = []
    for name, want in tensors.items():
        if name in checkpoint:
            info = checkpoint.info(name)
            if (info.dtype, info.shape) != (want.dtype, want.shape):
                wrong.append(
                    f"{name} in {info.shard}: expected {want.dtype} {list(want.shape)}, "
                    f"found {info.dtype} {list(info.shape)}"
                )
    found = [_counted(missing, "missing"), _counted(known, "unexpected"), _counted(wrong, "of wrong dtype or shape")]
    if any(found):
        problems = "; ".join(text for text in found if text)
        hint = "; a draft must be complete or wholly absent" if any(n.startswith("mtp.") for n in missing) else ""
        raise CheckpointError(f"{checkpoint.directory}: tensors do not match config.json: {problems}{hint}")
    return Layout(tensors, stages, tuple(name for name in extra if name not in known))


def _counted(names: list[str], what: str, shown: int = 3) -> str:
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} {what} ({', '.join(names[:shown])}{more})" if names else ""


def _count_experts(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, ...]:
    """The number of experts of each draft stage; those of the main layers must be the config's."""
    ids: dict[str, set[int]] = {}
    stages = set()
    for name in checkpoint.names():
        if match := _EXPERT.match(name):
            ids.setdefault(match[1], set()).add(int(match[2]))
        if match := _STAGE.match(name):
            stages.add(int(match[1]))
    if stages != set(range(len(stages))):
        raise CheckpointError(f"{checkpoint.directory}: draft stages: expected mtp.0 and up without a gap, "
                              f"found {', '.join(f'mtp.{s}' for s in sorted(stages))}")  # fmt: skip
    if stages and not config.dspark:
        raise ConfigError(f"{checkpoint.directory}: holds draft stages (mtp.*), but config.json has no dspark_* keys")
    main = [f"layers.{i}." for i in range(config.num_hidden_layers)]
    draft = [f"mtp.{s}." for s in range(len(stages))]
    counts = []
    for prefix in main + draft:
        gate = f"{prefix}ffn.gate.weight"
        held = len(ids.get(prefix, ()))
        rows = checkpoint.info(gate).shape[0] if gate in checkpoint and checkpoint.info(gate).shape else held
        want = config.n_routed_experts if prefix in main else rows
        if not want == rows == held:
            raise CheckpointError(
                f"{checkpoint.directory}: {prefix}ffn: expected as many experts as rows in {gate} and, in main layers, "
                f"n_routed_experts = {config.n_routed_experts}; found {held} experts, {rows} rows"
            )
        if want < config.num_experts_per_tok:
            raise CheckpointError(f"{checkpoint.directory}: {prefix}ffn: expected at least num_experts_per_tok = "
                                  f"{config.num_experts_per_tok} experts, found {want}")  # fmt: skip
        counts.append(want)
    return tuple(counts[len(main) :])


def part_of(checkpoint: Checkpoint, name: str, row: Row, split: Split) -> tuple[slice, ...]:
    """Which part of a stored tensor a rank holds, as an index."""
    return split.index(checkpoint.info(name).shape, row.shard, row.axis)


def held_bytes(checkpoint: Checkpoint, layout: Layout, split: Split) -> int:
    """Bytes of a rank's parts of all tensors."""
    held = 0
    for name, tensor in layout.tensors.items():
        length = tensor.shape[tensor.row.axis] if tensor.row.shard != WHOLE else 1
        share = split.share(length, tensor.row.shard)
        held += checkpoint.info(name).nbytes // length * (share.stop - share.start)
    return held


def check_values(
    checkpoint: Checkpoint, layout: Layout, deep: bool, progress: Progress | None = None, split: Split | None = None
) -> None:
    """No NaN scale, no non-finite parameter, no expert id out of range. split: look at a rank's parts only.

    Not deep: what is small (all but the expert scales and the large matrices). Deep: everything, which reads the whole
    checkpoint. Raises CheckpointError naming tensor and place.
    """
    done = 0
    for name, tensor in layout.tensors.items():
        if deep or _small(tensor):
            part = None if split is None or split.size == 1 else part_of(checkpoint, name, tensor.row, split)
            checkpoint.check_values(name, tensor.experts, part)
        done += checkpoint.info(name).nbytes
        if progress:
            progress(done, checkpoint.total_bytes)


def _small(tensor: Expected) -> bool:
    row = tensor.row
    scale = tensor.dtype == "F8_E8M0" and row.where != "expert"
    return scale or row.form.endswith("vector") or row.format in ("f32", "i64")


# ---------------------------------------------------------------------- loading
def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, ops: Ops, progress: Progress | None = None, split: Split | None = None,
    make_bank: MakeBank | None = None,
) -> Weights:  # fmt: skip
    """Check the checkpoint, then hand every tensor, or a rank's part of it, to the backend. Raises CheckpointError.

    make_bank: who makes a layer's bank where its routed experts are not to be taken where the checkpoint is mapped.
    A checkpoint of less than 4 GB has every value checked; of a larger one the expert scales and large matrices are
    left to the deep inspection.
    """
    layout, split = check(checkpoint, config), split or Split.of(config)
    check_values(checkpoint, layout, deep=checkpoint.total_bytes < DEEP_LIMIT, split=split)
    return _Loader(checkpoint, config, ops, progress, layout, split, make_bank).load(layout.stages)


class _Loader:
    """Builds the dataclasses from the table; counts the bytes for the progress report."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, progress, layout: Layout, split: Split, make_bank
    ):  # fmt: skip
        self.checkpoint, self.config, self.ops, self.progress, self.make_bank = checkpoint, config, ops, progress, make_bank
        self.split, self.done, self.total = split, 0, held_bytes(checkpoint, layout, split)

    def load(self, stages: tuple[int, ...]) -> Weights:
        c = self.config
        tree = self.tree("", "model")
        blocks = tuple(
            self.block(f"layers.{i}.", c.n_routed_experts, ratio, i < c.num_hash_layers)
            for i, ratio in enumerate(c.compress_ratios)
        )
        hc_head = self.hyper(tree.pop("hc_head"))
        return Weights(split=self.split, **tree, hc_head=hc_head, blocks=blocks, draft=self.draft(stages) if stages else None)

    def draft(self, stages: tuple[int, ...]) -> Draft:
        blocks = tuple(self.block(f"mtp.{s}.", experts) for s, experts in enumerate(stages))
        tree = self.tree("mtp.0.", "first stage") | self.tree(f"mtp.{len(stages) - 1}.", "last stage")
        return Draft(**tree | {"hc_head": self.hyper(tree["hc_head"])}, stages=blocks)

    def block(self, prefix: str, experts: int, ratio: int = 0, hashed: bool = False) -> Block:
        tree = self.tree(prefix, *_kinds(ratio, hashed))
        ffn, shared = tree["ffn"], tree["ffn"].pop("shared")
        shared = (shared["w1"], shared["w2"], shared["w3"])
        if self.make_bank is None:
            bank = self.ops.bank([self.expert(f"{prefix}ffn.experts.{e}.") for e in range(experts)], shared)
        else:
            bank = self.make_bank(prefix, shared, ffn.get("fixed"))
            parts = [part for _, part in expert_tensors(self.checkpoint, prefix, 0, self.split)]  # of bytes
            self.done += experts * sum((n.stop - n.start) * (k.stop - k.start) for n, k in parts)
        return Block(
            tree["attn_norm"],
            tree["ffn_norm"],
            self.hyper(tree["hc_attn"]),
            self.hyper(tree["hc_ffn"]),
            self.attention(tree["attn"], ratio),
            MoE(ffn["gate"], ffn.get("bias"), ffn.get("fixed"), bank),
        )

    def attention(self, tree: dict[str, Any], ratio: int) -> Attention:
        c = self.config
        parts: dict[str, Any] = {"compressor": None, "indexer": None}
        if ratio:
            parts["compressor"] = Compressor(**tree["compressor"], ratio=ratio, dim=c.head_dim)
        if ratio == INDEXED_RATIO:
            inner = tree["indexer"]
            compressor = Compressor(**inner["compressor"], ratio=ratio, dim=c.index_head_dim)
            parts["indexer"] = Indexer(
                inner["wq_b"], inner["weights_proj"], compressor, c.index_n_heads, c.index_head_dim
            )
        return Attention(**tree | parts, ratio=ratio)

    def expert(self, prefix: str) -> tuple[Any, Any, Any]:
        tree = self.tree(prefix, "expert")
        return tree["w1"], tree["w2"], tree["w3"]

    def hyper(self, tree: dict[str, Any]) -> HyperConnection:
        c = self.config
        return HyperConnection(**tree, streams=c.hc_mult, iterations=c.hc_sinkhorn_iters, eps=c.hc_eps,
                               norm_eps=c.rms_norm_eps)  # fmt: skip

    def tree(self, prefix: str, *kinds: str) -> dict[str, Any]:
        """The leaves of these rows, nested by the dots of their fields."""
        root: dict[str, Any] = {}
        for row in _rows(*kinds):
            *path, last = row.field.split(".")
            node = root
            for part in path:
                node = node.setdefault(part, {})
            node[last] = self.leaf(prefix + row.name, row)
        if self.progress:
            self.progress(self.done, self.total)
        return root

    def leaf(self, name: str, row: Row) -> Any:
        kind = row.form.split()[1]
        if kind == "vector":
            return self.ops.vector(self.view(name, row))
        if kind == "table":
            return self.ops.table(self.view(name, row))
        if row.format in ("fp8", "fp4"):
            weight, scale = self.view(name + ".weight", row), self.view(name + ".scale", row)
            return self.ops.matrix(row.format, weight.view(np.uint8), scale)
        return self.ops.matrix(row.format, self.view(name, row))

    def view(self, name: str, row: Row) -> np.ndarray:
        array = self.checkpoint.view(name, part_of(self.checkpoint, name, row, self.split))
        self.done += array.nbytes
        return array

"""Describe a checkpoint from its headers alone: what it holds, and what would fit where."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .config import COUNTS, INDEXED_RATIO, ModelConfig, RunConfig
from .plan import make_plan
from .split import divided, parts_by_shard
from .weights import ROUTED, Layout, check, check_values


def describe(directory: str | Path, deep: bool = False) -> dict[str, Any]:
    """A report on the checkpoint in DIRECTORY, of JSON types only; bytes and counts are integers.

    Checks names, dtypes, shapes and file sizes; with `deep` also reads all data and checks every value. Raises
    ConfigError or CheckpointError for what a load would refuse.
    """
    config = ModelConfig.load(directory)
    with Checkpoint(directory) as checkpoint:
        layout = check(checkpoint, config)
        if deep:
            check_values(checkpoint, layout, deep=True)
        return {
            "directory": str(directory),
            "checked": "every value" if deep else "headers",
            "shards": len(checkpoint.shards),
            "tensors": sum(shard.tensors for shard in checkpoint.shards),
            "total_bytes": checkpoint.total_bytes,
            "dtypes": _dtypes(checkpoint),
            "unused": list(layout.unused),
            "layers": _layers(config),
            "experts": {
                "routed": config.n_routed_experts, "per_token": config.num_experts_per_tok, "shared": 1,
            },
            "draft": _draft(config, layout),
            "vocabulary": config.vocab_size,
            "context": config.max_position_embeddings,
            "bytes": _bytes(checkpoint, layout),
            "parameters": _parameters(config, layout),
            "ranks": [_rank(checkpoint, config, layout, ranks) for ranks in COUNTS],
            "state": _state(config, len(layout.stages)),
        }  # fmt: skip


def _dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for info in map(checkpoint.info, checkpoint.names()):
        entry = found.setdefault(info.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
    return dict(sorted(found.items()))


def _layers(config: ModelConfig) -> dict[str, Any]:
    """Layers by attention: window only, indexed (ratio 4), or all compressed entries."""
    by_ratio = defaultdict(list)
    for layer, ratio in enumerate(config.compress_ratios):
        by_ratio[ratio].append(layer)
    names = {0: "window", INDEXED_RATIO: "compressed, indexed"}
    kinds = [
        {"kind": names.get(ratio, "compressed"), "ratio": ratio, "count": len(layers), "layers": layers}
        for ratio, layers in sorted(by_ratio.items())
    ]
    return {"count": config.num_hidden_layers, "window": config.sliding_window, "hash_routed": config.num_hash_layers,
            "kinds": kinds}  # fmt: skip


def _draft(config: ModelConfig, layout: Layout) -> dict[str, Any] | None:
    if not layout.stages or not config.dspark:
        return None
    d = config.dspark
    return {"stages": len(layout.stages), "experts": list(layout.stages), "block_size": d.block_size,
            "target_layers": list(d.target_layer_ids), "markov_rank": d.markov_rank}  # fmt: skip


def _bytes(checkpoint: Checkpoint, layout: Layout) -> dict[str, int]:
    """Bytes by part of the main model; all of the draft's as one, and of these the routed experts'."""
    found: dict[str, int] = defaultdict(int)
    for name, tensor in layout.tensors.items():
        draft = name.startswith("mtp.")
        found["draft" if draft else tensor.row.part] += checkpoint.info(name).nbytes
        if draft and tensor.row.part == ROUTED:
            found["of draft: " + ROUTED] += checkpoint.info(name).nbytes
    return dict(found)


def _parameters(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Parameters without scales and tables of ids; active: those that one token of the main model meets."""
    main = draft = routed = 0
    for name, tensor in layout.tensors.items():
        if tensor.dtype in ("F8_E8M0", "I64"):
            continue
        count = math.prod(tensor.shape) * (2 if tensor.dtype == "I8" else 1)
        if name.startswith("mtp."):
            draft += count
        else:
            main += count
            routed += count if tensor.row.part == ROUTED else 0
    active = main - routed + routed * config.num_experts_per_tok // config.n_routed_experts
    return {"main": main, "active": active, "draft": draft}


def _rank(checkpoint: Checkpoint, config: ModelConfig, layout: Layout, ranks: int) -> dict[str, Any]:
    """Bytes that one of `ranks` ranks holds: what is always resident, and its share of the routed experts.

    A part whose sum has fewer slices than ranks is whole on every rank (docs/ranks.md).
    """
    attention, experts = divided(config, ranks)
    parts = parts_by_shard(attention, experts, ranks)
    held = {"resident": 0, "draft_experts": 0, "experts": 0}
    for name, tensor in layout.tensors.items():
        size = checkpoint.info(name).nbytes
        share = -(-size // parts[tensor.row.shard])
        routed = tensor.row.part == ROUTED
        held["resident" if not routed else "draft_experts" if name.startswith("mtp.") else "experts"] += share
    attention, experts = attention == ranks, experts == ranks
    return {"ranks": ranks, "possible": attention or experts, "splits_attention": attention, "splits_experts": experts,
            **held}  # fmt: skip


def _state(config: ModelConfig, stages: int) -> dict[str, Any]:
    """Bytes of one session: fixed, per token of context, and in all at the longest context."""
    chunk, limit = RunConfig.chunk, config.max_position_embeddings
    plan = make_plan(config, weights=0, max_context=limit, max_sessions=1, headroom=chunk, available=0, stages=stages)
    fixed = {"window keys": plan.windows, "compressor rows": plan.compressor_rows, "draft windows": plan.draft}
    growing = {"compressed keys": plan.entries, "index keys": plan.index_keys}
    return {
        "chunk": chunk,
        "fixed": fixed,
        "at_max_context": growing,
        "per_token": sum(growing.values()) / limit,
        "total_at_max_context": sum(fixed.values()) + sum(growing.values()),
    }


# ---------------------------------------------------------------------- text
def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    sections = (_render_files, _render_model, _render_bytes, _render_ranks, _render_state)
    return "\n\n".join("\n".join(section(report)) for section in sections)


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _ranges(numbers: list[int]) -> str:
    """2, 4, 6, 8 → "2, 4 .. 8"; 0, 1, 2 → "0 .. 2": evenly spaced runs of three or more are cut."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    even = all(b - a == step for a, b in zip(numbers, numbers[1:]))
    if len(numbers) < 3 or not even:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]} .. {numbers[-1]}" if step == 1 else f"{numbers[0]}, {numbers[1]} .. {numbers[-1]}"


def _lines(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [title, *(f"  {label:<{width}}  {text}" for label, text in rows)]


def _render_files(report: dict[str, Any]) -> list[str]:
    rows = [("size", f"{_size(report['total_bytes'])} in {report['tensors']:,} tensors, {report['shards']} shard(s)")]
    rows += [(dtype, f"{_size(d['bytes'])} in {d['tensors']:,} tensors") for dtype, d in report["dtypes"].items()]
    rows.append(("checked", f"{report['checked']}: complete, dtypes and shapes as config.json asks"))
    if report["unused"]:
        rows.append(("unused", f"{len(report['unused'])} tensor(s) that the model has no place for: "
                               f"{', '.join(report['unused'][:5])}"))  # fmt: skip
    return _lines(report["directory"], rows)


def _render_model(report: dict[str, Any]) -> list[str]:
    layers, experts, draft, count = report["layers"], report["experts"], report["draft"], report["parameters"]
    rows = [
        ("parameters", f"{_billions(count['main'] + count['draft'])}: {_billions(count['main'])}, of which a token meets "
                       f"{_billions(count['active'])}" + (f", and the draft's {_billions(count['draft'])}" if draft else "")),
        ("layers", f"{layers['count']}, window {layers['window']}, first {layers['hash_routed']} routed by token id"),
    ]  # fmt: skip
    for kind in layers["kinds"]:
        name = kind["kind"] + (f", ratio {kind['ratio']}" if kind["ratio"] else "")
        rows.append(("", f"{kind['count']} x {name}: {_ranges(kind['layers'])}"))
    rows.append(("experts", f"{experts['routed']} routed, {experts['per_token']} a token, {experts['shared']} shared"))
    rows.append(("draft", f"{draft['stages']} stages of {', '.join(map(str, draft['experts']))} experts, block "
                          f"{draft['block_size']}, reads layers {_ranges(draft['target_layers'])}"
                          if draft else "none: runs without speculation"))  # fmt: skip
    rows.append(("vocabulary", f"{report['vocabulary']:,} tokens"))
    rows.append(("context", f"{report['context']:,} positions"))
    return _lines("Model", rows)


def _render_bytes(report: dict[str, Any]) -> list[str]:
    parts = sorted(report["bytes"].items(), key=lambda item: -item[1])
    return _lines("Bytes by part", [(part, _size(size)) for part, size in parts])


def _render_ranks(report: dict[str, Any]) -> list[str]:
    """What each rank must hold when the routed experts stay in host memory, and what the experts need there."""
    lines = ["What each rank holds", "  ranks  resident     + draft experts  + its experts (host or device)"]
    for rank in report["ranks"]:
        whole = [part for part in ("attention", "experts") if rank["ranks"] > 1 and not rank[f"splits_{part}"]]
        note = f"  {' and '.join(whole)} whole on every rank" if whole else ""
        sizes = f"{_size(rank['resident']):<11}  {_size(rank['draft_experts']):<15}  {_size(rank['experts'])}{note}"
        lines.append(f"  {rank['ranks']:<5}  {sizes if rank['possible'] else 'not possible: nothing would be split'}")
    return lines


def _render_state(report: dict[str, Any]) -> list[str]:
    state = report["state"]
    rows = [(part, _size(size)) for part, size in state["fixed"].items()]
    rows += [(part, f"{_size(size)} at {report['context']:,} positions")
             for part, size in state["at_max_context"].items()]  # fmt: skip
    rows += [("per token", f"{state['per_token']:.0f} B"), ("in all", _size(state["total_at_max_context"]))]
    return _lines(f"State of one session (chunks of {state['chunk']})", rows)

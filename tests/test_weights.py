"""Weights: every tensor of a checkpoint is used, and each one that is absent, extra, misshapen or poisoned is named."""

import dataclasses
import os
import re
import time

import numpy as np
import pytest

import dsv4
from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.weights import TABLE, check, check_values, expected, load_weights
from variants import (
    Files, RecordingOps, Tensor, drop_draft, mute_experts, poison, prune_experts, scatter, spell_newer, write_shard,
)  # fmt: skip


def load(directory, progress=None):
    with Checkpoint(directory) as checkpoint:
        return load_weights(checkpoint, ModelConfig.load(directory), RecordingOps(), progress)


def fails(directory, *patterns, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        load(directory)
    text = str(caught.value)
    assert "\n" not in text
    for pattern in patterns:
        assert re.search(pattern, text), (pattern, text)


@pytest.fixture(scope="module")
def files(tiny_root):
    return Files.read(tiny_root / "tiny-tp")


@pytest.fixture(scope="module")
def headers(tiny_root):
    """tiny-tp without data: writes in no time."""
    return Files.read(tiny_root / "tiny-tp", data=False)


# ---------------------------------------------------------------------- all of it is used
def leaves(node):
    if isinstance(node, np.ndarray):
        yield node
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from leaves(getattr(node, field.name))
    elif isinstance(node, (tuple, list)):
        for item in node:
            yield from leaves(item)


@pytest.mark.parametrize("name", ["nano", "tiny-a", "tiny-b", "tiny-m", "tiny-tp"])
def test_every_tensor_reaches_the_backend_once(checkpoint_dir, name):
    """The table's own completeness: the arrays in the dataclasses are the tensors of the files, each exactly once."""
    directory = checkpoint_dir(name)
    reports = []
    weights = load(directory, lambda done, total: reports.append((done, total)))
    with Checkpoint(directory) as checkpoint:
        stored = sorted((v.shape, v.tobytes()) for v in map(checkpoint.view, checkpoint.names()))
        total = checkpoint.total_bytes
    assert sorted((leaf.shape, leaf.tobytes()) for leaf in leaves(weights)) == stored
    assert reports[-1] == (total, total) and [r[0] for r in reports] == sorted(r[0] for r in reports)


class Same:
    """Compares what the backend was given with the tensors of a checkpoint."""

    def __init__(self, checkpoint):
        self.view = checkpoint.view

    def vector(self, leaf, name):
        return leaf[0] == "vector" and np.array_equal(leaf[1], self.view(name))

    def table(self, leaf, name):
        stored = self.view(name)
        return leaf[0] == "table" and leaf[1].dtype == stored.dtype and np.array_equal(leaf[1], stored)

    def matrix(self, leaf, fmt, name):
        kind, given, weight, scale = leaf
        if fmt in ("fp8", "fp4"):
            stored = self.view(name + ".weight").view(np.uint8)
            scaled = np.array_equal(scale, self.view(name + ".scale"))
        else:
            stored, scaled = self.view(name), scale is None
        same = weight.dtype == stored.dtype and np.array_equal(weight, stored)
        return (kind, given) == ("matrix", fmt) and same and scaled


@pytest.fixture(scope="module")
def loaded(tiny_root, tmp_path_factory):
    """tiny-m with two different epsilons: (weights, config, Same)."""
    files = Files.read(tiny_root / "tiny-m")
    files.config.update(hc_eps=2e-6, rms_norm_eps=3e-6)
    directory = files.write(tmp_path_factory.mktemp("epsilons"))
    with Checkpoint(directory) as checkpoint:
        yield load(directory), ModelConfig.load(directory), Same(checkpoint)


def test_fields_of_the_model(loaded):
    w, _, same = loaded
    assert same.table(w.embed, "embed.weight") and same.matrix(w.head, "bf16", "head.weight")
    assert same.vector(w.norm, "norm.weight") and same.matrix(w.hc_head.fn, "f32", "hc_head_fn")
    assert same.vector(w.hc_head.base, "hc_head_base") and same.vector(w.hc_head.scale, "hc_head_scale")


def test_fields_of_a_block(loaded):
    w, _, same = loaded
    block = w.blocks[1]
    for name in ("attn_norm", "ffn_norm"):
        assert same.vector(getattr(block, name), f"layers.1.{name}.weight")
    for name in ("hc_attn", "hc_ffn"):
        hc = getattr(block, name)
        assert same.matrix(hc.fn, "f32", f"layers.1.{name}_fn") and same.vector(hc.base, f"layers.1.{name}_base")
        assert same.vector(hc.scale, f"layers.1.{name}_scale")
        assert (hc.streams, hc.iterations, hc.eps, hc.norm_eps) == (4, 20, 2e-6, 3e-6)


def test_fields_of_attention(loaded):
    w, _, same = loaded
    attn, at = w.blocks[1].attn, "layers.1.attn."
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        assert same.matrix(getattr(attn, name), "fp8", at + name)
    assert same.vector(attn.sink, at + "attn_sink") and same.vector(attn.kv_norm, at + "kv_norm.weight")
    assert same.vector(attn.q_norm, at + "q_norm.weight")
    assert [block.attn.ratio for block in w.blocks] == [0, 4, 16, 4, 0] and w.blocks[0].attn.compressor is None
    wide = w.blocks[2].attn
    assert (wide.compressor.ratio, wide.compressor.dim, wide.indexer) == (16, 128, None)
    indexer = attn.indexer
    assert (indexer.heads, indexer.dim, indexer.compressor.ratio, indexer.compressor.dim) == (8, 64, 4, 64)
    assert same.matrix(indexer.wq_b, "fp8", at + "indexer.wq_b")
    assert same.matrix(indexer.weights_proj, "bf16", at + "indexer.weights_proj.weight")
    for compressor, where in ((attn.compressor, at + "compressor."), (indexer.compressor, at + "indexer.compressor."),
                              (wide.compressor, "layers.2.attn.compressor.")):  # fmt: skip
        assert same.matrix(compressor.wkv, "bf16", where + "wkv.weight")
        assert same.matrix(compressor.wgate, "bf16", where + "wgate.weight")
        assert same.vector(compressor.ape, where + "ape") and same.vector(compressor.norm, where + "norm.weight")


def test_fields_of_experts(loaded):
    w, _, same = loaded
    hashed, scored = w.blocks[0].ffn, w.blocks[1].ffn
    assert same.matrix(scored.gate, "bf16", "layers.1.ffn.gate.weight")
    assert same.vector(scored.bias, "layers.1.ffn.gate.bias") and scored.fixed is None
    assert same.table(hashed.fixed, "layers.0.ffn.gate.tid2eid") and hashed.bias is None
    _, experts, shared = scored.bank
    assert len(experts) == 8
    for e, expert in enumerate(experts):
        for name, leaf in zip(("w1", "w2", "w3"), expert):
            assert same.matrix(leaf, "fp4", f"layers.1.ffn.experts.{e}.{name}")
    for name, leaf in zip(("w1", "w2", "w3"), shared):
        assert same.matrix(leaf, "fp8", f"layers.1.ffn.shared_experts.{name}")


def test_fields_of_the_draft(loaded):
    w, _, same = loaded
    d = w.draft
    assert len(d.stages) == 3 and all(stage.attn.ratio == 0 for stage in d.stages)
    for s, stage in enumerate(d.stages):
        assert same.matrix(stage.attn.wkv, "fp8", f"mtp.{s}.attn.wkv")
    assert same.matrix(d.main_proj, "fp8", "mtp.0.main_proj") and same.vector(d.main_norm, "mtp.0.main_norm.weight")
    assert same.vector(d.norm, "mtp.2.norm.weight") and same.vector(d.hc_head.scale, "mtp.2.hc_head_scale")
    assert same.table(d.markov_w1, "mtp.2.markov_head.markov_w1.weight")
    assert same.matrix(d.markov_w2, "bf16", "mtp.2.markov_head.markov_w2.weight")
    assert same.matrix(d.confidence, "bf16", "mtp.2.confidence_head.proj.weight")


def test_shard_rules_of_the_table():
    rules = {(row.name, row.where): row.shard for row in TABLE}
    sharded = {name: shard for (name, _), shard in rules.items() if shard != "replicated"}
    assert sharded == {
        "head.weight": "vocab", "attn.wq_b": "heads", "attn.attn_sink": "heads", "attn.wo_a": "o_groups",
        "attn.wo_b": "o_groups", "w1": "moe_inter", "w2": "moe_inter", "w3": "moe_inter",
        "ffn.shared_experts.w1": "moe_inter", "ffn.shared_experts.w2": "moe_inter",
        "ffn.shared_experts.w3": "moe_inter",
    }  # fmt: skip


# ---------------------------------------------------------------------- each tensor in turn
def test_whole_headers_load(headers, tmp_path):
    """The control of the loops below: nothing else is wrong with what they write."""
    load(headers.write(tmp_path))


def each_tensor(files, tmp_path, change):
    """(name, directory) for every tensor, with change(files, name) applied to its shard alone."""
    files.write(tmp_path)
    for name in files.names():
        shard = files.shard_of(name)
        broken = files.copy()
        change(broken, name)
        write_shard(tmp_path / shard, broken.shards[shard])
        broken.write_index(tmp_path)
        yield name, tmp_path
        write_shard(tmp_path / shard, files.shards[shard])


def test_every_deleted_tensor_is_named(headers, tmp_path):
    seen = 0
    for name, directory in each_tensor(headers, tmp_path, Files.delete):
        fails(directory, "1 missing" + (r".*complete or wholly absent" if name.startswith("mtp") else ""),
              re.escape(f"({name})"))  # fmt: skip
        seen += 1
    assert seen == len(headers.names()) > 300


def test_every_deleted_tensor_that_the_index_still_names(headers, tmp_path):
    headers.write(tmp_path)
    for name in headers.names():
        shard = headers.shard_of(name)
        write_shard(tmp_path / shard, {n: t for n, t in headers.shards[shard].items() if n != name})
        fails(tmp_path, re.escape(f": {name} is not in {shard}"))
        write_shard(tmp_path / shard, headers.shards[shard])


def test_every_renamed_tensor_is_named(headers, tmp_path):
    for name, directory in each_tensor(headers, tmp_path, lambda f, n: f.rename(n, n + "_")):
        fails(directory, "1 missing", re.escape(f"({name})"))


def test_every_truncated_tensor_is_named(headers, tmp_path):
    headers.write(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        for name in headers.names():
            info = checkpoint.info(name)
            path = tmp_path / info.shard
            size = path.stat().st_size
            os.truncate(path, info.end - 1)
            fails(tmp_path, re.escape(info.shard), "truncated", re.escape(f" {name} "))
            os.truncate(path, size)


def test_every_reshaped_tensor_is_named(headers, tmp_path):
    def reshape(files, name):
        tensor = files.get(name)
        files.put(name, Tensor(tensor.dtype, (*tensor.shape, 1)))

    for name, directory in each_tensor(headers, tmp_path, reshape):
        fails(directory, re.escape(name), "expected", "found")


def test_every_retyped_tensor_is_named(headers, tmp_path):
    other = {"BF16": "F16", "F32": "I32", "I64": "F64", "F8_E4M3": "F8_E5M2", "F8_E8M0": "U8", "I8": "U8"}

    def retype(files, name):
        tensor = files.get(name)
        files.put(name, Tensor(other[tensor.dtype], tensor.shape))

    for name, directory in each_tensor(headers, tmp_path, retype):
        fails(directory, "1 of wrong dtype or shape", re.escape(name), other[headers.get(name).dtype])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_poisoned_tensor_is_named(files, tmp_path, value):
    """A NaN (or infinity) anywhere, or an expert id out of range: only fp4 codes have no bad value."""
    files.write(tmp_path)
    config = ModelConfig.load(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        layout = check(checkpoint, config)
        check_values(checkpoint, layout, deep=True)
        for name in files.names():
            tensor, info = files.get(name), checkpoint.info(name)
            if tensor.dtype == "I8" or (tensor.dtype != "F32" and value is not np.nan):
                continue
            broken = files.copy()
            poison(broken, name, value)
            overwrite(tmp_path / info.shard, info.begin, broken.get(name).data)
            place = re.escape(f"{info.shard}: {name}: expected ")
            with pytest.raises(CheckpointError, match=f"{place}.*, found"):
                checkpoint.check_values(name, layout.tensors[name].experts)
            overwrite(tmp_path / info.shard, info.begin, tensor.data)
        check_values(checkpoint, layout, deep=True)


def overwrite(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("name", ["layers.1.ffn.experts.3.w2.scale", "layers.0.attn.wkv.scale", "head.weight",
                                  "layers.2.hc_attn_fn", "mtp.1.norm.weight", "layers.0.ffn.gate.tid2eid"])  # fmt: skip
def test_poison_stops_the_load(files, tmp_path, name):
    broken = files.copy()
    poison(broken, name)
    broken.write(tmp_path)
    fails(tmp_path, re.escape(name))


def test_values_of_a_huge_checkpoint(files, tmp_path, monkeypatch):
    """Above the limit, expert scales and large matrices wait for the deep check; everything small does not."""
    monkeypatch.setattr("dsv4.weights.DEEP_LIMIT", 1)
    for name, at_load in {"layers.1.ffn.experts.3.w2.scale": False, "embed.weight": False,
                          "mtp.0.attn.wkv.weight": False, "layers.1.ffn.shared_experts.w2.scale": True,
                          "layers.1.attn.attn_sink": True, "layers.0.ffn.gate.tid2eid": True,
                          "mtp.1.hc_head_fn": True}.items():  # fmt: skip
        broken = files.copy()
        poison(broken, name)
        broken.write(tmp_path)
        if at_load:
            fails(tmp_path, re.escape(name))
        else:
            load(tmp_path)
            with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=re.escape(name)):
                check_values(checkpoint, check(checkpoint, ModelConfig.load(tmp_path)), deep=True)


# ---------------------------------------------------------------------- absent, extra and disagreeing groups
@pytest.mark.parametrize("name", ["layers.0.attn.wq_c.weight", "layers.4.attn_norm.weight", "mtp.0.head.weight",
                                  "embed.scale", "layers.0.attn.compressor.ape"])  # fmt: skip
def test_extra_tensor_where_the_model_lives(headers, tmp_path, name):
    extra = headers.copy()
    extra.put(name, Tensor("BF16", (4,)), extra.shard_of("norm.weight"))
    fails(extra.write(tmp_path), "1 unexpected", re.escape(name))


def test_extra_tensor_elsewhere_is_reported(headers, tmp_path):
    extra = headers.copy()
    extra.put("vision.patch.weight", Tensor("F16", (4,)), extra.shard_of("norm.weight"))
    extra.write(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        assert check(checkpoint, ModelConfig.load(tmp_path)).unused == ("vision.patch.weight",)


def test_many_faults_are_counted(headers, tmp_path):
    broken = headers.copy()
    for name in [n for n in broken.names() if ".hc_attn_" in n]:
        broken.delete(name)
    fails(broken.write(tmp_path), "18 missing", "and 15 more")


def test_incomplete_draft(headers, tmp_path):
    def without(pattern):
        broken = headers.copy()
        for name in [n for n in broken.names() if re.match(pattern, n)]:
            broken.delete(name)
        return broken.write(tmp_path)

    fails(without(r"mtp\.0\."), "expected mtp.0 and up", "found mtp.1")
    fails(without(r"mtp\.1\."), r"missing \(mtp\.0\.norm\.weight", "complete or wholly absent")
    fails(without(r"mtp\.0\.ffn\.shared"), r"6 missing \(mtp\.0\.ffn\.shared_experts\.w1\.weight")
    keyless = headers.copy()
    keyless.config = {k: v for k, v in keyless.config.items() if not k.startswith("dspark_")}
    fails(keyless.write(tmp_path), "mtp", "dspark_", kind=ConfigError)


def test_no_draft(headers, tmp_path):
    for keys in (True, False):
        bare = headers.copy()
        drop_draft(bare, keys)
        assert load(bare.write(tmp_path / str(keys))).draft is None


def test_expert_counts_that_disagree(files, tmp_path):
    for root, prefix in (("layers", "layers.2."), ("mtp", "mtp.1.")):
        broken = files.copy()
        for name in [n for n in broken.names() if n.startswith(f"{prefix}ffn.experts.3.")]:
            broken.delete(name)
        fails(broken.write(tmp_path), re.escape(f"{prefix}ffn"), "found 3 experts, 4 rows")
    pruned = files.copy()
    prune_experts(pruned, [0, 2])
    pruned.config["n_routed_experts"] = 4
    fails(pruned.write(tmp_path), "n_routed_experts = 4; found 2 experts, 2 rows")
    few = files.copy()
    prune_experts(few, [1], root="mtp")
    fails(few.write(tmp_path), "mtp.0.ffn", "num_experts_per_tok = 2 experts, found 1")


def test_draft_with_fewer_experts(files, tmp_path):
    pruned = files.copy()
    prune_experts(pruned, [0, 1, 3], root="mtp")
    weights = load(pruned.write(tmp_path))
    assert [len(stage.ffn.bank[1]) for stage in weights.draft.stages] == [3, 3]
    assert [len(block.ffn.bank[1]) for block in weights.blocks] == [4] * 4


# ---------------------------------------------------------------------- variants compute the same
def logits(directory):
    engine = dsv4.Engine.load(directory, backend="reference", max_context=64, max_sessions=1, chunk=16)
    with engine.session() as session:
        return session.forward(list(range(5, 16)), wanted="all").logits


@pytest.fixture(scope="module")
def small(tiny_root):
    return Files.read(tiny_root / "tiny-m")


@pytest.fixture(scope="module")
def plain(tiny_root):
    return logits(tiny_root / "tiny-m")


@pytest.mark.parametrize("change, shift", [(spell_newer, 0), (scatter, 0), (drop_draft, 0), (lambda files: None, 3)])
def test_variant_gives_the_same_logits(small, plain, tmp_path, change, shift):
    variant = small.copy()
    change(variant)
    assert np.array_equal(logits(variant.write(tmp_path, shift)), plain)


def test_pruned_experts_give_the_logits_of_muted_ones(small, plain, tmp_path):
    keep = [0, 2, 3, 5, 7]
    muted, pruned = small.copy(), small.copy()
    mute_experts(muted, keep)
    prune_experts(pruned, keep)
    expected_logits = logits(muted.write(tmp_path / "muted"))
    assert np.array_equal(logits(pruned.write(tmp_path / "pruned")), expected_logits)
    assert not np.array_equal(expected_logits, plain)


def test_expected_names_are_quick_at_full_size():
    from variants import REAL

    started = time.perf_counter()
    assert len(expected(ModelConfig.load(REAL), (160, 160, 160))) == 45_821
    print(f"45,821 expected tensors in {time.perf_counter() - started:.2f} s")

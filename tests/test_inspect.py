"""inspect: what a checkpoint holds, from its headers, also at the size of the published release."""

import json
import os
import time

import pytest

from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.inspection import _ranges, describe, render
from dsv4.weights import load_weights
from variants import REAL, Files, RecordingOps, Tensor, drop_draft, poison, prune_experts, real_release

TOTAL = 107_803_320_952  # what the release's own index says


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The published release with its real headers over sparse files: 108 GB that take a few megabytes."""
    directory = real_release().write(tmp_path_factory.mktemp("release"))
    on_disk = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    assert on_disk < 100e6, "this filesystem has no sparse files"
    return directory


@pytest.fixture(scope="module")
def report(release):
    started = time.perf_counter()
    found = describe(release)
    print(f"describe: {time.perf_counter() - started:.2f} s for 45,821 tensors")
    return found


def test_release_files(report):
    assert (report["tensors"], report["shards"], report["total_bytes"]) == (45_821, 48, TOTAL)
    assert sum(d["tensors"] for d in report["dtypes"].values()) == 45_821
    assert sum(d["bytes"] for d in report["dtypes"].values()) == TOTAL
    assert set(report["dtypes"]) == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I64", "I8"}
    assert report["unused"] == [] and report["checked"] == "headers"


def test_release_model(report):
    kinds = {kind["ratio"]: kind for kind in report["layers"]["kinds"]}
    assert {ratio: kind["count"] for ratio, kind in kinds.items()} == {0: 2, 4: 21, 128: 20}
    assert kinds[0]["layers"] == [0, 1] and kinds[4]["layers"] == list(range(2, 43, 2))
    assert kinds[128]["layers"] == list(range(3, 42, 2))
    assert (report["layers"]["count"], report["layers"]["hash_routed"]) == (43, 3)
    assert report["experts"] == {"routed": 160, "per_token": 6, "shared": 1}
    assert (report["draft"]["stages"], report["draft"]["experts"]) == (3, [160] * 3)
    assert report["context"] == 1_048_576
    # 43 layers x 160 experts of 3 · 2048 · 4096 parameters and the rest
    assert 43 * 160 * 3 * 2048 * 4096 < report["parameters"]["main"] < 182e9
    assert 10e9 < report["parameters"]["active"] < 15e9


def test_release_bytes(report):
    parts = report["bytes"]
    expert = 3 * 2048 * 4096 * 17 // 32  # codes and a scale per 32
    assert parts["routed experts"] == 43 * 160 * expert and parts["of draft: routed experts"] == 3 * 160 * expert
    assert sum(size for part, size in parts.items() if not part.startswith("of ")) == TOTAL
    one = report["ranks"][0]
    assert one["resident"] + one["draft_experts"] + one["experts"] == TOTAL


def test_release_ranks(report):
    ranks = report["ranks"]
    assert [rank["ranks"] for rank in ranks] == [1, 2, 4, 8] and all(rank["possible"] for rank in ranks)
    for rank in ranks:
        assert rank["experts"] * rank["ranks"] == ranks[0]["experts"]
    resident = [rank["resident"] for rank in ranks]
    split = [2 * (a - b) for a, b in zip(resident, resident[1:])]  # what halves: the same bytes, divided again
    assert split[0] == 2 * split[1] == 4 * split[2] > 0


def test_release_state(report):
    state = report["state"]
    key, index = 448 + 7 + 128, 64 + 4
    per_token = 21 * (key + index) / 4 + 20 * key / 128
    assert state["per_token"] == pytest.approx(per_token)
    assert sum(state["at_max_context"].values()) == per_token * 1_048_576
    assert state["fixed"]["draft windows"] == (128 + state["chunk"]) * (3 * key + 4 * 3 * 4096) + 5 * key


def test_report_is_json_and_text(report):
    assert json.loads(json.dumps(report)) == report
    text = render(report)
    for part in ("107.80 GB in 45,821 tensors, 48 shard(s)", "21 x compressed, indexed, ratio 4: 2, 4 .. 42",
                 "20 x compressed, ratio 128", "2 x window", "160 routed, 6 a token", "3 stages of 160, 160, 160",
                 "1,048,576 positions", "193.0 B: 180.4 B, of which a token meets 13.8 B, and the draft's 12.6 B"):  # fmt: skip
        assert part in text, part


def test_release_loads(release, monkeypatch):
    """What a load checks, apart from the expert scales: on zeros, all of it passes, and little is read."""
    amounts = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: amounts.append(count) or pread(fd, count, at))
    started = time.perf_counter()
    with Checkpoint(release) as checkpoint:
        weights = load_weights(checkpoint, ModelConfig.load(release), RecordingOps())
        loaded = time.perf_counter()
        checked, maps = sum(amounts), checkpoint._maps
        checkpoint._maps = None  # a page touched through a map drags its neighbours in
        assert checkpoint.identity
        checkpoint._maps = maps
    assert checked < 200e6 and sum(amounts) - checked < 20e6
    print(f"load: {loaded - started:.2f} s, identity: {time.perf_counter() - loaded:.2f} s")
    assert len(weights.blocks) == 43 and all(len(block.ffn.bank[1]) == 160 for block in weights.blocks)


@pytest.mark.parametrize("name", ["layers.42.ffn.experts.159.w2.scale", "mtp.2.markov_head.markov_w1.weight"])
def test_release_with_one_tensor_less(tmp_path, name):
    broken = real_release()
    broken.delete(name)
    with pytest.raises(CheckpointError, match=rf"1 missing \({name}\)"):
        describe(broken.write(tmp_path))


def test_manifest_is_the_release():
    assert len(real_release().names()) == 45_821
    assert sum(tensor.nbytes for held in real_release().shards.values() for tensor in held.values()) == TOTAL
    assert json.loads((REAL / "config.json").read_text())["num_nextn_predict_layers"] == 1  # and yet three stages


def test_variants(tiny_root, tmp_path):
    files = Files.read(tiny_root / "tiny-tp", data=False)
    bare = files.copy()
    drop_draft(bare)
    report = describe(bare.write(tmp_path / "bare"))
    assert report["draft"] is None and "draft" not in report["bytes"] and report["parameters"]["draft"] == 0
    assert "runs without speculation" in render(report)
    full = Files.read(tiny_root / "tiny-tp")
    prune_experts(full, [0, 3], root="mtp")
    full.put("vision.weight", Tensor("U8", (3,), b"abc"), full.shard_of("norm.weight"))
    report = describe(full.write(tmp_path / "pruned"))
    assert report["draft"]["experts"] == [2, 2] and report["experts"]["routed"] == 4
    assert report["unused"] == ["vision.weight"] and "vision.weight" in render(report)


def test_ranks_that_split_only_a_part(nano_dir):
    report = describe(nano_dir)
    assert [rank["possible"] for rank in report["ranks"]] == [True, True, False, False]
    assert "experts whole on every rank" in render(report) and "not possible" in render(report)


def test_deep_reads_the_expert_scales(tiny_root, tmp_path):
    files = Files.read(tiny_root / "tiny-tp")
    assert describe(files.write(tmp_path), deep=True)["checked"] == "every value"
    name = "layers.3.ffn.experts.2.w3.scale"
    poison(files, name)
    files.write(tmp_path)
    assert describe(tmp_path)["checked"] == "headers"
    with pytest.raises(CheckpointError, match=f"{name}: expected no NaN"):
        describe(tmp_path, deep=True)


@pytest.mark.parametrize("numbers, text", [
    ([3], "3"), ([1, 2], "1, 2"), ([0, 1, 2], "0 .. 2"), ([2, 4, 6], "2, 4 .. 6"), ([1, 2, 4], "1, 2, 4"), ([], ""),
])  # fmt: skip
def test_ranges(numbers, text):
    assert _ranges(numbers) == text

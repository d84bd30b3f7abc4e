"""synth: random checkpoints in the real format, checked by loading and running them."""

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dsv4
from dsv4 import formats, synth
from dsv4.checkpoint import INDEX, Checkpoint
from dsv4.cli import main
from dsv4.config import ModelConfig
from dsv4.errors import CapacityError, ConfigError
from dsv4.inspection import describe
from dsv4.synth import PUBLISHED, Recipe, read_config, write
from dsv4.weights import check, check_values, expected
from variants import REAL

NANO = read_config("nano")


def make(directory: Path, config=NANO, **sizes) -> Path:
    write(directory, Recipe.of(config, **sizes))
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tensors(directory: Path) -> dict[str, bytes]:
    with Checkpoint(directory) as checkpoint:
        return {name: checkpoint.view(name).tobytes() for name in checkpoint.names()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Five layers of all kinds with 6 experts, and two draft stages."""
    return make(tmp_path_factory.mktemp("synth"), layers=5, experts=6, ratios=(0, 4, 16), stages=2, seed=3)


def test_the_sizes_built_in_are_the_published_ones():
    assert replace(ModelConfig.load(REAL), n_routed_experts=256) == PUBLISHED


def test_config_survives_its_way_to_json():
    assert ModelConfig.from_dict(synth.as_json(PUBLISHED, 3)) == PUBLISHED


def test_layers_experts_ratios_and_stages_are_as_asked(small):
    report = describe(small, deep=True)
    assert report["layers"]["count"] == 5 and report["experts"]["routed"] == 6
    assert {kind["ratio"]: kind["layers"] for kind in report["layers"]["kinds"]} == {0: [0, 3], 4: [1, 4], 16: [2]}
    assert report["draft"]["experts"] == [6, 6] and report["unused"] == []
    assert json.loads((small / "config.json").read_text())["compress_ratios"] == [0, 4, 16, 0, 4, 0, 0]


def test_every_tensor_is_there_once_and_aligned(small):
    config = ModelConfig.load(small)
    with Checkpoint(small) as checkpoint:
        assert checkpoint.names() == sorted(expected(config, (6, 6)))
        assert len(checkpoint.shards) == 1 + 5 + 2
        for name in checkpoint.names():
            assert checkpoint.info(name).begin % checkpoint.view(name).itemsize == 0, name
        check_values(checkpoint, check(checkpoint, config), deep=True)


def test_the_size_told_beforehand_is_the_size(small):
    recipe = Recipe.of(NANO, layers=5, experts=6, ratios=(0, 4, 16), stages=2, seed=3)
    with Checkpoint(small) as checkpoint:
        assert recipe.total_bytes() == checkpoint.total_bytes
    assert sorted(recipe.shards()) == sorted(path.name for path in small.glob("*.safetensors"))


def test_same_seed_same_bytes_and_another_seed_others(tmp_path, small):
    sizes = dict(layers=5, experts=6, ratios=(0, 4, 16), stages=2)
    assert contents(make(tmp_path / "again", **sizes, seed=3)) == contents(small)
    other, here = tensors(make(tmp_path / "other", **sizes, seed=4)), tensors(small)
    same = {name for name in here if other[name] == here[name]}
    assert all(len(here[name]) <= 8 for name in same), same  # a few codes may agree by chance


def test_a_layer_does_not_depend_on_the_number_of_layers(tmp_path, small):
    here, short = tensors(small), tensors(make(tmp_path, layers=2, experts=6, ratios=(0, 4), stages=0, seed=3))
    assert all(here[name] == data for name, data in short.items())


def test_linears_keep_the_variance_of_their_input(small):
    """Decoded weights are K^-½ wide, so that an output is as wide as the inputs. And no two are alike."""
    seen = set()
    with Checkpoint(small) as checkpoint:
        layout = check(checkpoint, ModelConfig.load(small))
        for name, tensor in layout.tensors.items():
            if tensor.row.format in ("fp8", "fp4") and name.endswith(".weight"):
                weight, scale = checkpoint.view(name).view(np.uint8), checkpoint.view(name[:-6] + "scale")
                values = (formats.decode_fp8 if tensor.row.format == "fp8" else formats.decode_fp4)(weight, scale)
                assert 0.35 < values.std() * values.shape[1] ** 0.5 < 2.83, name  # rounding of the scale, then a factor 2
                assert weight.tobytes()[:64] not in seen
                seen.add(weight.tobytes()[:64])


def test_blocks_are_cut_where_items_end(monkeypatch):
    table = next(t for n, t in expected(NANO, ()).items() if t.dtype == "I64")
    monkeypatch.setattr(synth, "_BLOCK", 104)  # 13 ids: half a row too many
    ids = np.frombuffer(b"".join(synth.draw("x", table, 0)), np.int64).reshape(table.shape)
    assert ids.min() == 0 and ids.max() == NANO.n_routed_experts - 1
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def test_it_loads_and_activations_stay_tame(small):
    engine = dsv4.Engine.load(small, threads=1, max_context=400, chunk=64, max_sessions=1, debug=True)
    with engine.session() as session:
        logits = session.forward(list(range(1, 65)), "all").logits
        for token in range(200):
            last = session.decode(token)
    assert np.isfinite(logits).all() and np.isfinite(last).all()
    assert 0.3 < logits.std() < 3
    assert len({int(row.argmax()) for row in logits}) > 16  # it does not say one thing whatever it reads


def test_it_drafts(small):
    engine = dsv4.Engine.load(small, threads=1, max_context=128, max_sessions=1)
    plain, spec = ([s.token for s in engine.generate([1, 2, 3], dsv4.SamplingParams(temperature=0, max_tokens=12), spec=m)]
                   for m in ("off", "always"))  # fmt: skip
    assert plain == spec and len(plain) >= 1


def test_deep_stacks_stay_tame(tmp_path):
    make(tmp_path, layers=24, ratios=(0, 4, 16), stages=0)
    engine = dsv4.Engine.load(tmp_path, threads=1, max_context=64, max_sessions=1)
    with engine.session() as session:
        assert 0.3 < session.forward(list(range(1, 33)), "all").logits.std() < 3


@pytest.mark.parametrize("layers, targets", [(1, (0,)), (2, (0, 1)), (4, (1, 2, 3)), (9, (1, 2, 3))])
def test_the_draft_reads_layers_that_exist(layers, targets):
    assert Recipe.of(NANO, layers=layers).config.dspark.target_layer_ids == targets


def test_like_may_be_a_file_in_another_spelling(tmp_path, small):
    assert read_config(str(small)) == read_config(str(small / "config.json")) == ModelConfig.load(small)


def test_a_config_without_a_draft_gives_a_checkpoint_without(tmp_path):
    plain = replace(NANO, dspark=None)
    assert describe(make(tmp_path, plain, layers=1))["draft"] is None
    with pytest.raises(ConfigError, match="no draft stages"):
        Recipe.of(plain, stages=1)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"experts": 1}, "num_experts_per_tok"),
        ({"ratios": (3,)}, "compress_ratios"),
        ({"layers": 0}, "layers >= 1"),
        ({"seed": -1}, "seed >= 0"),
    ],
)
def test_impossible_sizes(sizes, words):
    with pytest.raises(ConfigError, match=words):
        Recipe.of(NANO, **sizes)


def test_a_directory_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        make(tmp_path, layers=1)
    assert contents(tmp_path) == {"notes.txt": b"mine"}
    with pytest.raises(ConfigError, match="found a file"):
        make(tmp_path / "notes.txt", layers=1)


def test_force_replaces_the_checkpoint_and_nothing_else(tmp_path):
    make(tmp_path, layers=4, stages=0)
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, Recipe.of(NANO, layers=1, stages=0), force=True)
    assert sorted(contents(tmp_path)) == sorted(
        ["config.json", INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "notes.txt"]
    )
    assert describe(tmp_path)["layers"]["count"] == 1


def test_too_little_disk(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(CapacityError, match="free disk, found 0.00 GB"):
        make(tmp_path / "new", layers=1)
    assert not (tmp_path / "new").exists()


def test_an_interrupted_one_is_no_checkpoint(tmp_path):
    """The index comes last, and no half file stays."""
    def stop(stage, done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, Recipe.of(NANO), progress=stop)
    assert tmp_path / INDEX not in list(tmp_path.iterdir())
    assert not list(tmp_path.glob(".*")) and len(list(tmp_path.glob("*.safetensors"))) >= 1


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    write(tmp_path, Recipe.of(NANO, layers=1), progress=lambda *report: seen.append(report))
    assert seen[-1] == ("write", Recipe.of(NANO, layers=1).total_bytes(), seen[-1][2]) and seen[-1][1] == seen[-1][2]


def test_command(tmp_path, capsys):
    arguments = ["synth", str(tmp_path / "a"), "--like", "nano", "--ratios", "0,4", "--experts", "4", "--stages", "0"]
    assert main(arguments) == 0
    assert "GB in 3 shards" in capsys.readouterr().out
    assert main(arguments) == 2 and "--force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert main(["synth", str(tmp_path / "b"), "--ratios", "x"]) == 2
    assert main(["synth", str(tmp_path / "b"), "--like", str(tmp_path / "none.json")]) == 2
    assert "expected real, nano" in capsys.readouterr().err and not (tmp_path / "b").exists()

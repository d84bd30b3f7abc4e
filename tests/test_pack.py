"""Packed copies: what is in them, when they are refused, and that nothing half-written stays."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv4 import Engine
from dsv4.checkpoint import Checkpoint
from dsv4.cli import main
from dsv4.config import ModelConfig
from dsv4.errors import CapacityError, CheckpointError, ConfigError
from dsv4.experts import packed
from dsv4.experts.packed import PackedExperts, check_packed, pack
from dsv4.experts.sources import CheckpointExperts
from dsv4.split import Split
from dsv4.weights import check, expert_tensors


def opened(directory, path, rank=0, size=1):
    config, checkpoint = ModelConfig.load(directory), Checkpoint(directory)
    split = Split.of(config, rank, size)
    like = CheckpointExperts(checkpoint, config, check(checkpoint, config).stages, split)
    return PackedExperts(path, like, checkpoint.identity, split), checkpoint, split


@pytest.fixture(scope="module")
def nano(nano_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "nano.bin"
    pack(nano_dir, path)
    return path


@pytest.mark.parametrize("name, ranks", [("nano", 1), ("nano", 2), ("tiny-tp", 1), ("tiny-tp", 2), ("tiny-tp", 8)])
def test_every_rank_finds_its_part_of_every_tensor(checkpoint_dir, tmp_path, name, ranks):
    directory, path = checkpoint_dir(name), tmp_path / "experts.bin"
    seen = []
    assert pack(directory, path, ranks, 2, lambda *progress: seen.append(progress)) == path.stat().st_size
    assert seen[-1][0] == "pack" and seen[-1][1] == seen[-1][2] and [s[1] for s in seen] == sorted({s[1] for s in seen})
    assert check_packed(directory, path, ranks) == path.stat().st_size
    assert os.listdir(tmp_path) == ["experts.bin"]
    for rank in {0, ranks - 1}:
        found, checkpoint, split = opened(directory, path, rank, ranks)
        for prefix, experts in found.banks.items():
            for expert in {0, experts // 2, experts - 1}:
                arrays = found.layout.arrays(found.data(prefix, expert))
                for array, (tensor, part) in zip(arrays, expert_tensors(checkpoint, prefix, expert, split), strict=True):
                    np.testing.assert_array_equal(array, checkpoint.view(tensor, part).view(np.uint8))
                begins = found.pieces(prefix, expert)[:, 1]  # one after another: a run
                assert (np.diff(begins) == np.diff(found.layout.starts)).all()


def test_the_same_checkpoint_gives_the_same_file(nano, nano_dir, tmp_path):
    pack(nano_dir, tmp_path / "again.bin", threads=4)
    assert (tmp_path / "again.bin").read_bytes() == nano.read_bytes()


# ---------------------------------------------------------------------- what is refused
def refused(directory, path, words, **settings):
    with pytest.raises(CheckpointError) as caught:
        Engine.load(directory, packed=str(path), **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value), caught.value


def changed(nano, tmp_path, **values):
    """The packed file with other values in its header, of the same length and checksum."""
    data = nano.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = packed._text(json.loads(data[8 : 8 + length]) | values)
    head = (len(text).to_bytes(8, "little") + text).ljust(packed._padded(8 + length), b"\0")
    path = tmp_path / "changed.bin"
    path.write_bytes(head + data[len(head) :])
    return path


def test_a_copy_of_another_checkpoint_or_number_of_ranks(checkpoint_dir, nano, tmp_path):
    refused(checkpoint_dir("tiny-tp"), nano, "expected a copy of checkpoint")
    pack(checkpoint_dir("tiny-tp"), tmp_path / "two.bin", 2)
    refused(checkpoint_dir("tiny-tp"), tmp_path / "two.bin", "expected experts divided among 1, as on 1 rank(s); found 2 parts; pack it with --ranks 1")


@pytest.mark.parametrize(
    "values, words",
    [
        ({"format": "other"}, "expected a file of format dsv4-experts"),
        ({"version": "2"}, "expected format version 1; found 2"),
        ({"identity": "0" * 64}, "found one of 000000000000; pack it again"),
        ({"banks": {"layers.0.": 8}}, "expected the layers and sizes of the checkpoint; found others: damaged"),
        ({"shapes": [[1, 2]] * 6}, "expected the layers and sizes of the checkpoint; found others: damaged"),
        ({"note": "hello"}, "damaged; pack it again"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_headers_that_do_not_fit(nano, tmp_path, values, words):
    refused("nano", changed(nano, tmp_path, **values), words)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, 4096, 100_000, -33, -1])
def test_a_truncated_copy(nano, tmp_path, keep):
    (tmp_path / "cut.bin").write_bytes(nano.read_bytes()[:keep])
    refused("nano", tmp_path / "cut.bin", "damaged header" if 0 <= keep <= 200 else "truncated; pack it again")


def test_a_header_that_nests_without_end(tmp_path):
    (tmp_path / "deep.bin").write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    refused("nano", tmp_path / "deep.bin", "damaged header")


def test_a_longer_copy(nano, tmp_path):
    (tmp_path / "long.bin").write_bytes(nano.read_bytes() + b"\0")
    refused("nano", tmp_path / "long.bin", "truncated; pack it again")


@pytest.mark.parametrize("at", [5000, 1_000_000, -40_000, -500, -100, -1])
def test_one_wrong_byte(nano, nano_dir, tmp_path, at):
    data = bytearray(nano.read_bytes())
    data[at] ^= 16
    (tmp_path / "wrong.bin").write_bytes(data)
    refused("nano", tmp_path / "wrong.bin", "damaged; pack it again")
    with pytest.raises(CheckpointError, match="damaged; pack it again"):
        check_packed(nano_dir, tmp_path / "wrong.bin")


def test_what_is_no_file(tmp_path):
    refused("nano", tmp_path / "absent", "expected a packed file that can be read; found No such file")
    refused("nano", tmp_path, "expected a packed file that can be read; found Is a directory")


def test_a_large_copy_is_left_to_the_check(nano, nano_dir, tmp_path, monkeypatch):
    data = bytearray(nano.read_bytes())
    data[1_000_000] ^= 16
    (tmp_path / "wrong.bin").write_bytes(data)
    monkeypatch.setattr(packed, "DEEP_LIMIT", 1000)
    opened(nano_dir, tmp_path / "wrong.bin")
    with pytest.raises(CheckpointError, match="damaged; pack it again"):
        check_packed(nano_dir, tmp_path / "wrong.bin")


# ---------------------------------------------------------------------- writing
def test_whatever_fails_the_old_one_stays(nano, nano_dir, tmp_path, monkeypatch):
    path = tmp_path / "experts.bin"
    path.write_bytes(b"old")

    def unchanged():
        return path.read_bytes() == b"old" and os.listdir(tmp_path) == ["experts.bin"]

    calls = []

    def interrupted(source, prefix, expert, *rest):
        calls.append(expert)
        if len(calls) == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packed, "read_expert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack(nano_dir, path)
        assert unchanged() and len(calls) == 9
    with monkeypatch.context() as patch:
        usage = packed.shutil.disk_usage(tmp_path)._replace(free=1000)
        patch.setattr(packed.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(CapacityError, match=r"expected \d+ bytes free in .*, found 1000"):
            pack(nano_dir, path)
        assert unchanged()
    pack(nano_dir, path)
    assert path.read_bytes() == nano.read_bytes()


def test_a_full_disk_leaves_the_old_one(nano_dir, tmp_path):
    """A limit on the size of files stands for it."""
    path = tmp_path / "experts.bin"
    path.write_bytes(b"old")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # noqa: E731
    command = [sys.executable, "-m", "dsv4", "pack", "nano", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"dsv4: error: packed experts {path}: expected to write") and done.stderr.count("\n") == 1
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["experts.bin"]


def test_a_device_without_room(nano_dir):
    with pytest.raises(CheckpointError, match="expected to write .* found: No space left on device"):
        pack(nano_dir, "/dev/full")


def test_a_nan_scale_is_not_packed(checkpoint_dir, tmp_path):
    source = Path(shutil.copytree(checkpoint_dir("nano"), tmp_path / "source"))
    with Checkpoint(source) as checkpoint:
        tensor, _ = expert_tensors(checkpoint, "layers.2.", 3, Split.of(ModelConfig.load(source)))[3]
        info = checkpoint.info(tensor)
        with open(source / info.shard, "r+b") as file:
            file.seek(info.begin + 10)
            file.write(b"\xff")
    with pytest.raises(CheckpointError, match=rf"{tensor}: .*NaN \(0xFF\) scale at byte {info.begin + 10}"):
        pack(source, tmp_path / "experts.bin")
    assert not (tmp_path / "experts.bin").exists()


def test_a_place_where_nothing_can_be_written(nano_dir, tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "experts.bin"):
        with pytest.raises(CheckpointError, match="expected the name of a file in a directory that is there"):
            pack(nano_dir, path)
    source = Path(shutil.copytree(nano_dir, tmp_path / "nano"))
    for shard in source.glob("*.safetensors"):
        before = shard.read_bytes()
        with pytest.raises(CheckpointError, match="expected another file than a shard of the checkpoint itself"):
            pack(source, shard)
        assert shard.read_bytes() == before
    with pytest.raises(ConfigError, match="ranks: expected one of 1, 2; found 3"):
        pack(nano_dir, tmp_path / "experts.bin", 3)


# ---------------------------------------------------------------------- command
def test_the_command(tmp_path, capsys):
    path = tmp_path / "experts.bin"
    assert main(["pack", "nano", str(path), "--threads", "1"]) == 0
    size = path.stat().st_size
    assert capsys.readouterr().out == f"{path}: {size:,} bytes, for 1 rank(s)\n"
    assert main(["pack", "nano", str(path), "--check"]) == 0
    assert capsys.readouterr().out == f"{path}: {size:,} bytes, as they were written\n"
    command = ["generate", "--tokens", "1,2,3", "--temperature", "0", "--max-tokens", "5"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--packed", str(path)]) == 0 and capsys.readouterr().out == plain
    path.write_bytes(path.read_bytes()[:-1])
    assert main([*command, "--packed", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dsv4: error: packed experts {path}: expected {size} bytes; found {size - 1}") and error.count("\n") == 1
    assert main(["pack", str(tmp_path / "none"), str(path)]) == 2 and "not found" in capsys.readouterr().err

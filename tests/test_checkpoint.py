"""Safetensors directories: views of the right bytes, and one clear line for everything that does not fit."""

import json
import os
import re
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv4.checkpoint import DTYPES, INDEX, SINGLE, Checkpoint
from dsv4.errors import CheckpointError
from variants import Files, Tensor, poison, scatter, spell_newer, write_shard


@pytest.fixture(scope="module")
def files(tiny_root):
    return Files.read(tiny_root / "tiny-tp")


def fails(directory, *patterns):
    """Opening fails with one line in which every pattern is found."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory)
    text = str(caught.value)
    assert "\n" not in text
    for pattern in patterns:
        assert re.search(pattern, text), (pattern, text)


# ---------------------------------------------------------------------- what it returns
def test_views_are_the_bytes_of_the_file(tiny_root):
    directory = tiny_root / "tiny-tp"
    with Checkpoint(directory) as checkpoint:
        listed = json.loads((directory / INDEX).read_text())
        assert checkpoint.names() == sorted(listed["weight_map"])
        assert checkpoint.total_bytes == listed["metadata"]["total_size"]
        for name in checkpoint.names():
            info = checkpoint.info(name)
            with open(directory / info.shard, "rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
                file.seek(info.begin)
                raw = file.read(info.nbytes)
            view = checkpoint.view(name)
            assert view.tobytes() == raw
            assert (list(view.shape), info.dtype) == (header[name]["shape"], header[name]["dtype"])
            assert not view.flags.writeable and view.flags.aligned


def test_written_by_the_safetensors_library(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([3, -1], np.int64),
              "c": np.arange(5, dtype=np.int8), "empty": np.zeros((0, 4), np.float32)}  # fmt: skip
    save_file(arrays, tmp_path / SINGLE, metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == ["a", "b", "c", "empty"]
        for name, array in arrays.items():
            view = checkpoint.view(name)
            assert view.dtype == array.dtype and np.array_equal(view, array)


@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_odd_alignment_gives_the_same_values(files, tmp_path, shift):
    files.write(tmp_path / "even")
    files.write(tmp_path / "odd", shift=shift)
    with Checkpoint(tmp_path / "even") as even, Checkpoint(tmp_path / "odd") as odd:
        assert any(odd.info(name).begin % 4 for name in odd.names() if odd.info(name).dtype == "F32")
        for name in even.names():
            view = odd.view(name)
            assert view.flags.aligned and not view.flags.writeable
            assert view.tobytes() == even.view(name).tobytes()
        assert even.identity == odd.identity


def test_views_outlive_the_checkpoint(tiny_root):
    with Checkpoint(tiny_root / "tiny-tp") as checkpoint:
        view = checkpoint.view("embed.weight")
        before = view.tobytes()
    assert view.tobytes() == before


def test_other_files_are_ignored(files, tmp_path):
    files.write(tmp_path)
    (tmp_path / "model-99999-of-99999.safetensors").write_bytes(b"stray")
    (tmp_path / "notes.txt").write_text("hello")
    Checkpoint(tmp_path).close()


def test_unknown_name(tiny_root):
    with Checkpoint(tiny_root / "tiny-tp") as checkpoint:
        assert "nothing" not in checkpoint
        with pytest.raises(CheckpointError, match="no tensor nothing"):
            checkpoint.view("nothing")


# ---------------------------------------------------------------------- identity
def test_identity_of_the_same_model(files, tmp_path):
    files.write(tmp_path / "a")
    dealt = files.copy()
    scatter(dealt)
    spell_newer(dealt)
    dealt.write(tmp_path / "b")
    with Checkpoint(tmp_path / "a") as a, Checkpoint(tmp_path / "b") as b:
        assert a.identity == b.identity and re.fullmatch("[0-9a-f]{64}", a.identity)


@pytest.mark.parametrize("change", [
    lambda f: poison(f, "layers.2.attn.q_norm.weight"), lambda f: poison(f, "layers.1.ffn.gate.bias"),
    lambda f: f.config.update(routed_scaling_factor=1.25), lambda f: f.config["rope_scaling"].update(factor=8),
    lambda f: f.put("extra", Tensor("U8", (1,), b"x"), f.shard_of("norm.weight")), lambda f: f.delete("norm.weight"),
    lambda f: poison(f, "embed.weight"),
])  # fmt: skip
def test_identity_of_another_model(files, tmp_path, change):
    files.write(tmp_path / "a")
    other = files.copy()
    change(other)
    other.write(tmp_path / "b")
    with Checkpoint(tmp_path / "a") as a, Checkpoint(tmp_path / "b") as b:
        assert a.identity != b.identity


# ---------------------------------------------------------------------- what it refuses
def test_missing_parts(files, tmp_path):
    fails(tmp_path / "nowhere", "nowhere: not found")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", INDEX, SINGLE)
    files.write(tmp_path / "ck")
    shard = files.shard_of("layers.0.attn_norm.weight")
    (tmp_path / "ck" / shard).unlink()
    fails(tmp_path / "ck", re.escape(shard), "missing", r"layers\.0\.")
    (tmp_path / "ck" / shard).mkdir()
    fails(tmp_path / "ck", re.escape(shard), "missing")
    (tmp_path / "ck" / INDEX).unlink()
    fails(tmp_path / "ck", INDEX)


@pytest.mark.parametrize("index, pattern", [
    ("{", "not JSON"), ("[]", "weight_map"), ('{"weight_map": {}}', "weight_map"), ('{"weight_map": []}', "weight_map"),
    ('{"weight_map": {"a": 3}}', "a: expected the name.*3"), ('{"weight_map": {"a": "../x"}}', "a: expected.*'../x'"),
    ('{"weight_map": {"a": "x", "a": "y"}}', "names a twice"),
    ("version https://git-lfs", "git-lfs pointer"),
])  # fmt: skip
def test_bad_index(tmp_path, index, pattern):
    (tmp_path / INDEX).write_text(index)
    fails(tmp_path, INDEX, pattern)


def test_index_and_shards_disagree(files, tmp_path):
    name, other = "layers.0.attn_norm.weight", "embed.weight"
    shard, elsewhere = files.shard_of(name), files.shard_of(other)

    def listed(change):
        files.write(tmp_path)
        index = json.loads((tmp_path / INDEX).read_text())
        change(index["weight_map"])
        (tmp_path / INDEX).write_text(json.dumps(index))
        return tmp_path

    fails(listed(lambda m: m.pop(name)), re.escape(shard), name, "does not list")
    fails(listed(lambda m: m.update({name: elsewhere})), re.escape(shard), name, f"lists it in {elsewhere}")
    fails(listed(lambda m: m.update(ghost=shard)), INDEX, "ghost", re.escape(shard))
    twice = files.copy()
    twice.put(name, twice.get(name), elsewhere)
    twice.write(tmp_path)
    fails(tmp_path, name, "lists it in|already in")


def one_shard(tmp_path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return tmp_path


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("header, data, pattern", [
    (b"{", b"", "header is not JSON"), (b"[]", b"", "not a JSON object"), (b'{"a":1,"a":2}', b"", "names a twice"),
    (b"\xff\xfe", b"", "not JSON"), (b"[" * 100_000, b"", "not JSON"),
    ({"a": 3}, b"", "a: expected dtype"), ({"a": {"dtype": "F32"}}, b"", "a: expected dtype"),
    ({"a": entry(dtype="F4")}, b"", "a: unknown dtype 'F4'"), ({"a": entry(dtype=["F32"])}, b"", "a: unknown dtype"),
    ({"a": entry(shape=(-2,))}, bytes(8), "a: expected integers"),
    ({"a": entry(shape=(2.0,))}, bytes(8), "a: expected integers"),
    ({"a": entry(end=9)}, bytes(9), r"a: F32 \[2\] needs 8 bytes, its data_offsets span 9"),
    ({"a": entry(begin=8, end=0)}, bytes(8), "a: .* needs 8 bytes"),
    ({"a": entry()}, bytes(7), "truncated: a ends"), ({"a": entry()}, bytes(9), "1 bytes after the last"),
    ({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12), "b overlaps a"),
    ({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20), "b leaves a gap after a"),
    ({"a": entry(shape=(1 << 62, 4))}, bytes(8), "a: .* needs"),
])  # fmt: skip
def test_bad_shard(tmp_path, header, data, pattern):
    fails(one_shard(tmp_path, header, data), SINGLE, pattern)


@pytest.mark.parametrize("content, pattern", [
    (b"", "truncated"), (b"1234567", "truncated"), (struct.pack("<Q", 50) + b"{}", "header of 50 bytes in 10"),
    (struct.pack("<Q", 1 << 63), "truncated or not safetensors"),
    (b"version https://git-lfs.example/spec/v1\noid sha256:00\nsize 3\n", "git-lfs pointer"),
])  # fmt: skip
def test_not_a_shard(tmp_path, content, pattern):
    (tmp_path / SINGLE).write_bytes(content)
    fails(tmp_path, SINGLE, pattern)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_shard(tmp_path):
    write_shard(tmp_path / SINGLE, {"a": Tensor("U8", (1,), b"x")})
    (tmp_path / SINGLE).chmod(0)
    fails(tmp_path, SINGLE, "cannot be read")


def test_truncation_at_every_byte_of_a_small_shard(tmp_path):
    tensors = {"a": Tensor("U8", (3,), b"abc"), "b": Tensor("I64", (2,), bytes(16)), "c": Tensor("F32", (1,), bytes(4))}
    write_shard(tmp_path / SINGLE, tensors)
    whole = (tmp_path / SINGLE).read_bytes()
    Checkpoint(tmp_path).close()
    for length in range(len(whole)):
        (tmp_path / SINGLE).write_bytes(whole[:length])
        fails(tmp_path, SINGLE, "truncated")


# ---------------------------------------------------------------------- values
GOOD = {"F8_E8M0": [0, 0x7F, 0xFE], "F8_E4M3": [0, 0x7E, 0xFE, 0x80], "BF16": [0, 0x7F7F, 0xFF7F, 0x8000],
        "F32": [0.0, -3e38, 1e-45], "I64": [0, 4], "I8": [-128, 127, -1]}  # fmt: skip
BAD = {"F8_E8M0": [0xFF], "F8_E4M3": [0x7F, 0xFF], "BF16": [0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81],
       "F32": [np.nan, np.inf, -np.inf], "I64": [5, -1, 1 << 40]}  # fmt: skip


@pytest.mark.parametrize("dtype", GOOD)
def test_values_good_and_bad(tmp_path, monkeypatch, dtype):
    """Every bad value at every place, over several pieces and at an odd offset; each named with its place."""
    monkeypatch.setattr("dsv4.checkpoint._CHUNK", 16)
    whole = np.resize(np.array(GOOD[dtype], DTYPES[dtype]), 37)

    def check(array):
        write_shard(tmp_path / SINGLE, {"t": Tensor(dtype, (37,), array.tobytes())}, shift=1)
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.check_values("t", below=5)

    check(whole)
    for bad in BAD.get(dtype, []):
        for at in range(37):
            array = whole.copy()
            array[at] = bad
            with pytest.raises(CheckpointError, match=rf"{SINGLE}: t: expected .* found .* at element {at} "):
                check(array)


def test_shard_cut_short_while_open(files, tmp_path):
    files.write(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        shard = checkpoint.info("head.weight").shard
        os.truncate(tmp_path / shard, 4096)
        with pytest.raises(CheckpointError, match=f"{re.escape(shard)}: head.weight: cut short"):
            checkpoint.check_values("head.weight")

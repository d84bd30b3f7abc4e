"""What a rank holds: parts that together are the whole, views and not copies, values checked where they are held."""

import dataclasses
import re

import numpy as np
import pytest
from compare import same_bits
from test_weights import leaves
from variants import Files, RecordingOps, poison

from dsv4.checkpoint import Checkpoint
from dsv4.comm import Single, Threads
from dsv4.config import ModelConfig, RunConfig, World, default_threads, init_timeout
from dsv4.errors import BackendError, CheckpointError, ConfigError
from dsv4.model import Model
from dsv4.ops import open_ops
from dsv4.ranks import serve
from dsv4.split import Split
from dsv4.weights import check, held_bytes, load_weights, part_of


@pytest.fixture(scope="module")
def tiny(tiny_root):
    with Checkpoint(tiny_root / "tiny-tp") as checkpoint:
        yield checkpoint, ModelConfig.load(tiny_root / "tiny-tp")


def parts(config, size):
    return [Split.of(config, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_parts_of_a_tensor_are_the_tensor(tiny, size):
    checkpoint, config = tiny
    cut = 0
    for name, tensor in check(checkpoint, config).tensors.items():
        pieces = [checkpoint.view(name, part_of(checkpoint, name, tensor.row, split)) for split in parts(config, size)]
        whole = checkpoint.view(name)
        if tensor.row.shard == "replicated":
            assert all(piece.shape == whole.shape for piece in pieces), name
            continue
        cut += 1
        axis = 1 if re.search(r"\.(wo_b|w2)\.", name) else 0
        same_bits(np.concatenate(pieces, axis=axis), whole, name)
        assert max(piece.shape[axis] for piece in pieces) - min(piece.shape[axis] for piece in pieces) <= 1, name
        if checkpoint.info(name).begin % whole.itemsize == 0:
            assert all(np.shares_memory(piece, whole) for piece in pieces), name
    assert cut == sum(tensor.row.shard != "replicated" for tensor in check(checkpoint, config).tensors.values()) > 100


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_rank_is_given_its_part_and_no_more(tiny, size):
    """The backend sees exactly the bytes that are announced, and the ranks' parts add up."""
    checkpoint, config = tiny
    layout, held = check(checkpoint, config), []
    for split in parts(config, size):
        reports = []
        weights = load_weights(checkpoint, config, RecordingOps(), lambda *report: reports.append(report), split)
        seen = sum(leaf.nbytes for leaf in leaves(dataclasses.replace(weights, split=None)))
        held.append(held_bytes(checkpoint, layout, split))
        assert seen == held[-1] and reports[-1] == (seen, seen)
    shared = sum(checkpoint.info(name).nbytes for name, t in layout.tensors.items() if t.row.shard == "replicated")
    assert sum(held) - (size - 1) * shared == checkpoint.total_bytes
    assert size == 1 or max(held) < 0.75 * checkpoint.total_bytes


def test_an_uneven_vocabulary(tiny):
    split = [Split.of(dataclasses.replace(tiny[1]), rank, 8) for rank in range(8)]
    shares = [s.share(515, "vocab") for s in split]
    assert shares[0].start == 0 and shares[-1].stop == 515
    assert all(a.stop == b.start for a, b in zip(shares, shares[1:]))


@pytest.mark.parametrize("changes, attention, experts", [
    ({}, 4, 4),
    ({"o_groups": 2}, 1, 4),
    ({"moe_intermediate_size": 1024 + 256}, 4, 1),
    ({"head_dim": 64 + 16}, 1, 4),  # a rank's heads would begin inside a scale block of wq_b
])  # fmt: skip
def test_what_is_divided_among_four(tiny, changes, attention, experts):
    split = Split.of(dataclasses.replace(tiny[1], **changes), 3, 4)
    assert (split.attention, split.experts) == (attention, experts)
    assert split.heads * attention == 8 and split.moe_slices * experts == dataclasses.replace(tiny[1], **changes).moe_slices


def test_counts_that_divide_nothing(tiny):
    with pytest.raises(ConfigError, match="ranks: expected one of 1, 2, 4, 8; found 16"):
        Split.of(tiny[1], 0, 16)
    with pytest.raises(ConfigError, match="expected one of 1, 2, 4, 8; found 6"):
        Split.of(tiny[1], 0, 6)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_a_matrix_of_columns(fmt, backend):
    """Columns of a larger matrix, in place, give the bits that a copy of them gives."""
    ops, rng = open_ops(backend), np.random.default_rng(1)
    pack = 2 if fmt == "fp4" else 1
    weight = rng.integers(0, 0x70, (200, 1024 // pack), np.uint8)
    scale = rng.integers(120, 130, (200, 32) if fmt == "fp4" else (2, 8), np.uint8)
    for rank in range(4):
        part = slice(rank * 256 // pack, (rank + 1) * 256 // pack)
        scales = slice(scale.shape[1] * rank // 4, scale.shape[1] * (rank + 1) // 4)
        views = weight[:, part], scale[:, scales]
        for rows in (1, 7, 40):
            x = rng.standard_normal((rows, 256), np.float32)
            found = ops.linear(x, ops.matrix(fmt, *views), 2)
            same_bits(found, ops.linear(x, ops.matrix(fmt, *map(np.ascontiguousarray, views)), 2), f"{rank}, {rows}")


def test_columns_that_do_not_lie_together():
    with pytest.raises(ValueError, match="rows of adjacent items"):
        open_ops("cpu").matrix("f32", np.zeros((4, 64), np.float32)[:, ::2])


# ---------------------------------------------------------------------- values
@pytest.mark.parametrize("name, holders", [
    ("layers.1.attn.wo_b.scale", {0}),  # poison strikes the first element: rank 0's columns
    ("layers.1.attn.wq_b.weight", {0}),
    ("layers.1.attn.attn_sink", {0}),
    ("layers.2.ffn.experts.1.w2.scale", {0}),
    ("layers.1.attn.wkv.scale", {0, 1, 2, 3}),
])  # fmt: skip
def test_a_bad_value_stops_the_ranks_that_hold_it(tiny_root, tmp_path, name, holders):
    files = Files.read(tiny_root / "tiny-tp")
    poison(files, name)
    files.write(tmp_path)
    config = ModelConfig.load(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError) as whole:
            load_weights(checkpoint, config, RecordingOps())
        stopped = set()
        for split in parts(config, 4):
            try:
                load_weights(checkpoint, config, RecordingOps(), split=split)
            except CheckpointError as error:
                assert str(error) == str(whole.value)
                stopped.add(split.rank)
    place = int(re.search(r"at element (\d+)", str(whole.value))[1])
    if len(holders) < 4:
        info_shape = files.get(name).shape
        axis = 1 if ".w2." in name or "wo_b" in name else 0
        holders = {np.unravel_index(place, info_shape)[axis] * 4 // info_shape[axis]}
    assert stopped == holders


# ---------------------------------------------------------------------- never a partial sum
def test_weights_of_a_rank_need_that_ranks_communicator(tiny):
    checkpoint, config = tiny
    ops = open_ops("reference")
    weights = load_weights(checkpoint, config, ops, split=Split.of(config, 1, 4))
    with pytest.raises(BackendError, match="expected the communicator of rank 1 of 4, as the weights were cut; found rank 0 of 1"):
        Model(config, weights, ops, Single())
    with pytest.raises(BackendError, match="found rank 2 of 4"):
        Model(config, weights, ops, Threads.group(4)[2])
    Model(config, weights, ops, Threads.group(4)[1])


# ---------------------------------------------------------------------- the environment
@pytest.mark.parametrize("variables, rank, size", [
    ({}, 0, 1),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 3, 4),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 1, 2),
    ({"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "5"}, 5, 8),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 0, 1),  # inside a batch script, not started by srun
])  # fmt: skip
def test_what_launchers_say(monkeypatch, variables, rank, size):
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (World.from_env().rank, World.from_env().size) == (rank, size)


def test_the_time_to_wait(monkeypatch):
    monkeypatch.delenv("DSV4_INIT_TIMEOUT", raising=False)
    assert init_timeout() == 600
    monkeypatch.setenv("DSV4_INIT_TIMEOUT", "30")
    assert init_timeout() == 30
    monkeypatch.setenv("DSV4_INIT_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="DSV4_INIT_TIMEOUT: expected an integer >= 1, found 'soon'"):
        RunConfig.from_env()


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert [default_threads(n) for n in (1, 2, 4, 8)] == [6, 3, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert default_threads(2) == 5


def test_serve_is_for_the_others():
    with pytest.raises(ConfigError, match="expected a rank other than 0"):
        serve()

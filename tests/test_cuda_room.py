"""What the CUDA backend reckons for a forward's arrays, beside what they take: counted at full size without running a kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_cupy import fake_cupy
from sizing import Sized

import dsv4
from dsv4 import loading
from dsv4.config import ModelConfig
from dsv4.engine import NANO
from dsv4.errors import CapacityError
from dsv4.ops.cuda import CudaOps
from dsv4.ops.cuda_room import step_bytes
from dsv4.ops.kernels import DeviceLauncher
from dsv4.split import Split
from dsv4.synth import PUBLISHED, Recipe

REAL = Recipe.of(layers=3, ratios=(0, 4, 128), experts=16).config  # a layer of every kind
MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    "rows, context, ranks",
    [(512, 32768, 1), (512, 1 << 20, 1), (8, 1 << 20, 1), (6, 8192, 1), (64, 8192, 1), (512, 32768, 4), (512, 32768, 8)],
)
def test_a_step_at_full_size_takes_what_was_reckoned(rows, context, ranks):
    sized = Sized(REAL, rows=rows, context=context, ranks=ranks, stages=3)
    taken = max(sized.forward("last"), sized.forward("all"), sized.drafts(), sized.prime())
    assert taken <= step_bytes(REAL, sized.split, rows, context) <= 1.3 * taken + 40 * MEGABYTE


@pytest.mark.parametrize(
    "rows, context, ranks",
    [(512, 32768, 1), (64, 8192, 1), (32, 8192, 1), (512, 32768, 2), (512, 32768, 8), (1, 131072, 1), (130, 1 << 20, 8)],
)
def test_what_layers_take_is_reckoned(rows, context, ranks):
    """Without logits and drafts, which take more than layers do."""
    draftless = replace(PUBLISHED, vocab_size=1024, dspark=None)
    config = Recipe.of(draftless, layers=3, ratios=(0, 4, 128), experts=16).config
    sized = Sized(config, rows=rows, context=context, ranks=ranks)
    taken = sized.forward()
    assert taken <= step_bytes(config, sized.split, rows, context) <= 1.6 * taken + 40 * MEGABYTE


@pytest.mark.parametrize("rows", [6, 64, 300])
def test_a_step_of_nano(rows):
    config = ModelConfig.load(NANO)
    sized = Sized(config, rows=rows, context=512, stages=3)
    taken = max(sized.forward(), sized.drafts(), sized.prime())
    assert taken <= step_bytes(config, sized.split, rows, 512) <= 2 * taken


def test_the_count_sees_what_is_held_too_long():
    """Queries, and what attention found, that layers leave behind are beyond what was reckoned."""
    sized = Sized(REAL, rows=512, context=32768, stages=3)
    ops, kept = sized.model.ops, []
    query, attend = ops.query, ops.attend
    ops.query = lambda *args: kept.append(query(*args)) or kept[-1]
    ops.attend = lambda *args: kept.append(attend(*args)) or kept[-1]
    assert sized.forward() > step_bytes(REAL, sized.split, 512, 32768)


@pytest.mark.parametrize("cache", [None, 80_000])
def test_the_engine_keeps_to_its_plan(checkpoint_dir, monkeypatch, cache):
    """Several sequences: their prompts, drafts of all at once, rounds. Arrays that end a byte too far are seen by the sanitizer."""
    from cuda_ops import emulated

    ops = emulated()
    monkeypatch.setattr(loading, "open_ops", lambda name, **_: ops)
    reserved = []
    monkeypatch.setattr(ops.launcher, "reserve", lambda nbytes: reserved.append((nbytes, ops.launcher.live)))
    with dsv4.Engine.load(checkpoint_dir("tiny-m"), backend="cuda", max_context=256, chunk=16, max_sessions=4, expert_cache=cache) as engine:
        ((planned, before),) = reserved
        config, rows = engine.config, max(16, 1 + engine.config.dspark.block_size)
        split, k = Split.of(config), config.num_experts_per_tok
        sums = 4 * rows * (k + 1) * split.moe_slices * config.hidden_size if cache else 0  # while experts come
        assert planned == engine.plan.step == step_bytes(config, split, rows, 256) + sums
        ops.launcher.peak = before
        sessions = [engine.session() for _ in range(4)]
        for session in sessions:
            session.prefill(list(range(3, 43)))
        dsv4.session.draft_all([(session, 7, dsv4.sampling.greedy) for session in sessions])
        for session in sessions:
            session.speculative_step(5)
        assert 0 < ops.launcher.peak - before <= planned


# ---------------------------------------------------------------------- refusals, before anything is loaded
def load(memory, tmp_path, monkeypatch, **settings):
    launcher = DeviceLauncher(cache=tmp_path, cupy=fake_cupy(memory=memory)[0])
    monkeypatch.setattr(launcher, "free_bytes", lambda: memory)
    monkeypatch.setattr(loading, "open_ops", lambda name, **_: CudaOps(launcher))
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("loaded"))
    return dsv4.Engine.load("nano", backend="cuda", max_context=4096, **settings)


def test_a_chunk_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    config = ModelConfig.load(NANO)
    need = step_bytes(config, Split.of(config), 4096, 4096)
    with pytest.raises(CapacityError, match=r"memory: expected at most .* for the state and a step's arrays of .*chunk\)") as caught:
        load(need, tmp_path, monkeypatch, chunk=4096)
    assert "\n" not in str(caught.value)


def test_a_chunk_half_as_long_needs_half():
    one = Split.of(REAL)
    long, short = (step_bytes(REAL, one, rows, 32768) for rows in (2048, 1024))
    assert np.isclose(long, 2 * short, rtol=0.1)
    assert step_bytes(REAL, one, 512, 1 << 20) > step_bytes(REAL, one, 512, 4096)

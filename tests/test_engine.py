"""Loading an engine: plans and refusals before anything large happens, and values that went wrong."""

import builtins
import dataclasses
import re

import numpy as np
import psutil
import pytest

from dsv4 import Engine, SamplingParams
from dsv4.config import ModelConfig
from dsv4.errors import BackendError, CapacityError, ConfigError, Dsv4Error, InputError
from dsv4.plan import index_key_bytes, key_bytes, make_plan


def available(monkeypatch, n):
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=n))


# ---------------------------------------------------------------------- the plan
@pytest.mark.parametrize("name", ["nano", "tiny-m", "tiny-b"])
def test_the_plan_is_what_the_pool_takes(name, engine):
    """Byte for byte, but for the page table."""
    loaded = engine(name, threads=1, chunk=64, max_sessions=2, max_context=300)
    pool, plan = loaded.pool, loaded.plan
    sizes = {"window": 0, "ring": 0, "index_ring": 0, "entries": 0, "index": 0}
    for state in pool.layers:
        for part, cache in state.caches().items():
            sizes[part] += sum(array.nbytes for array in cache)
    assert sizes["window"] == plan.windows and sizes["ring"] + sizes["index_ring"] == plan.compressor_rows
    assert sizes["entries"] == plan.entries and sizes["index"] == plan.index_keys
    stages = sum(array.nbytes for state in pool.stages for array in state.window)
    assert stages + pool.hidden.nbytes + sum(array.nbytes for array in pool.block) == plan.draft
    assert plan.state == sum(sizes.values()) + plan.draft


def test_too_little_memory_says_what_would_fit(checkpoint_dir, monkeypatch):
    config = ModelConfig.load(checkpoint_dir("nano"))
    plan = lambda n: make_plan(  # noqa: E731
        config, weights=0, max_context=n, max_sessions=1, headroom=64, available=0, stages=3
    ).state
    exact = plan(4096)
    settings = {"threads": 1, "chunk": 64, "max_sessions": 1}
    available(monkeypatch, exact)
    assert Engine.load("nano", max_context=4096, **settings).plan.state == exact
    available(monkeypatch, exact - 1)
    with pytest.raises(CapacityError, match=r"memory: expected at most .* GB .* 4096 positions, .* a context of (\d+) would fit"):
        Engine.load("nano", max_context=4096, **settings)
    available(monkeypatch, 1000)
    with pytest.raises(CapacityError, match="no context fits"):
        Engine.load("nano", max_context=4096, **settings)


def test_what_is_said_to_fit_does_fit(monkeypatch):
    settings = {"threads": 1, "chunk": 64, "max_sessions": 1}
    available(monkeypatch, 1_500_000)
    with pytest.raises(CapacityError) as refused:
        Engine.load("nano", max_context=8192, **settings)
    fits = int(str(refused.value).split("a context of ")[1].split()[0])
    assert Engine.load("nano", max_context=fits, **settings).max_context == fits
    with pytest.raises(CapacityError):
        Engine.load("nano", max_context=fits + 64, **settings)


def test_stored_sizes(nano_dir):
    config = ModelConfig.load(nano_dir)
    assert key_bytes(config) == 64 + 1 + 2 * 64 and index_key_bytes(config) == 32 + 2


# ---------------------------------------------------------------------- settings
def test_settings_that_cannot_be(monkeypatch):
    with pytest.raises(ConfigError, match="expected one of cpu, cuda, reference; found 'gpu'"):
        Engine.load("nano", backend="gpu")
    with pytest.raises(ConfigError, match="at most the model's 8192"):
        Engine.load("nano", max_context=8193)
    with pytest.raises(ConfigError, match="run settings: unknown argument colour; expected one of backend, .*, threads$"):
        Engine.load("nano", colour=1)
    with pytest.raises(ConfigError, match=r"unknown argument thread; did you mean threads\?$"):
        Engine.load("nano", thread=1)
    with pytest.raises(ConfigError, match=r"gate settings: unknown argument margins; did you mean margin\?$"):
        Engine.load("nano", gate={"margins": 1})
    for name in ("threads", "max_context", "max_sessions", "chunk"):
        with pytest.raises(ConfigError, match=f"{name}.*expected an integer >= 1"):
            Engine.load("nano", **{name: 0})
    monkeypatch.setenv("DSV4_BACKENDS", "cpu")
    with pytest.raises(ConfigError, match="DSV4_BACKENDS"):
        Engine.load("nano")


@pytest.mark.parametrize("context, larger", [(64, " or load with a larger max_context"), (None, " (this model has 8192 positions)")])
def test_a_full_context_is_told_with_what_helps(engine, context, larger):
    """A larger one is no way out where the model has no more positions."""
    with engine("nano", max_context=context).session() as session:
        full = session.engine.max_context
        with pytest.raises(CapacityError, match=re.escape(f"found {full + 1}; shorten it{larger}") + "$"):
            session.prefill([3] * (full + 1))
        session.tokens = [3] * full
        with pytest.raises(CapacityError, match=re.escape(f"found {full} used and 1 more; begin a new session{larger}") + "$"):
            session.check([3])


def test_environment_sets_what_arguments_do_not(monkeypatch):
    monkeypatch.setenv("DSV4_CHUNK", "17")
    monkeypatch.setenv("DSV4_MAX_CONTEXT", "99")
    loaded = Engine.load("nano", threads=1, max_context=77)
    assert (loaded.chunk, loaded.max_context) == (17, 77)
    monkeypatch.setenv("DSV4_CHUNK", "many")
    with pytest.raises(ConfigError, match="DSV4_CHUNK"):
        Engine.load("nano")


def test_gate_settings_reach_the_engine(monkeypatch):
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_MARGIN", "1.5")
    loaded = Engine.load("nano", threads=1, gate={"min_draft": 2, "decay": None})
    assert (loaded.gate.margin, loaded.gate.min_draft, loaded.gate.decay) == (1.5, 2, 0.9)
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_MARGIN", "much")
    with pytest.raises(ConfigError, match="DEEPSEEK_DSPARK_GATE_MARGIN"):
        Engine.load("/nowhere")  # told before anything is loaded


@pytest.mark.parametrize(
    "error, message",
    [
        (ImportError("no module _cpu"), "the compiled module is missing.*pip install -e"),
        (ValueError("numpy.dtype size changed"), "built with another NumPy .numpy.dtype size changed.; install it again"),
    ],
)
def test_without_the_compiled_module(monkeypatch, error, message):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.endswith("cpu"):
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendError, match=message):
        Engine.load("nano")
    assert Engine.load("nano", backend="reference").model.ops.name == "reference"


# ---------------------------------------------------------------------- values that went wrong
def test_numbers_that_are_not_finite(checkpoint_dir):
    """Without debug the sampler refuses the logits; with it, the layer is named."""
    for debug, message in ((False, "logits: expected finite numbers"), (True, "layer 2: expected finite values")):
        bad = Engine.load(checkpoint_dir("nano"), threads=1, max_sessions=1, debug=debug)
        blocks = list(bad.model.weights.blocks)
        norm = np.full_like(blocks[2].attn_norm, np.inf)
        blocks[2] = dataclasses.replace(blocks[2], attn_norm=norm)
        weights = dataclasses.replace(bad.model.weights, blocks=tuple(blocks))
        bad.model = dataclasses.replace(bad.model, weights=weights)
        with pytest.raises((Dsv4Error, InputError), match=message):
            list(bad.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=3)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_prompts_longer_than_a_chunk(backend, engine):
    """Forwards that want no row at all, on every backend."""
    results = []
    for chunk in (64, 8):
        with engine("nano", backend=backend, threads=1, chunk=chunk, max_sessions=1, max_context=64).session() as session:
            seen = []
            results.append(session.prefill(list(range(20, 50)), lambda done, total: seen.append((done, total))))
            assert seen[-1] == (30, 30) and len(seen) == -(-30 // chunk)
    assert np.array_equal(*results)

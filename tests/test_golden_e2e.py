"""The whole model against what an independent implementation computed: prefill, then 44 forced decode steps."""

import dataclasses
import json
import re

import numpy as np
import pytest
from compare import rel_l2_rows
from ops_cases import NoQuantOps, read_tensors

from dsv4.checkpoint import Checkpoint
from dsv4.comm import Single
from dsv4.config import ModelConfig
from dsv4.formats import bf16_decode
from dsv4.model import Model
from dsv4.ops import open_ops
from dsv4.rows import Rows
from dsv4.state import Pool
from dsv4.step import Step
from dsv4.weights import load_weights

CHECKPOINTS = ["nano", "tiny-m", "tiny-tp", "tiny-a", "tiny-b"]

# One flipped 8-bit code early in a prompt moves all of its later steps, so the median step is either clean or far off.
# On nano and tiny-m, and on tiny-b with its wide limit, it is reliable. On tiny-tp and tiny-a it is not: this
# implementation against itself, with its linears off by at most 1.5e-7 at random, has medians from 1.9e-7 to 9e-3 and
# 16 % to 61 % clean steps over four seeds each. There a share of clean steps is asked for instead. A wrong formula
# leaves none, as the last test shows.
STEADY = ("nano", "tiny-m", "tiny-b")
CLEAN = 3e-6


@dataclasses.dataclass(frozen=True)
class Recorder(Model):
    """The model, keeping every layer's output of its last forward."""

    blocks: list = dataclasses.field(default_factory=list)

    def forward(self, step, pool):
        self.blocks.clear()
        return super().forward(step, pool)

    def block(self, w, h, step, state):
        h = super().block(w, h, step, state)
        self.blocks.append(h)
        return h


def open_model(directory, ops, **changes) -> Recorder:
    """The model on a backend; `changes` replace fields of the config."""
    config = ModelConfig.load(directory)
    weights = load_weights(Checkpoint(directory), dataclasses.replace(config, **changes), ops)
    return Recorder(dataclasses.replace(config, **changes), weights, ops, Single())


def open_pool(model, max_context, headroom) -> Pool:
    """A pool for one sequence, which has slot 0."""
    stages = len(model.weights.draft.stages)
    pool = Pool(model.ops, model.config, slots=1, max_context=max_context, headroom=headroom, stages=stages)
    pool.reserve(pool.take_slot(), max_context)
    return pool


def golden(golden_dir, name, mode) -> dict:
    """{prompt length: {array name: array}}; bf16 arrays as float32."""
    out: dict = {}
    for key, array in read_tensors(golden_dir / f"e2e.{name}.{mode}.safetensors").items():
        length, field = re.fullmatch(r"p(\d+)\.(.*)", key).groups()
        out.setdefault(int(length), {})[field] = bf16_decode(array) if array.dtype == np.uint16 else array
    return out


def run_prompt(model, case):
    """Prefill and forced decode → logits [45, V], main hidden [45, ·], layers' outputs at the prompt's last row."""
    prompt, tokens = case["prompt"], case["tokens"]
    length = len(prompt)
    pool = open_pool(model, length + len(tokens), headroom=length)
    slot = 0
    output = model.forward(Step(model.ops, pool, Rows.of(slot, 0, prompt)), pool)
    logits, hidden = [output.logits], [output.main_hidden]
    block = np.stack([h[-1] for h in model.blocks])
    for i, token in enumerate(tokens[:-1]):
        output = model.forward(Step(model.ops, pool, Rows.of(slot, length + i, [token])), pool)
        logits.append(output.logits)
        hidden.append(output.main_hidden)
    return np.concatenate(logits), np.concatenate(hidden), block


def expected(case):
    logits = np.concatenate([case["prefill_logits"][None], case["logits"]])
    hidden = np.concatenate([case["prefill_main_hidden_last"][None], case["main_hidden"]])
    return logits, hidden, case["prefill_block"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mathematics_with_the_quantisers_off(name, checkpoint_dir, golden_dir):
    model = open_model(checkpoint_dir(name), NoQuantOps())
    for length, case in golden(golden_dir, name, "noq").items():
        logits, hidden, block = expected(case)
        found, found_hidden, found_block = run_prompt(model, case)
        assert rel_l2_rows(found, logits).max() <= 1e-5, length
        assert rel_l2_rows(found_hidden, hidden).max() <= 1e-5, length
        assert rel_l2_rows(found_block, block).max() <= 1e-5, length
        assert np.array_equal(found.argmax(1), logits.argmax(1)), length


def measure(model, cases):
    """rel_l2 of every step, and (agrees, golden's margin) of every argmax."""
    errors, agree, margins = [], [], []
    for case in cases.values():
        logits, _, _ = expected(case)
        found, _, _ = run_prompt(model, case)
        errors.append(rel_l2_rows(found, logits))
        agree.append(found.argmax(1) == logits.argmax(1))
        margins.append(case["margins"])
    return np.concatenate(errors), np.concatenate(agree), np.concatenate(margins)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_as_users_run_it(name, backend, checkpoint_dir, golden_dir):
    stats = json.loads((golden_dir / f"stats.{name}.json").read_text())
    errors, agree, margins = measure(
        open_model(checkpoint_dir(name), open_ops(backend, threads=2)), golden(golden_dir, name, "fp32")
    )
    assert len(errors) == stats["bf16"]["steps"]
    if name in STEADY:
        assert np.median(errors) <= 3 * max(stats["fp32_acc64"]["step_median"], 1e-6)
    assert (errors <= CLEAN).mean() >= 0.15
    assert np.quantile(errors, 0.9) <= stats["bf16"]["step_p90"]
    assert errors.max() <= 3 * stats["bf16"]["step_max"]
    clear = margins > (stats["bf16"]["largest_margin_flipped"] or 0.3)
    assert clear.sum() > len(clear) // 4
    assert agree[clear].all(), f"diverged at margins {margins[clear & ~agree]}"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_report_against_bf16_numerics(name, checkpoint_dir, golden_dir, record_property):
    """We do not round as they do: the distance is reported, and only has to be that of another rounding."""
    errors, agree, _ = measure(
        open_model(checkpoint_dir(name), open_ops("cpu", threads=2)), golden(golden_dir, name, "bf16")
    )
    record_property("bf16", f"median {np.median(errors):.2e}, max {errors.max():.2e}, argmax {agree.mean():.3f}")
    assert np.isfinite(errors).all() and np.median(errors) < 0.1


@pytest.mark.parametrize("change", [{"hc_sinkhorn_iters": 10}, {"rms_norm_eps": 1e-4}, {"sliding_window": 31}], ids=str)
def test_a_wrong_formula_leaves_no_step_clean(change, checkpoint_dir, golden_dir):
    model = open_model(checkpoint_dir("tiny-tp"), open_ops("cpu", threads=2), **change)
    case = golden(golden_dir, "tiny-tp", "fp32")[33]
    errors, _, _ = measure(model, {33: case})
    assert (errors <= CLEAN).mean() == 0 and np.median(errors) > 1e-3

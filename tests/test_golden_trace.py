"""Module by module: attention, experts and whole blocks on the inputs that an independent implementation saw."""

import numpy as np
import pytest
from compare import rel_l2_rows
from ops_cases import NoQuantOps
from safetensors.numpy import load_file
from test_golden_e2e import open_model, open_pool

from dsv4.ops import open_ops
from dsv4.rows import Rows
from dsv4.step import Step

LAYERS = range(5)
# Where no code flips a row agrees to 1e-5. A flipped code moves a row by far less than a wrong formula would (which
# the mutants of this file show); how many rows may hold one was measured: at most 2 of 45.
EXACT, FLIPPED, MAY_FLIP = 1e-5, 0.05, 4


class Trace:
    """One trace file and a model to run its modules: the first n_prefill rows at once, the rest one by one."""

    def __init__(self, directory, path, ops):
        self.model = open_model(directory, ops)
        self.data = load_file(path)
        self.tokens = self.data["tokens"][: len(self.data["main_hidden"])]
        self.n_prefill = int(self.data["n_prefill"].ravel()[0])

    def __call__(self, run, *inputs):
        """run(step, pool, rows of each input) over the whole sequence → results, concatenated by row."""
        n = len(self.tokens)
        pool = open_pool(self.model, n, headroom=n)
        spans = [(0, self.n_prefill)] + [(i, i + 1) for i in range(self.n_prefill, n)]
        out = []
        for start, stop in spans:
            step = Step(self.model.ops, pool, Rows.of(0, start, self.tokens[start:stop]))
            out.append(run(step, pool, *(np.ascontiguousarray(x[start:stop]) for x in inputs)))
        self.pool = pool
        return np.concatenate(out)

    def layer(self, number, name):
        return self.data.get(f"layers.{number}.{name}")


MODES = [("noq", "reference"), ("fp32", "reference"), ("fp32", "cpu")]


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def trace(request, tiny_root, golden_dir):
    mode, backend = request.param
    ops = NoQuantOps() if mode == "noq" else open_ops(backend, threads=2)
    found = Trace(tiny_root / "tiny-m", golden_dir / f"trace.tiny-m.{mode}.safetensors", ops)
    found.exact_only = mode == "noq"
    return found


def check(trace, found, expected, what):
    errors = rel_l2_rows(found, expected)
    flips = int((errors > EXACT).sum())
    assert flips <= (0 if trace.exact_only else MAY_FLIP), f"{what}: {flips} rows differ, worst {errors.max():.1e}"
    assert errors.max() <= FLIPPED, what


@pytest.mark.parametrize("number", LAYERS)
def test_attention(trace, number):
    w = trace.model.weights.blocks[number].attn
    chosen = []

    def run(step, pool, x):
        state = pool.layers[number]
        out = trace.model.attention(w, x, step, state)
        if w.indexer:  # once more, to see the choice: writing the same rows again changes nothing
            qr = trace.model.ops.act_quant(
                trace.model.ops.rmsnorm(
                    trace.model.ops.linear(trace.model.ops.act_quant(x), w.wq_a), w.q_norm, trace.model.config.rms_norm_eps
                )
            )
            chosen.extend(trace.model.index(w.indexer, x, qr, step, state))
        return out

    check(trace, trace(run, trace.layer(number, "attn_in")), trace.layer(number, "attn_out"), f"layer {number} attention")
    if w.compressor:
        places = np.arange(len(trace.tokens) // w.ratio, dtype=np.int32)
        check_entries(trace, number, "comp_kv", trace.model.ops.decode_keys(trace.pool.layers[number].entries, places))
    if w.indexer:
        check_entries(trace, number, "index_kv", trace.model.ops.decode_index(trace.pool.layers[number].index, places))
        expected = trace.layer(number, "index_topk")
        different = [
            p for p, (f, e) in enumerate(zip(chosen, expected)) if set(f.tolist()) - {-1} != set(e.tolist()) - {-1}
        ]
        assert len(different) <= (0 if trace.exact_only else 1), f"layer {number}: rows {different} choose other entries"


def check_entries(trace, number, name, found):
    expected = trace.layer(number, name)
    # Found in storage order: entry e was given place e, as the pool hands out its pages from the first on.
    check(trace, found[: len(expected)], expected, f"layer {number} {name}")


@pytest.mark.parametrize("number", LAYERS)
def test_experts(trace, number):
    w, c, ops = trace.model.weights.blocks[number].ffn, trace.model.config, trace.model.ops
    x = trace.layer(number, "ffn_in")
    found = trace(lambda step, pool, x: trace.model.moe(w, x, step), x)
    check(trace, found, trace.layer(number, "ffn_out"), f"layer {number} experts")

    tokens = trace.tokens.astype(np.int32)
    ids, weights = ops.gate(x, w.gate, w.bias, w.fixed, tokens, c.num_experts_per_tok, c.routed_scaling_factor)
    golden_ids = trace.layer(number, "gate_ids")
    order = np.argsort(golden_ids, axis=1, kind="stable")
    assert np.array_equal(ids, np.take_along_axis(golden_ids, order, 1))
    golden_weights = np.take_along_axis(trace.layer(number, "gate_w"), order, 1)
    assert rel_l2_rows(weights, golden_weights).max() <= 1e-6


@pytest.mark.parametrize("number", LAYERS)
def test_block(trace, number):
    model = trace.model
    if number:
        h = trace.layer(number - 1, "block_out")
    else:
        h = model.ops.embed(model.weights.embed, trace.tokens.astype(np.int32), model.config.hc_mult)
    run = lambda step, pool, h: model.block(model.weights.blocks[number], h, step, pool.layers[number])  # noqa: E731
    check(trace, trace(run, h), trace.layer(number, "block_out"), f"block {number}")


def test_head_and_main_hidden(trace):
    model, c = trace.model, trace.model.config
    h = trace.layer(4, "block_out")
    y = model.ops.hc_head(h, model.weights.hc_head)
    logits = model.ops.linear(model.ops.rmsnorm(y, model.weights.norm, c.rms_norm_eps), model.weights.head)
    assert rel_l2_rows(logits[trace.n_prefill - 1 :], trace.data["logits"]).max() <= 1e-6
    hidden = [model.ops.mean_streams(trace.layer(n, "block_out")) for n in c.dspark.target_layer_ids]
    assert rel_l2_rows(np.concatenate(hidden, 1), trace.data["main_hidden"]).max() <= 1e-6

"""The bench of a GPU's kernels, at the sizes of nano, on the launcher there is. No time is asserted anywhere."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_ops import emulated

from dsv4 import cli
from dsv4.bench import cuda
from dsv4.synth import Recipe, read_config

pytestmark = pytest.mark.emulated
NANO = Recipe.of(read_config("nano"), experts=12).config
SMALL = cuda.Sizes(
    copy=1 << 16, matrix=64, staged=1 << 16, cold=1, context=512, layer_context=64, entries=256, page=16, sequences=3, prefill=20,
    repeats=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def records():
    config = replace(NANO, vocab_size=512, hc_mult=2, hc_sinkhorn_iters=2)
    return cuda.measure(emulated(), config, SMALL)


def test_records(records):
    card, *rest = records
    assert card["name"] == "card" and all(card[key] > 0 for key in ("copy_gbs", "matrix_tflops", "staging_gbs"))
    for r in rest:
        assert r["seconds"] > 0 and math.isfinite(r["seconds"])
        if "bytes" in r:
            assert r["gbs"] == pytest.approx(r["bytes"] / r["seconds"] / 1e9)
            assert r["ratio"] == pytest.approx(r["gbs"] / card["copy_gbs"])
        if "operations" in r:
            assert r["ratio"] == pytest.approx(r["operations"] / r["seconds"] / 1e12 / card["matrix_tflops"])
        assert ("bar" in r) == ("met" in r)
        assert r.get("met") in (None, r.get("ratio", 0) >= r.get("bar", 0))


def test_everything_is_measured(records):
    rows = {}
    for r in records[1:]:
        rows.setdefault(r["name"], []).append(r["rows"])
    assert rows == {
        "fp8 linear, wq_b": [1, 2, 4, 8], "prefill, linear, wq_b": [20], "fp8 linear, wo_b": [1, 2, 4, 8],
        "prefill, linear, wo_b": [20], "bf16 head": [1, 6], "best of logits": [1, 6], "fp4 experts": [1, 2, 4], "prefill, experts": [20],
        "attention, ratio 4": [1, 3], "attention, ratio 16": [1, 3], "indexer": [1, 6], "activation quantisation": [1, 20],
        "rmsnorm": [1, 20], "hyper-connection, in": [1, 20], "hyper-connection, out": [1, 20], "compressor, ratio 4": [5],
        "compressor, ratio 16": [1], "layer, window only": [1, 6],
        "layer, ratio 4": [1, 6], "layer, ratio 16": [1, 6], **{f"3 layers, verify {n}": [n + 1] for n in range(6)},
    }  # fmt: skip
    bars = {r["name"].split(",")[0]: r["bar"] for r in records if "bar" in r}
    assert bars == {"fp8 linear": 0.7, "fp4 experts": 0.7, "attention": 0.5, "prefill": 0.35}


def test_bytes_that_must_be_read(records):
    c = NANO
    first = {(r["name"], r["rows"]): r for r in records[1:]}
    n, k = c.num_attention_heads * c.head_dim, c.q_lora_rank
    assert first["fp8 linear, wq_b", 4]["bytes"] == n * k + -(-n // 128) * -(-k // 128)
    assert first["fp4 experts", 2]["bytes"] == (2 * c.num_experts_per_tok + 1) * 3 * c.hidden_size * c.moe_intermediate_size * 17 // 32
    key = c.head_dim - c.qk_rope_head_dim + -(-(c.head_dim - c.qk_rope_head_dim) // 64) + 2 * c.qk_rope_head_dim
    assert first["attention, ratio 16", 3]["bytes"] == 3 * (512 // 16 + c.sliding_window) * key
    d, m = c.hidden_size, 2
    assert first["hyper-connection, in", 20]["bytes"] == 4 * (20 * (m * d + d) + (2 + m) * m * m * d)
    assert first["hyper-connection, out", 20]["bytes"] == 4 * 20 * (m * d + m * d + d)
    assert first["rmsnorm", 20]["bytes"] == first["activation quantisation", 20]["bytes"] == 2 * 4 * 20 * d
    assert first["compressor, ratio 4", 5]["bytes"] == 4 * 5 * (2 * 4 * 2 * c.head_dim + c.head_dim)
    assert first["compressor, ratio 16", 1]["bytes"] == 4 * (2 * 16 * c.head_dim + c.head_dim)
    assert first["indexer", 6]["bytes"] == 256 * c.index_head_dim * 17 // 32


def test_the_device_is_busy_while_calls_are_queued():
    """Copies go ahead of every round, at least as long as the host takes to queue its calls."""
    card, queued = cuda.Card(emulated(), SMALL), []
    card._copy = lambda i: queued.append("copy")
    card.copy_seconds = 1e-9
    card.seconds(lambda i: queued.append(i), 2, rounds=1)
    assert queued[:4] == [0, 1, 0, 1] and queued[-2:] == [0, 1]
    assert queued[4:-2] and set(queued[4:-2]) == {"copy"}


def test_a_table(records, capsys):
    cuda.render(records)
    text = capsys.readouterr().out
    assert "met" in text and "3 layers, verify 5" in text and text.splitlines()[0].startswith("emulated, ")


def test_command(monkeypatch, capsys, tmp_path, records):
    monkeypatch.setattr("dsv4.ops.open_ops", lambda name, device=0: (name, device))
    monkeypatch.setattr(cuda, "measure", lambda ops, config, progress: records if ops == ("cuda", 1) else None)
    assert cli.main(["bench", "cuda", "--like", "nano", "--device", "1", "--json", "--output", str(tmp_path / "found.json")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "found.json").read_text()) == json.loads(json.dumps(records))


def test_without_a_gpu_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cli.main(["bench", "cuda", "--output", str(tmp_path / "no" / "x")]) == 2
    assert "expected a place to write the JSON to" in capsys.readouterr().err
    assert cli.main(["bench", "cuda"]) == 2
    assert "CuPy cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("driver, words", [(0, "expected a GPU and its driver"), (11, "CUDA 12 or newer, found 11")])
def test_gpu_check_says_where_it_cannot_run(tmp_path, driver, words):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {driver}\n")
    python.chmod(0o755)
    script = Path(__file__).parent.parent / "launch" / "gpu_check.sh"
    done = subprocess.run([script], env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["python"]

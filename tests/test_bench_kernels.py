"""The kernel benches run at the sizes of nano and say what they must. No time is asserted anywhere."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from rich.table import Table

from dsv4 import _cpu
from dsv4.bench import layers as module
from dsv4.bench import machine, timing
from dsv4.bench.cli import bench
from dsv4.bench.experts import experts, indexer
from dsv4.bench.layers import Bench, layers, prefill
from dsv4.cli import main
from dsv4.cli_support import console
from dsv4.errors import InputError
from dsv4.ops import open_ops
from dsv4.ops.cpu import CpuOps
from dsv4.ops.stream import multiply_bytes, read_all
from dsv4.synth import Recipe, read_config

NANO = Recipe.of(read_config("nano"), experts=12).config
KEYS = {"name", "threads", "rows", "seconds", "bytes", "gbs", "bandwidth_gbs", "ratio"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(timing, "READ_BYTES", 1 << 20)
    monkeypatch.setattr("dsv4.bench.experts.COLD", 1 << 20)
    monkeypatch.setattr(timing, "BYTE_PRODUCTS", 1 << 18)
    timing._words.cache_clear()
    yield
    timing._words.cache_clear()


def sound(records):
    for r in records:
        assert KEYS <= set(r)
        assert all(math.isfinite(r[key]) and r[key] > 0 for key in KEYS - {"name"}), r
        assert r["gbs"] == pytest.approx(r["bytes"] / r["seconds"] / 1e9)
        if "gflops" not in r:
            assert r["ratio"] == pytest.approx(r["gbs"] / r["bandwidth_gbs"])
    return records


def test_placement(tmp_path, monkeypatch):
    """Cores by memory node, of those that the process may use."""
    for node, cores in enumerate(("0-3,8", "4-7", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {1, 8, 6}, raising=False)
    assert machine.placement(tmp_path) == {"nodes": 3, "affinity": {0: 2, 1: 1}}
    assert machine.placement(tmp_path / "absent") == {"nodes": 1, "affinity": {0: 3}}


def test_the_processor_with_its_generation(tmp_path):
    info, more = tmp_path / "cpuinfo", "cpu family\t: 25\nmodel\t\t: 17\n"
    info.write_text(f"processor\t: 0\n{more}model name\t: A CPU @ 2: GHz\n\nprocessor\t: 1\ncpu family\t: 6\nmodel name\t: B\n")
    assert machine.cpu_model(info) == "A CPU @ 2: GHz, family 25 model 17"
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert machine.cpu_model(info) == machine.cpu_model(tmp_path / "absent") != ""


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_read_reads_everything(threads):
    words = np.random.default_rng(0).integers(0, 1 << 63, 32 * 37, np.uint64)
    with np.errstate(over="ignore"):
        assert read_all(open_ops("cpu", threads=threads).team, words) == int(words.sum(dtype=np.uint64))


@pytest.mark.parametrize("words", [np.zeros(33, np.uint64), np.zeros(32, np.float64), np.zeros((32, 32), np.uint64)])
def test_the_read_refuses_other_arrays(words):
    with pytest.raises(InputError, match="a multiple of 32"):
        read_all(open_ops("cpu").team, words)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", _cpu.instruction_sets())
def test_bytes_are_multiplied(isa, threads):
    """The sums of products of ones, which no instruction set may lose to 16 bits, are what was done."""
    team = CpuOps(threads, isa).team
    once = multiply_bytes(team, 1)
    at_a_time = {"avx512": 16, "avx512bf16": 16}.get(isa, 4)  # sums in registers
    assert once == threads * at_a_time * 16 * 4 * 2048
    assert multiply_bytes(team, 3) == 3 * once and multiply_bytes(team, 0) == 0


def test_experts():
    found = sound(experts(NANO, [1, 2], 1))
    moe = [r for r in found if r["name"] != "indexer"]
    assert [(r["threads"], r["rows"], r["experts"]) for r in moe] == [(n, *r) for n in (1, 2) for r in ((1, 2), (6, 2), (6, 7))]
    assert all(r["bytes"] == r["experts"] * 3 * 256 * 128 * 17 // 32 for r in moe)


def test_indexer():
    found = sound(indexer(NANO, 1, 1e9, 1, [64, 640]))
    assert [(r["entries"], r["bytes"]) for r in found] == [(64, 64 * 34), (640, 640 * 34)]  # 32 codes, 2 scales
    for r in found:
        assert r["ops"] == r["entries"] * NANO.index_n_heads * NANO.index_head_dim
        assert r["ratio_ops"] == pytest.approx(max(r["bytes"] / 1e9, r["ops"] / r["ops_rate"]) / r["seconds"])
    assert indexer(NANO, 1, 1.0, 1, [64])[0]["ratio_ops"] > 1  # of memory that slow, the reading counts


def test_layers():
    found = sound(layers(NANO, [2], 1, context=300))
    single = [r for r in found if r["rows"] == 1]
    assert [r["name"] for r in single] == ["layer, window only", "layer, ratio 4", "layer, ratio 16", "whole model"]
    whole, parts = single[-1], {r["name"]: r for r in single[:-1]}
    counts = {"layer, window only": 1, "layer, ratio 4": 2, "layer, ratio 16": 1}
    assert whole["seconds"] == pytest.approx(whole["head_seconds"] + sum(n * parts[name]["seconds"] for name, n in counts.items()))
    assert whole["limit_tokens_per_s"] == pytest.approx(whole["bandwidth_gbs"] * 1e9 / whole["bytes"])
    several = [r for r in found if r["rows"] == 6]
    assert [r["experts"] for r in several] == [2, 4, 6, 8, 10, 12] * 3
    assert sum(r["seconds"] - r["line_seconds"] for r in several[:6]) == pytest.approx(0, abs=1e-6)


def test_prefill():
    found = sound(prefill(NANO, [1, 2], 1, context=300, rows=64))
    kinds = ["layer, window only", "layer, ratio 4", "layer, ratio 16"]
    assert [(r["threads"], r["name"]) for r in found] == [(n, name) for n in (1, 2) for name in kinds]
    assert all(r["ratio"] == pytest.approx(r["gflops"] / r["matmul_gflops"]) for r in found)


@pytest.mark.parametrize("ratio, entries, index", [(0, 0, 0), (4, 16, 75), (16, 18, 0)])
def test_bytes_that_a_row_must_read(ratio, entries, index):
    """Weights of the block as stored but experts and ids; keys of the window and the entries chosen; index keys."""
    bench = Bench(NANO, ratio, 12, 300, open_ops("cpu"), 6)
    weights = 0
    with_names = module.Drawn(bench.recipe)
    for name in with_names.names():
        if name.startswith("layers.0.") and ".experts." not in name and not name.endswith("tid2eid"):
            weights += with_names.info(name).nbytes
    keys = (64 + entries) * (64 + 1 + 2 * 64) + index * 34
    assert bench.read_bytes(5) == weights + 5 * 3 * 256 * 128 * 17 // 32 + keys


@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_the_layer_measured_computes_finite_numbers_with_the_experts_asked_for(ratio, monkeypatch):
    bench = Bench(NANO, ratio, 12, 300, open_ops("cpu"), 6)
    seen = []
    moe, block = bench.ops.moe, bench.model.block
    monkeypatch.setattr(bench.ops, "moe", lambda x, ids, *rest: seen.append(set(ids.ravel().tolist())) or moe(x, ids, *rest))
    outputs = []
    object.__setattr__(bench.model, "block", lambda *a: outputs.append(block(*a)) or outputs[-1])
    bench.time([np.array([0, 1, 2, 0, 1, 2]), np.array([3, 4, 5, 3, 4, 5])], 1)
    assert all(np.isfinite(o).all() for o in outputs) and outputs[0].shape == (6, 4, 256)
    assert set(map(frozenset, seen)) == {frozenset(range(6)), frozenset(range(6, 12))}


@pytest.mark.parametrize("command", ["experts", "layer", "prefill"])
def test_commands(command, capsys):
    options = ["bench", command, "--like", "nano", "--threads", "1", "--repeats", "1"]
    assert main([*options, "--json"]) == 0
    records = sound(json.loads(capsys.readouterr().out))
    assert all({"cpu", "cores", "like"} <= set(r) for r in records)
    assert main(options) == 0
    assert "GB/s" in capsys.readouterr().out
    for wrong, words in (("0", "expected numbers >= 1; found '0'"), ("1,x", "expected numbers separated by commas, such as 1,2; found '1,x'")):
        assert main(["bench", command, "--threads", wrong]) == 2
        assert words in capsys.readouterr().err


def test_prefill_takes_a_number_of_experts(capsys, monkeypatch):
    seen, moe = set(), CpuOps.moe
    monkeypatch.setattr(CpuOps, "moe", lambda self, x, ids, *rest: seen.update(ids.ravel().tolist()) or moe(self, x, ids, *rest))
    assert main(["bench", "prefill", "--like", "nano", "--experts", "12", "--threads", "1", "--repeats", "1", "--json"]) == 0
    assert {r["experts"] for r in json.loads(capsys.readouterr().out)} == {12} and seen == set(range(12))
    assert main(["bench", "experts", "--experts", "12"]) == 2  # would change nothing
    assert "No such option" in capsys.readouterr().err


def test_tables_are_plain_text(capsys, monkeypatch):
    """Even where output looks like a terminal, as a rank's under mpirun does; names in brackets are no markup."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    out = console()
    out.print("model[dim] 3.5", Table("a", title="b"))
    assert out.width == 200 and capsys.readouterr().out.startswith("model[dim] 3.5")
    assert main(["bench", "experts", "--like", "nano", "--threads", "1", "--repeats", "1"]) == 0
    assert "GB/s" in (text := capsys.readouterr().out) and "\x1b" not in text


def test_a_busy_machine_is_named(monkeypatch, capsys):
    options = ["bench", "experts", "--like", "nano", "--threads", "1", "--repeats", "1"]
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    for load, words in ((2.0, ""), (2.6, "this machine is busy (load average 2.6, 2 cores)")):
        monkeypatch.setattr(machine.os, "getloadavg", lambda load=load: (load, 9.0, 9.0), raising=False)
        assert main([*options, "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) and words in err and bool(words) == bool(err)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")  # rank 0 has said it
    done = CliRunner().invoke(bench, [*options[1:], "--json"])
    assert done.exit_code == 0 and done.stderr == "" and machine.busy()

    def unknown():
        raise OSError

    monkeypatch.setattr(machine.os, "getloadavg", unknown)
    assert machine.busy() is None

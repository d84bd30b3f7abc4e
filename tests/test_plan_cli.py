"""python -m dsv4 plan: bytes that are the model's, times that are bytes over bandwidth, and one line for what is wrong."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4 import cli
from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import CapacityError, ConfigError
from dsv4.inspection import describe
from dsv4.planner import Machine, Sizes, parse_gpus, predict, render
from dsv4.planner.machine import GIB, HOST_RESERVE, HOST_SHARE, LAYER_MS, PCIE_SHARE
from dsv4.synth import PUBLISHED, STAGES

README = Path(__file__).resolve().parent.parent / "README.md"
DOC = README.parent / "docs" / "hardware.md"
FOUR = Machine(4, 22, pcie=3)


@pytest.fixture(scope="module")
def sizes():
    return {ranks: Sizes.of(PUBLISHED, STAGES, ranks) for ranks in (1, 4, 8)}


def test_the_published_checkpoint_has_the_size_it_has():
    pruned = replace(PUBLISHED, n_routed_experts=160)
    assert Sizes.of(pruned, STAGES, 1).total == 107_803_320_952  # as published


def test_sizes_are_those_of_a_checkpoint(nano_dir):
    """Whole and split: what `inspect` says of the files."""
    config = ModelConfig.load(nano_dir)
    with Checkpoint(nano_dir) as checkpoint:
        total = checkpoint.total_bytes
    for rank in describe(nano_dir)["ranks"]:
        if rank["possible"]:
            found = Sizes.of(config, 3, rank["ranks"])
            assert found.total == total
            assert found.dense + found.draft == rank["resident"]
            assert abs(found.experts * found.expert - rank["experts"]) <= found.experts
            assert abs(config.n_routed_experts * 3 * found.expert - rank["draft_experts"]) <= found.experts


def test_distinct_experts(sizes):
    found = sizes[1].distinct
    assert found(1) == pytest.approx(6) and found(2) == pytest.approx(12 - 36 / 256)
    assert found(6) < 36 and found(10_000) == pytest.approx(256)


def test_keys_that_a_row_reads(sizes):
    """43 windows of 128; 21 indexed layers, 512 entries chosen; 20 layers that read every 128th."""
    key, index, context = 448 + 7 + 128, 68, 65536
    assert sizes[1].keys(context, 1) == 43 * 129 * key + 21 * (context // 4 * index + 512 * key) + 20 * (context // 128) * key
    assert sizes[1].keys(10, 1) == 43 * 10 * key + 21 * (2 * index + 2 * key)


def test_every_byte_of_memory_is_counted(sizes):
    memory = predict(FOUR, sizes[4])["memory"]
    assert sum(memory["gpu"].values()) == pytest.approx(22 * GIB, abs=10)
    assert sum(memory["experts"].values()) == pytest.approx(1)
    held = 4 * memory["gpu"]["experts"] + memory["host"]["experts"]
    assert held == pytest.approx(sizes[4].total_experts, rel=1e-6)
    host = predict(Machine(), sizes[1])["memory"]["host"]
    assert sum(host.values()) == pytest.approx(256 * GIB - HOST_RESERVE, abs=10)


def test_state_is_the_engines_own_plan(sizes):
    gpu = predict(FOUR, sizes[4], context=100_000, sessions=2)["memory"]["gpu"]
    assert gpu["state"] == sizes[4].state(100_000, 2, 512).state > 2 * 0.3e9


def test_time_on_the_processor_is_bytes_over_bandwidth(sizes):
    found, s = predict(Machine(bandwidth=50), sizes[1], context=4096), sizes[1]
    read = s.read + s.keys(4096, 1) + 43 * 6 * s.expert
    assert found["plain"]["ms"] == pytest.approx(1e3 * read / (50e9 * HOST_SHARE) + 43 * LAYER_MS)
    assert found["plain"]["tok_s"] == pytest.approx(1e3 / found["plain"]["ms"])
    assert found["bound"] == "host_memory"


def test_experts_that_travel_are_bytes_over_the_slower_road(sizes):
    s, found = sizes[4], predict(FOUR, sizes[4])
    share = found["memory"]["experts"]
    away = 43 * 6 * s.expert * share["in_memory"]
    there = 43 * 6 * s.expert * share["on_gpu"] / FOUR.device
    assert found["bound"] == "pcie"
    assert found["plain"]["parts"]["pcie"] == pytest.approx(1e3 * (away / (15.75e9 * PCIE_SHARE) - there))
    slow = predict(replace(FOUR, bandwidth=20), s)
    assert slow["bound"] == "host_memory" and "pcie" not in slow["plain"]["parts"]
    assert slow["plain"]["parts"]["host_memory"] == pytest.approx(1e3 * (4 * away / (20e9 * HOST_SHARE) - there))


def test_too_little_memory_reads_the_disk(sizes):
    found = predict(Machine(ram=64), sizes[1])
    assert found["bound"] == "disk" and found["memory"]["experts"]["on_disk"] > 0.5
    assert any("GiB of host memory" in one["change"] for one in found["changes"])
    found = predict(replace(FOUR, ram=64), sizes[4])
    assert found["bound"] == "disk" and sum(found["memory"]["experts"].values()) == pytest.approx(1)


def test_speculation_takes_the_best_length(sizes):
    """At no acceptance drafting cannot pay; at full acceptance with all experts at hand the whole block does."""
    fast = Machine(8, 80, pcie=5, gpu_bandwidth=3000)
    assert predict(fast, sizes[8], acceptance=0)["speculation"]["length"] == 0
    found = predict(fast, sizes[8], acceptance=1)["speculation"]
    assert found["length"] == 5
    assert found["tok_s"] == pytest.approx(6e3 / (found["draft_ms"] + found["verify_ms"][4]))
    half = predict(fast, sizes[8], acceptance=0.5)["speculation"]
    n = half["length"]
    assert half["tok_s"] == pytest.approx(1e3 * (2 - 0.5**n) / (half["draft_ms"] + half["verify_ms"][n - 1]))
    assert predict(Machine(), Sizes.of(replace(PUBLISHED, dspark=None), 0, 1))["speculation"] is None


@pytest.mark.parametrize("better", [
    {"bandwidth": 150}, {"ram": 512}, {"disk": 9}, {"pcie": 4}, {"lanes": 16}, {"gpu_memory": 30}, {"gpu_bandwidth": 900},
])  # fmt: skip
def test_more_is_never_slower(sizes, better):
    start = Machine(4, 22, ram=128, pcie=3, lanes=8)
    rate = predict(start, sizes[4])["plain"]["tok_s"]
    assert predict(replace(start, **better), sizes[4])["plain"]["tok_s"] >= rate


def test_changes_are_what_the_planner_says_of_them(sizes):
    found = {one["change"]: one["tok_s"] for one in predict(FOUR, sizes[4])["changes"]}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found["PCIe 4"] == predict(replace(FOUR, pcie=4), sizes[4])["speculation"]["tok_s"]
    plain = {one["change"]: one["plain_tok_s"] for one in predict(FOUR, sizes[4])["changes"]}
    assert plain["GPUs of 44 GiB"] == predict(replace(FOUR, gpu_memory=44), sizes[4])["plain"]["tok_s"] < found["GPUs of 44 GiB"]
    assert found["8 such GPUs"] == predict(replace(FOUR, gpus=8), sizes[8])["speculation"]["tok_s"]


def test_what_would_fit_does_fit(sizes):
    with pytest.raises(CapacityError, match=r"plan: memory of a GPU: .* found 10 GiB; a --context of (\d+) would fit") as caught:
        predict(Machine(4, 10), sizes[4], context=1 << 20)
    fits = int(str(caught.value).split("--context of ")[1].split()[0])
    predict(Machine(4, 10), sizes[4], context=fits)
    with pytest.raises(CapacityError):
        predict(Machine(4, 10), sizes[4], context=fits + 256)
    with pytest.raises(CapacityError, match="found 4 GiB; more or larger GPUs would do, or --gpus 0"):
        predict(Machine(4, 4), sizes[4])
    with pytest.raises(CapacityError, match="plan: host memory: .* found 16 GiB; .* (.*) GiB hold all of them$") as caught:
        predict(Machine(ram=16), sizes[1])
    least, all_of_them = (float(words) for words in re.search(r"at least (.*?) GiB .* (\S+) GiB hold", str(caught.value)).groups())
    assert predict(Machine(ram=least), sizes[1])["memory"]["experts"]["on_disk"] < 1
    assert predict(Machine(ram=all_of_them), sizes[1])["memory"]["experts"]["on_disk"] == 0
    assert predict(Machine(ram=all_of_them - 0.1), sizes[1])["memory"]["experts"]["on_disk"] > 0


# ---------------------------------------------------------------------- the command
def run(capsys, *options):
    status = cli.main(["plan", *options])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_the_command_of_the_page(capsys):
    (command,) = set(re.findall("python -m dsv4 plan (--gpus .*?)(?:  .*)?\n", DOC.read_text("utf-8") + README.read_text("utf-8")))
    assert f"| `{command}` |" in DOC.read_text("utf-8")
    options = command.split()
    status, text, _ = run(capsys, *options)
    assert status == 0
    for words in ("A prediction", "4 GPU(s) of 22 GiB", "Plain decoding: ", "What bounds it: experts on their way over PCIe", "PCIe 4"):
        assert words in text
    status, text, _ = run(capsys, *options, "--json")
    found = json.loads(text)
    assert status == 0 and found["machine"]["gpus"] == 4 and found == predict(replace(FOUR, gpu_bandwidth=616), Sizes.of(PUBLISHED, STAGES, 4))


def test_other_models(capsys):
    assert json.loads(run(capsys, "--model", "nano", "--json")[1])["model"]["context"] == 8192  # no more than it can
    status, text, _ = run(capsys, "--model", "nano", "--context", "4096", "--json")
    assert status == 0 and json.loads(text)["model"]["bytes"] < 10e6
    assert run(capsys, "--model", "nano", "--context", "4096")[0] == 0
    assert run(capsys, "--model", "nano", "--gpus", "2x22")[0] == 0  # four, a change to try, cannot run it
    assert json.loads(run(capsys, "--experts", "160", "--json")[1])["model"]["bytes"] == 107_803_320_952


@pytest.mark.parametrize("options, words", [
    (["--gpus", "4*22"], "--gpus: expected COUNTxGIB, such as 4x22, or 0 for none; found '4*22'"),
    (["--gpus", "0x22"], "--gpus: expected COUNTxGIB"),
    (["--gpus", "4x0"], "--gpus: expected COUNTxGIB"),
    (["--gpus", "3x22"], "--gpus: expected 1, 2, 4 or 8 GPUs, over which this model can be divided; found 3"),
    (["--gpus", "4x22", "--model", "nano"], "--gpus: expected 1 or 2 GPUs, over which this model can be divided; found 4"),
    (["--pcie", "9"], "plan: pcie: expected a generation, 3, 4, 5, 6; found 9"),
    (["--lanes", "3"], "plan: lanes: expected 1, 2, 4, 8 or 16; found 3"),
    (["--ram", "-1"], "expected a number above 0; found -1.0"),
    (["--bandwidth", "nan"], "expected a number above 0; found nan"),
    (["--disk", "inf"], "expected a number above 0; found inf"),
    (["--disk", "1e-4"], "plan: disk: expected a number of at least 0.001, found 0.0001"),
    (["--ram", "1e308"], "expected at most 1e+09; found 1e+308"),
    (["--gpus", f"{'9' * 5000}x22"], "--gpus: expected COUNTxGIB"),
    (["--gpus", f"4x{'9' * 400}"], "--gpus: expected COUNTxGIB"),
    (["--sessions", "9" * 400], "'--sessions'"),
    (["--experts", "100000"], "'--experts'"),
    (["--acceptance", "1.5"], "expected a number within 0..1; found 1.5"),
    (["--acceptance", "nan"], "expected a number within 0..1; found nan"),
    (["--context", "2000000"], "run settings: max_context: expected at most the model's 1048576 positions, found 2000000"),
    (["--context", "0"], "'--context'"),
    (["--model", "/nowhere"], "/nowhere: expected real, nano, a config.json or a directory with one"),
])  # fmt: skip
def test_wrong_arguments(capsys, options, words):
    status, out, err = run(capsys, *options)
    assert status == 2 and out == "" and words in err and "Traceback" not in err


def test_machines_that_cannot_be():
    for wrong in ({"bandwidth": 0}, {"ram": float("nan")}, {"gpus": -1}, {"disk": float("inf")}):
        with pytest.raises(ConfigError, match=f"plan: {next(iter(wrong))}: expected a number of at least"):
            Machine(**wrong)
    assert parse_gpus(" 2X12.5 ") == (2, 12.5) and parse_gpus("0") == (0, 0.0)


def test_text_says_what_json_says(sizes):
    found = predict(Machine(8, 80, pcie=5, gpu_bandwidth=3000), sizes[8])
    text = render(found)
    assert f"{found['plain']['tok_s']:.1f} tok/s" in text and f"{found['speculation']['tok_s']:.1f} tok/s" in text
    assert "100% on the GPUs" in text and "launches and exchanges" in text
    assert "tok/s, plain and with speculation where it pays:" in text and "alone" not in text
    for one in found["changes"]:
        assert re.search(rf"{re.escape(one['change'])} +{one['plain_tok_s']:.1f} +{one['tok_s']:.1f}$", text, re.MULTILINE)
    assert "of one session that runs alone" in render(predict(FOUR, sizes[4], sessions=16))
    alone = {**found, "changes": [], "speculation": None}
    assert "No single change" in render(alone) and "Speculation" not in render(alone)


# ---------------------------------------------------------------------- docs/hardware.md
SHORT = {"host_memory": "host memory", "pcie": "PCIe", "layers": "launches"}
ROWS = [[cell.strip() for cell in line.strip("|").split("|")]
        for line in DOC.read_text("utf-8").splitlines() if line.startswith("|") and "`--" in line]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tables_are_what_the_command_says(capsys, row):
    _, options, *cells = row

    def ask(*more):
        status, text, _ = run(capsys, *shlex.split(options.strip("`")), "--json", *more)
        assert status == 0
        return json.loads(text)

    found = ask()
    rate = f"{found['plain']['tok_s']:.1f}"
    if len(cells) == 3:
        gpu = found["memory"]["gpu"]
        assert cells == [f"{gpu['state'] / GIB:.2f}", f"{gpu['experts'] / GIB:.2f}", rate]
        return
    speculative = [f"{ask('--acceptance', p)['speculation']['tok_s']:.1f}" for p in ("0.5", "0.75", "0.9")]
    assert cells == [f"{found['memory']['experts']['on_gpu']:.0%}", rate, *speculative, SHORT[found["bound"]]]


def test_the_page_states_the_models_bytes(sizes):
    text, s = DOC.read_text("utf-8"), sizes[1]
    read = f"reads {s.read / 1e9:.1f} GB of dense weights, its keys ({s.keys(32768, 1) / 1e9:.2f} GB"
    assert f"has {s.total / 1e9:.1f} GB of weights" in text and read in text
    assert f"{43 * 6 * s.expert / 1e9:.1f} GB of the {s.total_experts / 1e9:.0f} GB" in text
    assert len(ROWS) >= 15


def test_the_page_states_what_holds_all_experts():
    """The least whole or half GiB that does, with and without GPUs."""
    text = " ".join(DOC.read_text("utf-8").split())

    def least(words, place, **machine):
        """The figure after these words is the least of which nothing is elsewhere than in these places."""
        found, name = float(re.search(re.escape(words) + r" ([\d.]+)", text)[1]), "ram" if "ram" in machine else "gpu_memory"
        step = 1 if found % 1 == 0 and name == "ram" else 0.5
        for size, holds in ((found, True), (found - step, False)):
            made = Machine(**{**machine, name: size})
            experts = predict(made, Sizes.of(PUBLISHED, STAGES, max(1, made.gpus)))["memory"]["experts"]
            assert (sum(experts[one] for one in place) > 1 - 1e-9) is holds, (words, size)

    for gpus, words in ((1, "takes one card of"), (2, "157.5 GiB, two of"), (4, "81, four of"), (8, "43 or eight of")):
        least(words, ["on_gpu"], gpus=gpus)
    both = ["on_gpu", "in_memory"]
    least("without a GPU that takes", both, ram=0)
    least("one card of 24 GiB", both, ram=0, gpus=1, gpu_memory=24)
    least("four of 22 GiB", both, ram=0, gpus=4, gpu_memory=22)

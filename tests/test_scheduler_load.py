"""Many clients at once for a while: nothing fails, nothing hangs, nothing is kept, and every answer is the single run's."""

import json

import numpy as np
from click.testing import CliRunner

from dsv4.bench import serve
from dsv4.cli import cli
from dsv4.scheduler import Scheduler


def test_sixteen_clients(engine):
    small = engine("nano", threads=2, max_sessions=8, max_context=512)
    found = serve.load(small, clients=16, seconds=8)
    assert not found["wrong"] and found["failed"] == found["hung"] == 0
    assert found["answered"] and found["left"], found
    stats = found["stats"]
    assert stats["running"] == stats["waiting"] == 0 and stats["prefix_hits"]
    assert stats["prefix_bytes"] <= serve.PREFIX_BYTES and found["free_slots"] == 8
    grown = found["memory_end_bytes"] - found["memory_start_bytes"]
    assert grown < serve.PREFIX_BYTES + (16 << 20), f"{grown:,} bytes more than after a second"
    assert serve.good([found])


def test_a_wrong_answer_would_be_seen(engine, monkeypatch):
    small = engine("nano", threads=2, max_sessions=8, max_context=512)
    expected = serve.complete

    def other(*arguments, **options):
        found = expected(*arguments, **options)
        found.tokens[0] ^= 1
        return found

    monkeypatch.setattr(serve, "complete", other)
    found = serve.load(small, clients=2, seconds=0.5)
    assert found["wrong"] and not serve.good([found])
    monkeypatch.undo()
    monkeypatch.setattr(Scheduler, "submit", lambda *_: 1 / 0)
    found = serve.load(small, clients=1, seconds=0.2)
    assert len(found["wrong"]) > 1 and "ZeroDivisionError" in found["wrong"][0] and found["first_token_s"] == {}
    assert not serve.good([found])


def test_times_to_the_first_token_are_counted_to_half_a_percent():
    counts, times = np.zeros(len(serve.SECONDS), int), np.random.default_rng(0).lognormal(-4, 2, 10_000)
    for seconds in times:
        counts[serve.SECONDS[:-1].searchsorted(seconds)] += 1
    for name, seconds in serve.percentiles(counts).items():
        assert 1 <= seconds / np.percentile(times, int(name[1:])) < 1.006


def test_a_ratio_is_that_of_runs_next_to_each_other(monkeypatch):
    speeds = {1: iter([100, 50, 200]), 8: iter([250, 200, 600])}  # the machine's own speed moves more than all else

    def run(_engine, spec, running, tokens):
        speed = next(speeds[running]) if (spec, tokens) == ("gate", 200) else 1
        return {"name": "throughput", "spec": spec, "sequences": running, "tokens_per_s": speed}

    monkeypatch.setattr(serve, "throughput", run)
    records = serve.throughputs(None, [1, 8], 200, 3, None)
    assert [(r["sequences"], r["tokens_per_s"], r["ratio_to_one"]) for r in records[:2]] == [(1, 100, 1), (8, 250, 3)]
    assert records[2]["spec"] == records[3]["spec"] == "off"


def test_the_command(monkeypatch):
    monkeypatch.setattr(serve, "WAVES", 1)
    run = ["bench", "serve", "--threads", "1", "--max-context", "256"]
    few = [*run, "--tokens", "8", "--repeats", "1", "--json"]
    found = CliRunner().invoke(cli, [*few, "--sequences", "2"])
    assert found.exit_code == 0, found.output
    records = json.loads(found.stdout)
    assert [(r["spec"], r["sequences"]) for r in records] == [("gate", 1), ("gate", 2), ("off", 1), ("off", 2)]
    assert records[0]["ratio_to_one"] == 1 and records[3]["drafted"] == 0 and records[1]["rows_per_step"] > 1
    found = CliRunner().invoke(cli, [*run, "--clients", "3", "--seconds", "0.5"])
    assert found.exit_code == 0 and "0 failed, 0 hung, 0 wrong" in " ".join(found.output.split())
    assert CliRunner().invoke(cli, [*few, "--sequences", "0"]).exit_code == 2
    for wrong, said in (
        ([*few, "--clients", "3"], "--tokens has no meaning with --clients"),
        ([*run, "--seconds", "1"], "--seconds has no meaning without --clients"),
        (["bench", "--model", "other", "serve"], "expected the options of `serve` after it, found --model before it"),
        ([*run[:-1], "60"], "expected at least 258 positions"),
    ):
        found = CliRunner().invoke(cli, wrong)
        assert found.exit_code and said in f"{found.output} {found.exception}", found.output

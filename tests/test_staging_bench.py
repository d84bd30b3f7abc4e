"""What the benches say of experts: how fast they are read, and where they are."""

import pytest

from dsv4.bench import cli
from dsv4.bench import engine as bench_engine
from dsv4.bench import staging as bench_staging
from dsv4.config import ModelConfig


@pytest.mark.parametrize("name, ranks", [("nano", [1]), ("tiny-tp", [1, 4])])
def test_records_of_reading(checkpoint_dir, monkeypatch, name, ranks):
    monkeypatch.setattr(bench_staging, "COLD", 200_000)
    monkeypatch.setattr(bench_staging, "bandwidth", lambda threads: 1e9)
    config, seen = ModelConfig.load(checkpoint_dir(name)), []
    records = bench_staging.staging(config, [1, 2], 2, lambda *progress: seen.append(progress))
    names = [f"staging, {kind}, {n} rank(s)" for n in ranks for kind in ("checkpoint", "packed")]
    assert [(r["threads"], r["name"]) for r in records] == [(t, n) for t in (1, 2) for n in names]
    whole = 3 * config.hidden_size * config.moe_intermediate_size * 17 // 32
    for r in records:
        part = whole / int(r["name"].split(", ")[2].split()[0])
        assert part <= r["bytes"] < part + 6 * 256 and r["ratio"] == pytest.approx(r["bytes"] / r["seconds"] / 1e9)
    assert seen == [("measure", 1, 2), ("measure", 2, 2)]


def test_where_experts_are(engine, checkpoint_dir):
    plain = bench_engine.experts(engine("nano"))
    assert plain == {"name": "experts", "placement": "mapped", "planned_cache_bytes": 0, "planned_staging_bytes": 0}
    assert cli._placement(plain) == "experts: mapped"
    (staged,) = [r for r in bench_engine.measure("nano", {"expert_cache": 1 << 20}, [64], 1, 2) if r["name"] == "experts"]
    assert staged["placement"] == "staged" and 0 < staged["planned_cache_bytes"] <= 1 << 20 and staged["misses"] > 0
    assert "MB resident" in cli._placement(staged) and "% hits" in cli._placement(staged)

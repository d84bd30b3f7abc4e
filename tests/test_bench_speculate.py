"""bench speculate: every record, the picture, and what is refused before the model is loaded."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from pytest import approx

from dsv4.bench.speculate import calibration
from dsv4.cli import main

SMALL = ["bench", "speculate", "--threads", "1", "--tokens", "8", "--repeats", "1"]
PNG = b"\x89PNG"


@pytest.fixture
def fails(capsys):
    """Runs a command that must end with status 2 → what it says."""

    def run(*options):
        assert main([*SMALL, "--model", "/nowhere", *map(str, options)]) == 2
        return capsys.readouterr().err

    return run


def test_records_and_table(capsys):
    assert main([*SMALL, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    named = {name: [r for r in records if r["name"] == name] for name in ("draft", "plain", "verify", "fit", "text", "confidence")}
    assert sum(map(len, named.values())) == len(records) and all(r["model"] == "nano" and r["threads"] == 1 for r in records)
    assert all(r["ms"] > 0 for name in ("draft", "plain", "verify") for r in named[name])
    verify, plain, (fit,) = named["verify"], named["plain"][0]["ms"], named["fit"]
    assert [r["n"] for r in verify] == [1, 2, 3, 4, 5] and [r["ratio_to_plain"] * plain for r in verify] == approx([r["ms"] for r in verify])
    assert [fit["verify_slope_ms"], fit["verify_base_ms"]] == approx(np.polyfit([1, 2, 3, 4, 5], [r["ms"] for r in verify], 1))
    text, speed = named["text"], {(r["kind"], r["mode"]): r["tokens_per_s"] for r in named["text"]}
    assert [r["mode"] for r in text] == 4 * ["off", "always", "gate"] and len({r["kind"] for r in text}) == 4
    assert [r["ratio_to_plain"] for r in text] == approx([speed[r["kind"], r["mode"]] / speed[r["kind"], "off"] for r in text])
    assert [r["drafted"] > 0 for r in text][:2] == [False, True]
    known = sum(r["n"] for r in named["confidence"])  # of rounds that always draft
    accepted, drafted = (sum(r[name] for r in text if r["mode"] == "always") for name in ("accepted", "drafted"))
    assert len(named["confidence"]) == 6 and accepted <= known <= drafted
    assert main(SMALL) == 0
    assert "verify(n) = " in (table := capsys.readouterr().out) and table.count("always") == 4
    table = " ".join(table.split())  # lines are cut to the terminal's width
    assert "to plain: speed as a multiple" in table and "sigmoid: the share that their confidence promised" in table


def test_more_tokens_than_the_model_has_positions(capsys):
    assert main([*SMALL, "--tokens", "9000"]) == 2
    assert "; ask for fewer tokens (this model has 8192 positions)\n" in capsys.readouterr().err


def test_outcomes_by_confidence():
    """What came after the first rejected token is not known and is not counted; a bucket holds its lower bound."""
    rounds = [SimpleNamespace(confidence=[6.0, 2.0, 0.0], length=3, accepted=1), SimpleNamespace(confidence=[2.0], length=1, accepted=1)]
    found = {(r["from"], r["to"]): (r["n"], r["match_rate"], r["expected"]) for r in calibration(rounds)}
    none = (0, None, None)
    assert found == {
        (None, -0.5): none, (-0.5, 0.5): none, (0.5, 1.5): none, (1.5, 3.0): (2, 0.5, approx(0.880797)), (3.0, 6.0): none,
        (6.0, None): (1, 1.0, approx(0.997527)),
    }  # fmt: skip


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "--plot", str(tmp_path / "found")]) == 0
    assert (tmp_path / "found").read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_load(fails, tmp_path, monkeypatch):
    place = tmp_path / "no" / "x.png"
    assert f"{place}: expected a place to write the picture to" in fails("--plot", place)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "plot: expected matplotlib, found none; `pip install -e '.[plot]'`" in fails("--plot", tmp_path / "x.png")
    assert "/nowhere" in fails()

"""Replay of recorded rounds: the published rule's digits, bars of our own, causality, the file, the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from dsv4.cli_gate import gate
from dsv4.errors import ConfigError, InputError
from dsv4.gate import Costs, Fixed, GateSettings, Rule, make_rule
from dsv4.gate.calibration import HELD_OUT, PRIOR, prior_for
from dsv4.gate.records import RecordedRound, Recording, read_rounds, write_rounds
from dsv4.gate.replay import play, replay, vary

GOLDEN = Path(__file__).parent / "golden"
FILE = GOLDEN / "dspark_rounds_tp4.json"
MEASURED = read_rounds(FILE)
NANO = read_rounds(GOLDEN / "nano_rounds.json")
KINDS = ("prose", "math", "repeat", "code")


def rounded(report):
    return [round(report.played[kind].rate, 2) for kind in KINDS] + [round(report.round_weighted, 2)]


@pytest.mark.parametrize(
    "rule, accounting, expected",
    [
        ("bucket", "published", [3.05, 2.45, 5.76, 4.92, 3.62]),
        ("bucket", "honest", [2.97, 2.24, 5.76, 4.92, 3.46]),
        ("always", "honest", [2.88, 1.80, 5.76, 4.92, 3.14]),
        ("always", "published", [2.88, 1.80, 5.76, 4.92, 3.14]),
        ("fixed:0", "honest", [3.30, 3.30, 3.30, 3.30, 3.30]),
    ],
)
def test_published_digits(rule, accounting, expected):
    assert rounded(replay(MEASURED, rule, accounting)) == expected


def test_bars_of_the_default_rule():
    prose, math, repeat, code, overall = rounded(replay(MEASURED))
    assert prose >= 3.60 and math >= 2.90 and code >= 4.90 and repeat >= 5.60 and overall >= 4.05
    assert replay(MEASURED, accounting="published").round_weighted >= 4.1


def test_every_setting_halved_or_doubled():
    """None matters much: not the rule's own, and not the costs it starts from, as it measures them."""
    rows = vary(MEASURED, GateSettings())
    names = {name for name, _, _ in rows}
    assert names >= {"decay", "margin", "patience", "first_wait", "probe_share", "prior a", "prior b_precision"}
    assert names >= {"draft_ms", "verify_base_ms", "verify_slope_ms", "plain_ms"}
    assert len(rows) == 1 + 2 * (len(names) - 1)
    for name, value, report in rows:
        assert report.round_weighted >= 3.9, (name, value)
    assert rounded(rows[0][2]) == rounded(replay(MEASURED))


def test_no_prompt_is_scored_with_what_was_learned_from_it():
    assert {kind: prior_for(MEASURED.source, kind) for kind in KINDS} == HELD_OUT
    assert prior_for("elsewhere", "prose") == prior_for(MEASURED.source, "other") == PRIOR
    used = replay(MEASURED).played["math"]
    fresh = make_rule("calibrated", 5, prior=HELD_OUT["math"])
    assert used.lengths == play(fresh, MEASURED.prompts["math"], Costs()).lengths


class Seen(Rule):
    """Notes what it is told; drafts and verifies as listed, None: no draft."""

    def __init__(self, plan):
        super().__init__(5)
        self.plan, self.told, self.margins = list(plan), [], []

    def before_draft(self, margin=None):
        self.margins.append(margin)
        return self.plan[len(self.told)] is not None

    def choose(self, confidences):
        return self.plan[len(self.told)]

    def record(self, confidences, n, accepted):
        self.told.append((n, accepted))

    def record_skip(self):
        self.told.append(None)


def test_accounting():
    rounds = [
        RecordedRound((1.0,) * 5, 5, 3, margin=0.5), RecordedRound((1.0,) * 5, 5, 5), RecordedRound((1.0,) * 5, 5, 5),
        RecordedRound((1.0,) * 5, 2, 2), RecordedRound((), 0, 0),
    ]  # fmt: skip
    for accounting, wasted in (("honest", 499), ("published", 303)):
        rule = Seen([5, 0, None, 4, 5])
        found = play(rule, rounds, Costs(), accounting)
        assert found.lengths == [5, 0, 0, 2, 0] and found.undrafted == [2, 4]
        assert found.tokens == 4 + 1 + 1 + 3 + 1
        assert found.ms == 1041 + wasted + 303 + (496 + 2 * 109) + 303
        assert rule.told == [(5, 3), (0, 0), None, (2, 2), None]  # a skipped round tells nothing
        assert rule.margins == [0.5, None, None, None]
    with pytest.raises(InputError, match="accounting: expected one of honest, published; found 'kind'"):
        play(Fixed(1, 5), rounds, Costs(), "kind")


def test_round_weighted_and_total():
    report = replay(MEASURED, "always")
    seconds = {kind: 1 / report.played[kind].rate for kind in KINDS}
    counts = {kind: len(MEASURED.prompts[kind]) for kind in KINDS}
    assert report.round_weighted == pytest.approx(31 / sum(counts[k] * seconds[k] for k in KINDS))
    tokens = sum(1 + one.accept for rounds in MEASURED.prompts.values() for one in rounds)
    assert report.total == pytest.approx(1000 * tokens / (31 * 1041))


@given(cut=st.integers(0, 7), accept=st.integers(0, 5), shift=st.floats(-20, 20))
def test_causal(cut, accept, shift):
    """Rounds to come change no earlier choice."""

    def changed(rounds):
        later = [replace(one, accept=accept, conf=tuple(c + shift for c in one.conf)) for one in rounds[cut:]]
        return (*rounds[:cut], *later)

    other = replace(MEASURED, prompts={kind: changed(rounds) for kind, rounds in MEASURED.prompts.items()})
    for rule in ("calibrated", "bucket"):
        before, after = replay(MEASURED, rule), replay(other, rule)
        for kind in KINDS:
            # the confidences of round `cut` itself may change its length, not whether it is drafted
            assert before.played[kind].lengths[:cut] == after.played[kind].lengths[:cut]


def test_costs_are_charged_and_settings_believed():
    free = Costs(0.0, 303.0, 0.0, 303.0)
    assert replay(MEASURED, "always", costs=free).total == pytest.approx(1000 * replay_tokens() / (31 * 303))
    free = GateSettings(draft_ms=0.0, verify_base_ms=303.0, verify_slope_ms=0.0)
    assert all(n == 5 for one in replay(MEASURED, "bucket", settings=free).played.values() for n in one.lengths)
    assert replay(MEASURED, "always", settings=free).total == pytest.approx(1000 * replay_tokens() / (31 * 1041))
    floor = replay(MEASURED, settings=GateSettings(min_draft=2))
    assert all(n >= 2 for one in floor.played.values() for n in one.lengths)
    assert min(n for one in replay(MEASURED).played.values() for n in one.lengths) == 0


def replay_tokens():
    return sum(1 + one.accept for rounds in MEASURED.prompts.values() for one in rounds)


def test_rounds_of_another_model():
    """Mostly accepted: drafting pays throughout, and the gate must not lose much of it."""
    for kind, played in replay(NANO).played.items():
        better = max(replay(NANO, "always").played[kind].rate, 1000 / 303)
        assert played.rate >= 0.93 * better, kind


def test_file_round_trip(tmp_path):
    path = tmp_path / "rounds.json"
    write_rounds(path, MEASURED)
    assert read_rounds(path) == MEASURED
    assert json.loads(path.read_text())["prompts"] == json.loads(FILE.read_text())["prompts"]
    short = RecordedRound((0.5, -1.0, 2.0), 2, 1, margin=3.25, draft_ms=1.5, verify_ms=2.0, plain_ms=1.0)
    recording = Recording(5, {"ünï": (short, RecordedRound((), 0, 0))}, "here", "a note")
    write_rounds(path, recording)
    assert read_rounds(path) == recording
    with pytest.raises(InputError, match="rounds.json: expected finite numbers"):
        write_rounds(path, Recording(5, {"x": (RecordedRound((float("nan"),), 1, 1),)}))
    assert read_rounds(path) == recording  # the file that was there stays
    with pytest.raises(InputError, match="a place to write"):
        write_rounds(tmp_path / "absent" / "rounds.json", recording)


GOOD = {"accept": 1, "k": 2, "conf": [0.5, 1]}


@pytest.mark.parametrize(
    "content, says",
    [
        ("{", "expected JSON"), ("[" * 100_000, "expected JSON"), ("[]", "expected a JSON object"),
        ({"prompts": {"p": [GOOD]}}, "block_size: expected an int"),
        ({"block_size": 0, "prompts": {"p": [GOOD]}}, "block_size"), ({"block_size": 5}, "prompts: expected"),
        ({"block_size": 5, "prompts": {}}, "prompts: expected"),
        ({"block_size": 5, "prompts": {"p": []}}, "prompts: p: expected"),
        ({"block_size": 5, "prompts": {"p": {}}}, "prompts: p: expected"),
        *(
            ({"block_size": 5, "prompts": {"p": [GOOD, bad]}}, f"p: round 1: {says}")
            for bad, says in [
                (3, "expected an object"), ({**GOOD, "acept": 1}, "acept: unknown key"),
                ({**GOOD, "k": 3}, "k: expected 0 .. 2"),
                ({**GOOD, "accept": 3}, "accept: expected 0 .. k = 2; found 3"), ({**GOOD, "accept": True}, "accept"),
                ({**GOOD, "conf": [1] * 6}, "conf: expected at most 5"), ({**GOOD, "conf": ["1", 2]}, "conf"),
                ({**GOOD, "conf": [float("nan"), 2]}, "conf"), ({**GOOD, "conf": [10**400, 2]}, "conf"),
                ({**GOOD, "margin": -1}, "margin"), ({**GOOD, "plain_ms": "x"}, "plain_ms"),
                ({"k": 0, "accept": 0}, "conf"),
            ]
        ),
    ],
)  # fmt: skip
def test_malformed_files(tmp_path, content, says):
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError) as error:
        read_rounds(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and says in message and "\n" not in message
    with pytest.raises(InputError, match="No such file"):
        read_rounds(tmp_path / "none.json")


def run(*arguments):
    result = CliRunner().invoke(gate, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_command_replay(monkeypatch):
    record = json.loads(run("replay", FILE, "--json"))
    report = replay(MEASURED)
    assert record["per_prompt"] == {kind: report.played[kind].rate for kind in KINDS}
    assert (record["round_weighted"], record["total"]) == (report.round_weighted, report.total)
    assert record["lengths"] == {kind: report.played[kind].lengths for kind in KINDS}
    assert record["undrafted"]["prose"] == report.played["prose"].undrafted
    assert record["plain"] == 1000 / 303
    assert record["ratio_to_plain"] == {"round_weighted": report.round_weighted / record["plain"], "total": report.total / record["plain"]}
    published = json.loads(run("replay", FILE, "--rule", "bucket", "--accounting", "published", "--json"))
    assert round(published["round_weighted"], 2) == 3.62
    faster = json.loads(run("replay", FILE, "--rule", "always", "--costs", 19.6, 30, 10.9, 30.3, "--json"))
    assert faster["total"] == pytest.approx(10 * replay(MEASURED, "always").total) and faster["plain"] == 1000 / 30.3
    with pytest.raises(ConfigError, match="^plain_ms: expected"):
        run("replay", FILE, "--costs", 1, 1, 1, 0)
    table = run("replay", FILE, "--rule", "bucket")
    assert "2.97 tok/s   0.90 x plain   5 5 5 5 0 5 5" in table and "3.46 tok/s   1.05 x plain" in table
    assert table.startswith("prompt ") and "round by round" in table.splitlines()[0]
    assert table.splitlines()[-1].split() == ["plain", "3.30", "tok/s"]
    with pytest.raises(ConfigError, match="gate rule"):
        run("replay", FILE, "--rule", "best")
    with monkeypatch.context() as misspelt:
        misspelt.setenv("DEEPSEEK_DSPARK_GATE_DECAI", "1")
        with pytest.raises(ConfigError, match=r"^DEEPSEEK_DSPARK_GATE_DECAI: .*did you mean DEEPSEEK_DSPARK_GATE_DECAY\?$"):
            GateSettings.from_env()
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_DECAY", "x")
    with pytest.raises(ConfigError, match="^DEEPSEEK_DSPARK_GATE_DECAY: "):
        run("replay", FILE)


def test_command_vary_and_fit(tmp_path):
    rows = json.loads(run("vary", FILE, "--json"))
    assert rows[0]["setting"] == "(as set)" and rows[0]["round_weighted"] == replay(MEASURED).round_weighted
    assert "patience" in run("vary", FILE) and "plain_ms" in run("vary", FILE)
    fits = json.loads(run("fit", FILE, "--json"))
    assert fits["all"]["a"] == pytest.approx(PRIOR.a, abs=1e-4)
    assert fits["without math"]["b"] == pytest.approx(HELD_OUT["math"].b, abs=1e-4)
    assert "a = 1.0407  b = 0.2671" in run("fit", FILE)
    path = tmp_path / "one.json"
    write_rounds(path, Recording(5, {"only": MEASURED.prompts["prose"]}))
    assert list(json.loads(run("fit", path, "--json"))) == ["all"]  # without it there is nothing to fit

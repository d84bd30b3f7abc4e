"""Costs measured round by round: speed of the machine, noise, outliers, the time before a plain step, who is told."""

import math
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeEngine, FakeSession
from gate_drift import COSTS, MEASURED
from hypothesis import given, strategies as st
from test_gate import BLOCK, live, one_round

from dsv4.gate import Calibrated, Costs, GateSettings, MeasuredCosts, make_rule
from dsv4.gate.costs import line
from dsv4.gate.replay import play
from dsv4.scheduling.costs import BatchCosts
from dsv4.speculate import Speculator

NAMES = ("draft_ms", "verify_base_ms", "verify_slope_ms", "plain_ms")
MACHINES = [  # draft, base, slope, plain
    Costs(), Costs(19.6, 30.0, 10.9, 30.3), Costs(10.5, 4.0, 2.2, 3.8), Costs(0.4, 9.0, 0.1, 9.0),
    Costs(30.0, 25.0, 20.0, 20.0), Costs(392.0, 600.0, 55.0, 606.0),
]  # fmt: skip


def values(costs):
    return [getattr(costs, name) for name in NAMES]


def observe(measured, machine, n, noise=1.0):
    """A round that drafts, verifies n tokens and takes `noise` times its usual time."""
    measured.observe(machine.draft_ms * noise, n, machine.verify(n) * noise)


def test_costs():
    costs = Costs()
    assert (costs.cost(0), costs.cost(1), costs.cost(5), costs.wasted()) == (303, 605, 1041, 499)
    assert (costs.verify(0), costs.verify(1)) == (303, 409)
    assert Costs.of(GateSettings(draft_ms=1, verify_base_ms=2, verify_slope_ms=3, plain_ms=4)).cost(2) == 9


def test_measured_costs_start_as_given():
    assert values(MeasuredCosts()) == values(Costs())
    given = Costs.of(GateSettings(draft_ms=1, verify_base_ms=2, verify_slope_ms=3, plain_ms=4))
    assert values(MeasuredCosts(given)) == [1, 2, 3, 4]
    assert values(make_rule("calibrated", BLOCK, GateSettings(plain_ms=250)).costs) == [196, 300, 109, 250]


@pytest.mark.parametrize("speed", [1e-3, 0.5, 1, 40])
def test_one_round_tells_how_fast_the_machine_is(speed):
    machine, measured = Costs(*(speed * ms for ms in values(Costs()))), MeasuredCosts()
    observe(measured, machine, 5)
    assert values(measured) == pytest.approx(values(machine))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_costs_become_those_of_the_machine(machine, seed):
    """Samples that vary by 15%, draft lengths as they come: what a round costs is known within 10%."""
    draw, measured = random.Random(seed), MeasuredCosts()
    for _ in range(80):
        observe(measured, machine, draw.choice([0, 2, 5, 5]), draw.lognormvariate(0, 0.15))
    for n in range(BLOCK + 1):
        assert measured.verify(n) == pytest.approx(machine.verify(n), rel=0.1), n
    assert measured.draft_ms == pytest.approx(machine.draft_ms, rel=0.1)


def test_whole_blocks_and_plain_steps_tell_the_line():
    machine, measured = Costs(50.0, 200.0, 10.0, 200.0), MeasuredCosts()
    for n in [5, 5, 0, 5] * 5:
        observe(measured, machine, n)
    assert [measured.verify(n) for n in range(6)] == pytest.approx([machine.verify(n) for n in range(6)], rel=0.1)


@pytest.mark.parametrize("factor", [10.0, 100.0])
def test_one_slow_sample_changes_little(factor):
    for slow in (5, 3, 1, 0):
        measured = MeasuredCosts()
        for n in [5, 3, 1, 0] * 8:
            observe(measured, COSTS, n)
        observe(measured, COSTS, slow, factor)
        for n in range(BLOCK + 1):
            assert measured.verify(n) == pytest.approx(COSTS.verify(n), rel=0.2)
        assert measured.draft_ms == pytest.approx(COSTS.draft_ms, rel=0.1)


def test_a_slow_first_sample_is_soon_forgotten():
    measured = MeasuredCosts()
    measured.observe(3038.0, 5, 845.0)
    for _ in range(8):
        observe(measured, COSTS, 5)
    assert measured.draft_ms < 1.25 * COSTS.draft_ms


@pytest.mark.parametrize("factor", [0.2, 0.5, 3.0])
def test_a_machine_that_changes_is_followed(factor):
    measured = MeasuredCosts()
    for _ in range(100):
        observe(measured, COSTS, 5)
    for _ in range(60):
        observe(measured, COSTS, 5, factor)
    assert measured.draft_ms == pytest.approx(factor * COSTS.draft_ms, rel=0.15)
    assert measured.verify(5) == pytest.approx(factor * COSTS.verify(5), rel=0.15)


@pytest.mark.parametrize("plain", [1.0, 151.5, 606.0, 9999.0])
def test_plain_decoding_is_bounded_until_it_is_measured(plain):
    """A step of one row takes no longer than one of two rows, and at least half as long."""
    measured = MeasuredCosts(Costs(plain_ms=plain))
    observe(measured, COSTS, 5)
    assert measured.verify(1) / 2 <= measured.plain_ms <= measured.verify(1)
    observe(measured, COSTS, 0)
    assert measured.plain_ms == pytest.approx(303, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1e4), st.floats(0.01, 50)), min_size=1, max_size=8))
def test_line_is_least_squares_and_never_negative(points):
    points.append((points[0][0] + 1, 5.0, 1.0))
    n, ms, weight = (np.array(column, float) for column in zip(*points))
    base, slope = line(points)
    assert base >= 0 and slope >= 0
    expected_slope, expected_base = np.polyfit(n, ms, 1, w=np.sqrt(weight))
    if expected_slope > 1e-6 and expected_base > 1e-6:
        assert (base, slope) == pytest.approx((expected_base, expected_slope), rel=1e-5, abs=1e-6)
    best = sum(weight * (base + slope * n - ms) ** 2)
    for other in ((base + 1, slope), (max(base - 1, 0), slope), (base, slope + 1), (base, max(slope - 1, 0))):
        assert best <= sum(weight * (other[0] + other[1] * n - ms) ** 2) * (1 + 1e-9) + 1e-6


@given(st.lists(st.tuples(st.booleans(), st.integers(0, BLOCK), st.floats(0, 1e4), st.floats(1e-3, 1e4)), max_size=30))
def test_costs_stay_usable(rounds):
    measured = MeasuredCosts()
    for drafted, n, draft_ms, verify_ms in rounds:
        measured.observe(draft_ms if drafted else None, n if drafted else 0, verify_ms)
        assert measured.plain_ms > 0 and all(measured.cost(n) > 0 for n in range(BLOCK + 1))
        assert measured.draft_ms >= 0 and measured.verify_base_ms >= 0 and measured.verify_slope_ms >= 0


@pytest.mark.parametrize("clock", [[0.0], [0.0, 15.6], [0.0, 3.0, 1e303], [1e303], [-1e12, 3.0]])
@pytest.mark.parametrize("given", [Costs(), Costs(draft_ms=0.0), Costs(1e-6, 1e-6, 1e-6, 1e-6)])
def test_clocks_that_stand_or_jump(clock, given):
    """Of one sequence and of a batch: costs stay numbers that can be divided by, and drafting stays a choice."""
    alone, batch = MeasuredCosts(given), BatchCosts(given)
    gates = [make_rule("calibrated", BLOCK, costs=costs) for costs in (alone, batch)]
    for step in range(200):
        ms = clock[step % len(clock)]
        batch.share(2)
        for gate in gates:
            draft = gate.before_draft(2.0)
            n = gate.choose([2.0] * BLOCK) if draft else 0
            gate.observe(ms if draft else None, n, ms)
            gate.record([2.0] * BLOCK, n, 0) if draft else gate.record_skip()
        if draft:
            batch.drafted(2, 2, ms, step % 7 == 0)
        batch.forwarded(2 + 2 * n, ms, not n, step % 5 == 0)
        for costs in (alone, batch):
            assert all(math.isfinite(value) for value in values(costs)) and costs.plain_ms > 0.0 <= costs.draft_ms


def test_sequences_share_what_an_engine_learned():
    costs = MeasuredCosts()
    one, two = (make_rule("calibrated", BLOCK, costs=costs) for _ in range(2))
    machine = Costs(10.0, 10.0, 1.0, 10.0)
    for _ in range(20):
        one_round(one, [2.0] * BLOCK, 0, costs=machine)
    assert two.costs is costs and costs.plain_ms == pytest.approx(10, rel=0.1)
    assert make_rule("calibrated", BLOCK).costs.plain_ms == 303


@pytest.mark.parametrize("name", ["bucket", "always", "fixed:3"])
def test_other_rules_keep_the_given_costs(name):
    rule = live(make_rule(name, BLOCK, costs=MeasuredCosts()), [([2.0] * BLOCK, 2)] * 5)
    rule.observe(1.0, 5, 1.0)
    assert values(rule.costs) == values(Costs())


def test_a_better_known_cost_corrects_the_balance():
    """Drafting seemed to lose while plain decoding was taken for twice as fast as it is."""
    rule = Calibrated(BLOCK, costs=MeasuredCosts(Costs(plain_ms=150.0)))
    one_round(rule, [2.0] * BLOCK, 3)  # 4 tokens in 1041 ms: more than plain decoding's 3.4
    assert rule.balance < 0
    assert one_round(rule, [2.0] * BLOCK, 3) is None  # so plain decoding is measured
    assert rule.balance > 0 and one_round(rule, [2.0] * BLOCK, 3) is not None


def test_plain_decoding_is_measured_now_and_then():
    """Where all is accepted, once after 16 rounds, then every 64; soon after the first round that loses."""
    rule = make_rule("calibrated", BLOCK)
    plain = [i for i in range(300) if one_round(rule, [9.0] * BLOCK, 5) is None]
    assert plain == [16, 81, 146, 211, 276]
    rule = make_rule("calibrated", BLOCK, GateSettings(min_draft=1))
    assert all(one_round(rule, [9.0] * BLOCK, 5) for _ in range(100))  # a floor is a floor
    rule = make_rule("calibrated", BLOCK)
    live(rule, [([9.0] * BLOCK, 5)] * 3 + [([9.0] * BLOCK, 1)])
    assert one_round(rule, [9.0] * BLOCK, 5) is None


@pytest.mark.parametrize("machine", MACHINES)
def test_the_gate_pays_on_machines_it_was_never_told_of(machine):
    """Mixed text, costs that begin as another machine's: nearly what a gate earns that knows them."""
    draw = random.Random(7)
    pool = [one for rounds in MEASURED.values() for one in rounds]
    rounds = [draw.choice(pool) for _ in range(400)]
    learned = play(Calibrated(BLOCK), rounds, machine).rate
    told = play(Calibrated(BLOCK, costs=machine), rounds, machine).rate
    assert learned > 0.95 * told and learned > 0.93 * 1000 / machine.plain_ms


def test_cheap():
    """10 µs a round; ten times that here, as machines and their load differ."""
    measured, start = MeasuredCosts(), time.process_time()
    for i in range(2000):
        measured.observe(196.0, i % 6, 300.0)
    assert (time.process_time() - start) / 2000 < 100e-6


class Drafting(FakeSession):
    """Drafts five tokens that are all wrong."""

    def try_draft(self, token, choose):
        ids = np.array([self.wrong] * BLOCK)
        return SimpleNamespace(ids=ids, confidence=np.full(BLOCK, 2.0, np.float32))

    wrong = 639


class Told:
    """A rule that drafts when `drafting` says so, asks for n tokens and notes what it is told."""

    def __init__(self, n, drafting=True):
        self.n, self.drafting, self.told = n, drafting, []

    skipped_by_margin = False
    reads_margin = True

    def before_draft(self, margin=None):
        return self.drafting

    def choose(self, confidences):
        return self.n

    def observe(self, draft_ms, n, verify_ms):
        assert verify_ms > 0 and (draft_ms is None or draft_ms > 0)
        self.told.append(("observe", draft_ms is not None, n))

    def record(self, confidences, n, accepted):
        self.told.append(("record", len(confidences), n, accepted))

    def record_skip(self):
        self.told.append(("skip",))


@pytest.mark.parametrize(
    "n, drafting, room, told",
    [
        (3, True, 9, [("observe", True, 3), ("record", BLOCK, 3, 0)]),
        (5, True, 3, [("observe", True, 2), ("record", BLOCK, 2, 0)]),  # the room limits the length
        (0, True, 9, [("observe", True, 0), ("record", BLOCK, 0, 0)]),  # drafted in vain
        (5, True, 1, [("observe", False, 0), ("skip",)]),  # no room to draft for
        (5, False, 9, [("observe", False, 0), ("skip",)]),
    ],
)
def test_a_round_tells_its_rule(n, drafting, room, told):
    session, rule = Drafting(FakeEngine()), Told(n, drafting)
    logits = session.prefill([5, 6, 7])
    Speculator(rule).step(session, 8, logits, room)
    assert rule.told == told

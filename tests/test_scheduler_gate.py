"""The gate of a batch on simulated machines: a clock that adds up what drafts and forwards cost there, no time is taken."""

import random
from functools import cache

import pytest

from dsv4.gate import Costs, Evidence, make_rule
from dsv4.scheduling.costs import BatchCosts

BLOCK = 5
MACHINES = {  # ms: base and slope of a forward over its rows, of a draft over its sequences
    "nano": ((0.55, 0.075), (0.05, 0.275)),
    "rows dear": ((0.3, 0.12), (0.1, 0.3)),
    "rows cheap": ((20.0, 0.3), (4.0, 0.2)),
    "draft dear": ((1.0, 0.05), (0.5, 1.0)),
    "draft base": ((5.0, 1.0), (5.0, 0.1)),
    "nano now": ((0.4, 0.027), (0.16, 0.105)),
}
COLD = (1.18, 1.13, 1.04, 1.02)  # times what later ones take: plain forwards after a draft, as measured on nano
STUMBLES = range(4)  # steps of every hundred
KINDS = {"hard": (0.3,), "good": (0.8,), "easy": (0.95,), "mixed": (0.95, 0.3, 0.8, 0.6)}  # chances of acceptance


class Text:
    """What one sequence drafts: every token right with the same chance; the confidence is a hint."""

    def __init__(self, chance, seed):
        self.chance, self.draw = chance, random.Random(seed)

    def block(self):
        """(confidences, how many are right from the first on)"""
        right = [self.draw.random() < self.chance for _ in range(BLOCK)]
        return [self.draw.gauss(2.5 if one else 0.5, 1.0) for one in right], (right + [False]).index(False)


def serve(machine, chances, rule, steps=1000, warm_up=200, noise=0.1, stumble=1.0):
    """Sequences that decode for ever, as the scheduler asks their gates → (tokens per ms after the warm-up, drafted rounds
    per round). stumble: how many times as long all takes in STUMBLES, which count for nothing."""
    (base, slope), (draft_base, draft_slope) = machine
    costs, clock = BatchCosts(Costs()), random.Random(1)
    gates = [make_rule(rule, BLOCK, costs=costs) for _ in chances]
    texts = [Text(chance, seed) for seed, chance in enumerate(chances)]
    wants = [gate.before_draft() for gate in gates]
    tokens = ms = drafted = plain = 0
    for step in range(warm_up + steps):
        costs.share(len(gates))
        asking, took, found = sum(wants), 0.0, []
        stumbles = stumble if step % 100 in STUMBLES else 1.0
        if asking:
            took = (draft_base + draft_slope * asking) * stumbles * clock.lognormvariate(0, noise)
            costs.drafted(asking, len(gates), took, False)
        for gate, text, want in zip(gates, texts, wants):
            confidences, right = text.block()
            n = gate.choose(confidences) if want else 0
            found.append((confidences, n, min(right, n)))
        rows = len(gates) + sum(n for _, n, _ in found)
        plain = 0 if asking else plain + 1
        cold = COLD[plain - 1] if 1 <= plain <= len(COLD) else 1.0
        forward = (base + slope * rows) * cold * stumbles * clock.lognormvariate(0, noise)
        for i, (gate, one) in enumerate(zip(gates, found)):
            gate.record(*one) if wants[i] else gate.record_skip()
            wants[i] = gate.before_draft()
        costs.forwarded(rows, forward, rows == len(gates), False)
        if step >= warm_up and (stumble == 1.0 or stumbles == 1.0):
            tokens, ms = tokens + len(gates) + sum(one[2] for one in found), ms + took + forward
            drafted += asking
    return tokens / ms, drafted / (steps * len(gates))


@cache
def rates(machine, kind, count):
    """tok/ms of gate, always and off, and how often the gate drafts."""
    chances = [KINDS[kind][i % len(KINDS[kind])] for i in range(count)]
    gated, drafting = serve(MACHINES[machine], chances, "calibrated")
    return gated, serve(MACHINES[machine], chances, "always")[0], serve(MACHINES[machine], chances, "fixed:0")[0], drafting


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_speculation_never_loses(machine, kind, count):
    gated, always, off, _ = rates(machine, kind, count)
    assert gated >= 0.96 * max(always, off)


def test_what_not_losing_costs():
    found = [rates(machine, kind, count) for machine in MACHINES for kind in KINDS for count in (1, 2, 4, 8, 16)]
    assert sum(gated / max(always, off) for gated, always, off, _ in found) / len(found) > 0.99


@pytest.mark.parametrize("stumble", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_a_machine_that_stumbles_ends_nothing_that_pays(count, stumble):
    rules = ("calibrated", "always", "fixed:0")
    gated, always, off = (serve(MACHINES["nano now"], [0.95] * count, rule, stumble=stumble)[0] for rule in rules)
    assert gated >= 0.975 * max(always, off) and (always > off) == (count < 16)


def test_each_machine_and_number_has_its_own_answer():
    """What the bars above compare: drafting must be seen to pay here, and not to pay there."""
    pays = {(machine, n): rates(machine, "good", n)[3] for machine in MACHINES for n in (1, 16)}
    assert pays["nano", 1] > 0.9 and pays["rows cheap", 16] > 0.9
    assert pays["nano", 16] < 0.05 and pays["rows dear", 16] < 0.05 and pays["draft dear", 16] < 0.05


def test_those_who_gain_draft_beside_those_who_lose():
    gated, always, off, drafting = rates("nano", "mixed", 4)
    assert gated > 1.05 * max(always, off) and 0.1 < drafting < 0.5


def test_drafting_comes_back_where_the_text_changes():
    """Tries are seldom where they lose much, and never end."""
    costs = BatchCosts(Costs())
    gate, tried = make_rule("calibrated", BLOCK, costs=costs), []
    for step in range(2000):
        costs.share(1)
        want = gate.before_draft()
        if want:
            costs.drafted(1, 1, 1.0, False)
            gate.record([2.0] * BLOCK, BLOCK, 0 if step < 1000 else BLOCK)
        else:
            gate.record_skip()
        costs.forwarded(6 if want else 1, 1.6 if want else 1.1, not want, False)
        tried.append(want)
    assert 2 <= sum(tried[100:1000]) < 20
    assert sum(tried[1800:]) > 150


def test_all_try_in_the_same_forward():
    costs, own = BatchCosts(Costs()), [Evidence() for _ in range(4)]
    costs.drafted(4, 4, 4.0, False)
    costs.forwarded(24, 6.0, False, False)
    for one in own:
        for _ in range(20):
            one.add(0.95, BLOCK, 0)
            costs.learn(BLOCK, 0)
    asked = []
    for _ in range(2000):
        costs.share(4)
        asked.append(sum(costs.pays(one) for one in own))
        costs.forwarded(4, 4.0, True, False)
    assert set(asked) == {0, 4} and asked.count(4) < 100

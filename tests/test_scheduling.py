"""How a step's rows are divided, and what a batch learns of its costs. No engine is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.gate import Costs, Evidence
from dsv4.scheduling.budget import divide, fill
from dsv4.scheduling.costs import BatchCosts, Line


# ---------------------------------------------------------------------- budget
@given(st.lists(st.integers(1, 6), max_size=9), st.lists(st.integers(1, 90), max_size=9), st.integers(7, 64))
def test_the_budget_is_kept_and_nobody_starves(blocks, prompts, budget):
    count, shares = divide(blocks, prompts, budget, 32)
    used = sum(blocks[:count]) + sum(shares)
    assert used <= budget and len(shares) == len(prompts)
    assert all(0 <= share <= min(left, 32) for share, left in zip(shares, prompts))
    assert count >= min(1, len(blocks)) and sum(shares) >= min(1, len(prompts))
    if count < len(blocks):
        assert used + blocks[count] > budget - max(budget // 4, 1)
    elif sum(shares) < sum(min(left, 32) for left in prompts):
        assert used == budget


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 60))
def test_rows_are_shared_evenly(wanted, rows):
    given_ = fill(wanted, rows)
    assert sum(given_) == min(rows, sum(wanted)) and all(g <= w for g, w in zip(given_, wanted))
    short = [g for g, w in zip(given_, wanted) if g < w]
    assert not short or max(given_) - min(short) <= 1


# ---------------------------------------------------------------------- costs
def test_costs_are_shares_of_the_batch():
    costs = BatchCosts(Costs())
    for _ in range(40):
        costs.learn(5, 3)
        for rows in (1, 6, 8, 48):
            costs.forwarded(rows, 0.5 + 0.1 * rows, False, False)
        costs.forwarded(600, 1.0, False, True)  # rows of prompts cost less
    costs.forwarded(6, 50.0, False, False)  # something else took the machine
    for n in (1, 8):
        for _ in range(40):
            costs.drafted(n, n, 0.4 + 0.2 * n, False)
        costs.share(n)
        assert costs.plain_ms == pytest.approx(0.5 / n + 0.1, rel=0.1)
        assert costs.verify(5) == pytest.approx(0.5 / n + 0.6, rel=0.1)
        assert costs.draft_ms == pytest.approx(0.4 / n + 0.2, rel=0.1)
    for _ in range(40):
        costs.forwarded(8, 1.6, False, False)  # steps of a machine are not a line
    costs.share(8)
    assert costs.plain_ms == pytest.approx(0.2, rel=0.05) and costs.verify(5) == pytest.approx(5.3 / 8, rel=0.1)


def test_a_line_starts_as_given_and_follows():
    line = Line(200.0, 100.0, (1.0, 6.0))
    assert line(3) == 500
    line.add(1, 3.0)  # a hundred times as fast
    assert line(1) == pytest.approx(3.0) and line(6) == pytest.approx(8.0)
    line.add(1, 900.0)
    for _ in range(200):
        line.add(1, 2.0), line.add(10, 2.9)
    assert line.base == pytest.approx(1.9, rel=0.05) and line.slope == pytest.approx(0.1, rel=0.1)
    flat = Line(1.0, 1.0, (1.0, 6.0))
    for _ in range(100):
        flat.add(1, 2.0), flat.add(10, 1.0)
    assert flat.slope >= 0.0 and flat.base >= 0.0


def test_the_first_plain_steps_say_little():
    """They are slower than those after them: two do not count."""
    costs = BatchCosts(Costs())
    for _ in range(20):
        costs.forwarded(48, 6.0, False, False)
        for ms in (1.9, 1.6, 1.3):
            costs.forwarded(8, ms, True, False)
    costs.share(8)
    assert 8 * costs.plain_ms == pytest.approx(1.3, rel=0.02)


# ---------------------------------------------------------------------- what a draft takes
def test_drafts_with_prompts_count_until_there_is_another():
    costs = BatchCosts(Costs())
    costs.forwarded(8, 0.8, True, False)
    for _ in range(9):
        costs.learn(5, 0)  # nothing that they bring would pay
    costs.drafted(8, 8, 4.0, True)
    costs.share(8)
    assert costs.draft_ms == pytest.approx(0.5) and costs.pays(Evidence())  # not known well enough to give up
    costs.drafted(8, 8, 1.0, False)
    costs.drafted(8, 8, 4.0, True)
    costs.share(8)
    assert costs.draft_ms == pytest.approx(0.125) and not costs.pays(Evidence())


def test_short_answers_alone_show_what_drafts_take():
    """Each drafts once, right after its prompt."""
    costs = BatchCosts(Costs())
    costs.forwarded(8, 0.8, True, False)
    for i in range(BatchCosts.ROUGH):
        assert costs.pays(Evidence())
        costs.learn(5, 0), costs.learn(5, 0)
        costs.drafted(8, 8, 4.0, True)
        costs.share(8)
    assert not costs.pays(Evidence())
    for _ in range(200):
        costs.drafted(8, 8, 2.0, True)
    costs.share(8)
    assert costs.draft_ms == pytest.approx(0.25, rel=0.01)


def test_a_draft_is_shared_as_the_last_one_was_by_those_who_could():
    costs = BatchCosts(Costs())
    for n in (1, 2, 4, 8):
        for _ in range(30):
            costs.drafted(n, n, 1.0 + 0.1 * n, False)
    for drafting, decoding, expected in ((4, 4, 1.8 / 8), (2, 4, 1.4 / 4), (1, 8, 1.1)):  # others read their prompts
        costs.drafted(drafting, decoding, 1.0 + 0.1 * drafting, False)
        costs.share(8)
        assert costs.draft_ms == pytest.approx(expected, rel=0.02)
    costs.drafted(8, 8, 1.8, False)
    while not costs.plain_is_due(False):
        costs.forwarded(48, 2.0, False, False)
    costs.drafted(2, 8, 1.2, False)  # the others knew already that all are to decode plainly
    costs.share(8)
    assert costs.draft_ms == pytest.approx(1.8 / 8, rel=0.02)


def test_a_few_slow_samples_do_not_count_and_many_do():
    line = Line(1.0, 1.0, (1.0, 6.0))
    for _ in range(20):
        line.add(8, 2.0)
    for _ in range(100):
        for _ in range(Line.STUMBLE):
            line.add(8, 9.0)
        line.add(8, 2.0)
    assert line.near(8) == pytest.approx(2.0, rel=0.01)
    for _ in range(100):
        line.add(8, 9.0)
    assert line.near(8) == pytest.approx(9.0, rel=0.05)


def test_what_becomes_slow_is_seen_between_samples_that_do_not():
    line = Line(1.0, 0.1, (1.0, 6.0))
    for _ in range(60):
        line.add(1, 1.0), line.add(8, 2.0)
    for _ in range(100):
        line.add(8, 7.0), line.add(1, 1.0)
    assert line.near(8) == pytest.approx(7.0, rel=0.1) and line.near(1) == pytest.approx(1.0, rel=0.1)

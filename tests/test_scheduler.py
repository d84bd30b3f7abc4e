"""Sequences side by side: whatever runs beside a request, its answer is the one it gets alone, bit for bit."""

import dataclasses
import gc
import threading
import time

import numpy as np
import pytest
from compare import same_bits, same_state, state_of
from rank_threads import crew_of

from dsv4 import Engine, SamplingParams
from dsv4.dspark import Ask
from dsv4.errors import CapacityError, ConfigError, Dsv4Error, InputError, StateError
from dsv4.gate import Costs
from dsv4.generate import Answer, complete, stream
from dsv4.sampling import greedy
from dsv4.scheduler import Request, Scheduler
from dsv4.scheduling.costs import BatchCosts
from dsv4.session import draft_all, forward_all, prime_all

KINDS = ("repeat", "code", "math", "prose")
SETTINGS = {"threads": 2, "chunk": 24, "max_sessions": 6, "max_context": 512}
WAIT = 60  # seconds after which a test that hangs fails


@pytest.fixture
def nano(engine):
    """An engine of which every slot is free, before and after."""
    found = engine("nano", **SETTINGS)
    assert found.pool.free_slots == 6
    yield found
    assert found.pool.free_slots == 6


@pytest.fixture(scope="module")
def prompts(prompts):
    """Three of every kind in turn."""
    return [prompts[kind][i] for i in range(3) for kind in KINDS]


@pytest.fixture
def seen(monkeypatch):
    """{prompt and seed: the logits each of its tokens was chosen from}, of every request that runs."""
    rows, push = {}, Answer.push

    def keep(self, tokens, logits, found):
        steps = push(self, tokens, logits, found)
        rows.setdefault(self.key, []).extend(np.array(row) for row in logits[: len(steps)])
        return steps

    def init(self, engine, prompt, params, *rest):
        self.key = (tuple(prompt), params)
        make(self, engine, prompt, params, *rest)

    make = Answer.__init__
    monkeypatch.setattr(Answer, "push", keep)
    monkeypatch.setattr(Answer, "__init__", init)
    return rows


def mixed(prompts) -> list[Request]:
    """Greedy and sampled, short and long, plain, always and gated, with stops and limits."""
    ways = [
        (SamplingParams(temperature=0, seed=0, max_tokens=30), "gate"),
        (SamplingParams(temperature=0, seed=0, max_tokens=25, ignore_eos=True, logprobs=2), "always"),
        (SamplingParams(temperature=1.0, seed=3, max_tokens=24), "always"),
        (SamplingParams(temperature=0, seed=0, max_tokens=40, stop=(" the", "9")), "fixed:3"),
        (SamplingParams(temperature=1.3, top_p=0.9, seed=8, max_tokens=20, ignore_eos=True), "off"),
        (SamplingParams(temperature=0, seed=0, max_tokens=1), "gate"),
        (SamplingParams(temperature=0.7, seed=1, max_tokens=35), "calibrated"),
    ]
    requests = [Request(prompt, *ways[i]) for i, prompt in enumerate(prompts[:7])]
    long = (prompts[3] + prompts[1]) * 3
    return [*requests, Request(long, *ways[0]), Request(long[:100], *ways[2]), Request(prompts[0][:1], *ways[1])]


def words(found) -> dict:
    """A completion without times and without what was drafted."""
    return {k: v for k, v in dataclasses.asdict(found).items() if k not in ("timings", "speculation")}


def alone(engine, request):
    return complete(engine, request.tokens, request.sampling, spec=request.spec)


def same_rows(found, expected):
    assert found.keys() == expected.keys()
    for key in expected:
        same_bits(np.stack(found[key]), np.stack(expected[key]), key[1])


# ---------------------------------------------------------------------- bits
@pytest.mark.parametrize("budget, running", [(None, None), (7, 3), (96, 6)])
def test_answers_are_those_of_single_runs(nano, prompts, seen, budget, running):
    requests = mixed(prompts)
    expected = [alone(nano, request) for request in requests]
    rows = dict(seen)
    seen.clear()
    with Scheduler(nano, token_budget=budget, max_running=running) as scheduler:
        tickets = [scheduler.submit(request) for request in requests]
        found = [ticket.result(WAIT) for ticket in tickets]
        stats = scheduler.stats()
    assert [words(one) for one in found] == [words(one) for one in expected]
    same_rows(seen, rows)
    assert stats["max_rows"] <= (budget or 24) and stats["finished"] == stats["requests"] == len(requests)
    assert stats["rows"] / stats["steps"] > 3, "hardly anything ran side by side"
    assert stats["generated_tokens"] == sum(len(one.tokens) for one in expected)
    assert stats["prompt_tokens"] == sum(len(request.tokens) for request in requests)
    for name in ("rounds", "drafted", "accepted", "skipped_rounds"):
        assert stats[name] == sum(one.speculation[name] for one in found), name


@pytest.mark.filterwarnings("ignore:speculation")
def test_cancelled_and_failing_neighbours_change_nothing(nano, prompts, seen, monkeypatch):
    from dsv4 import sampling

    sample = sampling.sample

    def refuse(logits, params, position):
        if params.seed == 666 and position > len(prompts[1]) + 9:
            raise Dsv4Error("no token")
        return sample(logits, params, position)

    monkeypatch.setattr(sampling, "sample", refuse)
    requests = mixed(prompts)[:8]
    expected = [alone(nano, request) for request in requests]
    rows = dict(seen)
    seen.clear()
    with Scheduler(nano) as scheduler:
        bad = [
            scheduler.submit(Request(prompts[1], SamplingParams(seed=666, max_tokens=40, temperature=t), spec))
            for t, spec in ((1, "always"), (1, "off"))
        ]
        gone = [scheduler.submit(Request(prompt, SamplingParams(temperature=0, max_tokens=400))) for prompt in prompts[8:11]]
        tickets = [scheduler.submit(request) for request in requests]
        for n, ticket in enumerate(gone):
            pieces = iter(ticket)
            for _ in range(3 * n):
                next(pieces)
            ticket.cancel()
            ticket.cancel()
            left = sum(1 for _ in pieces)
            found = ticket.result(WAIT)
            assert found.finish_reason == "cancelled" and len(found.tokens) == 3 * n + left < 400
        for ticket in bad:
            with pytest.raises(Dsv4Error, match="no token"):
                list(ticket)
            with pytest.raises(Dsv4Error, match="no token"):
                ticket.result(WAIT)
        found = [ticket.result(WAIT) for ticket in tickets]
        stats = scheduler.stats()
    assert [words(one) for one in found] == [words(one) for one in expected]
    same_rows({key: seen[key] for key in rows}, rows)
    assert (stats["failed"], stats["cancelled"], stats["finished"]) == (2, 3, len(requests))


def test_a_draft_of_broken_logits_fails_by_itself(nano):
    rng, size = np.random.default_rng(0), nano.config.dspark.block_size
    y = rng.standard_normal((2 * size, nano.config.hidden_size), np.float32)
    logits = rng.standard_normal((2 * size, nano.config.vocab_size), np.float32)
    asks = [Ask(0, 5, 9, greedy), Ask(1, 5, 9, greedy)]
    (alone,) = nano.draft.chain(y[::2].copy(), logits[::2].copy(), asks[:1])  # of every place the first sequence's rows
    logits[2 * 2 + 1, 7] = np.nan
    whole, broken = nano.draft.chain(y, logits, asks)
    same_bits(whole.ids, alone.ids)
    assert isinstance(broken, Dsv4Error) and "token 7 " in str(broken)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks(checkpoint_dir, size):
    settings = {"threads": 1, "chunk": 16, "max_sessions": 3, "max_context": 128}
    directory = checkpoint_dir("tiny-tp")
    requests = [
        Request([(7 * i * n + i) % 128 for n in range(5 + 9 * i)], SamplingParams(temperature=i % 2, seed=i, max_tokens=12), spec)
        for i, spec in enumerate(("always", "gate", "off", "always", "fixed:2"), 1)
    ]
    with crew_of(directory, 1, **settings) as engine:
        expected = [alone(engine, request) for request in requests]
    with crew_of(directory, size, **settings) as engine:
        with Scheduler(engine, prefix_bytes=1 << 20) as scheduler:
            for _ in range(2):  # the second time from kept states
                tickets = [scheduler.submit(request) for request in requests]
                assert [words(t.result(WAIT)) for t in tickets] == [words(one) for one in expected]
            assert scheduler.stats()["prefix_hits"] >= 4
        for _ in range(5):
            engine.session()  # dropped: its slot is given back
            gc.collect()
        assert words(alone(engine, requests[0])) == words(expected[0])


def test_drafts_and_forwards_of_several_sessions_are_those_of_each(nano, prompts):
    sessions, twins = [], []
    for i, prompt in enumerate(prompts[:3]):
        sessions.append(nano.session())
        sessions[-1].prefill(prompt)
        if i == 1:
            sessions[-1].draft(5)  # primed already
        twins.append(sessions[-1].fork())
    tokens = [5, 9, 77]

    def choose(logits, position):
        return (int(logits.argmax()) + position) % 640

    for found, twin, token in zip(draft_all([(s, t, choose) for s, t in zip(sessions, tokens)], logits=True), twins, tokens):
        for one, other in zip(found, twin.draft(token, choose)):
            same_bits(one, other)
    assert all(session.unprimed().start == session.position for session in sessions)
    parts = [(s, [t, 3, 4][: i + 1], ("all", "last", "none")[i]) for i, (s, t) in enumerate(zip(sessions, tokens))]
    for found, twin, (session, ids, wanted) in zip(forward_all(parts), twins, parts):
        expected = twin.forward(ids, wanted)
        same_bits(found.logits, expected.logits)
        same_bits(found.main_hidden, expected.main_hidden)
        assert session.tokens == twin.tokens and (session.logits is None) == (twin.logits is None)
    prime_all(sessions)
    for session, twin in zip(sessions, twins):
        same_state(state_of(session), state_of(twin))
        session.close(), twin.close()


# ---------------------------------------------------------------------- turns
def watch(engine, monkeypatch, hold_at=None):
    """(the rows of every step by slot, an event that lets the step numbered hold_at and later ones run)."""
    steps, go, forward = [], threading.Event(), engine.forward

    def note(rows):
        if len(steps) == hold_at:
            assert go.wait(WAIT)
        slots, counts = np.unique(rows.slots, return_counts=True)
        steps.append(dict(zip(slots.tolist(), counts.tolist())))
        return forward(rows)

    monkeypatch.setattr(engine, "forward", note)
    return steps, go


def test_prompts_run_beside_decoding_and_within_the_budget(nano, prompts, monkeypatch):
    steps, go = watch(nano, monkeypatch, hold_at=8)
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with Scheduler(nano, token_budget=10, spec="off") as scheduler:
        first = scheduler.submit(Request(prompts[0][:20], plain))
        next(iter(first))
        others = [scheduler.submit(Request(tokens, plain)) for tokens in ((prompts[1] * 9)[:100], prompts[2][:4])]
        go.set()
        for ticket in (first, *others):
            ticket.result(WAIT)
    (slot,) = steps[0]
    beside = [step for step in steps if slot in step and len(step) > 1]
    assert all(sum(step.values()) <= 10 for step in steps) and all(step[slot] == 1 for step in beside)
    assert len(beside) > 15, "the first one waited for the prompts, or they for it"
    assert 4 in beside[0].values() and 8 in beside[5].values(), "what was left was not shared evenly"


def test_blocks_that_do_not_fit_take_turns(nano, prompts, monkeypatch):
    """Between two blocks of one sequence everybody else who decodes has had one."""
    served, ready, forward = [], {}, nano.forward

    def note(rows):
        served.append({int(slot) for slot, position in zip(rows.slots, rows.positions) if position >= 9})
        ready.update({int(slot): len(served) - 1 for slot, position in zip(rows.slots, rows.positions) if position == 8})
        return forward(rows)

    monkeypatch.setattr(nano, "forward", note)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with Scheduler(nano, token_budget=7, spec="always") as scheduler:
        for ticket in [scheduler.submit(Request(prompt[:9], params)) for prompt in prompts[:4]]:
            ticket.result(WAIT)
    turns = {slot: [i for i, step in enumerate(served) if slot in step] for slot in set().union(*served)}
    assert len(turns) == 4 and min(map(len, turns.values())) > 5
    for slot, mine in turns.items():
        for other, theirs in turns.items():
            for before, after in zip(mine, mine[1:]):
                if ready[other] < before and after < theirs[-1] and other != slot:
                    assert any(before < turn <= after for turn in theirs), (slot, other, before, after)


def test_all_decode_plainly_now_and_then(nano, prompts, monkeypatch):
    """Where all speculate nobody would learn what plain decoding takes."""
    steps, _ = watch(nano, monkeypatch)
    forwarded, drafted = BatchCosts.forwarded, BatchCosts.drafted  # a machine on which drafting always pays
    kinds = []

    def steady(self, rows, ms, plain, prompts):
        kinds.append(plain and not prompts)
        forwarded(self, rows, 1 + rows / 100, plain, prompts)

    monkeypatch.setattr(BatchCosts, "forwarded", steady)
    monkeypatch.setattr(BatchCosts, "drafted", lambda self, n, of, ms, prompts: drafted(self, n, of, n / 100, prompts))
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with Scheduler(nano, token_budget=96) as scheduler:
        for ticket in [scheduler.submit(Request(prompts[1], params)) for _ in range(3)]:
            ticket.result(WAIT)
    plain = [i for i, step in enumerate(steps) if list(step.values()) == [1, 1, 1]]
    assert [i for i, one in enumerate(kinds[1:]) if one and len(steps[i]) == 3] == plain  # the first is told twice
    assert plain and BatchCosts.FIRST <= plain[0] < 30
    costs, due = BatchCosts(Costs()), []
    for _ in range(700):
        due.append(costs.plain_is_due(True))
        costs.forwarded(3 if due[-1] else 18, 5.0, due[-1], False)
    runs = "".join("p" if one else "." for one in due).split("p" * BatchCosts.IN_A_ROW)
    assert [len(run) for run in runs[:-1]] == [4, 8, 16, 32, 64, 128, 128, 128, 128]


def test_costs_are_told_who_could_draft_and_who_had_just_read_a_prompt(nano, prompts, monkeypatch):
    told = []
    monkeypatch.setattr(BatchCosts, "drafted", lambda self, n, of, ms, prompts: told.append((n, of, prompts)))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (300, 30)]
    with Scheduler(nano, token_budget=24, spec="always") as scheduler:
        first = scheduler.submit(Request(prompts[1], params[0]))
        while not told:
            time.sleep(0.001)
        with scheduler.submit(Request((prompts[1] * 9)[:120], params[1])) as second:
            second.result(WAIT), first.result(WAIT)
    assert told[:2] == [(1, 1, True), (1, 1, False)] and (2, 2, False) in told
    assert next(one for one in told if one[1] == 2) == (2, 2, True)  # before, the second read its prompt
    assert sum(prompts for _, _, prompts in told) == 2


def test_pieces_are_the_steps_of_a_stream_with_their_rounds(nano, prompts):
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
    expected = list(stream(nano, prompts[3], params, spec="always"))
    with Scheduler(nano, spec="always") as scheduler:
        ticket = scheduler.submit(Request(prompts[3], params))
        found = list(ticket)
        assert list(ticket) == found and ticket.done
    bare = {"usage": None, "timings": None, "speculation": None}
    assert [s._replace(**bare) for s in found] == [s._replace(**bare) for s in expected]
    last = found[-1]
    assert last.usage == {**expected[-1].usage, "cached_tokens": 0} and last.speculation == expected[-1].speculation
    assert set(last.timings) == {"queue_s", *expected[-1].timings} and all(s.usage is None for s in found[:-1])
    assert found[0].round is None
    rounds = {id(s.round): s.round for s in found[1:]}.values()
    assert [one.number for one in rounds] == list(range(1, last.speculation["rounds"] + 1))
    assert sum(one.verified for one in rounds) == last.speculation["drafted"]
    for one in rounds:
        assert len(one.drafted) == len(one.confidence) == 5 and one.accepted <= one.verified
        made = [s.token for s in found if s.round is one]
        assert tuple(made[: one.accepted]) == one.drafted[: one.accepted][: len(made)]


def test_many_threads(nano, prompts):
    params = [SamplingParams(temperature=1, seed=i, max_tokens=12) for i in range(12)]
    expected = [complete(nano, prompts[i % 4], p, spec="off").tokens for i, p in enumerate(params)]
    found = [None] * 12
    with Scheduler(nano) as scheduler:

        def ask(i):
            found[i] = [piece.token for piece in scheduler.submit(Request(prompts[i % 4], params[i]))]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        [thread.start() for thread in threads]
        [thread.join(WAIT) for thread in threads]
    assert found == expected


def test_a_bad_request_is_refused_where_it_is_made(nano):
    with Scheduler(nano) as scheduler:
        for request, error in (
            (Request([]), InputError), (Request([640]), InputError), (Request([1] * 512), InputError),
            (Request([1], SamplingParams(stop_ids=(640,))), InputError), (Request([1], spec="perhaps"), ConfigError),
        ):  # fmt: skip
            with pytest.raises(error):
                scheduler.submit(request)
        assert scheduler.stats()["waiting"] == scheduler.stats()["requests"] == 0


@pytest.mark.parametrize(
    "wrong", [{"token_budget": 6}, {"token_budget": 6.5}, {"max_running": 7}, {"max_running": 0}, {"max_waiting": 0},
              {"prefix_bytes": -1}, {"prefix_dir": "states"}],  # fmt: skip
)
def test_wrong_settings(nano, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Scheduler(nano, **wrong)


def test_the_queue_is_bounded_and_cancelling_empties_it(nano, prompts, monkeypatch):
    _, go = watch(nano, monkeypatch, hold_at=0)
    params = SamplingParams(temperature=0, max_tokens=3)
    with Scheduler(nano, max_running=1, max_waiting=2) as scheduler:
        running = scheduler.submit(Request(prompts[0], params))
        while scheduler.stats()["waiting"]:
            pass
        waiting = [scheduler.submit(Request(prompts[0], params)) for _ in range(2)]
        with pytest.raises(CapacityError, match="at most 2 waiting"):
            scheduler.submit(Request(prompts[0], params))
        with pytest.raises(TimeoutError):
            waiting[0].result(0.01)
        with waiting[1]:
            pass
        go.set()
        assert waiting[1].result(WAIT).finish_reason == "cancelled" and waiting[1].result().tokens == []
        assert len(waiting[0].result(WAIT).tokens) == len(running.result(WAIT).tokens) == 3
        assert scheduler.stats()["cancelled"] == 1


def test_counts_show_at_once_and_never_go_back(nano, prompts):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    seen = []
    with Scheduler(nano, max_running=3, spec="always") as scheduler:
        tickets = [scheduler.submit(Request(prompt, params)) for prompt in prompts[:9]]
        while not all(ticket.done for ticket in tickets):
            seen.append(scheduler.stats())
            time.sleep(0.001)
        next(iter(scheduler.submit(Request(prompts[0], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)))))
        seen.append(scheduler.stats())
    seen.append(scheduler.stats())  # after the last was cut off
    for name in ("generated_tokens", "rounds", "drafted", "finished"):
        values = [stats[name] for stats in seen]
        assert values == sorted(values), name
    assert any(s["generated_tokens"] and not s["finished"] for s in seen)
    assert seen[-2]["generated_tokens"] > 9 * 30


def test_closing_ends_all(nano, prompts, monkeypatch):
    _, go = watch(nano, monkeypatch, hold_at=0)
    scheduler = Scheduler(nano, max_running=2)
    tickets = [scheduler.submit(Request(prompt, SamplingParams(temperature=0, max_tokens=300))) for prompt in prompts[:4]]
    go.set()
    next(iter(tickets[0]))
    scheduler.close()
    scheduler.close()
    for ticket in tickets:
        with pytest.raises(StateError, match="closed before"):
            ticket.result(WAIT)
    with pytest.raises(StateError, match="found it closed"):
        scheduler.submit(Request(prompts[0]))


def test_an_engine_has_one_scheduler_and_ends_it_first(nano, checkpoint_dir, prompts):
    with Scheduler(nano), pytest.raises(StateError, match="runs another"):
        Scheduler(nano)
    Scheduler(nano).close()
    with Engine.load(checkpoint_dir("nano"), max_sessions=1, max_context=300) as engine:
        ticket = Scheduler(engine).submit(Request(prompts[0], SamplingParams(temperature=0, max_tokens=200)))
    with pytest.raises(StateError, match="closed before"):
        ticket.result(WAIT)


def test_a_failing_engine_ends_all(nano, prompts, monkeypatch):
    forward, calls = nano.forward, []

    def fail(rows):
        calls.append(rows)
        if len(calls) == 9:
            raise MemoryError("none left")
        return forward(rows)

    monkeypatch.setattr(nano, "forward", fail)
    with Scheduler(nano, max_running=2, spec="off") as scheduler:
        tickets = [scheduler.submit(Request(prompt, SamplingParams(temperature=0, max_tokens=300))) for prompt in prompts[:4]]
        for ticket in tickets:
            with pytest.raises(MemoryError, match="none left"):
                list(ticket)
        assert scheduler.broken
        with pytest.raises(MemoryError, match="none left"):
            scheduler.submit(Request(prompts[0]))


def test_a_session_that_is_dropped_gives_its_slot_back(nano):
    for _ in range(20):
        nano.session().prefill([1, 2, 3])
        gc.collect()

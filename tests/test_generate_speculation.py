"""More than one token per step: whatever ends a generation, the answer is exactly plain decoding's."""

import dataclasses
import warnings
from collections import Counter
from itertools import count

import numpy as np
import pytest

from dsv4 import SamplingParams
from dsv4.dspark import Draft
from dsv4.errors import ConfigError, InputError
from dsv4.gate import make_rule
from dsv4.generate import complete, settled, speculator, stream
from dsv4.sampling import greedy
from dsv4.scheduler import Request, Scheduler
from dsv4.speculate import Speculator

KINDS = ("repeat", "code", "math", "prose")
SPECS = ("always", "gate", "fixed:2")


@pytest.fixture(scope="module")
def nano(engine):
    return engine("nano", threads=2, chunk=130, max_sessions=3, max_context=512)


def answer(engine, prompt, spec, **params) -> dict:
    """A completion without what may differ: its times and what was drafted."""
    found = dataclasses.asdict(complete(engine, prompt, SamplingParams(**params), spec=spec))
    found.pop("timings"), found.pop("speculation")
    return found


def same_answers(engine, prompt, **params):
    plain = answer(engine, prompt, "off", **params)
    for spec in SPECS:
        assert answer(engine, prompt, spec, **params) == plain, (spec, params)
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_token_at_every_index_of_a_block(nano, prompts, kind):
    prompt = prompts[kind][0]
    tokens = answer(nano, prompt, "off", temperature=0, max_tokens=40)["tokens"]
    for i, token in enumerate(tokens[:20]):
        found = same_answers(nano, prompt, temperature=0, max_tokens=40, stop_ids=(token,), logprobs=2)
        assert found["finish_reason"] == "stop" and found["tokens"] == tokens[: tokens.index(token) + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_anywhere(nano, prompts, kind):
    prompt = prompts[kind][1]
    text = answer(nano, prompt, "off", temperature=0, max_tokens=40)["text"]
    for start in range(2, min(40, len(text) - 5), 3):
        found = same_answers(nano, prompt, temperature=0, max_tokens=40, stop=(text[start : start + 4],))
        assert found["finish_reason"] == "stop" and text[start : start + 4] not in found["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_limit_of_tokens(nano, prompts, kind):
    prompt = prompts[kind][2]
    whole = answer(nano, prompt, "off", temperature=0, max_tokens=20, ignore_eos=True)["tokens"]
    for limit in range(1, 15):
        found = same_answers(nano, prompt, temperature=0, max_tokens=limit, ignore_eos=True)
        assert found["tokens"] == whole[:limit] and found["finish_reason"] == "length"


def test_the_context_limit(engine, prompts):
    prompt = prompts["repeat"][0]
    for room in (1, 2, 3, 5, 6, 7):
        small = engine("nano", threads=1, chunk=16, max_sessions=1, max_context=len(prompt) + room)
        found = same_answers(small, prompt, temperature=0, max_tokens=100)
        assert len(found["tokens"]) == room and found["finish_reason"] == "length"


def test_a_chunk_shorter_than_a_block(engine, prompts):
    small = engine("nano", threads=1, chunk=2, max_sessions=1, max_context=128)
    same_answers(small, prompts["code"][0], temperature=0, max_tokens=30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.1, "temperature": 2.0}], ids=str)
def test_sampling_with_a_seed_is_the_same_with_speculation(nano, prompts, kind, params):
    """Not only the same distribution: the same tokens."""
    answers = set()
    for seed in range(3):
        params = {"temperature": 1.0, **params}
        found = same_answers(nano, prompts[kind][0], seed=seed, max_tokens=40, logprobs=1, **params)
        answers.add(tuple(found["tokens"]))
    assert len(answers) > 1 or params.get("top_k") or kind in ("code", "repeat"), "the seed changes nothing"


def test_sampled_drafts_are_accepted(nano, prompts):
    """Draft and target see the same random numbers: where they agree on the odds they agree on the token."""
    drafted = accepted = 0
    for seed in range(6):
        for kind in KINDS:
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=60)
            found = complete(nano, prompts[kind][0], params, spec="always").speculation
            drafted, accepted = drafted + found["drafted"], accepted + found["accepted"]
    assert accepted / drafted > 0.5, accepted / drafted


def test_sampled_distribution_is_the_plain_one(nano, prompts):
    """The third token after a prompt, over many seeds: counts with drafting follow plain decoding's probabilities."""
    prompt = prompts["math"][0]
    draws = {spec: Counter() for spec in ("off", "always")}
    for seed in range(120):
        for spec, counts in draws.items():
            params = SamplingParams(temperature=1.5, top_k=4, seed=seed, max_tokens=3)
            counts[complete(nano, prompt, params, spec=spec).tokens[2]] += 1
    assert draws["off"] == draws["always"] and len(draws["off"]) > 3


def test_closing_a_stream_frees_its_session(nano, prompts):
    free = len(nano.pool._free_slots)
    for spec in ("off", "always"):
        running = stream(nano, prompts["prose"][0], SamplingParams(temperature=0, max_tokens=50), spec=spec)
        for _ in range(4):
            next(running)
        assert len(nano.pool._free_slots) == free - 1
        running.close()
        assert len(nano.pool._free_slots) == free


def test_counters_and_rounds(nano, prompts):
    rounds = []
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    found = complete(nano, prompts["repeat"][0], params, spec="always", on_round=rounds.append)
    counts = found.speculation
    assert counts["mode"] == "always" and counts["rounds"] == len(rounds)
    assert counts["drafted"] == sum(r.length for r in rounds) and counts["accepted"] == sum(r.accepted for r in rounds)
    assert counts["accept_rate"] == counts["accepted"] / counts["drafted"] > 0.5
    assert 1 + sum(len(r.tokens) for r in rounds) == len(found.tokens) == 50
    assert complete(nano, prompts["repeat"][0], params, spec="off").speculation == {
        "mode": "off", "rounds": 49, "drafted": 0, "accepted": 0, "skipped_rounds": 0, "margin_skipped_rounds": 0,
        "accept_rate": 0.0,
    }  # fmt: skip


def test_counters_leave_out_what_a_stop_dropped(nano, prompts):
    """Accepted tokens are part of the answer: one first token, a bonus per round that was used to its end, the rest accepted."""
    tokens = answer(nano, prompts["repeat"][0], "off", temperature=0, max_tokens=40)["tokens"]
    for at in range(3, 20):
        if tokens[at] in tokens[:at]:
            continue
        params = SamplingParams(temperature=0, max_tokens=40, stop_ids=(tokens[at],))
        found = complete(nano, prompts["repeat"][0], params, spec="always")
        assert 1 + found.speculation["accepted"] <= len(found.tokens) <= 1 + sum(found.speculation[k] for k in ("accepted", "rounds"))


def test_a_stop_inside_a_block_rewinds_the_session(nano, prompts):
    prompt = prompts["code"][0]
    with nano.session() as session:
        running = settled(session, prompt, 40, speculator(nano, SamplingParams(temperature=0), "always"))
        tokens = [next(running)[0] for _ in range(9)]
        running.close()
        assert session.tokens == [*prompt, *tokens[:-1]]


def test_the_last_round_is_not_skipped_by_the_gate(nano, prompts):
    found = complete(nano, prompts["code"][0], SamplingParams(temperature=0, max_tokens=2), spec="always").speculation
    assert (found["rounds"], found["skipped_rounds"], found["margin_skipped_rounds"]) == (1, 0, 0)


def test_wrong_names(nano):
    with pytest.raises(ConfigError, match="expected one of calibrated, bucket, always, fixed:N; found 'sometimes'"):
        speculator(nano, SamplingParams(), "sometimes")
    with pytest.raises(InputError):
        complete(nano, [], SamplingParams(), spec="always")


@pytest.mark.parametrize("spec", ["off", "always", "gate"])
def test_a_round_starts_from_what_the_one_before_ended_with(nano, prompts, spec):
    rounds, steps = [], []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    complete(nano, prompts["repeat"][0], params, spec=spec, on_round=rounds.append, on_step=steps.append)
    for one, following in zip(rounds, rounds[1:]):
        assert (following.before == one.logits[-1]).all() and following.before.argmax() == one.tokens[-1]
    numbers = [number for number, one in enumerate(rounds, 1) for _ in one.tokens]
    assert [step.round.number for step in steps[1:]] == numbers


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_broken_logits_of_a_draft_fail_no_request(nano, prompts, monkeypatch, temperature):
    head, calls, broken = Draft.logits, count(), []

    def spoilt(self, x):
        logits = head(self, x)
        if next(calls) % 2:
            broken.append(len(logits))
            logits[len(broken) % len(logits), len(broken)] = np.nan  # another one each time
        return logits

    monkeypatch.setattr(Draft, "logits", spoilt)
    params = {"temperature": temperature, "seed": 1, "max_tokens": 30, "ignore_eos": True}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default", RuntimeWarning)
        tokens = same_answers(nano, prompts["code"][0], **params)["tokens"]
        with Scheduler(nano) as scheduler:
            tickets = [scheduler.submit(Request(prompts["code"][0], SamplingParams(**params), spec)) for spec in SPECS]
            assert [ticket.result(60).tokens for ticket in tickets] == [tokens] * len(SPECS)
            assert scheduler.stats()["skipped_rounds"] > 0
    assert len(broken) > 10
    (text,) = [str(one.message) for one in said if one.category is RuntimeWarning]
    assert text == "speculation: a draft failed and counts as none: Dsv4Error"


@pytest.mark.filterwarnings("ignore:speculation")
@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_gate_gives_up_on_drafts_that_always_fail(nano, prompts, monkeypatch, side_by_side):
    head, drafts = Draft.logits, count()

    def spoilt(self, x):
        next(drafts)
        return np.full_like(head(self, x), np.nan)

    monkeypatch.setattr(Draft, "logits", spoilt)
    request = Request(prompts["code"][0], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    if side_by_side:
        with Scheduler(nano) as scheduler:
            for ticket in [scheduler.submit(request) for _ in range(4)]:
                ticket.result(60)
    else:
        complete(nano, request.tokens, request.sampling)
    assert 0 < next(drafts) < 50


@pytest.mark.filterwarnings("ignore:speculation")
@pytest.mark.parametrize("mode", ["batched", "sequential"])
def test_a_choice_that_fails_is_asked_for_at_its_place(nano, prompts, mode):
    prompt = prompts["repeat"][0]
    for position in range(len(prompt), len(prompt) + 12):

        def refuse(logits, at):
            if at == position:
                raise ValueError("no")
            return greedy(logits, at)

        found = []
        for gate in (None, make_rule("always", 5), make_rule("fixed:2", 5), make_rule("calibrated", 5)):
            tokens = []
            with nano.session() as session, pytest.raises(ValueError, match="no"):
                for token, _, _ in settled(session, prompt, 20, Speculator(gate, refuse, mode)):
                    tokens.append(token)
            found.append(tokens)
        assert len(found[0]) == position - len(prompt) and found[1:] == found[:1] * 3

"""Streaming generation: text and tokens, stops, limits, repeatability. A stand-in engine gives fixed logits."""

import math

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import Dsv4Error, InputError
from dsv4.generate import StopMatcher, complete, stream
from dsv4.sampling import SamplingParams, sample, token_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEXT = "He said 🎉 naïve 你好 and stopped here, ok? Not yet. The end of it."


def greedy(**options):
    return SamplingParams(temperature=0, **{"max_tokens": 200, **options})


@pytest.fixture
def scripted(nano_dir):
    """An engine that says TEXT token by token, then its end token; and the tokens of TEXT."""
    engine = FakeEngine(nano_dir)
    tokens = engine.tokenizer.encode(TEXT)
    engine.script = [*tokens, 1]
    return engine, tokens


def test_steps_join_to_the_completion(scripted):
    engine, tokens = scripted
    steps = list(stream(engine, "Once", greedy()))
    assert [step.token for step in steps] == [*tokens, 1]
    assert "".join(step.text for step in steps) == TEXT
    assert [step.finish_reason for step in steps] == [None] * len(tokens) + ["stop"]
    assert all(step.logprob is None and step.top_logprobs is None for step in steps)
    assert any(step.text == "" for step in steps[:-1])  # characters that came whole


def test_a_completion_counts_and_times(scripted):
    engine, tokens = scripted
    seen = []
    result = complete(engine, "Once", greedy(), on_step=lambda step: seen.append(step.token))
    assert result.text == TEXT and result.tokens == [*tokens, 1] == seen
    assert result.finish_reason == "stop" and result.logprobs is None
    assert result.prompt_tokens == len(engine.tokenizer.encode_prompt("Once"))
    assert result.completion_tokens == len(tokens) + 1
    timings = result.timings
    assert set(timings) == {"prefill_s", "decode_s", "prefill_tps", "decode_tps"}
    assert timings["prefill_tps"] == pytest.approx(result.prompt_tokens / timings["prefill_s"])
    assert timings["decode_tps"] == pytest.approx(len(tokens) / timings["decode_s"])
    assert complete(engine, "Once", greedy(max_tokens=1)).timings["decode_tps"] == 0


def test_text_prompts_get_the_begin_token_and_ids_do_not(scripted):
    engine, _ = scripted
    ids = engine.tokenizer.encode("Once")
    list(stream(engine, "Once", greedy(max_tokens=1)))
    list(stream(engine, ids, greedy(max_tokens=1)))
    list(stream(engine, np.array(ids), greedy(max_tokens=1)))
    assert [session.tokens for session in engine.sessions] == [[0, *ids], ids, ids]


def test_every_token_of_a_greedy_run_can_be_the_stop(scripted):
    engine, tokens = scripted
    for index, token in enumerate(tokens):
        result = complete(engine, "Once", greedy(stop_ids=(token,)))
        end = tokens.index(token)
        assert end <= index and result.tokens == tokens[: end + 1] and result.finish_reason == "stop"
        assert result.text == engine.tokenizer.decode(tokens[:end])


def test_the_end_token_ends_unless_ignored(scripted):
    engine, tokens = scripted
    engine.script = [tokens[0], 1, tokens[1]]
    assert complete(engine, [3], greedy()).tokens == [tokens[0], 1]
    result = complete(engine, [3], greedy(ignore_eos=True, max_tokens=3))
    assert result.tokens == engine.script and result.finish_reason == "length"
    assert result.text == engine.tokenizer.decode(engine.script)
    assert complete(engine, [3], greedy(ignore_eos=True, stop_ids=(1,))).finish_reason == "stop"


def test_every_substring_can_be_the_stop(scripted):
    """Wherever it begins and however many tokens it spans: the text ends just before it, the tokens with it."""
    engine, tokens = scripted
    for start in range(0, len(TEXT)):
        for length in (1, 2, 5, 11):
            stop = TEXT[start : start + length]
            result = complete(engine, "Once", greedy(stop=(stop, "never said")))
            assert result.text == TEXT[: TEXT.index(stop)] and result.finish_reason == "stop"
            assert result.tokens == tokens[: len(result.tokens)]
            assert stop in engine.tokenizer.decode(result.tokens)
            assert stop not in engine.tokenizer.decode(result.tokens[:-1])


def test_text_that_may_become_a_stop_is_held_back_and_then_told(scripted):
    engine, tokens = scripted
    stop = "end of it.!"
    steps = list(stream(engine, "Once", greedy(stop=stop)))
    assert steps[-1].text == "end of it."
    told = ""
    for step in steps[:-1]:
        told += step.text
        assert TEXT.startswith(told) and not any(told.endswith(stop[:n]) for n in range(1, len(stop)))
    assert told + steps[-1].text == TEXT


def test_the_first_stop_text_wins(scripted):
    engine, _ = scripted
    assert complete(engine, "Once", greedy(stop=("The end", "ok?", "Not"))).text == TEXT[: TEXT.index("ok?")]


@settings(max_examples=400, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_stop_matching_does_not_depend_on_the_cuts(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    matcher = StopMatcher(stops)
    told, found_at = "", None
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        told += matcher.push(text[start:end])
        if matcher.found:
            found_at = end
            break
    told += matcher.finish()
    first = [n for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops)]
    if not first:
        assert told == text and found_at is None
    else:
        assert (
            found_at >= first[0] and told == text[: min(text[:found_at].find(s) for s in stops if s in text[:found_at])]
        )


@pytest.mark.parametrize("n", [1, 2, 7, 19])
def test_max_tokens(scripted, n):
    engine, tokens = scripted
    steps = list(stream(engine, "Once", greedy(max_tokens=n)))
    assert len(steps) == n and steps[-1].finish_reason == "length"
    assert "".join(step.text for step in steps) == engine.tokenizer.decode(tokens[:n])


def test_an_unfinished_character_is_told_at_the_end(nano_dir):
    engine = FakeEngine(nano_dir)
    engine.script = engine.tokenizer.encode("🎉")
    steps = list(stream(engine, [3], greedy(max_tokens=2)))
    assert [step.text for step in steps] == ["", engine.tokenizer.decode(engine.script[:2])]


def test_prompt_and_completion_fill_the_context_and_no_more(nano_dir):
    for length in range(1, 20):
        engine = FakeEngine(nano_dir, max_context=20)
        result = complete(engine, [3] * length, greedy(ignore_eos=True))
        assert length + result.completion_tokens == 20 and result.finish_reason == "length"


@pytest.mark.parametrize("length", [20, 21, 500])
def test_a_prompt_that_leaves_no_room_is_refused(nano_dir, length):
    with pytest.raises(InputError, match=f"prompt: expected at most 19 tokens .*; found {length}; shorten it or load with a larger max_context$"):
        stream(FakeEngine(nano_dir, max_context=20), [3] * length, GREEDY)
    with pytest.raises(InputError, match=r"found 1024; shorten it \(this model has 1024 positions\)$"):
        stream(FakeEngine(nano_dir, max_context=1024), [3] * 1024, GREEDY)


def test_text_that_cannot_fit_is_refused_before_it_is_cut_into_tokens(nano_dir, monkeypatch):
    engine = FakeEngine(nano_dir, max_context=20)
    longest = max(len(engine.tokenizer.token_bytes(token)) for token in range(engine.config.vocab_size))
    assert len(engine.tokenizer.encode("1" * 20 * longest)) >= 20
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *_, **__: pytest.fail("cut into tokens"))
    with pytest.raises(InputError, match="prompt: expected at most 19 tokens .*; found at least 21; shorten it"):
        stream(engine, "\ud800" + "1" * (20 * longest - 2), GREEDY)
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *_, **__: [3])
    assert len(list(stream(engine, "1" * 20 * longest, GREEDY)))


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "expected at least one token"),
        ([], "expected at least one token"),
        ([3, 640], "0..639, found 640"),
        ([-1], "0..639, found -1"),
        ([1.5], "token ids"),
        ([[1, 2]], "token ids"),
        ("a\ud800", "lone surrogate"),
    ],
)
def test_bad_prompts_are_refused_before_the_first_step(nano_dir, prompt, message):
    engine = FakeEngine(nano_dir)
    with pytest.raises(InputError, match=message):
        stream(engine, prompt, GREEDY)
    assert not engine.sessions


def test_without_a_tokenizer_ids_work_and_text_does_not():
    engine = FakeEngine()
    result = complete(engine, [3, 4], greedy(max_tokens=5))
    assert result.text == "" and len(result.tokens) == 5
    with pytest.raises(InputError, match="no tokenizer.json; expected token ids, found text"):
        stream(engine, "text", GREEDY)
    with pytest.raises(InputError, match="stop: .*use stop ids"):
        stream(engine, [3], greedy(stop="x"))


def test_stop_ids_outside_the_vocabulary_are_refused(nano_dir):
    with pytest.raises(InputError, match="stop_ids: expected token ids 0 to 639; found 640"):
        stream(FakeEngine(nano_dir), [3], greedy(stop_ids=(2, 640)))


def test_the_session_is_closed_however_the_stream_ends(scripted):
    engine, _ = scripted
    list(stream(engine, "Once", greedy()))
    running = stream(engine, "Once", greedy())
    next(running)
    assert engine.sessions[-1].open
    running.close()
    engine.spoil = 3
    with pytest.raises(Dsv4Error, match="expected finite numbers"):
        list(stream(engine, "Once", greedy()))
    engine.spoil = None

    def interrupt(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:  # keeps the frames alive: closing must not wait for them
        complete(engine, "Once", greedy(), on_step=interrupt)
    assert caught and len(engine.sessions) == 4 and not any(session.open for session in engine.sessions)


def test_same_seed_same_tokens(nano_dir):
    def run(**options):
        return complete(FakeEngine(nano_dir), [3, 4], SamplingParams(max_tokens=20, **options)).tokens

    assert run(seed=5) == run(seed=5) != run(seed=6)
    assert run() != run()
    assert run(temperature=0, seed=5) == run(temperature=0, seed=6)
    assert run(seed=5, top_k=1) == run(temperature=0)


def test_a_draw_does_not_depend_on_how_generation_got_there(nano_dir):
    """Continuing from a longer prompt draws what the whole run drew: the position decides, not the count of draws."""
    params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
    whole = complete(FakeEngine(nano_dir), [3, 4], params).tokens
    rest = complete(FakeEngine(nano_dir), [3, 4, *whole[:8]], params).tokens
    assert rest[:12] == whole[8:]


def test_logprobs_are_those_of_the_logits(nano_dir):
    params = SamplingParams(max_tokens=6, seed=5, temperature=0.7, top_k=3, logprobs=2)
    engine = FakeEngine(nano_dir)
    result = complete(engine, [3, 4], params)
    check = FakeEngine(nano_dir).session()
    logits = check.prefill([3, 4])
    for entry, token in zip(result.logprobs, result.tokens):
        assert token == sample(logits, params, check.position)
        logprob, top = token_logprobs(logits, token, 2)
        assert entry == {"token": token, "logprob": logprob, "top": [{"token": t, "logprob": v} for t, v in top]}
        logits = check.decode(token)
    chosen = complete(FakeEngine(nano_dir), [3, 4], SamplingParams(max_tokens=3, seed=5, logprobs=0))
    assert all(entry["top"] == [] and math.isfinite(entry["logprob"]) for entry in chosen.logprobs)
    assert [entry["token"] for entry in chosen.logprobs] == chosen.tokens


def test_progress_counts_the_prompt(nano_dir):
    seen = []
    complete(FakeEngine(nano_dir), [3] * 20, greedy(max_tokens=1), progress=lambda *args: seen.append(args))
    assert seen == [("prefill", 8, 20), ("prefill", 16, 20), ("prefill", 20, 20)]

"""The HTTP server over a scheduler that says what it is told: what answers look like, whole and streamed."""

import itertools
import threading

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_scheduler import steps  # noqa: E402
from server_cases import CALL, CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOOL, engine, events, joined, post, script, server  # noqa: E402, F401

from dsv4.chat import encode_ids, stop_ids  # noqa: E402


def test_a_completion(post, script):
    scheduler = script(steps(["Hel", "lo", ""], cached=1))
    body = {**TEXT, "max_tokens": 9, "stop": "X", "seed": 3, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "temperature": 0.5}
    answer = post(TEXT_PATH, body).json()
    assert answer["object"] == "text_completion" and answer["model"] == "nano" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": len(scheduler.requests[0].tokens), "completion_tokens": 3,
                               "total_tokens": len(scheduler.requests[0].tokens) + 3,
                               "prompt_tokens_details": {"cached_tokens": 1}}  # fmt: skip
    how = scheduler.requests[0].sampling
    assert (how.max_tokens, how.stop, how.seed, how.top_p, how.top_k, how.min_p, how.temperature) == (9, ("X",), 3, 0.5, 4, 0.1, 0.5)
    assert "dsv4_rounds" not in answer


def test_defaults(engine, post, script):
    scheduler = script(steps(["a"]))
    for body in ({**TEXT, "n": 1, "logit_bias": {}, "stream": None, "user": "me"}, {**TEXT, "prompt": [[5, 6]]}):
        assert post(TEXT_PATH, body).status_code == 200
    for body in (CHAT, {**CHAT, "tools": [TOOL]}, {**CHAT, "tools": [TOOL], "tool_choice": "none"}):
        assert post(CHAT_PATH, body).status_code == 200
    text, ids, chat, tools, without = [request.sampling for request in scheduler.requests]
    assert (text.max_tokens, text.temperature, text.top_p, text.stop, text.seed) == (16, 1.0, 1.0, (), None)
    assert (text.stop_ids, ids.stop_ids) == ((), ()) and chat.stop_ids == tools.stop_ids == stop_ids(engine.tokenizer) != ()
    assert scheduler.requests[1].tokens == [5, 6]
    assert (chat.max_tokens, chat.temperature, chat.top_p) == (500, 1.0, 1.0)
    assert (tools.top_p, without.top_p) == (0.95, 1.0)
    assert scheduler.requests[4].tokens == scheduler.requests[2].tokens != scheduler.requests[3].tokens


def test_the_prompt_is_the_chat_formats(engine, post, script):
    scheduler = script(steps(["a"]))
    tokenizer = engine.tokenizer
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": False}}
    cases = [
        ({}, {}),
        ({"reasoning_effort": "none"}, {}),
        ({"reasoning_effort": "max"}, {"thinking": True, "effort": "max"}),
        ({"thinking": {"type": "enabled"}}, {"thinking": True}),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, {"thinking": True, "effort": "high"}),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"response_format": schema}, {"response_format": schema}),
        ({"response_format": {"type": "text"}}, {}),
    ]
    for given, meant in cases:
        assert post(CHAT_PATH, {**CHAT, **given}).status_code == 200
        assert scheduler.requests[-1].tokens == encode_ids(CHAT["messages"], tokenizer, **meant), given


def test_an_answer_sent_back(post, script):
    """What the server says, whole or streamed, it also takes as a part of the next request."""
    script(steps(["x", "\n\n" + CALL, ""]))
    whole = post(CHAT_PATH, {**CHAT, "tools": [TOOL]}).json()["choices"][0]["message"]
    streamed, _ = joined(events(post(CHAT_PATH, {**CHAT, "tools": [TOOL], "stream": True})))
    sdk = {**whole, "refusal": None, "annotations": None, "audio": None, "function_call": None}
    for message in (whole, streamed, sdk):
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "blue"}
        response = post(CHAT_PATH, {**CHAT, "tools": [TOOL], "messages": [*CHAT["messages"], message, result]})
        assert response.status_code == 200, response.text


ANSWERS = [
    ("plain", {}, "Two words.", {"content": "Two words."}, "stop"),
    ("thinking", {"reasoning_effort": "high"}, "I STOP think</think>so STOP not this",
     {"reasoning_content": "I STOP think", "content": "so "}, "stop"),
    ("half a stop text", {}, "so ST", {"content": "so ST"}, "stop"),
    ("only thinking", {"thinking": {"type": "enabled"}}, "I think", {"reasoning_content": "I think", "content": ""}, "stop"),
    ("call", {"tools": [TOOL]}, "See:\n\n" + CALL,
     {"content": "See:", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}]},
     "tool_calls"),
    ("call alone", {"tools": [TOOL]}, CALL,
     {"content": "", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}]},
     "tool_calls"),
    ("broken call", {"tools": [TOOL]}, CALL[:60], {"content": CALL[:60]}, "stop"),
]  # fmt: skip


def plain(message):
    """A message without what differs by right: the ids of calls, the numbers of streamed ones, null for no content."""
    calls = [{k: v for k, v in call.items() if k not in ("id", "index")} for call in message.get("tool_calls", ())]
    assert all(call["id"].startswith("call_") for call in message.get("tool_calls", ()))
    return {**message, "content": message["content"] or ""} | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("given, text, message, reason", [a[1:] for a in ANSWERS], ids=[a[0] for a in ANSWERS])
def test_streamed_is_whole_however_cut(post, script, given, text, message, reason):
    expected = {"role": "assistant", **message}
    for size in (1, 2, 3, 7, 1000):
        texts = ["".join(part) for part in itertools.zip_longest(*[iter(text)] * size, fillvalue="")]
        scheduler = script(steps([*texts, ""]))
        body = {**CHAT, "stop": "STOP", **given}
        answer = post(CHAT_PATH, body).json()
        chunks = events(post(CHAT_PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}))
        choice = answer["choices"][0]
        assert plain(choice["message"]) == expected and choice["finish_reason"] == reason
        streamed, ended = joined(chunks)
        assert plain(streamed) == expected and ended == reason
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1]) and len({chunk["id"] for chunk in chunks}) == 1
        assert "role" in chunks[0]["choices"][0]["delta"]
        assert all(ticket.cancelled.wait(5) for ticket in scheduler.tickets)


def test_a_stop_text_ends_the_generation(post, script):
    """What would follow a stop text in the content is neither waited for nor counted."""
    never = threading.Event()
    scheduler = script([*steps(["a", "bST", "OPc", "d"])[:3], never])
    answer = post(CHAT_PATH, {**CHAT, "stop": ["STOP"]}).json()
    assert answer["choices"][0]["message"]["content"] == "ab" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3 and scheduler.tickets[0].cancelled.wait(5)


def test_the_end_of_a_cut_answer(post, script):
    script(steps(["a", "b"], reason="length"))
    assert post(CHAT_PATH, CHAT).json()["choices"][0]["finish_reason"] == "length"
    script(steps([CALL], reason="length"))
    assert post(CHAT_PATH, {**CHAT, "tools": [TOOL]}).json()["choices"][0]["finish_reason"] == "length"


def test_logprobs(engine, post, script):
    tokenizer = engine.tokenizer
    accent = tokenizer.encode("é")[0] if len(tokenizer.encode("é")) > 1 else 0
    scheduler = script([step._replace(token=accent) if i == 1 else step for i, step in
                        enumerate(steps(["H", "", "é"], logprob=-0.5, top_logprobs=((65, -0.5), (66, -1.5))))])  # fmt: skip
    wanted = {"logprobs": True, "top_logprobs": 2}
    whole = post(CHAT_PATH, {**CHAT, **wanted}).json()["choices"][0]["logprobs"]
    chunks = events(post(CHAT_PATH, {**CHAT, **wanted, "stream": True}))
    assert scheduler.requests[0].sampling.logprobs == 2
    assert [e for c in chunks for e in c["choices"][0]["logprobs"]["content"]] == whole["content"]
    first, second, _ = whole["content"]
    assert first["bytes"] == list(tokenizer.token_bytes(65)) and first["token"] == tokenizer.decode([65])
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, -1.5]
    assert second["bytes"] == list(tokenizer.token_bytes(accent)) and second["token"] == "\ufffd"

    whole = post(TEXT_PATH, {**TEXT, "logprobs": 2}).json()["choices"][0]["logprobs"]
    chunks = events(post(TEXT_PATH, {**TEXT, "logprobs": 2, "stream": True}))
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for c in chunks for v in c["choices"][0]["logprobs"][name]] == whole[name], name
    assert whole["text_offset"] == [0, 1, 1] and whole["tokens"][1].startswith("bytes:\\x")
    assert whole["top_logprobs"][0] == {tokenizer.decode([65]): -0.5, tokenizer.decode([66]): -1.5}


def test_rounds_only_when_asked_for(post, script):
    script(steps(["a", "b", "c", "d", ""]))
    entry = {"drafted": 3, "verified": 2, "accepted": 1, "confidence": [0.5, -1.0, 2.0]}
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        chunks = events(post(path, {**body, "stream": True, "dsv4_rounds": True}))
        assert [r for chunk in chunks for r in chunk["dsv4_rounds"]] == [entry, entry]
        assert post(path, {**body, "dsv4_rounds": True}).json()["dsv4_rounds"] == [entry, entry]
        assert "dsv4_rounds" not in post(path, body).text and "dsv4_rounds" not in post(path, {**body, "stream": True}).text

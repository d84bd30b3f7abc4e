"""The HTTP server over a scheduler that says what it is told: requests, refusals, answers' forms, clients that leave."""

import itertools
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_engine import FakeEngine  # noqa: E402
from fake_scheduler import FakeScheduler, served, steps, until  # noqa: E402

from dsv4.errors import BackendError, CapacityError, CheckpointError, Dsv4Error, InputError, StateError  # noqa: E402
from dsv4.server.serving import listen  # noqa: E402

CHAT = {"model": "nano", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"model": "nano", "prompt": "Hello"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">sea</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


@pytest.fixture(scope="module")
def engine(nano_dir):
    """What the server asks of an engine: tokenizer, vocabulary, context, identity."""
    found = FakeEngine(nano_dir, max_context=8192)
    found.identity = "0123456789abcdef"
    return found


@pytest.fixture(scope="module")
def server(engine):
    with served(engine, FakeScheduler(), max_body=20_000, max_tokens=500) as found:
        yield found


@pytest.fixture
def script(server):
    """script(steps): what the next requests are answered with. Returns the scheduler."""

    def set_script(found=()):
        scheduler = server.service.scheduler
        scheduler.script = found
        scheduler.requests.clear(), scheduler.tickets.clear()
        return scheduler

    return set_script


@pytest.fixture
def post(server):
    with httpx.Client(base_url=server.address, timeout=20) as client:
        yield lambda path, body, **options: client.post(path, json=body, **options)


def events(response):
    """The objects of a streamed response, checked to end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def joined(chunks):
    """The message that the deltas of a stream add up to, and the finish reason."""
    message, reason = {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert reason is None, "nothing after the finish reason"
            reason = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    message.setdefault(name, []).extend(value)
                else:
                    message[name] = message.get(name, "") + value
    return message, reason


# ------------------------------------------------------------------------------------------------ refused
def patched(base, **changes):
    return {name: value for name, value in {**base, **changes}.items() if value is not ...}


MESSAGE = {"role": "user", "content": "x"}
ANY = {"stream": "yes", "n": 2, "seed": -1, "top_p": 0, "temperature": -0.1, "temperature ": 1, "stop": [""], "min_p": 2,
       "top_k": 1.5, "max_tokens": 0, "frequency_penalty": 0.1, "logit_bias": {"5": 1}, "user": 7, "metadata": {},
       "stream_options": {"include_usage": True}, "dsv4_rounds": 1, "presence_penalty": True}  # fmt: skip
REFUSED = [
    *((TEXT_PATH, {name: value}, 400, name) for name, value in ANY.items()),
    *((CHAT_PATH, {name: value}, 400, name) for name, value in ANY.items()),
    *((path, {"max_tokens": 501}, 400, "max_tokens") for path in (TEXT_PATH, CHAT_PATH)),
    *((path, {"model": "gpt"}, 404, "model") for path in (TEXT_PATH, CHAT_PATH)),
    *((path, {"model": ...}, 400, "model") for path in (TEXT_PATH, CHAT_PATH)),
    *((TEXT_PATH, {name: 10**400}, 400, name) for name in ("temperature", "top_p", "min_p")),
    (TEXT_PATH, {"stream": True, "stream_options": {"include": 1}}, 400, "stream_options.include"),
    (TEXT_PATH, {"prompt": ...}, 400, "prompt"),
    (TEXT_PATH, {"prompt": ["a", "b"]}, 400, "prompt"),
    (TEXT_PATH, {"prompt": [1, "b"]}, 400, "prompt"),
    (TEXT_PATH, {"prompt": [640]}, 400, "tokens"),
    (TEXT_PATH, {"prompt": ""}, 400, "prompt"),
    (TEXT_PATH, {"prompt": "a\ud800"}, 400, "text"),
    (TEXT_PATH, {"echo": True}, 400, "echo"),
    (TEXT_PATH, {"best_of": 3}, 400, "best_of"),
    (TEXT_PATH, {"suffix": "s"}, 400, "suffix"),
    (TEXT_PATH, {"logprobs": 21}, 400, "logprobs"),
    (TEXT_PATH, {"messages": []}, 400, "messages"),
    (CHAT_PATH, {"prompt": "x"}, 400, "prompt"),
    (CHAT_PATH, {"messages": []}, 400, "messages"),
    (CHAT_PATH, {"messages": "x"}, 400, "messages"),
    (CHAT_PATH, {"messages": ["x"]}, 400, "messages[0]"),
    (CHAT_PATH, {"messages": [{"role": "owner", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT_PATH, {"messages": [{"role": "developer", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT_PATH, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT_PATH, {"messages": [{**MESSAGE, "name": "Bo"}]}, 400, "messages[0]"),
    (CHAT_PATH, {"messages": [{**MESSAGE, "tools": []}]}, 400, "messages[0].tools"),
    (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type"),
    (CHAT_PATH, {"messages": [MESSAGE, {"role": "assistant", "content": "y"}]}, 400, "messages[1].role"),
    (CHAT_PATH, {"messages": [{"role": "system", "content": "y"}]}, 400, "messages[0].role"),
    (CHAT_PATH, {"messages": [{"role": "latest_reminder", "content": "y"}]}, 400, "messages[0].role"),
    (CHAT_PATH, {"messages": [MESSAGE, {"role": "assistant", "content": "y"}, {"role": "latest_reminder", "content": "z"}]},
     400, "messages[1].role"),
    (CHAT_PATH, {"messages": [{"role": "user", "content": "a\ud800"}]}, 400, "messages[0].content"),
    (CHAT_PATH, {"messages": [MESSAGE, {"role": "tool", "content": "y", "tool_call_id": "c"}]}, 400, "messages[1].tool_call_id"),
    (CHAT_PATH, {"tools": [{"type": "retrieval"}]}, 400, "tools[0].type"),
    (CHAT_PATH, {"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, 400, "tools[0].function.strict"),
    (CHAT_PATH, {"tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT_PATH, {"tools": [TOOL], "parallel_tool_calls": False}, 400, "parallel_tool_calls"),
    (CHAT_PATH, {"response_format": {"type": "json_object"}}, 400, "response_format.type"),
    (CHAT_PATH, {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    (CHAT_PATH, {"response_format": {"type": "text", "x": 1}}, 400, "response_format"),
    (CHAT_PATH, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": True}}}, 400,
     "response_format.json_schema.strict"),
    (CHAT_PATH, {"top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT_PATH, {"logprobs": 2}, 400, "logprobs"),
    (CHAT_PATH, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT_PATH, {"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
    (CHAT_PATH, {"reasoning_effort": "medium"}, 400, "reasoning_effort"),
    (CHAT_PATH, {"thinking": {"type": "on"}}, 400, "thinking.type"),
    (CHAT_PATH, {"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, 400, "thinking.type"),
    (CHAT_PATH, {"functions": []}, 400, "functions"),
]  # fmt: skip


@pytest.mark.parametrize("path, changes, status, param", REFUSED, ids=lambda value: str(value)[:60])
def test_refused_with_the_place_named(server, script, post, path, changes, status, param):
    scheduler = script(steps(["a"]))
    body = json.dumps(patched(CHAT if path == CHAT_PATH else TEXT, **changes))
    response = post(path, None, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["message"].count("\n") == 0 and param in error["message"]
    assert not scheduler.requests


BODIES = [b"", b"{", b"[]", b"null", b"\xff{}", b'{"a": NaN}', b'{"model": "nano", "model": "nano"}', b"[" * 9000]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
def test_bodies_that_are_no_request(post, script, body):
    script()
    response = post(TEXT_PATH, None, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"].startswith("body: expected")


def test_only_json_is_taken(post):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        response = post(CHAT_PATH, None, content=json.dumps(CHAT), headers={"content-type": kind} if kind else {})
        assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


def test_too_large_declared_or_not(post, script):
    script(steps(["a"]))
    head = {"content-type": "application/json"}
    fitting = json.dumps(patched(TEXT, prompt="a" * 5000)) + " " * 20_000
    assert post(TEXT_PATH, None, content=fitting[:20_000], headers=head).status_code == 200
    for content in (fitting[:20_001].encode(), iter([fitting.encode()[:15_000], fitting.encode()[15_000:20_001]])):
        response = post(TEXT_PATH, None, content=content, headers=head)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def connect(server):
    return socket.create_connection(urlsplit(server.address).netloc.split(":"), timeout=20)


def head(path, length, host="127.0.0.1"):
    return f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode()


def test_too_large_before_it_has_come(server):
    with connect(server) as sock:
        sock.sendall(head(TEXT_PATH, 20_001))
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_never_comes(engine):
    with served(engine, FakeScheduler(), body_s=0.1) as server, connect(server) as sock:
        sock.sendall(head(TEXT_PATH, 100) + b'{"mod')
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code": "timeout"' in answer


@pytest.mark.parametrize("raised, status, kind", [
    (CapacityError("scheduler: full"), 429, "rate_limit_error"),
    (StateError("scheduler: closed"), 503, "server_error"),
    (InputError("prompt: expected at most 9 tokens; found 10"), 400, "invalid_request_error"),
])  # fmt: skip
def test_what_the_scheduler_refuses(post, script, raised, status, kind):
    scheduler = script(raised)
    response = post(CHAT_PATH, CHAT)
    assert response.status_code == status and response.json()["error"]["type"] == kind
    assert response.json()["error"]["message"] == str(raised) and len(scheduler.requests) == 1
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("error", [ValueError, Dsv4Error, BackendError, CheckpointError])
def test_what_breaks_is_told_in_general_words(engine, error):
    with served(engine, FakeScheduler()) as server, httpx.Client(base_url=server.address) as client:
        assert client.get("/health").status_code == 200
        server.service.scheduler.script = [*steps(["a", "b"])[:1], error("secret")]
        whole, streamed = client.post(CHAT_PATH, json=CHAT), client.post(CHAT_PATH, json={**CHAT, "stream": True})
        assert whole.status_code == 500 and "secret" not in whole.text and whole.json()["error"]["type"] == "server_error"
        assert events(streamed)[-1]["error"]["code"] == "internal_error" and "secret" not in streamed.text
        assert client.get("/health").status_code == 503 and client.get("/health").json() == {"status": "failed"}
        server.service.scheduler.script = error("secret")
        refused = client.post(CHAT_PATH, json=CHAT)
        assert refused.status_code == 500 and refused.json()["error"]["code"] == "internal_error"


def test_paths_and_methods(server):
    with httpx.Client(base_url=server.address) as client:
        for method, path, status in (("GET", "/v2", 404), ("GET", TEXT_PATH, 405), ("POST", "/v1/models", 405),
                                     ("GET", "/v1/models/gpt", 404), ("GET", "/page/../app.py", 404)):  # fmt: skip
            response = client.request(method, path)
            assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error", path


# ------------------------------------------------------------------------------------------------ who may ask
def test_a_key(engine):
    with served(engine, FakeScheduler(), key="sesame") as server, httpx.Client(base_url=server.address) as client:
        server.service.scheduler.script = steps(["a"])
        for path in ("/v1/models", "/metrics"):
            for shown in (None, "Bearer wrong", "Bearer sesam", "Bearer sesame1", "Basic sesame", "sesame", "Bearer"):
                response = client.get(path, headers={"authorization": shown} if shown else {})
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer" and "sesame" not in response.text
            assert client.get(path, headers={"authorization": "Bearer sesame"}).status_code == 200
        assert client.post(CHAT_PATH, json=CHAT).status_code == 401 and not server.service.scheduler.requests
        assert client.get("/health").status_code == client.get("/").status_code == client.get("/page/app.js").status_code == 200


def test_small_packets_are_sent_at_once():
    """asyncio asks for that on sockets that say they are TCP's; else every answer would wait 40 ms for an acknowledgement."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_names_of_this_host_only(server):
    with httpx.Client(base_url=server.address) as client:
        for name in ("localhost", "127.0.0.1:80", "[::1]:9", "LOCALHOST:1"):
            assert client.get("/health", headers={"host": name}).status_code == 200
        for name in ("evil.example", "localhost.evil.example:8000", "127.0.0.1.nip.io", "[::2]"):
            assert client.get("/health", headers={"host": name}).status_code == 403


def test_any_name_where_others_may_connect(engine):
    with served(engine, FakeScheduler(), hosts=None) as server:
        assert httpx.get(server.address + "/health", headers={"host": "models.example"}).status_code == 200


# ------------------------------------------------------------------------------------------------ answers
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


def test_defaults(post, script):
    scheduler = script(steps(["a"]))
    for body in ({**TEXT, "n": 1, "logit_bias": {}, "stream": None, "user": "me"}, {**TEXT, "prompt": [[5, 6]]}):
        assert post(TEXT_PATH, body).status_code == 200
    for body in (CHAT, {**CHAT, "tools": [TOOL]}, {**CHAT, "tools": [TOOL], "tool_choice": "none"}):
        assert post(CHAT_PATH, body).status_code == 200
    text, ids, chat, tools, without = [request.sampling for request in scheduler.requests]
    assert (text.max_tokens, text.temperature, text.top_p, text.stop, text.seed) == (16, 1.0, 1.0, (), None)
    assert scheduler.requests[1].tokens == [5, 6]
    assert (chat.max_tokens, chat.temperature, chat.top_p) == (500, 1.0, 1.0)
    assert (tools.top_p, without.top_p) == (0.95, 1.0)
    assert scheduler.requests[4].tokens == scheduler.requests[2].tokens != scheduler.requests[3].tokens


def test_the_prompt_is_the_chat_formats(engine, post, script):
    from dsv4.chat import encode_ids

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
    scheduler = script([step.__class__(**{**step.__dict__, "token": accent}) if i == 1 else step for i, step in
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


# ------------------------------------------------------------------------------------------------ time and leaving
def test_an_answer_that_takes_too_long(engine):
    with served(engine, FakeScheduler(), request_s=0.7) as server, httpx.Client(base_url=server.address) as client:
        scheduler = server.service.scheduler
        scheduler.script = [*steps(["a", "b"])[:1], threading.Event()]
        response = client.post(CHAT_PATH, json=CHAT)
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        _, first, last = events(client.post(CHAT_PATH, json={**CHAT, "stream": True}))
        assert first["choices"][0]["delta"]["content"] == "a" and last["error"]["type"] == "timeout_error"
        assert all(ticket.cancelled.wait(5) for ticket in scheduler.tickets) and len(scheduler.tickets) == 2


def test_a_client_that_does_not_read_is_given_up(engine, monkeypatch):
    monkeypatch.setattr("dsv4.server.app.LAST_WORDS", 0.2)
    with served(engine, FakeScheduler(), request_s=0.7) as server:
        scheduler = server.service.scheduler
        scheduler.script = [*steps(["a" * 30_000_000] * 2 + ["b"])[:2], threading.Event()]  # more than any buffer takes
        body = json.dumps({**CHAT, "stream": True}).encode()
        with connect(server) as sock:
            sock.sendall(head(CHAT_PATH, len(body)) + body)
            until(lambda: scheduler.tickets)
            assert scheduler.tickets[0].cancelled.wait(20)
            until(lambda: not server.service.tickets)


@pytest.mark.parametrize("streamed, begun", [(False, False), (True, False), (True, True)])
def test_a_client_that_leaves_frees_its_slot(engine, streamed, begun):
    """While nothing has come yet, and between two steps; the server does not wait for the next one."""
    with served(engine, FakeScheduler()) as server:
        scheduler = server.service.scheduler
        scheduler.script = [*(steps(["a", "b"])[:1] if begun else []), threading.Event()]
        body = json.dumps({**CHAT, "stream": streamed}).encode()
        with connect(server) as sock:
            sock.sendall(head(CHAT_PATH, len(body)) + body)
            until(lambda: scheduler.tickets)
            if streamed:
                assert b"200 OK" in sock.recv(4096)  # before anything has come
            assert not scheduler.tickets[0].cancelled.is_set()
        assert scheduler.tickets[0].cancelled.wait(5)
        until(lambda: not server.service.tickets)
        metrics = httpx.get(server.address + "/metrics").text
        assert "dsv4_disconnects_total 1.0" in metrics
        assert f'path="{CHAT_PATH}",status="{200 if streamed else 499}"' in metrics


def test_a_ticket_that_just_ends(post, script):
    """As the scheduler's do when it closes: an answer never ends without a reason."""
    script(steps(["a", "b"])[:1])
    assert post(CHAT_PATH, CHAT).status_code == 503
    assert events(post(CHAT_PATH, {**CHAT, "stream": True}))[-1]["error"]["code"] == "closing"


def test_while_closing(engine):
    with served(engine, FakeScheduler()) as server, httpx.Client(base_url=server.address) as client:
        server.service.closing, server.service.scheduler.script = True, steps(["a"])
        response = client.post(CHAT_PATH, json=CHAT)
        assert response.status_code == 503 and response.headers["retry-after"]
        assert client.get("/health").status_code == 503 and client.get("/v1/models").status_code == 200


# ------------------------------------------------------------------------------------------------ the rest
def test_models_health_metrics(server, script, post):
    script(steps(["a"]))
    post(TEXT_PATH, TEXT), post(TEXT_PATH, {})
    with httpx.Client(base_url=server.address) as client:
        listed = client.get("/v1/models").json()
        assert [entry["id"] for entry in listed["data"]] == ["nano"] and client.get("/v1/models/nano").json() == listed["data"][0]
        text = client.get("/metrics").text
    for line in ("dsv4_running 7.0", "dsv4_waiting 7.0", "dsv4_rounds_total 7.0", "dsv4_accepted_total 7.0",
                 "dsv4_step_seconds_total 7.0", 'dsv4_http_requests_total{path="/v1/completions",status="200"}',
                 'dsv4_http_requests_total{path="/v1/completions",status="400"}', "dsv4_first_token_seconds_count",
                 "dsv4_request_seconds_count"):  # fmt: skip
        assert line in text, line


def test_the_page_is_kept_to_itself(server):
    with httpx.Client(base_url=server.address) as client:
        page = client.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        for name, kind in (("style.css", "text/css"), ("app.js", "text/javascript"), ("stream.js", "text/javascript"),
                           ("rounds.js", "text/javascript"), ("icon.svg", "image/svg+xml")):  # fmt: skip
            file = client.get(f"/page/{name}")
            assert file.status_code == 200 and file.headers["content-type"].startswith(kind)
            assert "innerHTML" not in file.text and "eval(" not in file.text
            assert "http" not in file.text.replace("http://www.w3.org/2000/svg", ""), "no outside address"
        assert "http" not in page.text and "<script>" not in page.text and " style=" not in page.text

"""The HTTP server over a scheduler that says what it is told: refusals, who may ask, time, clients that leave."""

import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_scheduler import FakeScheduler, served, steps, until  # noqa: E402
from server_cases import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOOL, engine, events, post, script, server  # noqa: E402, F401

from dsv4.errors import BackendError, CapacityError, CheckpointError, Dsv4Error, InputError, StateError  # noqa: E402
from dsv4.server import app, serving  # noqa: E402
from dsv4.server.serving import listen  # noqa: E402


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


LINE, HEADER = b"POST /v1/compl", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "


@pytest.mark.parametrize("asked, sent", [(0, b""), (0, LINE), (0, HEADER), (2, LINE), (2, HEADER)])
def test_a_head_that_never_ends(server, monkeypatch, asked, sent):
    """Its connection is closed, also one that was answered before, however often another byte comes; others are not."""
    monkeypatch.setattr(serving, "SLOW_HEADS", 0.5)
    start, end = time.monotonic(), None
    with connect(server) as slow, httpx.Client(base_url=server.address) as other:
        for _ in range(asked):
            slow.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b'"ok"}'):
                assert (part := slow.recv(4096))
                answer += part
        slow.sendall(sent)
        slow.settimeout(0.1)
        while end is None and time.monotonic() < start + 10:
            try:
                end = slow.recv(4096)
            except TimeoutError:
                slow.sendall(b"x" if sent else b"")
                assert other.get("/health").status_code == 200
    assert end == b"" and time.monotonic() > start + 0.5


def test_a_slow_body_and_a_slow_answer_are_no_slow_head(engine, monkeypatch):
    monkeypatch.setattr(serving, "SLOW_HEADS", 0.2)
    scheduler, go_on = FakeScheduler(), threading.Event()
    scheduler.script = [go_on, *steps(["a", "b"])]
    body = json.dumps(TEXT).encode()
    with served(engine, scheduler) as server, connect(server) as sock:
        sock.sendall(head(TEXT_PATH, len(body)))
        time.sleep(0.5)
        sock.sendall(body)
        threading.Timer(0.5, go_on.set).start()
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")


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
            allowed = {TEXT_PATH: "POST", "/v1/models": "GET, HEAD"}.get(path)
            assert response.headers.get("allow") == allowed
            assert allowed is None or f"expected {allowed}; found" in response.json()["error"]["message"]


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


def test_large_bodies_take_their_turns_and_leave_room(engine, monkeypatch):
    """What cuts them into tokens may take long: one at a time does, small ones pass, and who has left has no turn."""
    read, cutting, go_on = app.read_json, [], threading.Event()

    def slow(body):
        if len(body) > app.LARGE:
            cutting.append(json.loads(body)["seed"])
            assert go_on.wait(20)
        return read(body)

    monkeypatch.setattr(app, "read_json", slow)
    with served(engine, FakeScheduler()) as server:
        scheduler = server.service.scheduler
        scheduler.script = steps(["a", "b"])
        bodies = [json.dumps({**TEXT, "prompt": "1" * app.LARGE, "seed": seed}).encode() for seed in range(40)]
        socks = [connect(server) for _ in bodies]
        for sock, body in zip(socks, bodies):
            sock.sendall(head(TEXT_PATH, len(body)) + body)
            until(lambda: cutting)
        with httpx.Client(base_url=server.address, timeout=20) as client:
            assert client.post(TEXT_PATH, json=TEXT).status_code == 200
        for sock in socks[2:]:
            sock.close()
        assert len(cutting) == 1
        time.sleep(0.2)  # the server hears of it
        go_on.set()
        for sock in socks[:2]:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            sock.close()
        until(lambda: not server.service.tickets)
        assert set(cutting) == {0, 1} and len(scheduler.requests) == 3


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


def test_health_tells_of_a_worker_that_died(engine):
    with served(engine, FakeScheduler()) as found, httpx.Client(base_url=found.address) as client:
        assert client.get("/health").json() == {"status": "ok"}
        found.service.scheduler.broken = True
        answer = client.get("/health")
        assert answer.status_code == 503 and answer.json() == {"status": "failed"}


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

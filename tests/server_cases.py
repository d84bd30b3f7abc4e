"""What the tests of the server share: requests, a server over a scripted scheduler as fixtures, readers of streams."""

import json

import httpx
import pytest
from fake_engine import FakeEngine
from fake_scheduler import FakeScheduler, served

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

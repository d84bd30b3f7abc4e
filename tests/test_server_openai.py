"""The server over the real scheduler and the embedded model, asked by the official client: the answers of one request alone."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_scheduler import served, until  # noqa: E402

import dsv4  # noqa: E402
from dsv4.chat import encode_ids, parse, stop_ids  # noqa: E402
from dsv4.generate import complete  # noqa: E402
from dsv4.scheduler import Scheduler  # noqa: E402

CODE = [{"role": "user", "content": "Write a Python function count_total with arguments total."}]
STORY = [{"role": "user", "content": "Tell me a story about a wren."}]
# Greedy, nano tells this story in circles, without an end.
ENDLESS = {"model": "nano", "prompt": "Once upon a time", "max_tokens": 2000, "temperature": 0, "stream": True}
PROMPTS = ["Once upon a time", "def add(a, b):", "1, 2, 3, 4, ", "Oren has 6 bags of 12 eggs."]


@pytest.fixture(scope="module")
def alone():
    """An engine of its own, for what a request alone gives."""
    with dsv4.Engine.load("nano", max_sessions=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server():
    with dsv4.Engine.load("nano", max_sessions=4, max_context=2048) as engine:
        with Scheduler(engine, max_waiting=20, prefix_bytes=32 << 20) as scheduler:
            with served(engine, scheduler) as found:
                yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def stats(server):
    return SimpleNamespace(**server.service.scheduler.stats())


def of_completion(alone, prompt, **params):
    return complete(alone, prompt, dsv4.SamplingParams(**params))


def of_chat(alone, messages, thinking=False, **params):
    ids = encode_ids(messages, alone.tokenizer, thinking=thinking)
    found = complete(alone, ids, dsv4.SamplingParams(**{"max_tokens": 60, "stop_ids": stop_ids(alone.tokenizer), **params}))
    return parse(found.text, thinking=thinking), found


def joined(stream):
    """(the deltas' texts by field, the usage) of a stream."""
    found, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for name, value in choice.delta.model_dump(exclude_none=True).items():
                found[name] = found.get(name, "") + value
    return found, usage


def test_models(client):
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").max_context == 2048
    with pytest.raises(openai.NotFoundError, match="expected nano; found 'gpt'"):
        client.models.retrieve("gpt")


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 0.7, "seed": 6, "top_p": 0.8}],
                         ids=["greedy", "seed", "top_p"])  # fmt: skip
def test_completions_are_those_of_the_engine_alone(client, alone, how):
    for prompt in (*PROMPTS, alone.tokenizer.encode_prompt("One morning, ")):
        expected = of_completion(alone, prompt, max_tokens=30, **how)
        answer = client.completions.create(model="nano", prompt=prompt, max_tokens=30, **how)
        assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == expected.finish_reason
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, len(expected.tokens))
        stream = client.completions.create(model="nano", prompt=prompt, max_tokens=30, stream=True, **how)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


def test_top_k_and_min_p(client, alone):
    for more in ({"top_k": 2}, {"min_p": 0.3}):
        expected = of_completion(alone, PROMPTS[0], max_tokens=40, seed=3, **more)
        given = client.completions.create(model="nano", prompt=PROMPTS[0], max_tokens=40, seed=3, extra_body=more)
        assert given.choices[0].text == expected.text


def test_stop_texts(client, alone):
    whole = of_completion(alone, PROMPTS[0], max_tokens=60, temperature=0).text
    stop = whole[30:34]
    answer = client.completions.create(model="nano", prompt=PROMPTS[0], max_tokens=60, temperature=0, stop=[stop, "none"])
    assert answer.choices[0].text == whole[: whole.index(stop)] and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("effort, messages", [("none", STORY), ("low", STORY), ("low", CODE)])
def test_chat_answers_are_those_of_the_engine_alone(client, alone, effort, messages):
    how = {"model": "nano", "messages": messages, "temperature": 0, "max_tokens": 60, "reasoning_effort": effort}
    expected, found = of_chat(alone, messages, thinking=effort != "none", temperature=0)
    answer = client.chat.completions.create(**how)
    message = answer.choices[0].message
    assert message.content == expected["content"] and getattr(message, "reasoning_content", "") == expected["reasoning_content"]
    assert answer.usage.completion_tokens == len(found.tokens) and answer.choices[0].finish_reason == found.finish_reason
    deltas, usage = joined(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert deltas.pop("role") == "assistant" and usage == answer.usage.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details})
    assert deltas == {name: text for name, text in expected.items() if name in deltas}


def test_a_chat_answer_ends_where_another_turn_begins(client, alone):
    """A completion of the same prompt goes on."""
    messages, how = [{"role": "user", "content": "Hello"}], {"model": "nano", "temperature": 1, "seed": 7, "max_tokens": 60}
    prompt = encode_ids(messages, alone.tokenizer)
    whole = client.completions.create(prompt=prompt, **how).choices[0]
    content, marker, _ = whole.text.partition("<｜begin▁of▁sentence｜>")
    answer = client.chat.completions.create(messages=messages, **how).choices[0]
    assert marker and content and (answer.message.content, answer.finish_reason, whole.finish_reason) == (content, "stop", "length")


def test_a_conversation_reuses_its_beginning(client, alone, server):
    """The second turn starts from the state of the first: the same answer as from nothing."""
    messages = [{"role": "system", "content": "You tell long stories. " * 30}, *STORY]
    first = client.chat.completions.create(model="nano", messages=messages, temperature=0, max_tokens=20)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(model="nano", messages=messages, temperature=0, max_tokens=20)
    expected, _ = of_chat(alone, messages, temperature=0, max_tokens=20)
    assert second.choices[0].message.content == expected["content"]
    assert second.usage.prompt_tokens_details.cached_tokens > 100 and stats(server).prefix_hits > 0


def test_logprobs(client, alone):
    _, found = of_chat(alone, STORY, temperature=0, max_tokens=12, logprobs=3)
    answer = client.chat.completions.create(model="nano", messages=STORY, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [entry["logprob"] for entry in found.logprobs]
    assert [[top.logprob for top in e.top_logprobs] for e in entries] == [[t["logprob"] for t in e["top"]] for e in found.logprobs]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.choices[0].message.content
    found = of_completion(alone, PROMPTS[0], temperature=0, max_tokens=12, logprobs=2)
    given = client.completions.create(model="nano", prompt=PROMPTS[0], temperature=0, max_tokens=12, logprobs=2).choices[0]
    assert given.logprobs.token_logprobs == [entry["logprob"] for entry in found.logprobs]
    assert "".join(given.logprobs.tokens) == given.text and given.logprobs.text_offset[0] == 0


def test_rounds(alone):
    """Whatever drafts cost on this machine: no gate."""
    with Scheduler(alone, spec="always") as scheduler, served(alone, scheduler) as server:
        with openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            stream = client.completions.create(model="nano", prompt=PROMPTS[2], temperature=0, max_tokens=40, stream=True,
                                               extra_body={"dsv4_rounds": True})  # fmt: skip
            rounds = [entry for chunk in stream for entry in chunk.dsv4_rounds]
    assert rounds and sum(entry["accepted"] for entry in rounds) > 5
    for entry in rounds:
        assert len(entry["confidence"]) == entry["drafted"] >= entry["verified"] >= entry["accepted"] >= 0


def test_the_example_of_the_documentation(server, alone, capsys):
    text = (Path(__file__).parents[1] / "docs" / "server.md").read_text(encoding="utf-8")
    (code,) = re.findall("```python\n(.*?)```", text, re.DOTALL)
    exec(code.replace("http://127.0.0.1:8000", server.address))
    printed = capsys.readouterr().out
    assert len(alone.tokenizer.encode(printed)) > 10


# ------------------------------------------------------------------------------------------------ refused
def test_refusals_reach_the_client_as_its_exceptions(client):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="'no_such': unknown field") as refused:
        create(model="nano", messages=STORY, extra_body={"no_such": 1})
    assert refused.value.param == "no_such" and refused.value.code == "unknown_field"
    with pytest.raises(openai.BadRequestError, match=r"'max_token': unknown field; did you mean 'max_tokens'\?"):
        create(model="nano", messages=STORY, extra_body={"max_token": 9})
    with pytest.raises(openai.BadRequestError, match=r"'stream_options.include_usages': .*mean 'stream_options.include_usage'\?"):
        create(model="nano", messages=STORY, stream=True, stream_options={"include_usages": True})
    with pytest.raises(openai.NotFoundError, match="model: expected nano; found 'gpt-4o'"):
        create(model="gpt-4o", messages=STORY)
    with pytest.raises(openai.BadRequestError, match="prompt: expected at most 2047 tokens"):
        create(model="nano", messages=[{"role": "user", "content": "word " * 3000}])
    with pytest.raises(openai.BadRequestError, match="n: expected 1"):
        create(model="nano", messages=STORY, n=2)


def test_a_full_queue(client, server):
    """What runs and what waits is limited; the next is told to come again, and nothing of it stays behind."""
    streams = []
    with pytest.raises(openai.RateLimitError, match="waiting requests"):
        for _ in range(30):
            streams.append(client.completions.create(**ENDLESS))
    assert len(streams) >= 20
    for stream in streams:
        stream.close()
    until(lambda: stats(server).running == stats(server).waiting == 0 and not server.service.tickets)


# ------------------------------------------------------------------------------------------------ leaving, and many at once
def test_a_client_that_leaves_frees_its_slot(client, server):
    until(lambda: stats(server).running == 0)
    before = stats(server)
    stream = client.completions.create(**ENDLESS)
    next(iter(stream))
    assert stats(server).running == 1
    stream.close()
    until(lambda: stats(server).running == 0)
    assert stats(server).cancelled == before.cancelled + 1
    assert server.service.metrics.disconnects._value.get() > 0


def one(client, alone_answers, number):
    """Request `number` of a crowd: whole, streamed, or streamed and left early; and what is wrong with it, if anything."""
    prompt, expected = PROMPTS[number % 4], alone_answers[number % 8]
    params = {"model": "nano", "prompt": prompt, "max_tokens": expected.completion_tokens, "temperature": 1, "seed": number % 8}
    if number % 3 == 0:
        text = client.completions.create(**params).choices[0].text
        return None if text == expected.text else (number, text)
    text = ""
    with client.completions.create(**params, stream=True) as stream:
        for chunk in stream:
            text += chunk.choices[0].text
            if number % 3 == 1 and len(text) > number:
                return None if expected.text.startswith(text) else (number, text)
    return None if text == expected.text else (number, text)


def test_sixteen_clients_at_once(client, alone, server):
    """Whole answers, streams and clients that leave, side by side: each gets what it would have got alone."""
    lengths = [12, 70, 33, 5, 50, 21, 90, 40]
    answers = [of_completion(alone, PROMPTS[i % 4], max_tokens=lengths[i], seed=i) for i in range(8)]
    with ThreadPoolExecutor(16) as crowd:
        wrong = list(crowd.map(lambda number: one(client, answers, number), range(48)))
    assert [found for found in wrong if found] == []
    until(lambda: stats(server).running == stats(server).waiting == 0 and not server.service.tickets)
    until(lambda: all(thread.name != "dsv4-ticket" for thread in threading.enumerate()))


def test_metrics_count_it(client, server):
    client.completions.create(model="nano", prompt=PROMPTS[2], max_tokens=60, temperature=0)
    until(lambda: stats(server).running == 0)
    before = stats(server)
    text = httpx.get(server.address + "/metrics").text
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values["dsv4_generated_tokens_total"] == before.generated_tokens >= 60
    assert values["dsv4_accepted_total"] == before.accepted > 0 and values["dsv4_rounds_total"] > 0
    assert json.loads(httpx.get(server.address + "/health").text) == {"status": "ok"}

"""The prompt format: published vectors byte for byte, turns, tools, ids, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4
from dsv4.chat import EFFORTS, encode, encode_ids, parse, pieces, sampling_defaults, stop_ids
from dsv4.chat.markup import ASSISTANT, BOS, EOS, SPECIAL, USER
from dsv4.errors import ConfigError, InputError
from dsv4.tokenizer import Tokenizer

VECTORS = Path(__file__).parent / "chat_vectors"
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "description": "Grüße", "parameters": {"type": "object"}}}


def call(name="f", arguments="{}", id=None):
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if id is None else {"id": id, **found}


def answer(content=None, *calls, reasoning=None):
    found = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return {**found, "tool_calls": list(calls)} if calls else found


def result(content, id=None):
    return {"role": "tool", "content": content, **({"tool_call_id": id} if id else {})}


def vector(number: int) -> tuple[dict, str]:
    data = json.loads((VECTORS / f"input_{number}.json").read_text("utf-8"))
    return data if isinstance(data, dict) else {"messages": data}, (VECTORS / f"output_{number}.txt").read_text("utf-8")


@pytest.mark.parametrize("number", [1, 2])
def test_vectors_byte_for_byte(number):
    data, expected = vector(number)
    messages, tools = data["messages"], data.get("tools")
    assert encode(messages, tools=tools, thinking=True) == expected
    first = {**messages[0], "tools": tools}  # where the published lists carry them
    assert encode([first, *messages[1:]], thinking=True) == expected


def test_efforts_are_the_published_texts():
    assert EFFORTS == json.loads((VECTORS / "reasoning_effort.json").read_text("utf-8"))
    for effort, text in EFFORTS.items():
        assert encode([SYSTEM, HELLO], thinking=True, effort=effort).startswith(f"{BOS}{text}Be brief.{USER}")
        assert encode([SYSTEM, HELLO], effort=effort) == encode([SYSTEM, HELLO])  # chat mode has none


def test_the_package_offers_the_module():
    assert dsv4.chat.encode is encode


def test_chat_mode():
    assert encode([HELLO]) == f"{BOS}{USER}Hello{ASSISTANT}</think>"
    assert encode([HELLO], thinking=True) == f"{BOS}{USER}Hello{ASSISTANT}<think>"
    turns = [SYSTEM, HELLO, answer("Hi", reasoning="greet"), HELLO]
    assert encode(turns) == f"{BOS}Be brief.{USER}Hello{ASSISTANT}</think>Hi{EOS}{USER}Hello{ASSISTANT}</think>"
    assert encode(turns[:3]).endswith(f"</think>Hi{EOS}")


def test_earlier_reasoning_is_dropped_unless_tools_are_declared():
    turns = [HELLO, answer("Hi", reasoning="greet"), HELLO, answer("Yes", reasoning="agree")]
    old, new = f"{ASSISTANT}</think>Hi{EOS}", f"{ASSISTANT}<think>agree</think>Yes{EOS}"
    assert encode(turns, thinking=True) == f"{BOS}{USER}Hello{old}{USER}Hello{new}"
    kept = encode(turns, thinking=True, tools=[TOOL])
    assert f"{ASSISTANT}<think>greet</think>Hi{EOS}" in kept and kept.endswith(new)
    assert "greet" not in encode(turns, tools=[TOOL])  # chat mode


def test_a_result_is_a_users_turn_too():
    turns = [HELLO, answer("", call(id="a"), reasoning="look"), result("5", "a")]
    assert "look" not in encode(turns, thinking=True) and "look" in encode(turns, thinking=True, tools=[TOOL])


def test_tools_and_response_format():
    text = encode([HELLO], tools=[TOOL, TOOL], response_format={"type": "object", "title": "né"})
    head, _, tail = text.partition("\n\n### Available Tool Schemas\n\n")
    line = '{"name": "f", "description": "Grüße", "parameters": {"type": "object"}}'
    assert head.startswith(f"{BOS}\n\n## Tools\n\nYou have access")
    assert tail.startswith(f"{line}\n{line}\n\nYou MUST strictly follow")
    assert tail.endswith(
        "invoke tool calls.\n\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        f'{{"type": "object", "title": "né"}}{USER}Hello{ASSISTANT}</think>'
    )
    assert encode([HELLO], tools=[]) == encode([HELLO]) == encode([HELLO], response_format={"type": "text"})


@pytest.mark.parametrize(
    "given, schema",
    [
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"a": 1}}}, '{"a": 1}'),
        ({"a": [1, None]}, '{"a": [1, null]}'),
    ],
)
def test_forms_of_a_response_format(given, schema):
    assert f"to reply:\n{schema}{USER}" in encode([HELLO], response_format=given)
    assert encode([{"role": "system", "response_format": given}, HELLO]) == encode([HELLO], response_format=given)


def test_calls_say_what_is_text_and_what_is_json():
    arguments = '{"a": "5", "b": 5, "c": {"d": [1.5, null, "é"]}, "e": "two\\nlines", "f": true}'
    text = encode([HELLO, answer("Look:", call("f", arguments), call("g"))])
    assert text.endswith(
        """Look:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="false">5</｜DSML｜parameter>
<｜DSML｜parameter name="c" string="false">{"d": [1.5, null, "é"]}</｜DSML｜parameter>
<｜DSML｜parameter name="e" string="true">two
lines</｜DSML｜parameter>
<｜DSML｜parameter name="f" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="g">

</｜DSML｜invoke>
</｜DSML｜tool_calls><｜end▁of▁sentence｜>"""
    )


def test_results_stand_in_the_order_of_their_calls():
    asked = answer("", call(id="a"), call(id="b"), call(id="c"))
    text = encode([HELLO, asked, result("C", "c"), result("A", "a"), {"role": "user", "content": "and?"}, result("B", "b")])
    assert text.endswith(
        f"{USER}<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>\n\nand?\n\n<tool_result>C</tool_result>"
        f"{ASSISTANT}</think>"
    )
    unnamed = encode([HELLO, answer("", call(), call()), result("1"), result("2")])
    assert "<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>" in unnamed


def test_a_users_messages_in_a_row_are_one_turn():
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    one = f"{BOS}{USER}a\n\nb{ASSISTANT}</think>"
    assert encode([parts]) == encode([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == one


def test_reminders_belong_to_the_turn_they_stand_by():
    reminder = {"role": "latest_reminder", "content": "Monday"}
    assert encode([reminder, HELLO]) == f"{BOS}<｜latest_reminder｜>Monday{USER}Hello{ASSISTANT}</think>"
    assert encode([HELLO, reminder]) == f"{BOS}{USER}Hello<｜latest_reminder｜>Monday{ASSISTANT}</think>"


def test_nulls_count_as_absent():
    """What an OpenAI client sends back of an answer."""
    sent = {"role": "assistant", "content": "Hi", "refusal": None, "audio": None, "tool_calls": None}
    assert encode([HELLO, sent]) == encode([HELLO, answer("Hi")])


def test_sampling_defaults():
    assert sampling_defaults() == {"temperature": 1.0, "top_p": 1.0}
    assert sampling_defaults(tools=True) == {"temperature": 1.0, "top_p": 0.95}


# ---------------------------------------------------------------------- refused
USER_ROLE, OK = {"role": "user"}, [HELLO, answer("", call(id="a"))]
REFUSED = [
    ([], "messages: expected a list of at least one message"),
    ("hello", "messages: expected a list of at least one message, found 'hello'"),
    (["hello"], r"messages\[0\]: expected an object with role and content"),
    ([HELLO, {"role": "developer", "content": ""}], r"messages\[1\].role: 'developer' is internal"),
    ([{"role": "bot", "content": ""}], r"messages\[0\].role: expected system or user or .*, found 'bot'"),
    ([{"role": ["user"], "content": ""}], r"messages\[0\].role: expected .*, found 'list'"),
    ([{"content": ""}], r"messages\[0\].role: .* found None"),
    ([HELLO, SYSTEM], r"messages\[1\].role: expected the system message first, found it after 1"),
    ([USER_ROLE], r"messages\[0\].content: expected text, found None"),
    ([{**USER_ROLE, "content": 5}], r"messages\[0\].content: expected text, found 5"),
    ([{**USER_ROLE, "content": "a\ud800"}], r"messages\[0\].content: .* lone surrogate at character 1"),
    ([{**HELLO, "name": "Ann"}], r"messages\[0\]: unknown field 'name'; expected role, content"),
    ([{**HELLO, "tool_calls": []}], r"messages\[0\]: unknown field 'tool_calls'"),
    ([{**USER_ROLE, "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\].type: expected 'text'"),
    ([{**USER_ROLE, "content": [{"type": "text", "text": "", "x": 1}]}], r"content\[0\]: unknown field 'x'"),
    ([{**USER_ROLE, "content": ["a"]}], r"messages\[0\].content\[0\]: expected an object"),
    ([HELLO, {"role": "assistant"}], r"messages\[1\].content: expected content or tool_calls, found neither"),
    ([HELLO, {"role": "assistant", "tool_calls": {}}], r"messages\[1\].tool_calls: expected a list"),
    ([HELLO, answer("", "f")], r"messages\[1\].tool_calls\[0\]: expected an object"),
    ([HELLO, answer("", {**call(), "index": 0})], r"tool_calls\[0\]: unknown field 'index'"),
    ([HELLO, answer("", {**call(), "type": "custom"})], r"tool_calls\[0\].type: expected 'function'"),
    ([HELLO, answer("", {"function": {"name": "f"}})], r"function.arguments: expected a JSON object as text, found None"),
    ([HELLO, answer("", call('a"b'))], r"tool_calls\[0\].function.name: expected a name without quotation marks"),
    ([HELLO, answer("", call("f", '{"a\\nb": 1}'))], r"arguments: name: expected a name without quotation marks"),
    *(([HELLO, answer("", call("f", bad))], r"messages\[1\].tool_calls\[0\].function.arguments: expected a JSON object")
      for bad in ("", "{", "[1]", '{"a": NaN}', '"a"', "[" * 100_000, {"a": 1})),
    ([HELLO, answer("", call("f", '{"a": "\\ud800"}'))], r"arguments: a: .* lone surrogate"),
    ([HELLO, answer("", call(id="a"), call(id="a"))], r"tool_calls\[0\].id: expected an id of its own, found 'a' twice"),
    ([result("5", "a")], r"messages\[0\].tool_call_id: .*no calls.*found 'a'"),
    ([*OK, result("5", "b")], r"messages\[2\].tool_call_id: expected the id of a call of the last answer \('a'\), found 'b'"),
    ([*OK, result("5", "a"), result("6", "a")], r"messages\[3\].tool_call_id: .* found a second for 'a'"),
    ([*OK, result("5", "a"), result("6")], r"messages\[3\].tool_call_id"),
    ([*OK, {"role": "tool", "tool_call_id": "a"}], r"messages\[2\].content: expected text, found None"),
    ([{**SYSTEM, "tools": {}}], r"messages\[0\].tools: expected a list of tools"),
]  # fmt: skip


@pytest.mark.parametrize("messages, words", REFUSED, ids=[words[:60] for _, words in REFUSED])
def test_wrong_lists_are_refused_in_one_line(messages, words):
    with pytest.raises(InputError, match=words) as caught:
        encode(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"effort": "medium"}, "effort: expected low, high, max; found 'medium'"),
        ({"tools": [{"type": "web"}]}, r"tools\[0\].type: expected 'function', found 'web'"),
        ({"tools": [{**TOOL, "strict": True}]}, r"tools\[0\]: unknown field 'strict'"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\].function.name"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: expected an object"),
        ({"response_format": "json"}, "response_format: expected an object, found 'json'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "schema: expected a JSON schema, found None"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format: unknown field 'x'"),
        ({"response_format": {"a": float("nan")}}, "response_format: expected what JSON can say"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        encode([HELLO], **options)


def test_tools_twice_are_refused():
    with pytest.raises(InputError, match=r"messages\[0\].tools: expected it once"):
        encode([{**SYSTEM, "tools": [TOOL]}], tools=[TOOL])


# ---------------------------------------------------------------------- ids
@pytest.fixture(scope="module")
def tokenizer(nano_dir):
    return Tokenizer.load(nano_dir)


@pytest.mark.parametrize("number", [1, 2])
def test_ids_are_those_of_the_text(tokenizer, number):
    """Where no message holds a marker: nothing is lost at the seams of pieces."""
    data, text = vector(number)
    ids = encode_ids(data["messages"], tokenizer, tools=data.get("tools"), thinking=True)
    assert ids == tokenizer.encode(text, special=True)


MARKED = st.lists(st.sampled_from([*SPECIAL, "a", " b", "\n\n", "é", "<", "</think", "{}"]), max_size=6).map("".join)


@settings(max_examples=200, deadline=None)
@given(MARKED, MARKED, MARKED, MARKED, st.booleans())
def test_markers_in_messages_are_text(tokenizer, system, user, content, returned, thinking):
    """However many a message holds, the prompt has the special tokens of its form only."""

    def prompt(system, user, content, returned):
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            answer(content, call("f", json.dumps({"k": content, "j": [content]}), "1"), reasoning=content),
            result(returned, "1"),
            {"role": "latest_reminder", "content": user},
        ]

    messages = prompt(system, user, content, returned)
    tool = [{"type": "function", "function": {"name": "f", "description": system}}]
    options = {"tools": tool, "thinking": thinking, "response_format": {"title": user}}
    ids = encode_ids(messages, tokenizer, **options)
    assert tokenizer.decode(ids) == encode(messages, **options) == "".join(t for t, _ in pieces(messages, **options))
    plain = {**options, "tools": [{"type": "function", "function": {"name": "f", "description": "x"}}]}
    special = {tokenizer.token_id(name) for name in SPECIAL}
    bare = encode_ids(prompt("x", "x", "x", "x"), tokenizer, **{**plain, "response_format": {"title": "x"}})
    assert [i for i in ids if i in special] == [i for i in bare if i in special]


def test_a_tokenizer_without_the_markers_is_named():
    class Bare:
        path = "tokenizer.json"

        def token_id(self, text):
            return None

    with pytest.raises(ConfigError, match="tokenizer.json: expected the chat format's token <｜begin▁of▁sentence｜>"):
        encode_ids([HELLO], Bare())


def test_what_begins_another_turn_ends_an_answer(tokenizer):
    ended = stop_ids(tokenizer)
    assert tokenizer.decode(ended) == "<｜begin▁of▁sentence｜><｜User｜><｜Assistant｜><｜latest_reminder｜>" and len(ended) == 4
    assert tokenizer.token_id("<think>") not in ended


def test_an_answer_survives_being_written_and_read():
    arguments = '{"a": "5", "b": 5, "c": {"d": [1.5, null, "é\\n"]}}'
    said = answer("Look:", call("f", arguments), call("g"), reasoning="hm")
    text = encode([HELLO, said], thinking=True).partition("<think>")[2]
    assert parse(text, thinking=True) == said


def test_the_example_of_the_page_runs(capsys):
    page = Path(__file__).resolve().parent.parent / "docs" / "chat.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out.startswith("Once upon a time, Elsa lived near the mill.")

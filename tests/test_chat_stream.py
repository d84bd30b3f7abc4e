"""Parsing answers: whole, cut anywhere, and malformed."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.chat import StreamParser, encode, parse, parsing
from dsv4.chat.markup import CALLS, END_CALLS, END_INVOKE, END_PARAMETER, EOS, INVOKE, PARAMETER
from dsv4.errors import StateError

VECTORS = Path(__file__).parent / "chat_vectors"


def param(name, value, string="true"):
    return f'{PARAMETER}{name}" string="{string}">{value}{END_PARAMETER}\n'


def invoke(name, *params):
    return f'{INVOKE}{name}">\n{"".join(params)}{END_INVOKE}\n'


def block(*invokes):
    return f"{CALLS}\n{''.join(invokes)}{END_CALLS}"


def message(content="", *calls, reasoning=""):
    calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": calls}


def answers() -> list[str]:
    """The assistant turns of the vectors, with their end tokens."""
    text = "".join((VECTORS / f"output_{i}.txt").read_text("utf-8") for i in (1, 2))
    return [part.partition(EOS)[0] + EOS for part in text.split("<｜Assistant｜>")[1:]]


def in_pieces(text, cuts, thinking):
    """The message, and what the deltas add up to."""
    parser = StreamParser(thinking=thinking)
    deltas = []
    bounds = [0, *sorted(cuts), len(text)]
    for start, stop in zip(bounds, bounds[1:]):
        deltas += parser.feed(text[start:stop])
    deltas += parser.close() + parser.close()
    added = message()
    for delta in deltas:
        ((name, value),) = delta.items()
        if name == "tool_calls":
            (call,) = value
            assert call.pop("index") == len(added["tool_calls"])
            added[name].append(call)
        else:
            assert value
            added[name] += value
    assert added == parser.message
    return added


CALLED = message("Look:", ("f", '{"a": "5", "b": 5, "c": {"d": [1, null]}}'), ("g", "{}"))
TEXT = "Look:\n\n" + block(
    invoke("f", param("a", "5"), param("b", "5", "false"), param("c", '{"d": [1, null]}', "false")), invoke("g")
)
WELL_FORMED = [
    ("", False, message()),
    ("Hello", False, message("Hello")),
    ("Hello" + EOS, False, message("Hello")),
    ("</think>Hello" + EOS, False, message("Hello")),  # with its prefix
    ("hm</think>Hello", True, message("Hello", reasoning="hm")),
    ("<think>hm</think>Hello", True, message("Hello", reasoning="hm")),
    ("hm", True, message(reasoning="hm")),
    ("hm" + EOS, True, message(reasoning="hm")),
    ("</think>", True, message()),
    ("a</think>b</think>c", True, message("b</think>c", reasoning="a")),
    ("a<think>b", False, message("a<think>b")),
    ("a\n\n\n", False, message("a\n\n\n")),
    (TEXT, False, CALLED),
    (TEXT + EOS, False, CALLED),
    ("hm</think>" + TEXT, True, {**CALLED, "reasoning_content": "hm"}),
    (TEXT[7:], False, {**CALLED, "content": ""}),
    ("a\n" + block(invoke("f")), False, message("a\n", ("f", "{}"))),
    ("a\n\n\n" + block(invoke("f")), False, message("a\n", ("f", "{}"))),
    (block(f'{INVOKE}f">\n\n{END_INVOKE}'), False, message("", ("f", "{}"))),
    (block(invoke("f", param("a", "x\n</think>\n\n" + EOS))), False,
     message("", ("f", json.dumps({"a": "x\n</think>\n\n" + EOS}, ensure_ascii=False)))),
    (block(invoke("f", param("a", "1e5 ", "false"))), False, message("", ("f", '{"a": 1e5 }'))),
    (block(invoke("f")) + "then" + block(invoke("g")), False, message("then", ("f", "{}"), ("g", "{}"))),
    (f"{CALLS}{invoke('f')}\n", False, message("", ("f", "{}"))),  # cut short after a whole call
    (f"{CALLS}{invoke('f')}\n" + EOS, False, message("", ("f", "{}"))),
]  # fmt: skip
OPENED = f"{CALLS}\n{INVOKE}"
MALFORMED = [
    CALLS,
    END_CALLS,
    f"a\n\n{CALLS}",
    f"a\n\n{CALLS}\nhello",
    block(),  # no calls
    OPENED + 'f"',
    OPENED + 'f" x="1">',
    OPENED + '">',
    OPENED + "f\n\">",
    block(invoke("f", "text")),
    block(invoke("f", param("a", "1", "maybe"))),
    block(invoke("f", param("a", "oops", "false"))),
    block(invoke("f", param("a", "NaN", "false"))),
    block(invoke("f", param("a", "1e999", "false"))),
    block(invoke("f", param("a", '"\\ud800"', "false"))),
    block(invoke("f", param("a", "[" * 100_000, "false"))),
    block(invoke("f", param("a", "1" * 10_000, "false"))),
    block(invoke("f", param("a", "1"), param("a", "2"))),
    block(invoke("f", param("", "1"))),
    TEXT[: TEXT.index(END_INVOKE)],  # cut short
    f"{EOS}more",
    "<｜DSML｜tool_callz>",
]


@pytest.mark.parametrize("text, thinking, expected", WELL_FORMED)
def test_every_cut_gives_the_same_parse(text, thinking, expected):
    assert parse(text, thinking=thinking) == expected
    for cut in range(len(text) + 1):
        assert in_pieces(text, [cut], thinking) == expected
    assert in_pieces(text, range(len(text)), thinking) == expected


@pytest.mark.parametrize("text", answers())
def test_every_cut_of_the_vectors(text):
    thinking = text.startswith("<think>")
    whole = parse(text, thinking=thinking)
    assert all(whole[key] for key in ["reasoning_content"] * thinking) and (whole["content"] or whole["tool_calls"])
    for cut in range(len(text) + 1):
        assert in_pieces(text, [cut], thinking) == whole
    assert in_pieces(text, range(len(text)), thinking) == whole


def test_the_vectors_answers_are_their_messages():
    messages = json.loads((VECTORS / "input_1.json").read_text("utf-8"))["messages"]
    said = [parse(text, thinking=True) for text in answers()[:2]]
    asked = messages[2]["tool_calls"][0]["function"]
    assert said[0] == message("", (asked["name"], asked["arguments"]), reasoning=messages[2]["reasoning_content"])
    assert said[1] == message(messages[4]["content"], reasoning=messages[4]["reasoning_content"])


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("before", ["", "hm\n\n"])
def test_malformed_markup_is_content(text, before):
    text = before + text
    assert parse(text) == message(text)
    cuts = range(len(text)) if len(text) < 1000 else range(0, len(text), 997)
    for cut in cuts:
        assert in_pieces(text, [cut], False) == message(text)


def test_calls_before_the_malformed_one_count():
    text = f"a\n\n{CALLS}\n{invoke('f', param('k', 'v'))}{INVOKE}g\">oops{END_INVOKE}\n{END_CALLS}"
    expected = message(f'a{INVOKE}g">oops{END_INVOKE}\n{END_CALLS}', ("f", '{"k": "v"}'))
    for cut in range(len(text) + 1):
        assert in_pieces(text, [cut], False) == expected


def test_text_comes_as_soon_as_it_is_certain():
    parser = StreamParser()
    assert parser.feed("Hello") == [{"content": "Hello"}]
    assert parser.feed("\n") == []
    assert parser.feed("\n<") == []
    assert parser.feed("b>") == [{"content": "\n\n<b>"}]
    assert parser.feed("\n\n" + CALLS) == []
    assert parser.feed("oops") == [{"content": f"\n\n{CALLS}oops"}]
    assert parser.feed(block(invoke("f"))[:-1]) == [
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    ]
    thinking = StreamParser(thinking=True)
    assert thinking.feed("hm<") == [{"reasoning_content": "hm"}]
    assert thinking.feed("/think>Yes") == [{"content": "Yes"}]


def test_a_long_call_is_not_read_again_with_every_piece(monkeypatch):
    seen = []
    monkeypatch.setattr(parsing, "strict_json", lambda text: seen.append(text))
    values = [f"[{i}]" for i in range(5)]
    text = block(invoke("f", *(param(f"p{i}", value, "false") for i, value in enumerate(values))))
    in_pieces(text, range(len(text)), False)
    assert seen == values


def test_nothing_comes_after_the_end():
    parser = StreamParser()
    parser.close()
    with pytest.raises(StateError, match="found text after its end"):
        parser.feed("x")


PARTS = ["a", "\n", "\n\n", " ", EOS, "<think>", "</think>", CALLS, END_CALLS, INVOKE + 'f">', END_INVOKE, "<｜DSML｜",
         f'{PARAMETER}a" string="true">', f'{PARAMETER}b" string="false">', END_PARAMETER, "5", "{", '"', "｜", "<"]  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join), st.data(), st.booleans())
def test_any_markup_cut_anywhere(text, data, thinking):
    """No text raises, none is lost but for markup understood, and no cut matters."""
    whole = parse(text, thinking=thinking)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert in_pieces(text, cuts, thinking) == whole
    assert in_pieces(text, range(len(text)), thinking) == whole
    if not whole["tool_calls"] and not thinking:
        assert text.removeprefix("</think>").removesuffix(EOS) == whole["content"]


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='"\n'), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(WORDS, WORDS, st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3), st.booleans(), st.data())
def test_answers_survive_being_written_and_read(content, reasoning, calls, thinking, data):
    said = message(content, *((n, json.dumps(a, ensure_ascii=False)) for n, a in calls), reasoning=reasoning)
    sent = {**said, "tool_calls": said["tool_calls"] or None}
    text = encode([{"role": "user", "content": "x"}, sent], thinking=thinking).partition("<｜Assistant｜>")[2]
    text = text.partition("<think>" if thinking else "</think>")[2]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    assert in_pieces(text, cuts, thinking) == {**said, "reasoning_content": reasoning if thinking else ""}

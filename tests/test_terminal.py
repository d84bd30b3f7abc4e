"""The terminal chat without a screen: what is prefilled, kept, stopped, saved; commands; plain lines."""

import io
import json
import signal
import sys
from pathlib import Path

import pytest

from dsv4 import SamplingParams
from dsv4.chat import encode_ids, parse, stop_ids
from dsv4.errors import ConfigError, InputError
from dsv4.generate import complete
from dsv4.terminal import Chat, Stopped
from dsv4.terminal_screen import Screen, open_reader

CODE = "Write a Python function count_total with arguments total."  # what nano answers at length, thinking or not
ASKS = ["Write a short story about Elsa.", "Count in threes.", "Hello", "Write a short story about Tobin.", CODE]


@pytest.fixture
def chat(engine):
    """chat(max_tokens=…, chunk=…, **options): a greedy chat on nano."""
    made = []

    def make(max_tokens=40, max_context=700, chunk=16, **options):
        loaded = engine("nano", max_context=max_context, chunk=chunk, max_sessions=2)
        made.append(Chat(loaded, SamplingParams(max_tokens=max_tokens, temperature=0), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(chat, text):
    """The whole answer as a message."""
    for _ in chat.ask(text):
        pass
    return chat.messages[-1]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("chunk", [16, 128])
def test_answers_are_those_of_a_new_session_each_time(chat, engine, thinking, chunk):
    """Kept, rewound or restored, the session says what one says that reads the whole prompt."""
    talk = chat(chunk=chunk, thinking=thinking, system="You tell stories.")
    for text in ASKS:
        said = ask(talk, text)
        prompt = encode_ids(talk.messages[:-1], talk.engine.tokenizer, thinking=thinking)
        params = SamplingParams(max_tokens=40, temperature=0, stop_ids=stop_ids(talk.engine.tokenizer))
        alone = complete(engine("nano", max_context=700), prompt, params, spec="off")
        expected = parse(alone.text, thinking=thinking)
        assert said["content"] == expected["content"]
        assert said.get("reasoning_content", "") == expected["reasoning_content"]
        assert talk.stats.completion_tokens == alone.completion_tokens
        assert talk.stats.finish_reason == alone.finish_reason
        assert talk.stats.prompt_tokens == len(prompt)


@pytest.mark.parametrize("marker, seed", [("<｜begin▁of▁sentence｜>", 7), ("<｜Assistant｜>", 15)])
def test_an_answer_ends_where_another_turn_begins(engine, marker, seed):
    """The model samples a marker instead of its end token and would go on; the next answer is that of the text before it."""
    loaded, params = engine("nano", max_context=700, max_sessions=2), SamplingParams(max_tokens=60, seed=seed)
    prompt = encode_ids([{"role": "user", "content": "Hello"}], loaded.tokenizer)
    tokens = complete(loaded, prompt, params).tokens
    end = tokens.index(loaded.tokenizer.token_id(marker))
    with Chat(loaded, params) as talk:
        assert ask(talk, "Hello")["content"] == loaded.tokenizer.decode(tokens[:end]) and end + 1 < len(tokens)
        assert (talk.stats.completion_tokens, talk.stats.finish_reason) == (end + 1, "stop")
        ask(talk, "More")
        assert talk.session.tokens[: talk.stats.prompt_tokens] == encode_ids(talk.messages[:-1], loaded.tokenizer)


def test_only_what_is_new_is_prefilled(chat):
    talk = chat()
    ask(talk, ASKS[0])
    assert talk.stats.new_tokens == talk.stats.prompt_tokens
    held = talk.session.position
    ask(talk, ASKS[2])
    assert talk.stats.new_tokens == talk.stats.prompt_tokens - held  # the answer's last token was not consumed yet
    talk.set_system("Other.")
    ask(talk, ASKS[2])
    assert talk.stats.new_tokens == talk.stats.prompt_tokens  # from the beginning


def test_reasoning_that_the_next_prompt_leaves_out_costs_no_second_reading(chat):
    """The answer is longer than a rewind reaches: the snapshot from before it is restored."""
    talk = chat(max_tokens=60, thinking=True)
    assert len(ask(talk, CODE)["reasoning_content"]) > 100 and talk.stats.completion_tokens == 60
    first = talk.stats.prompt_tokens
    ask(talk, ASKS[2])
    assert talk.stats.new_tokens == talk.stats.prompt_tokens - (first - 1)


def test_an_answer_that_is_read_as_other_tokens_costs_no_second_reading_of_what_was_before(chat):
    """Sampled tokens need not be those that their text is split into."""
    talk = chat(max_tokens=60)
    ask(talk, ASKS[0])
    first = talk.stats.prompt_tokens
    talk.messages[-1]["content"] = "Other words." + talk.messages[-1]["content"]
    ask(talk, ASKS[2])
    assert talk.stats.new_tokens == talk.stats.prompt_tokens - (first - 1)


def test_a_stopped_answer_stays_as_far_as_it_came(chat):
    talk = chat(max_tokens=200)
    seen = ""
    for delta in talk.ask("Hello"):
        seen += delta["content"]
        talk.stop()
    assert talk.stats.finish_reason == "stopped" and 0 < talk.stats.completion_tokens < 20
    assert talk.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": seen}]
    assert ask(talk, "Hello")["content"] and talk.stats.finish_reason != "stopped"


def test_a_message_stopped_while_it_is_read_is_taken_back(chat, monkeypatch):
    talk = chat()
    ask(talk, "Hello")
    before = list(talk.messages)
    forward = talk.engine.forward
    monkeypatch.setattr(talk.engine, "forward", lambda rows: (talk.stop(), forward(rows))[1])
    with pytest.raises(Stopped):
        ask(talk, "word " * 40)
    monkeypatch.undo()
    assert talk.messages == before
    held = talk.session.position
    ask(talk, "word " * 40)
    assert talk.stats.new_tokens <= talk.stats.prompt_tokens - held  # what was read already is not read again


def test_a_conversation_that_does_not_fit_is_refused_and_kept(chat):
    talk = chat(max_context=128)
    with pytest.raises(InputError, match="chat: expected a conversation of at most 127 tokens, found .*; /reset it, or start with a larger --max-context$"):
        ask(talk, "word " * 100)
    with pytest.raises(InputError, match=r"; /reset it \(this model has 8192 positions\)$"):
        ask(chat(max_context=8192), "word " * 8000)
    assert talk.messages == []
    ask(talk, "Hello")
    talk.params = SamplingParams(max_tokens=1000, temperature=0).seeded()
    talk.reset()
    ask(talk, "Hello")
    stats = talk.stats
    assert stats.finish_reason == "length" and stats.prompt_tokens + stats.completion_tokens == 128


def test_system_and_reset(chat):
    talk = chat(system="A")
    ask(talk, "Hello")
    talk.set_system("B")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"] and talk.system == "B"
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "B"}] and talk.session.position == 0
    talk.set_system("")
    assert talk.messages == [] and talk.system == ""


def test_save_and_load(chat, tmp_path):
    talk = chat(system="Grüße")
    ask(talk, "Hello")
    talk.save(tmp_path / "a.json")
    saved = talk.messages
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == saved
    talk.reset()
    talk.load(tmp_path / "a.json")
    assert talk.messages == saved
    again = ask(talk, "Hello")
    other = chat(system="Grüße")
    ask(other, "Hello")
    assert ask(other, "Hello") == again


@pytest.mark.parametrize("content, words", [
    (None, "a.json: expected a readable file; No such file"),
    (b"{", "a.json: expected a JSON list of messages; "),
    (b"\xff", "a.json: expected a JSON list of messages; "),
    (b"[" * 100_000, "a.json: expected a JSON list of messages; "),
    (b"{}", "a.json: messages: expected a list of at least one message"),
    (b'[{"role": "bot"}]', r"a.json: messages\[0\].role: expected"),
])  # fmt: skip
def test_a_file_that_is_no_conversation_is_refused(chat, tmp_path, content, words):
    talk = chat()
    ask(talk, "Hello")
    before = list(talk.messages)
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=words):
        talk.load(tmp_path / "a.json")
    with pytest.raises(InputError, match="zero: expected a readable file; found none"):
        talk.load(Path("/dev/zero"))
    assert talk.messages == before


def test_a_place_that_cannot_be_written_to_is_named(chat, tmp_path):
    with pytest.raises(InputError, match="none/a.json: expected a place to write the conversation to; No such file"):
        chat().save(tmp_path / "none" / "a.json")


def test_a_checkpoint_without_a_tokenizer_is_refused(engine):
    with pytest.raises(InputError, match="chat: expected a checkpoint with tokenizer.json"):
        Chat(engine("tiny-a", max_sessions=1), SamplingParams())


# ---------------------------------------------------------------------- the screen
def run(talk, lines, monkeypatch, capsys, terminal=False):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    Screen(talk, open_reader(False), terminal).run()
    return capsys.readouterr()


def test_lines_in_answers_out(chat, monkeypatch, capsys):
    talk = chat(spec="always")  # the gate may find that drafts do not pay here
    output = run(talk, ["Hello", "", "   ", "/quit", "Hello"], monkeypatch, capsys)
    assert output.out == talk.messages[1]["content"] + "\n" and len(talk.messages) == 2
    assert "40 tokens · " in output.err and "tok/s" in output.err and "drafted accepted" in output.err


def test_a_space_makes_a_slash_a_message(chat, monkeypatch, capsys):
    talk = chat(max_tokens=3)
    run(talk, [" /reset"], monkeypatch, capsys)
    assert talk.messages[0]["content"] == "/reset"


def test_commands(chat, monkeypatch, capsys, tmp_path):
    talk = chat(max_tokens=3)
    lines = ["/help", "/system Be kind.", "/system", "Hello", f"/save {tmp_path}/x", "/reset", f"/load {tmp_path}/x", "/think on"]
    notes = run(talk, lines, monkeypatch, capsys).err
    for words in ("/save FILE", "system: Be kind.\nsystem: Be kind.\n", "3 messages written", "forgotten", "x: 3 messages\n", "thinking: on"):
        assert words in notes
    assert talk.thinking and [m["role"] for m in talk.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("line, words", [
    ("/sing", "/sing: expected a command, found none of that name; /help lists them"),
    ("/think maybe", "/think: expected on or off, found 'maybe'"),
    ("/save", "/save: expected the name of a file, found none"),
    ("/load", "/load: expected the name of a file, found none"),
    ("/save ~nobody.here/x", "/save: expected the name of a file, found '~nobody.here/x'; Could not determine home directory."),
    ("/save a\0b", "a\0b: expected a place to write the conversation to; embedded null byte"),
])  # fmt: skip
def test_wrong_commands(chat, monkeypatch, capsys, line, words):
    talk = chat(max_tokens=3)
    with pytest.raises(InputError) as caught:
        run(talk, [line, "Hello"], monkeypatch, capsys)
    assert str(caught.value) == words and not talk.messages  # plain lines: a script ends at its first mistake
    shown = run(talk, [line, "Hello"], monkeypatch, capsys, terminal=True)
    assert f"error: {words}".replace("\0", "\\x00") in shown.out and len(talk.messages) == 2  # a person goes on


def test_reasoning_is_marked(chat, monkeypatch, capsys):
    talk = chat(thinking=True)

    def answer(text):
        talk.stats = STATS
        yield {"reasoning_content": "h"}
        yield {"reasoning_content": "m\x1b[2J\x9b"}
        yield {"content": "yes"}
        yield {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "f\x1b[2J", "arguments": "{}"}}]}

    ask(talk, "Hello")
    STATS = talk.stats
    monkeypatch.setattr(talk, "ask", answer)
    assert run(talk, ["x"], monkeypatch, capsys).out == "<think>hm\x1b[2J\x9b</think>\nyes\n[f\x1b[2J {}]\n"
    shown = run(talk, ["x"], monkeypatch, capsys, terminal=True).out
    assert shown.startswith("\x1b[2mhm\\x1b[2J\\x9b\x1b[0m\nyes\n[f\\x1b[2J {}]\n\x1b[2m")  # a model cannot move the cursor
    monkeypatch.setattr(talk, "ask", lambda text: iter([{"reasoning_content": "hm"}]))
    assert run(talk, ["x"], monkeypatch, capsys).out == "<think>hm</think>\n\n"


def test_ctrl_c_beside_an_answer_keeps_the_talk(chat, monkeypatch, capsys):
    talk = chat(max_tokens=3)
    monkeypatch.setattr(talk, "reset", lambda: signal.raise_signal(signal.SIGINT))
    run(talk, ["/reset", "Hello"], monkeypatch, capsys, terminal=True)
    assert len(talk.messages) == 2
    with pytest.raises(KeyboardInterrupt):
        run(talk, ["/reset", "Hello"], monkeypatch, capsys)


def test_answers_reach_a_terminal_without_control_characters_wherever_the_lines_come_from(chat, monkeypatch, capsys):
    talk = chat(max_tokens=3, system="\x1b[2J")
    ask(talk, "Hello")
    monkeypatch.setattr(talk, "ask", lambda text: iter([{"content": "\x1b[2J"}]))
    assert run(talk, ["x"], monkeypatch, capsys).out == "\x1b[2J\n"
    assert "\x1b[2J" not in run(talk, ["x", "/system"], monkeypatch, capsys, terminal=True).out  # a loaded file's text, too
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(talk, ["x"], monkeypatch, capsys).out == "\\x1b[2J\n"


def test_a_terminal_without_prompt_toolkit_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(ConfigError, match=r"expected the package prompt_toolkit, for a terminal; found none; `pip install -e '.\[chat\]'`"):
        open_reader(True)
    open_reader(False)


def test_input_that_is_no_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8"))
    with pytest.raises(InputError, match="standard input: expected UTF-8 text"):
        open_reader(False)()

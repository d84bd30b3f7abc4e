"""The tokenizer: text to ids and back, whole and token by token."""

import json
import shutil
import sys
import threading
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import CheckpointError, ConfigError, InputError
from dsv4.tokenizer import Tokenizer

TEXTS = [
    "Once upon a time",
    "  two  spaces\n\nand\ttabs ",
    "naïve café – “quoted” … €",
    "你好，世界。これはペンです",
    "🎉👩‍👩‍👧‍👦🇩🇪 e\u0301 \u200b",
    "<think>x</think> ｜DSML｜ <｜User｜>",
    "def f(x):\n    return x + 1234567\n",
    "\0\x7f\ufffd\U0010ffff",
]


@pytest.fixture(scope="module")
def tokenizer(nano_dir):
    return Tokenizer.load(nano_dir)


@pytest.fixture(scope="module")
def library(nano_dir):
    return tokenizers.Tokenizer.from_file(str(nano_dir / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_text_survives_whole_and_token_by_token(tokenizer, text, special):
    ids = tokenizer.encode(text, special=special)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text  # no half characters on the way


def test_a_character_split_over_tokens_comes_with_its_last_one(tokenizer):
    ids = tokenizer.encode("🎉")
    assert len(ids) > 1
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🎉"]
    assert stream.finish() == ""


def test_a_stream_cut_anywhere_equals_the_whole(tokenizer):
    ids = [token for text in TEXTS for token in tokenizer.encode(text, special=True)]
    for cut in range(len(ids) + 1):
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids[:cut])) + stream.finish() == tokenizer.decode(ids[:cut])


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 639), max_size=20))
def test_any_tokens_decode_as_the_library_does(tokenizer, library, ids):
    """Also sequences no text gives: broken UTF-8, special tokens inside characters."""
    whole = tokenizer.decode(ids)
    assert whole == library.decode(ids, skip_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == whole


def test_special_tokens_are_text_unless_asked_for(tokenizer):
    assert tokenizer.encode("<think>", special=True) == [5]
    plain = tokenizer.encode("<think>")
    assert 5 not in plain and tokenizer.decode(plain) == "<think>"
    assert tokenizer.encode("<think>", special=True) == [5]  # the one does not disturb the other


def test_a_prompt_begins_with_the_begin_token_once(tokenizer):
    assert tokenizer.bos == "<｜begin▁of▁sentence｜>" and tokenizer.eos == "<｜end▁of▁sentence｜>"
    bare = tokenizer.encode_prompt("Once")
    assert bare[0] == 0 and bare.count(0) == 1
    assert tokenizer.encode_prompt(tokenizer.bos + "Once") == bare
    assert tokenizer.encode_prompt("") == []


def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(InputError, match="expected valid Unicode; found a lone surrogate at character 2"):
        tokenizer.encode("ab\udc80")


def test_ids_without_a_token_give_no_text(tokenizer):
    assert tokenizer.decode([5000, 5]) == "<think>"


def test_no_tokenizer_file_means_no_tokenizer(tmp_path):
    assert Tokenizer.load(tmp_path) is None


def _copy(nano_dir, target, change=None):
    shutil.copy(nano_dir / "tokenizer.json", target)
    data = json.loads((target / "tokenizer.json").read_text())
    if change:
        change(data)
    (target / "tokenizer.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    "files, bos",
    [
        ({"tokenizer_config.json": {"bos_token": "<think>"}}, "<think>"),
        ({"tokenizer_config.json": {"bos_token": {"content": "<think>"}}}, "<think>"),
        ({"generation_config.json": {"bos_token_id": 5}}, "<think>"),
        ({"generation_config.json": {"bos_token_id": [5, 6]}}, "<think>"),
        ({"tokenizer_config.json": {"bos_token": None}, "generation_config.json": {"bos_token_id": 5}}, "<think>"),
        ({}, None),
    ],
)
def test_where_the_begin_token_is_named(nano_dir, tmp_path, files, bos):
    _copy(nano_dir, tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos == bos
    assert tokenizer.encode_prompt("a")[0] == (5 if bos else tokenizer.encode("a")[0])


def test_the_vocabulary_must_fit_the_model(nano_dir):
    for size in (640, 1000):  # real checkpoints have rows to spare
        Tokenizer.load(nano_dir, SimpleNamespace(vocab_size=size, bos_token_id=0))
    with pytest.raises(ConfigError, match="tokenizer.json: 640 tokens, but vocab_size in config.json is 639"):
        Tokenizer.load(nano_dir, SimpleNamespace(vocab_size=639, bos_token_id=0))
    with pytest.raises(ConfigError, match="has id 0, but bos_token_id in config.json is 7"):
        Tokenizer.load(nano_dir, SimpleNamespace(vocab_size=640, bos_token_id=7))


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 3}'])
def test_a_broken_tokenizer_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer.json: not a tokenizer file") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_kind_of_tokenizer_is_refused(nano_dir, tmp_path):
    _copy(nano_dir, tmp_path, lambda data: data.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}))
    with pytest.raises(ConfigError, match="decoder: expected ByteLevel, found WordPiece"):
        Tokenizer.load(tmp_path)


def test_a_broken_settings_file_is_named(nano_dir, tmp_path):
    _copy(nano_dir, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config.json: expected JSON"):
        Tokenizer.load(tmp_path)


def test_other_threads_run_while_a_long_text_is_encoded(nano_dir):
    tokenizer, go, ran = Tokenizer.load(nano_dir), threading.Event(), []
    other = threading.Thread(target=lambda: (go.wait(), ran.append(True)))
    other.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is asked to let others run
    try:
        go.set()
        tokenizer.encode("ab" * 500_000)
        done = bool(ran)
    finally:
        sys.setswitchinterval(before)
        other.join()
    assert done

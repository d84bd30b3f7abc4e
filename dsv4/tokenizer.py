"""Text ↔ token ids: a byte-level BPE tokenizer.json read by the `tokenizers` library."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from .errors import CheckpointError, ConfigError, InputError


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's alphabet: letter → byte. Printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_LETTERS = _byte_letters()


def _bytes_of(name: str) -> bytes:
    """What a token of this name in the vocabulary stands for; special tokens: their name."""
    whole = all(letter in _LETTERS for letter in name)
    return bytes(_LETTERS[letter] for letter in name) if whole else name.encode("utf-8")


def _read_json(path: Path) -> dict:
    """A JSON object, {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON; {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object; found {type(data).__name__}")
    return data


class Tokenizer:
    """encode and decode; `bos` and `eos` are the texts of the begin and end tokens, None where unknown."""

    def __init__(self, directory: Path):
        from tokenizers import Tokenizer as Library

        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            self._markup = Library.from_str(text)
            self._plain = Library.from_str(text)
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise CheckpointError(f"{path}: not a tokenizer file that can be read: {error}") from error
        self._plain.encode_special_tokens = True  # read special tokens' names as ordinary text
        decoder = (json.loads(text).get("decoder") or {}).get("type")
        if decoder != "ByteLevel":
            raise ConfigError(f"{path}: decoder: expected ByteLevel, found {decoder}")
        self.path = path
        self._bytes: dict[int, bytes] = {}
        self.texts = Texts(self)
        settings = _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        self.bos = self._special("bos", settings, generation)
        self.eos = self._special("eos", settings, generation)

    @classmethod
    def load(cls, directory: str | Path, config=None) -> Tokenizer | None:
        """The tokenizer of a checkpoint directory, None if it has no tokenizer.json; checked if given a ModelConfig."""
        directory = Path(directory)
        if not (directory / "tokenizer.json").exists():
            return None
        tokenizer = cls(directory)
        if config is not None:
            tokenizer.check(config)
        return tokenizer

    def _special(self, kind: str, settings: dict, generation: dict) -> str | None:
        """Text of the begin or end token: tokenizer_config.json names it, generation_config.json numbers it."""
        token = settings.get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            return token
        number = generation.get(f"{kind}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        return self._markup.id_to_token(number) if isinstance(number, int) else None

    def check(self, config) -> None:
        """Raises ConfigError if the model (a ModelConfig) has no row for one of the tokens, or another begin token.

        The model may have more rows than there are tokens: real checkpoints pad the vocabulary.
        """
        needed = 1 + max(self._markup.get_vocab(with_added_tokens=True).values(), default=-1)
        if needed > config.vocab_size:
            raise ConfigError(
                f"{self.path}: {needed} tokens, but vocab_size in config.json is {config.vocab_size}: "
                "the tokenizer belongs to another model"
            )
        begin = self.token_id(self.bos) if self.bos is not None else None
        if begin is not None and begin != config.bos_token_id:
            raise ConfigError(
                f"{self.path}: begin token {self.bos!r} has id {begin}, but bos_token_id in config.json is "
                f"{config.bos_token_id}: the tokenizer belongs to another model"
            )

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its text in the vocabulary, None if there is no such token."""
        return self._markup.token_to_id(token)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`. special: names of special tokens in it (<think> …) become those tokens, not text."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"text: expected valid Unicode; found a lone surrogate at character {error.start}"
            ) from error
        library = self._markup if special else self._plain
        return library.encode_batch_fast([text], add_special_tokens=False)[0].ids  # unlike encode it releases the GIL

    def fewest(self, text: str) -> int:
        """How many tokens `text` has at least, without the seconds that encoding megabytes may take."""
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._longest) if self._markup.normalizer is None else 0

    @cached_property
    def _longest(self) -> int:
        """The most bytes that a token stands for."""
        return max((len(_bytes_of(name)) for name in self._markup.get_vocab(with_added_tokens=True)), default=0) or 1

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt: special tokens are recognised; the begin token is put in front if it is not there."""
        ids = self.encode(text, special=True)
        begin = self.token_id(self.bos) if self.bos is not None else None
        return ids if not ids or begin is None or ids[0] == begin else [begin, *ids]

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for (special tokens: their name); b"" for an id without a token."""
        if token not in self._bytes:
            self._bytes[token] = _bytes_of(self._markup.id_to_token(token) or "")
        return self._bytes[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens by name; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def stream(self) -> Detokenizer:
        return Detokenizer(self)


class Texts(dict):
    """Token → its text by itself; None where its bytes are not valid UTF-8 without those of others."""

    def __init__(self, tokenizer: Tokenizer):
        self._bytes = tokenizer.token_bytes

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._bytes(token).decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class Detokenizer:
    """decode, token by token: a character split over tokens comes out whole with its last one.

    The pieces of all pushes and of finish, joined, equal Tokenizer.decode of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._texts, self._bytes = tokenizer.texts, tokenizer.token_bytes
        self._held = b""  # of a character that is not complete

    def push(self, token: int) -> str:
        """The text that is certain now."""
        if not self._held:
            whole = self._texts[token]
            if whole is not None:
                return whole
        data = self._held + self._bytes(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")

"""A conversation on one session: what `python -m dsv4 chat` does, without a screen.

Only what is new is prefilled: the session keeps its tokens from answer to answer and goes back to where the next prompt
leaves them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from .chat import StreamParser, encode, encode_ids, stop_ids
from .errors import InputError, StateError
from .files import replacing
from .generate import settled, speculator
from .sampling import SamplingParams
from .session import remedy


class Stopped(Exception):
    """The answer was stopped before its first token."""


@dataclass(frozen=True)
class Stats:
    """One answer. Seconds run to the first token, and from there to the last."""

    prompt_tokens: int
    new_tokens: int  # of the prompt: those that were not kept from before
    completion_tokens: int
    prefill_s: float
    decode_s: float
    drafted: int
    accepted: int
    finish_reason: str  # stop, length, or stopped by the user

    @property
    def tokens_per_second(self) -> float:
        """After the first token; 0 where there was only one."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def render(self) -> str:
        """The status line."""
        parts = [f"{self.completion_tokens} tokens", f"{self.tokens_per_second:.1f} tok/s"]
        if self.drafted:
            parts.append(f"{self.accepted / self.drafted:.0%} of {self.drafted} drafted accepted")
        parts.append(f"prompt {self.prompt_tokens}, {self.new_tokens} new in {self.prefill_s:.2f} s")
        return " · ".join(parts + [self.finish_reason] * (self.finish_reason != "stop"))


class Chat:
    """Messages, settings and the session they run on. Use as a context manager, or close().

    params.max_tokens limits each answer; stop texts are not looked for. thinking, effort: as of chat.encode.
    """

    def __init__(
        self, engine, params: SamplingParams, *, system: str = "", thinking: bool = False, effort: str = "low", spec="gate"
    ):
        if engine.tokenizer is None:
            raise InputError("chat: expected a checkpoint with tokenizer.json, found none; use generate with --tokens")
        self.engine, self.thinking, self.effort = engine, thinking, effort
        self.params = params.seeded()
        self.messages: list[dict] = []
        self.stats: Stats | None = None  # of the last answer
        self._rounds = speculator(engine, self.params, spec)
        self._ends = {*engine.config.eos_token_ids, *stop_ids(engine.tokenizer)}
        self._kept = None  # snapshot of the session before its last answer
        self._stop = False
        self.set_system(system)
        encode_ids(self.messages or [{"role": "user", "content": ""}], engine.tokenizer, effort=effort)  # refuses early
        self.session = engine.session()

    # ------------------------------------------------------------------ the conversation
    @property
    def system(self) -> str:
        """The system text, "" without one."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        """Replace the system text; "" takes it away. The next prompt is read anew from its beginning."""
        turns = self.messages[1:] if self.system else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + turns

    def reset(self) -> None:
        """Forget all turns; the system text stays."""
        self.messages = self.messages[:1] if self.system else []
        self._kept = None
        self.session.rewind(0)

    def save(self, path: Path) -> None:
        """The messages as a JSON list, in OpenAI's form. Raises InputError where it cannot be written."""
        try:
            with replacing(path) as out:
                out.write(json.dumps(self.messages, ensure_ascii=False, indent=1).encode())
        except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
            what = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"{path}: expected a place to write the conversation to; {what}") from error

    def load(self, path: Path) -> None:
        """Go on from a saved list. Raises InputError, and keeps what was, where it is none."""
        if path.exists() and not path.is_file():  # a device may have no end
            raise InputError(f"{path}: expected a readable file; found none")
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: expected a readable file; {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: expected a JSON list of messages; {error}") from error
        try:
            encode(messages)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        self.messages = messages

    # ------------------------------------------------------------------ an answer
    def stop(self) -> None:
        """End the running answer after the current forward. May be called from a signal handler."""
        self._stop = True

    def ask(self, text: str) -> Iterator[dict]:
        """The answer to a user's message, as deltas of chat.StreamParser; then `stats` tell of it.

        A stopped answer stays in the conversation as far as it came. Before its first token Stopped is raised, and like
        with InputError (a prompt that does not fit) the message is taken back.
        """
        self._stop = False
        before = self.messages
        self.messages = [*before, {"role": "user", "content": text}]
        try:
            yield from self._answer()
        except BaseException:
            self.messages = before
            raise

    def _answer(self) -> Iterator[dict]:
        ids = encode_ids(self.messages, self.engine.tokenizer, thinking=self.thinking, effort=self.effort)
        room = self.engine.max_context - len(ids)
        if room < 1:
            raise InputError(
                f"chat: expected a conversation of at most {self.engine.max_context - 1} tokens, found {len(ids)}; "
                + remedy(self.engine, "/reset it", ", or start with a larger --max-context")
            )
        parser, text = StreamParser(thinking=self.thinking), self.engine.tokenizer.stream()
        reason, count = "length", 0
        before = replace(self._rounds.counters)
        start = first = time.perf_counter()
        self._reuse(ids)
        limit = min(room, self.params.max_tokens)
        with closing(settled(self.session, ids, limit, self._rounds, self._progress)) as found:
            for count, (token, *_) in enumerate(found, 1):
                first = time.perf_counter() if count == 1 else first
                if token in self._ends:
                    reason = "stop"
                    break
                yield from parser.feed(text.push(token))
                if self._stop:
                    reason = "stopped"
                    break
        took = time.perf_counter() - first
        yield from parser.feed(text.finish()) + parser.close()
        self.messages.append({name: value for name, value in parser.message.items() if value or name == "content"})
        counters = self._rounds.counters
        self.stats = Stats(
            len(ids), self._new, count, first - start, took,
            counters.drafted - before.drafted, counters.accepted - before.accepted, reason,
        )  # fmt: skip

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self._stop:
            raise Stopped

    def _reuse(self, ids: Sequence[int]) -> None:
        """Bring the session to the longest beginning of `ids` it can have, at least one token short of them."""
        keep = min(_common(self.session.tokens, ids), len(ids) - 1)
        try:
            self.session.rewind(keep)
        except StateError:  # too far back: what a longer forward has written over
            tokens = [] if self._kept is None else self._kept.tokens
            if 0 < len(tokens) < len(ids) and _common(tokens, ids) == len(tokens):
                self.session.restore(self._kept)
            else:
                self.session.rewind(0)
        self._new = len(ids) - self.session.position
        # The next prompt may differ from here on: reasoning is left out, or the answer's text has other tokens.
        if self.session.position < len(ids) - 1:
            self.session.prefill(ids[self.session.position : -1], lambda done, total: self._progress("", done, total))
        self._kept = self.session.snapshot()

    def close(self) -> None:
        """Give the session back. Closing twice is fine."""
        self.session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

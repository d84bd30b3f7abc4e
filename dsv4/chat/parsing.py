"""The model's answer → reasoning, content and tool calls, whole or as it comes.

The parse does not depend on where a stream was cut. Markup that is not well-formed is content, as are its tags; nothing
that a model can say raises.
"""

from __future__ import annotations

import json

from ..errors import StateError
from . import markup
from .messages import strict_json

_PREFIXES = (markup.GAP + markup.CALLS, markup.CALLS, markup.EOS)  # what an end of content may turn out to begin
_WAIT, _BAD = "wait", "bad"


def parse(text: str, *, thinking: bool = False) -> dict:
    """An answer, the text after the assistant prefix: {role, reasoning_content, content, tool_calls}.

    thinking: the answer begins inside its reasoning. An end token at the very end is dropped. tool_calls: [{"type":
    "function", "function": {"name", "arguments": JSON text}}], in order.
    """
    parser = StreamParser(thinking=thinking)
    parser.feed(text)
    parser.close()
    return parser.message


class StreamParser:
    """parse, piece by piece: feed(text) and close() → deltas; `message` is what they add up to so far.

    A delta is one of {"reasoning_content": text}, {"content": text}, {"tool_calls": [{"index", "type", "function":
    {"name", "arguments"}}]}. A call comes whole, once it is complete.
    """

    def __init__(self, *, thinking: bool = False):
        self._where = "reasoning" if thinking else "content"
        self._prefix = markup.THINK if thinking else markup.END_THINK  # of an answer given with its prefix
        self._held = ""  # text that is not decided yet
        self._gap = ""  # the blank line before the block of calls, until a call has come
        self._in_block = 0  # calls of this block so far
        self._call = _Call()
        self._deltas: list[dict] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict] = []
        self._closed = False

    @property
    def message(self) -> dict:
        """What parse returns, of the text so far."""
        return {
            "role": "assistant",
            "reasoning_content": "".join(self._reasoning),
            "content": "".join(self._content),
            "tool_calls": list(self._calls),
        }

    def feed(self, text: str) -> list[dict]:
        """The next piece of the answer, cut anywhere → what is certain now."""
        if self._closed:
            raise StateError("chat stream: expected an open stream, found text after its end")
        self._held += text
        if self._prefix and self._held:
            if len(self._held) < len(self._prefix) and self._prefix.startswith(self._held):
                return []
            self._held = self._held.removeprefix(self._prefix)
            self._prefix = ""
        steps = {"reasoning": self._reasoning_step, "content": self._content_step, "calls": self._calls_step}
        while steps[self._where]():
            pass
        return self._taken()

    def close(self) -> list[dict]:
        """The answer has ended: what was held back. Closing twice is fine."""
        if self._closed:
            return []
        self._closed = True
        rest, self._held = self._held.removesuffix(markup.EOS), ""
        if self._where == "calls":
            rest = rest.lstrip() if self._in_block else self._opening() + rest
        self._emit("reasoning_content" if self._where == "reasoning" else "content", rest)
        return self._taken()

    # ------------------------------------------------------------------ steps: True if another may follow
    def _reasoning_step(self) -> bool:
        text, found, rest = self._held.partition(markup.END_THINK)
        if found:
            self._emit("reasoning_content", text)
            self._held, self._where = rest, "content"
            return True
        self._pass_on("reasoning_content", (markup.END_THINK, markup.EOS))
        return False

    def _content_step(self) -> bool:
        text, found, rest = self._held.partition(markup.CALLS)
        if not found:
            self._pass_on("content", _PREFIXES)
            return False
        content = text.removesuffix(markup.GAP)
        self._emit("content", content)
        self._gap, self._in_block = text[len(content) :], 0
        self._held, self._where = rest, "calls"
        return True

    def _calls_step(self) -> bool:
        """Take the next call, or the block's end; leave the block as content where neither can follow."""
        found = self._call.read(self._held)
        if found == _WAIT:
            return False
        if found == markup.END_INVOKE:
            self._take_call()
        elif found == markup.END_CALLS and self._in_block:
            self._held, self._where = self._held[self._call.at :], "content"
        else:
            self._emit("content", self._opening())
            self._held, self._where = self._held.lstrip() if self._in_block else self._held, "content"
        self._call = _Call()
        return True

    def _take_call(self) -> None:
        call = {"type": "function", "function": {"name": self._call.name, "arguments": self._call.json()}}
        self._deltas.append({"tool_calls": [{"index": len(self._calls), **call}]})
        self._calls.append(call)
        self._in_block += 1
        self._held = self._held[self._call.at :]

    # ------------------------------------------------------------------ output
    def _opening(self) -> str:
        """What began the block, as content: nothing once a call of it was passed on."""
        return "" if self._in_block else self._gap + markup.CALLS

    def _pass_on(self, name: str, prefixes: tuple[str, ...]) -> None:
        """Emit what is held, but for an end that one of `prefixes` may begin in."""
        text = self._held
        longest = min(len(text), max(map(len, prefixes)))
        keep = next((n for n in range(longest, 0, -1) if any(p.startswith(text[-n:]) for p in prefixes)), 0)
        self._emit(name, text[: len(text) - keep])
        self._held = text[len(text) - keep :]

    def _emit(self, name: str, text: str) -> None:
        if not text:
            return
        (self._reasoning if name == "reasoning_content" else self._content).append(text)
        if self._deltas and name in self._deltas[-1]:
            self._deltas[-1][name] += text
        else:
            self._deltas.append({name: text})

    def _taken(self) -> list[dict]:
        deltas, self._deltas = self._deltas, []
        return deltas


# A reader looks at the text from `at` on and says what it found and where that ends; _WAIT if more text must come to
# say, _BAD if no text can mend it. So its verdict on a text's beginning holds for the whole.


def _expect(text: str, at: int, tags: tuple[str, ...], blank: bool = True) -> tuple[str, int]:
    """The tag that stands at `at`, after white space where `blank`."""
    while blank and at < len(text) and text[at].isspace():
        at += 1
    for tag in tags:
        if text.startswith(tag, at):
            return tag, at + len(tag)
    return (_WAIT if any(tag.startswith(text[at : at + len(tag)]) for tag in tags) else _BAD), at


def _read_name(text: str, at: int) -> tuple[str | None, int]:
    """The name up to the quotation mark, which is no part of it; "" is as good as _BAD, None means wait."""
    end = text.find('"', at)
    name = text[at : len(text) if end < 0 else end]
    if "\n" in name or name == "" and end >= 0:
        return "", at
    return (name, end) if end >= 0 else (None, at)


def _read_parameter(text: str, at: int, arguments: dict[str, str]) -> tuple[str, int]:
    """Add a parameter, from its name on to its closing tag; one that is there already, or is no JSON, is bad."""
    name, at = _read_name(text, at)
    if not name or name in arguments:
        return (_WAIT if name is None else _BAD), at
    kind, at = _expect(text, at, ('" string="true">', '" string="false">'), blank=False)
    if kind in (_WAIT, _BAD):
        return kind, at
    end = text.find(markup.END_PARAMETER, at)
    if end < 0:
        return _WAIT, at
    value = text[at:end]
    if "true" in kind:
        value = json.dumps(value, ensure_ascii=False)
    else:
        try:
            # What could not be sent back is no JSON either: 1e999, half a surrogate pair.
            json.dumps(strict_json(value), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return _BAD, at
    arguments[name] = value
    return kind, end + len(markup.END_PARAMETER)


class _Call:
    """A call, or the end of the block of calls, while it comes. Text before `at` is understood and not read again."""

    def __init__(self) -> None:
        self.name, self.at = "", 0
        self.arguments: dict[str, str] = {}  # JSON text by name

    def json(self) -> str:
        """The arguments as the text of a JSON object."""
        return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in self.arguments.items()) + "}"

    def read(self, text: str) -> str:
        """Read on in the text from the call's beginning → the closing tag of the call or block, _WAIT or _BAD."""
        if not self.name:
            tag, at = _expect(text, 0, (markup.INVOKE, markup.END_CALLS))
            if tag != markup.INVOKE:
                self.at = at
                return tag
            name, at = _read_name(text, at)
            if not name:
                return _WAIT if name is None else _BAD
            tag, at = _expect(text, at, ('">',), blank=False)
            if tag in (_WAIT, _BAD):
                return tag
            self.name, self.at = name, at
        while True:
            tag, at = _expect(text, self.at, (markup.PARAMETER, markup.END_INVOKE))
            if tag == markup.PARAMETER:
                tag, at = _read_parameter(text, at, self.arguments)
            if tag in (_WAIT, _BAD):
                return tag
            self.at = at
            if tag == markup.END_INVOKE:
                return tag

"""A message list, checked: whatever the format cannot say is refused in one line that names message and field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError

FIELDS = {
    "system": ("content", "tools", "response_format"),
    "user": ("content",),
    "assistant": ("content", "reasoning_content", "tool_calls"),
    "tool": ("content", "tool_call_id"),
    "latest_reminder": ("content",),
}


@dataclass
class Call:
    """A tool call: the arguments by name, as Python values."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Pending:
    """The calls of the last answer, and which of them have no result yet."""

    def __init__(self, calls: Sequence[Call] = ()):
        self.calls = calls
        self.by_id = {call.id: i for i, call in enumerate(calls) if call.id is not None}
        self.open = dict.fromkeys(range(len(calls)))  # in order


@dataclass
class Turn:
    """A message, or what several make together: a user's texts and tool results are one turn.

    kind: system, user, assistant or latest_reminder.
    """

    kind: str
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    blocks: list[tuple[int | None, str]] = field(default_factory=list)  # a user's: (number of the answered call, text)


@dataclass
class Conversation:
    """What encode needs: the system text, the tools' functions, the schema to answer by, and the turns."""

    system: str
    tools: list[dict]
    schema: Any  # None: none
    turns: list[Turn]


def error(where: str, expected: str, found: Any) -> InputError:
    shown = found if isinstance(found, (str, int, float, bool)) or found is None else type(found).__name__
    return InputError(f"{where}: expected {expected}, found {shown!r}"[:400])


def unknown(where: str, name: Any, known: Sequence[str]) -> InputError:
    return InputError(f"{where}: unknown field {name!r}; expected {', '.join(known)}")


def given(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    """The object's fields that are not null; InputError for no object, or a field that is not among `known`."""
    if not isinstance(value, Mapping):
        raise error(where, "an object", value)
    found = {name: entry for name, entry in value.items() if entry is not None}
    for name in found:
        if name not in known:
            raise unknown(where, name, known)
    return found


def text_of(value: Any, where: str) -> str:
    """A text, or the texts of a list of {"type": "text", "text": …} parts; InputError for anything else."""
    if isinstance(value, list):
        return "\n\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(value))
    if not isinstance(value, str):
        raise error(where, "text", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as bad:
        raise InputError(f"{where}: expected valid Unicode, found a lone surrogate at character {bad.start}") from bad
    return value


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") != "text":
        raise error(f"{where}.type", "'text' (this model reads no other kind)", part.get("type"))
    return text_of(given(part, where, ("type", "text")).get("text"), f"{where}.text")


def read_tools(tools: Any, where: str = "tools") -> list[dict]:
    """The functions of OpenAI tool declarations; [] for None."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise error(where, "a list of tools", tools)
    return [_tool(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict:
    found = given(tool, where, ("type", "function"))
    if found.get("type") != "function":
        raise error(f"{where}.type", "'function'", found.get("type"))
    function = found.get("function")
    if not isinstance(function, dict):
        raise error(f"{where}.function", "an object", function)
    _name(function.get("name"), f"{where}.function.name")
    text_of(to_json(function, f"{where}.function"), f"{where}.function")
    return function


def _name(value: Any, where: str) -> str:
    """A name that can stand between quotation marks in a tag."""
    if not isinstance(value, str) or not value or '"' in value or "\n" in value:
        raise error(where, "a name without quotation marks and line breaks", value)
    return text_of(value, where)


def to_json(value: Any, where: str) -> str:
    """JSON in the form that the model was trained with: one line, letters as they are."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as bad:
        raise InputError(f"{where}: expected what JSON can say; {bad}") from bad


def read_schema(value: Any, where: str = "response_format") -> Any:
    """The schema of a response format: OpenAI's {"type": "json_schema" …}, or a JSON schema itself; None: free text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise error(where, "an object", value)
    kind = value.get("type")
    if kind == "text":
        given(value, where, ("type",))
        return None
    if kind == "json_object":
        given(value, where, ("type",))
        return {"type": "object"}
    if kind == "json_schema":
        inner = given(value, where, ("type", "json_schema")).get("json_schema")
        inner = given(inner, f"{where}.json_schema", ("name", "description", "schema", "strict"))
        value, where = inner.get("schema"), f"{where}.json_schema.schema"
        if not isinstance(value, dict):
            raise error(where, "a JSON schema", value)
    text_of(to_json(value, where), where)
    return value


def read(messages: Any, tools: Any = None, response_format: Any = None) -> Conversation:
    """The conversation of a message list. tools, response_format: instead of those on the system message.

    Raises InputError, one line that names message and field.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise error("messages", "a list of at least one message", "an empty list" if messages in ([], ()) else messages)
    found = Conversation("", read_tools(tools), read_schema(response_format), [])
    pending = Pending()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = _role(message, where)
        fields = given(message, where, ("role", *FIELDS[role]))
        if role == "system":
            if i:
                raise InputError(f"{where}.role: expected the system message first, found it after {i} other(s)")
            _system(fields, where, found)
        elif role == "assistant":
            found.turns.append(_assistant(fields, where))
            pending = Pending(found.turns[-1].calls)
        elif role == "latest_reminder":
            found.turns.append(Turn(role, text_of(fields.get("content"), f"{where}.content")))
        else:
            _user_block(fields, where, role, found.turns, pending)
    return found


def _role(message: Any, where: str) -> str:
    if not isinstance(message, Mapping):
        raise error(where, "an object with role and content", message)
    role = message.get("role")
    if role == "developer":
        raise InputError(f"{where}.role: 'developer' is internal to the model; expected {', '.join(FIELDS)}")
    if not isinstance(role, str) or role not in FIELDS:
        raise error(f"{where}.role", " or ".join(FIELDS), role)
    return role


def _system(fields: dict, where: str, found: Conversation) -> None:
    found.system = text_of(fields.get("content", ""), f"{where}.content")
    for name, read_field, attribute in (("tools", read_tools, "tools"), ("response_format", read_schema, "schema")):
        if name in fields:
            if getattr(found, attribute):
                raise InputError(f"{where}.{name}: expected it once, found it here and as an argument")
            setattr(found, attribute, read_field(fields[name], f"{where}.{name}"))


def _assistant(fields: dict, where: str) -> Turn:
    raw = fields.get("tool_calls", [])
    if not isinstance(raw, list):
        raise error(f"{where}.tool_calls", "a list", raw)
    if "content" not in fields and not raw:
        raise InputError(f"{where}.content: expected content or tool_calls, found neither")
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(raw)]
    ids = Counter(call.id for call in calls if call.id is not None)
    for i, call in enumerate(calls):
        if ids[call.id] > 1:
            raise InputError(f"{where}.tool_calls[{i}].id: expected an id of its own, found {call.id!r} twice")
    content = text_of(fields.get("content", ""), f"{where}.content")
    return Turn("assistant", content, text_of(fields.get("reasoning_content", ""), f"{where}.reasoning_content"), calls)


def _call(call: Any, where: str) -> Call:
    fields = given(call, where, ("id", "type", "function"))
    if fields.get("type", "function") != "function":
        raise error(f"{where}.type", "'function'", fields["type"])
    function = given(fields.get("function"), f"{where}.function", ("name", "arguments"))
    name = _name(function.get("name"), f"{where}.function.name")
    at = f"{where}.function.arguments"
    text = function.get("arguments")
    try:
        arguments = strict_json(text)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise error(at, "a JSON object as text", text)
    for key, value in arguments.items():
        _name(key, f"{at}: name")
        text_of(value if isinstance(value, str) else to_json(value, at), f"{at}: {key}")
    return Call(name, arguments, None if "id" not in fields else text_of(fields["id"], f"{where}.id"))


def strict_json(text: str) -> Any:
    """json.loads without NaN and infinities; ValueError for what is no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _user_block(fields: dict, where: str, role: str, turns: list[Turn], pending: Pending) -> None:
    """Add a user's text, or the result of a pending call, to the user's turn, which it opens if there is none."""
    content = text_of(fields.get("content"), f"{where}.content")
    answered = _answered(fields, where, pending) if role == "tool" else None
    if not turns or turns[-1].kind != "user":
        turns.append(Turn("user"))
    turns[-1].blocks.append((answered, content))


def _answered(fields: dict, where: str, pending: Pending) -> int:
    """Which of the last answer's calls a tool message answers: the one it names, else the first without a result."""
    key = fields.get("tool_call_id")
    where = f"{where}.tool_call_id"
    if key is not None and not isinstance(key, str):
        raise error(where, "text", key)
    i = next(iter(pending.open), None) if key is None else pending.by_id.get(key)
    if i is not None:
        if i not in pending.open:
            raise InputError(f"{where}: expected one result per call, found a second for {key!r}")
        del pending.open[i]
        return i
    calls = ", ".join(repr(call.id) for call in pending.calls) or "but the last answer has no calls"
    raise error(where, f"the id of a call of the last answer ({calls})", key)

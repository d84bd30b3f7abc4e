"""Conversation: the part of a chat request that becomes the prompt. dsv4.chat checks the messages themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..chat import EFFORTS, encode_ids
from ..tokenizer import Tokenizer
from .faults import Fault, wrong
from .fields import LIST, OBJECT, Fields, one_of


@dataclass(frozen=True)
class Conversation:
    """messages, tools and response_format in OpenAI's form; None where there is nothing to declare."""

    messages: list[Any]
    tools: list[Any] | None
    response_format: dict | None
    thinking: bool
    effort: str

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt. Raises InputError that names message and field, ConfigError for a model that does not chat."""
        return encode_ids(
            self.messages, tokenizer, tools=self.tools, response_format=self.response_format,
            thinking=self.thinking, effort=self.effort,
        )  # fmt: skip


def read_conversation(fields: Fields) -> Conversation:
    """messages, tools, tool_choice, response_format, reasoning_effort, thinking. Raises Fault."""
    messages = fields.need("messages", ("a list of at least one message", lambda v: isinstance(v, list) and v))
    _check_end(messages)
    thinking, effort = _thinking(fields)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return Conversation(messages, _tools(fields), _response_format(fields), thinking, effort)


def _check_end(messages: list[Any]) -> None:
    """There must be something to answer. Reminders aside, a user's or a tool's message stands at the end."""
    spoken = [(i, m.get("role")) for i, m in enumerate(messages) if isinstance(m, dict) and m.get("role") != "latest_reminder"]
    number, role = spoken[-1] if spoken else (len(messages) - 1, None)
    if role in ("assistant", "system") or all(isinstance(m, dict) for m in messages) and not spoken:
        raise wrong(f"messages[{number}].role", "a message to answer at the end: user or tool", role)


def _message(message: Any, where: str) -> Any:
    """A message as dsv4.chat takes it: calls of a streamed answer that is sent back lose their numbers."""
    if not isinstance(message, dict):
        return message
    for name in {"tools", "response_format"} & set(message):
        raise Fault(400, f"{where}.{name}: expected beside messages, found inside one", f"{where}.{name}", "unknown_field")
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    kept = [{k: v for k, v in c.items() if k != "index"} if isinstance(c, dict) else c for c in calls]
    return {**message, "tool_calls": kept}


def _tools(fields: Fields) -> list[Any] | None:
    """The tools that the prompt declares. Nothing makes the model call one, or keeps its arguments to a schema."""
    tools = fields.take("tools", LIST) or []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            raise wrong(f"tools[{i}].function.strict", "false (arguments are not kept to the schema)", function["strict"])
    choice = fields.take("tool_choice", one_of("auto", "none"), "auto")
    return tools if tools and choice == "auto" else None


def _response_format(fields: Fields) -> dict | None:
    """A schema goes into the prompt and asks for its form; the answer is not kept to it by force."""
    value = fields.take("response_format", OBJECT)
    kind = None if value is None else Fields(value, "response_format").need("type", one_of("text", "json_schema", "json_object"))
    if kind == "json_object":
        raise Fault(400, "response_format.type: json_object is not supported, as nothing here makes an answer valid JSON; "
                    "json_schema asks for it in the prompt", "response_format.type", "unsupported_field")  # fmt: skip
    if kind == "json_schema" and isinstance(value.get("json_schema"), dict) and value["json_schema"].get("strict"):
        raise wrong("response_format.json_schema.strict", "false (the prompt asks for the schema, nothing enforces it)", True)
    return value


def _thinking(fields: Fields) -> tuple[bool, str]:
    """(whether to think, effort): from reasoning_effort, or thinking: {"type": "enabled" | "disabled"}."""
    effort = fields.take("reasoning_effort", one_of("none", *EFFORTS))
    switch = fields.take("thinking", OBJECT)
    thinking = effort not in (None, "none")
    if switch is not None:
        inner = Fields(switch, "thinking")
        kind = inner.need("type", one_of("enabled", "disabled"))
        inner.finish()
        if effort is not None and thinking != (kind == "enabled"):
            raise wrong("thinking.type", f"the same as reasoning_effort {effort!r} says", kind)
        thinking = kind == "enabled"
    return thinking, effort if thinking and effort else "low"

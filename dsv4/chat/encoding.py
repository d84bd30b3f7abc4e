"""Messages → the prompt, as text, as pieces, or as token ids.

    BOS [effort] system text   then turns:   <｜User｜>text   <｜Assistant｜></think>answer EOS     chat mode
                                                             <｜Assistant｜><think>reasoning</think>answer EOS     thinking mode

A list that ends with a user's turn ends with the open assistant prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, InputError
from . import markup
from .messages import Conversation, Turn, read, to_json

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer


def encode(
    messages: list[dict],
    *,
    tools: list[dict] | None = None,
    thinking: bool = False,
    effort: str = "low",
    response_format: dict | None = None,
) -> str:
    """The prompt's text, begin token included.

    tools: OpenAI declarations; response_format: OpenAI's, or a JSON schema; both may stand on the system message
    instead. effort: low, high or max; it says something in thinking mode only.
    Raises InputError, one line that names message and field.
    """
    found = pieces(
        messages, tools=tools, thinking=thinking, effort=effort, response_format=response_format
    )
    return "".join(text for text, _ in found)


def encode_ids(messages: list[dict], tokenizer: Tokenizer, **options: Any) -> list[int]:
    """The prompt's token ids; options as of encode.

    A special token's name inside a message is text: only the format's own markers become special tokens. Else the ids
    are those of encode's text. Raises InputError, and ConfigError for a tokenizer without one of the markers.
    """
    ids: list[int] = []
    for text, special in pieces(messages, **options):
        if not special:
            ids += tokenizer.encode(text)
            continue
        token = tokenizer.token_id(text)
        if token is None:
            raise ConfigError(f"{tokenizer.path}: expected the chat format's token {text}, found none: "
                              "the model is no chat model; use generate")  # fmt: skip
        ids.append(token)
    return ids


def pieces(
    messages: list[dict],
    *,
    tools: list[dict] | None = None,
    thinking: bool = False,
    effort: str = "low",
    response_format: dict | None = None,
) -> list[tuple[str, bool]]:
    """The prompt as (text, is it a special token), in order; no two texts follow each other. Joined, they are encode's."""
    if effort not in markup.EFFORTS:
        raise InputError(f"effort: expected {', '.join(markup.EFFORTS)}; found {effort!r}")
    conversation = read(messages, tools, response_format)
    writer = _Writer()
    writer.ours(markup.BOS)
    if thinking:
        writer.ours(markup.EFFORTS[effort])
    _write_system(writer, conversation)
    _write_turns(writer, conversation, thinking)
    return writer.parts


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer beside the model's own end tokens, for SamplingParams: those that begin another turn.

    A model may sample one instead of its end token, and what came after it would read as part of the answer.
    """
    found = map(tokenizer.token_id, markup.TURNS)
    return tuple(token for token in found if token is not None)


def sampling_defaults(tools: bool = False) -> dict[str, float]:
    """The model's own: temperature and top_p; a little less freedom where it may call tools."""
    return {"temperature": 1.0, "top_p": 0.95 if tools else 1.0}


class _Writer:
    """Collects pieces: our own text, in which special tokens are meant, and others' text, in which nothing is."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, bool]] = []

    def ours(self, text: str) -> None:
        for part, special in markup.split(text):
            self._add(part, special)

    def theirs(self, text: str) -> None:
        if text:
            self._add(text, False)

    def _add(self, text: str, special: bool) -> None:
        if not special and self.parts and not self.parts[-1][1]:
            text = self.parts.pop()[0] + text  # one run of text: cut in two it could give other tokens
        self.parts.append((text, special))


def _write_system(writer: _Writer, conversation: Conversation) -> None:
    writer.theirs(conversation.system)
    if conversation.tools:
        writer.ours(markup.GAP + markup.TOOLS_HEAD)
        writer.theirs("\n".join(to_json(tool, "tools") for tool in conversation.tools))
        writer.ours(markup.TOOLS_TAIL)
    if conversation.schema is not None:
        writer.ours(markup.GAP + markup.RESPONSE_FORMAT)
        writer.theirs(to_json(conversation.schema, "response_format"))


def _write_turns(writer: _Writer, conversation: Conversation, thinking: bool) -> None:
    """In thinking mode a turn shows its reasoning if tools are declared or no user's turn follows."""
    turns = conversation.turns
    last_user = max((i for i, turn in enumerate(turns) if turn.kind == "user"), default=-1)
    open_prefix = markup.ASSISTANT + (markup.THINK if thinking else markup.END_THINK)
    for i, turn in enumerate(turns):
        if turn.kind == "assistant":
            shown = thinking and (bool(conversation.tools) or i > last_user)
            writer.ours(open_prefix if shown else markup.ASSISTANT + markup.END_THINK)
            _write_answer(writer, turn, shown)
        elif turn.kind == "user":
            writer.ours(markup.USER)
            _write_user(writer, turn)
        else:
            writer.ours(markup.REMINDER)
            writer.theirs(turn.text)
    spoken = [turn.kind for turn in turns if turn.kind != "latest_reminder"]
    if spoken and spoken[-1] == "user":
        writer.ours(open_prefix)


def _write_answer(writer: _Writer, turn: Turn, shown: bool) -> None:
    if shown:
        writer.theirs(turn.reasoning)
        writer.ours(markup.END_THINK)
    writer.theirs(turn.text)
    if turn.calls:
        writer.ours(f"{markup.GAP}{markup.CALLS}\n")
        for call in turn.calls:
            writer.ours(markup.INVOKE)
            writer.theirs(call.name)
            writer.ours('">\n')
            for i, (name, value) in enumerate(call.arguments.items()):
                writer.ours("\n" * bool(i) + markup.PARAMETER)
                writer.theirs(name)
                writer.ours(f'" string="{"true" if isinstance(value, str) else "false"}">')
                writer.theirs(value if isinstance(value, str) else to_json(value, "arguments"))
                writer.ours(markup.END_PARAMETER)
            writer.ours(f"\n{markup.END_INVOKE}\n")
        writer.ours(markup.END_CALLS)
    writer.ours(markup.EOS)


def _write_user(writer: _Writer, turn: Turn) -> None:
    """Texts where they stand; results in the order of the calls they answer."""
    results = iter(sorted((call, text) for call, text in turn.blocks if call is not None))
    for i, (call, text) in enumerate(turn.blocks):
        writer.ours(markup.GAP * bool(i))
        writer.theirs(text if call is None else f"<tool_result>{next(results)[1]}</tool_result>")

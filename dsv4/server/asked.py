"""Asked: the body of a request → what to generate and how to answer. Everything is checked here, and nothing ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..chat import sampling_defaults, stop_ids
from ..sampling import MAX_LOGPROBS, SEED_LIMIT, SamplingParams
from ..tokenizer import Tokenizer
from .conversation import Conversation, read_conversation
from .faults import Fault, wrong
from .fields import FLAG, OBJECT, TEXT, Check, Fields, integer, number
from .limits import Limits

# What OpenAI's requests may hold and this server can only leave as it is.
NEUTRAL = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
}
COMPLETION_NEUTRAL = {**NEUTRAL, "best_of": (1,), "echo": (False,), "suffix": ("",)}
CHAT_NEUTRAL = {**NEUTRAL, "store": (False,), "modalities": (["text"],), "parallel_tool_calls": (True,)}
UNSUPPORTED = ("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
CHAT_UNSUPPORTED = (*UNSUPPORTED, "audio", "verbosity", "web_search_options", "functions", "function_call")
COMPLETION_TOKENS = 16  # where the request names no limit, as OpenAI's endpoint
MAX_STOPS = 16


@dataclass(frozen=True)
class Asked:
    """What one request wants. prompt: text or token ids; sampling: as the scheduler takes it.

    stops: texts that end a chat answer's content; those of a completion are in `sampling`, as they end its whole text.
    """

    prompt: str | list[int]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    rounds: bool
    conversation: Conversation | None = None
    stops: tuple[str, ...] = ()


def read_completion(body: Any, model: str, limits: Limits) -> Asked:
    """The body of POST /v1/completions. Raises Fault."""
    fields = Fields(body)
    _model(fields, model)
    prompt = _prompt(fields)
    common = _common(fields)
    stops = common.pop("stops")
    max_tokens = fields.take("max_tokens", _tokens(limits), min(COMPLETION_TOKENS, limits.max_tokens))
    logprobs = fields.take("logprobs", integer(0, MAX_LOGPROBS))
    how = _sampling(fields, **sampling_defaults())
    fields.neutral(COMPLETION_NEUTRAL)
    fields.without(UNSUPPORTED)
    fields.finish()
    return Asked(prompt, SamplingParams(**how, max_tokens=max_tokens, logprobs=logprobs, stop=stops), **common)


def read_chat(body: Any, model: str, limits: Limits, tokenizer: Tokenizer) -> Asked:
    """The body of POST /v1/chat/completions. Raises Fault, and what Conversation.encode raises."""
    fields = Fields(body)
    _model(fields, model)
    common = _common(fields)
    conversation = read_conversation(fields)
    logprobs = _chat_logprobs(fields)
    given = [fields.take(name, _tokens(limits)) for name in ("max_completion_tokens", "max_tokens")]
    if None not in given and given[0] != given[1]:
        raise wrong("max_tokens", f"{given[0]}, as max_completion_tokens", given[1])
    sampling = _sampling(fields, **sampling_defaults(bool(conversation.tools)))
    fields.neutral(CHAT_NEUTRAL)
    fields.without(CHAT_UNSUPPORTED)
    fields.finish()
    longest = given[0] or given[1] or limits.max_tokens
    sampling = SamplingParams(**sampling, max_tokens=longest, stop_ids=stop_ids(tokenizer), logprobs=logprobs)
    return Asked(conversation.encode(tokenizer), sampling, conversation=conversation, **common)


def _model(fields: Fields, model: str) -> None:
    name = fields.need("model", TEXT)
    if name != model:
        raise Fault(404, f"model: expected {model}; found {name!r}", "model", "model_not_found")


def _prompt(fields: Fields) -> str | list[int]:
    """One prompt: text, token ids, or a list of just one of those."""
    expected = "a string, a list of token ids, or a list of one of those (one prompt a request)"
    value = fields.need("prompt", (expected, lambda value: isinstance(value, (str, list))))
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if not isinstance(value, str) and not all(type(token) is int for token in value):
        raise wrong("prompt", expected, value)
    return value


def _common(fields: Fields) -> dict[str, Any]:
    """What both endpoints share beside sampling: how to stream, and the stop texts."""
    stream = fields.take("stream", FLAG, False)
    options = fields.take("stream_options", OBJECT)
    if options is not None and not stream:
        raise Fault(400, "stream_options: expected only with stream: true", "stream_options")
    inner = Fields(options or {}, "stream_options")
    usage = inner.take("include_usage", FLAG, False)
    inner.neutral({"include_obfuscation": (False,)})
    inner.finish()
    fields.take("user", TEXT)  # a caller's own name for its user: no answer depends on it
    rounds = fields.take("dsv4_rounds", FLAG, False)
    return {"stream": stream, "include_usage": usage, "rounds": rounds, "stops": _stops(fields)}


def _stops(fields: Fields) -> tuple[str, ...]:
    def holds(value: Any) -> bool:
        texts = [value] if isinstance(value, str) else value
        return isinstance(texts, list) and len(texts) <= MAX_STOPS and all(isinstance(t, str) and t for t in texts)

    value = fields.take("stop", (f"a string or a list of up to {MAX_STOPS} strings, none of them empty", holds), [])
    return (value,) if isinstance(value, str) else tuple(value)


def _tokens(limits: Limits) -> Check:
    return integer(1, limits.max_tokens)


def _sampling(fields: Fields, temperature: float, top_p: float) -> dict[str, Any]:
    """How to choose a token, by the names of SamplingParams. temperature, top_p: where the request names none."""
    return {
        "temperature": fields.take("temperature", number(0, 100), temperature),
        "top_p": fields.take("top_p", ("a number above 0, up to 1", lambda v: number(0, 1)[1](v) and v > 0), top_p),
        "top_k": fields.take("top_k", integer(0, 2**31 - 1), 0),
        "min_p": fields.take("min_p", number(0, 1), 0.0),
        "seed": fields.take("seed", integer(0, SEED_LIMIT - 1)),
    }


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.take("logprobs", FLAG, False)
    top = fields.take("top_logprobs", integer(0, MAX_LOGPROBS))
    if top is not None and not wanted:
        raise Fault(400, "top_logprobs: expected only with logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None

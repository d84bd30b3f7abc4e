"""Generation: a prompt in, a stream of steps out, with the reasons to stop.

tokens of a completion  every token chosen, the end token or stop id that finished it included
text of a completion    a prefix of the decoded tokens: without the end token or stop id, and cut before the first
                        stop text, which may begin inside a token and span several
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from .errors import InputError
from .gate import Costs, make_rule, rule_of
from .sampling import SamplingParams, chooser, token_logprobs
from .session import check_tokens, remedy
from .speculate import Round, Speculator, granting


class RoundRecord(NamedTuple):
    """What a round of speculation drafted and kept: for whoever wants to show it."""

    number: int  # 1, 2, ..
    drafted: tuple[int, ...]  # the whole block; empty: nothing was drafted
    confidence: tuple[float, ...]  # a logit per drafted token
    verified: int  # drafted tokens that were verified
    accepted: int


class Step(NamedTuple):
    """One token and what it added. The texts of all steps, joined, are the text of the completion."""

    token: int
    text: str  # what became certain and printable with this token; may be empty. Always empty without a tokenizer
    logprob: float | None = None  # natural logarithm of the model's probability; None unless asked for
    top_logprobs: tuple[tuple[int, float], ...] | None = None  # (token, logprob), best first
    round: RoundRecord | None = None  # the round it came from; None for the first, which is the prompt's
    finish_reason: str | None = None  # on the last step: "stop" or "length"; so are the following
    usage: dict[str, int] | None = None  # prompt_tokens, completion_tokens
    timings: dict[str, float] | None = None  # seconds prefill_s, decode_s; tokens per second prefill_tps, decode_tps
    speculation: dict | None = None  # mode, and what was drafted: speculate.Counters


@dataclass(frozen=True)
class Completion:
    """A finished answer; its numbers are those of the last step."""

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[dict] | None  # per token {token, logprob, top: [{token, logprob}]}
    timings: dict[str, float]
    speculation: dict


class StopMatcher:
    """Passes text on, holding back what may still become a stop text, and cuts before the first one found."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain now; nothing once a stop text was found."""
        if self.found or not self.stops:
            return "" if self.found else text
        text = self._held + text
        starts = [at for at in map(text.find, self.stops) if at >= 0]
        self.found = bool(starts)
        certain = min(starts) if starts else len(text) - self._pending(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back in vain; nothing if a stop text was found."""
        held, self._held = self._held, ""
        return "" if self.found else held

    def _pending(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of a stop text."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)


def prompt_tokens(engine, prompt: str | Sequence[int]) -> list[int]:
    """The prompt as token ids, checked: text gets the begin token in front, ids are taken as they are.

    Raises InputError for text without a tokenizer, an empty prompt, text that cannot fit the context however it is cut, and
    ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise InputError("prompt: the checkpoint has no tokenizer.json; expected token ids, found text")
        least = engine.tokenizer.fewest(prompt)
        if least > engine.max_context:
            raise _too_long(engine, f"at least {least}")
        tokens = engine.tokenizer.encode_prompt(prompt)
    else:
        tokens = list(prompt)
    tokens = check_tokens(tokens, engine.config.vocab_size)
    if not tokens:
        raise InputError("prompt: expected at least one token; found none")
    return tokens


def _too_long(engine, found: str) -> InputError:
    return InputError(
        f"prompt: expected at most {engine.max_context - 1} tokens (a context of {engine.max_context}, one of them "
        f"to be generated); found {found}; {remedy(engine, 'shorten it')}"
    )


def checked(engine, prompt: str | Sequence[int], params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
    """A request as tokens and parameters with a seed. Raises InputError where this engine cannot serve it."""
    tokens = prompt_tokens(engine, prompt)
    params = (params or SamplingParams()).seeded()
    if len(tokens) >= engine.max_context:
        raise _too_long(engine, str(len(tokens)))
    vocab = engine.config.vocab_size
    if params.stop and engine.tokenizer is None:
        raise InputError("stop: the checkpoint has no tokenizer.json, so there is no text to stop at; use stop ids")
    for token in params.stop_ids:
        if token >= vocab:
            raise InputError(f"stop_ids: expected token ids 0 to {vocab - 1}; found {token}")
    return tokens, params


def speculator(
    engine, params: SamplingParams, spec: str = "gate", on_round: Callable | None = None, costs: Costs | None = None
) -> Speculator:
    """The rounds of one request. spec: off, always, gate (the default rule, or always where the settings say so), or
    the name of a rule. A checkpoint without a draft decodes plainly. costs: by default those the engine measures."""
    gate = None
    if spec != "off":
        rule = rule_of(engine.gate) if spec == "gate" else spec
        block = engine.config.dspark.block_size if engine.draft is not None else 1
        gate = make_rule(rule, block, engine.gate, costs=costs or engine.costs)
    if engine.draft is None:
        gate = None
    return Speculator(gate, chooser(params), on_round=on_round)


def stream(
    engine,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    progress: Callable | None = None,
    spec: str = "gate",
) -> Iterator[Step]:
    """Iterator of Step for a prompt (text, or token ids). The request is checked here, before the first step.

    It ends with finish_reason "stop" (an end token, a stop id, a stop text) or "length" (max_tokens, or prompt and
    completion fill the context). progress(stage, done, total): tokens of the prompt consumed. The session lives
    until the iterator is exhausted or closed. See the module's text for how text and tokens correspond.
    """
    tokens, params = checked(engine, prompt, params)
    return _steps(engine, tokens, params, progress, speculator(engine, params, spec), spec)


# ---------------------------------------------------------------------- what a sequence wants and settles
@dataclass(slots=True)
class WantsPrompt:
    """These tokens of a prompt, in as many forwards as it takes. Answer: the logits [vocab] after the last one."""

    tokens: list[int]


@dataclass(slots=True)
class Settles:
    """Tokens that are certain, each with the logits it was chosen from. Answer: (how many are kept, is more wanted?)."""

    tokens: list[int]
    logits: Sequence[np.ndarray]
    round: Round | None


class Settled(NamedTuple):
    """A token, the logits [vocab] it was chosen from, and the round it came from."""

    token: int
    logits: np.ndarray
    round: Round | None


def settling(session, prompt: list[int], limit: int, rounds: Speculator) -> Generator[Any, Any, None]:
    """The plan of a generation: `limit` tokens after a prompt of which the session may have consumed a part.

    Where fewer are kept than were settled, the session and the counters end as if the others had never been.
    """
    left = prompt[session.position :]
    logits = (yield WantsPrompt(left)) if left else session.logits
    token = rounds.choose(logits, session.position)
    count = 1
    _, more = yield Settles([token], [logits], None)
    while more and count < limit:
        found = yield from rounds.round(session, token, logits, limit - count)
        tokens = found.tokens
        kept, more = yield Settles(tokens, found.logits, found)
        if kept < len(tokens):
            rounds.drop(session, found, kept)
        token, logits = tokens[-1], session.logits
        count += len(tokens)


def settled(
    session, prompt: list[int], limit: int, rounds: Speculator, progress: Callable | None = None
) -> Iterator[Settled]:
    """`limit` tokens of a session by itself. One round settles several at once.

    Closed early, it takes back what the round settled beyond the last token that was seen.
    """
    plan = granting(session, settling(session, prompt, limit, rounds))
    answer = None
    while True:
        try:
            wish = plan.send(answer)
        except StopIteration:
            return
        if isinstance(wish, WantsPrompt):
            answer = session.prefill(wish.tokens, partial(progress, "prefill") if progress else None)
            continue
        for kept, (token, logits) in enumerate(zip(wish.tokens, wish.logits), 1):
            try:
                yield Settled(token, logits, wish.round)
            except GeneratorExit:
                with suppress(StopIteration):
                    plan.send((kept, False))
                raise
        answer = len(wish.tokens), True


class Answer:
    """One request's side of a generation: from tokens to steps, with text, stops, limits and, at the end, the numbers.

    It times from here on: prefill_s runs to the first token, decode_s from there to the last; decode_tps counts the
    tokens after the first.
    """

    def __init__(self, engine, prompt: list[int], params: SamplingParams, rounds: Speculator, spec: str):
        self.limit = min(params.max_tokens, engine.max_context - len(prompt))
        self._prompt, self._params, self._rounds, self._spec = len(prompt), params, rounds, spec
        self._ends = set(params.stop_ids) | (set() if params.ignore_eos else set(engine.config.eos_token_ids))
        self._detokenizer = engine.tokenizer.stream() if engine.tokenizer else None
        self._matcher = StopMatcher(params.stop)
        push = self._detokenizer.push if self._detokenizer else lambda token: ""
        self._say = (lambda token: self._matcher.push(push(token))) if params.stop else push  # the text that a token adds
        self._round: Round | None = None  # the last one seen, and as a record
        self._record: RoundRecord | None = None
        self.count = 0
        self._start = self._first = self._last = time.perf_counter()

    def push(self, tokens: list[int], logits: Sequence[np.ndarray], found: Round | None) -> list[Step]:
        """The next tokens, no more than the limit leaves, as steps, up to one with a finish_reason: that is the last,
        which then gets the numbers."""
        self._last = time.perf_counter()
        if not self.count:
            self._first = self._last
        ends, say, matcher = self._ends, self._say, self._matcher
        texts, reason = [], None
        for token in tokens:
            if token in ends:
                texts.append("")
                reason = "stop"
                break
            texts.append(say(token))
            if matcher.found:
                reason = "stop"
                break
        self.count += len(texts)
        if reason is None and self.count == self.limit:
            reason = "length"
        if found is not self._round:  # a round's tokens may come in several pushes
            number, drafted, confidence = self._rounds.counters.rounds, tuple(found.drafted), tuple(found.confidence)
            record = number, drafted, confidence, found.length, found.accepted
            self._round, self._record = found, tuple.__new__(RoundRecord, record)  # as RoundRecord(*record) would
        logprobs = tops = none = repeat(None)
        n = self._params.logprobs
        if n is not None:
            logprobs, tops = zip(*[token_logprobs(row, token, n) for row, token, _ in zip(logits, tokens, texts)])
        fields = zip(tokens, texts, logprobs, tops, repeat(self._record), none, none, none, none)
        steps = list(map(tuple.__new__, repeat(Step), fields))  # Step(token, text, ..) of each, at half the price
        if reason:
            steps[-1] = steps[-1]._replace(text=texts[-1] + self._rest(), finish_reason=reason)
        return steps

    def _rest(self) -> str:
        """The text that was held back, at the end."""
        left = self._detokenizer.finish() if self._detokenizer else ""
        return self._matcher.push(left) + self._matcher.finish()

    def numbers(self) -> dict[str, dict]:
        """usage, timings and speculation so far; of a last step once its tokens are kept and the others dropped."""
        return {
            "usage": {"prompt_tokens": self._prompt, "completion_tokens": self.count},
            "timings": timings(self._prompt, self.count, self._first - self._start, self._last - self._first),
            "speculation": {
                "mode": self._spec if self._rounds.gate is not None else "off", **self._rounds.counters.as_dict()
            },
        }  # fmt: skip


def completion(steps: Sequence[Step], finish_reason: str, numbers: dict[str, dict]) -> Completion:
    """Steps as an answer."""
    scored = bool(steps) and steps[0].logprob is not None
    return Completion(
        text="".join(step.text for step in steps),
        tokens=[step.token for step in steps],
        finish_reason=finish_reason,
        prompt_tokens=numbers["usage"]["prompt_tokens"],
        completion_tokens=len(steps),
        logprobs=[_scores(step) for step in steps] if scored else None,
        timings=numbers["timings"],
        speculation=numbers["speculation"],
    )


def _steps(engine, prompt: list[int], params: SamplingParams, progress, rounds: Speculator, spec: str) -> Iterator[Step]:
    answer = Answer(engine, prompt, params, rounds, spec)
    with engine.session() as session, closing(settled(session, prompt, answer.limit, rounds, progress)) as pairs:
        for token, logits, found in pairs:
            (step,) = answer.push([token], [logits], found)
            if step.finish_reason:
                pairs.close()
                yield step._replace(**answer.numbers())
                return
            yield step


def complete(
    engine,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    progress=None,
    on_step=None,
    spec: str = "gate",
    on_round=None,
) -> Completion:
    """The whole answer at once; on_step(step) and on_round(round) see every step and round as they come."""
    tokens, params = checked(engine, prompt, params)
    steps = []
    with closing(_steps(engine, tokens, params, progress, speculator(engine, params, spec, on_round), spec)) as running:
        for step in running:
            steps.append(step)
            if on_step:
                on_step(step)
    last = steps[-1]
    return completion(steps, last.finish_reason, {name: getattr(last, name) for name in NUMBERS})


NUMBERS = ("usage", "timings", "speculation")


def timings(prompt: int, completion: int, prefill_s: float, decode_s: float) -> dict[str, float]:
    """Seconds and tokens per second; 0 where nothing was decoded."""
    return {
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "prefill_tps": prompt / prefill_s if prefill_s else 0.0,
        "decode_tps": (completion - 1) / decode_s if decode_s and completion > 1 else 0.0,
    }


def _scores(step: Step) -> dict:
    top = [{"token": token, "logprob": logprob} for token, logprob in step.top_logprobs]
    return {"token": step.token, "logprob": step.logprob, "top": top}

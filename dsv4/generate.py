"""Generation: a prompt in, a stream of steps out, with the reasons to stop.

tokens of a completion  every token chosen, the end token or stop id that finished it included
text of a completion    a prefix of the decoded tokens: without the end token or stop id, and cut before the first
                        stop text, which may begin inside a token and span several
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from .errors import InputError
from .gate import DEFAULT, make_rule
from .sampling import SamplingParams, sample, token_logprobs
from .session import check_tokens
from .speculate import Speculator


@dataclass(frozen=True)
class Step:
    """One token and what it added. The texts of all steps, joined, are the text of the completion."""

    token: int
    text: str  # what became certain and printable with this token; may be empty. Always empty without a tokenizer
    logprob: float | None = None  # natural logarithm of the model's probability; None unless asked for
    top_logprobs: tuple[tuple[int, float], ...] | None = None  # (token, logprob), best first
    finish_reason: str | None = None  # on the last step: "stop" or "length"


@dataclass(frozen=True)
class Completion:
    """A finished answer. timings: seconds prefill_s, decode_s; tokens per second prefill_tps, decode_tps."""

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[dict] | None  # per token {token, logprob, top: [{token, logprob}]}
    timings: dict[str, float]
    speculation: dict  # mode, and what was drafted: speculate.Counters


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

    Raises InputError for text without a tokenizer, an empty prompt, and ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise InputError("prompt: the checkpoint has no tokenizer.json; expected token ids, found text")
        tokens = engine.tokenizer.encode_prompt(prompt)
    else:
        tokens = list(prompt)
    tokens = check_tokens(tokens, engine.config.vocab_size).tolist()
    if not tokens:
        raise InputError("prompt: expected at least one token; found none")
    return tokens


def _check(engine, tokens: list[int], params: SamplingParams) -> None:
    """InputError where the request cannot be served by this engine."""
    if len(tokens) >= engine.max_context:
        raise InputError(
            f"prompt: expected at most {engine.max_context - 1} tokens (a context of {engine.max_context}, one of them "
            f"to be generated); found {len(tokens)}; shorten it or load with a larger max_context"
        )
    vocab = engine.config.vocab_size
    if params.stop and engine.tokenizer is None:
        raise InputError("stop: the checkpoint has no tokenizer.json, so there is no text to stop at; use stop ids")
    for token in params.stop_ids:
        if token >= vocab:
            raise InputError(f"stop_ids: expected token ids 0 to {vocab - 1}; found {token}")


def speculator(engine, params: SamplingParams, spec: str = "gate", on_round: Callable | None = None) -> Speculator:
    """The rounds of one request. spec: off, always, gate (the default rule, or always where the settings say so), or
    the name of a rule. A checkpoint without a draft decodes plainly."""
    gate = None
    if spec != "off":
        rule = {"gate": DEFAULT if engine.gate.on else "always"}.get(spec, spec)
        block = engine.config.dspark.block_size if engine.draft is not None else 1
        gate = make_rule(rule, block, engine.gate, costs=engine.costs)
    if engine.draft is None:
        gate = None
    return Speculator(gate, lambda logits, position: sample(logits, params, position), on_round=on_round)


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
    tokens = prompt_tokens(engine, prompt)
    params = (params or SamplingParams()).seeded()
    _check(engine, tokens, params)
    return _steps(engine, tokens, params, progress, speculator(engine, params, spec))


def settled(
    session, prompt: list[int], limit: int, rounds: Speculator, progress: Callable | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """`limit` tokens, each with the logits [vocab] it was chosen from. One round settles several at once.

    Closed early, it takes back what the round settled beyond the last token that was seen.
    """
    logits = session.prefill(prompt, partial(progress, "prefill") if progress else None)
    token = rounds.choose(logits, session.position)
    yield token, logits
    count = 1
    while count < limit:
        found = rounds.step(session, token, logits, limit - count)
        for kept, pair in enumerate(zip(found.tokens, found.logits), 1):
            try:
                yield pair
            except GeneratorExit:
                rounds.drop(session, found, kept)
                raise
        token, logits = found.tokens[-1], found.logits[-1]
        count += len(found.tokens)


def _steps(engine, prompt: list[int], params: SamplingParams, progress, rounds: Speculator) -> Iterator[Step]:
    limit = min(params.max_tokens, engine.max_context - len(prompt))
    ends = set(params.stop_ids) | (set() if params.ignore_eos else set(engine.config.eos_token_ids))
    detokenizer = engine.tokenizer.stream() if engine.tokenizer else None
    matcher = StopMatcher(params.stop)
    with engine.session() as session, closing(settled(session, prompt, limit, rounds, progress)) as pairs:
        for count, (token, logits) in enumerate(pairs, 1):
            ended = token in ends
            text = matcher.push(detokenizer.push(token)) if detokenizer and not ended else ""
            reason = "stop" if ended or matcher.found else "length" if count == limit else None
            if reason and detokenizer:
                text += matcher.push(detokenizer.finish()) + matcher.finish()
            scores = (None, None) if params.logprobs is None else token_logprobs(logits, token, params.logprobs)
            yield Step(token, text, *scores, reason)
            if reason:
                return


def complete(
    engine,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    progress=None,
    on_step=None,
    spec: str = "gate",
    on_round=None,
) -> Completion:
    """The whole answer at once; on_step(step) and on_round(round) see every step and round as they come.

    prefill_s runs to the first token, decode_s from there to the last; decode_tps counts the tokens after the first.
    """
    tokens = prompt_tokens(engine, prompt)
    params = (params or SamplingParams()).seeded()
    _check(engine, tokens, params)
    rounds = speculator(engine, params, spec, on_round)
    steps, first = [], None
    start = time.perf_counter()
    with closing(_steps(engine, tokens, params, progress, rounds)) as running:
        for step in running:
            first = first or time.perf_counter()
            steps.append(step)
            if on_step:
                on_step(step)
    end = time.perf_counter()
    return Completion(
        text="".join(step.text for step in steps),
        tokens=[step.token for step in steps],
        finish_reason=steps[-1].finish_reason,
        prompt_tokens=len(tokens),
        completion_tokens=len(steps),
        logprobs=None if steps[0].logprob is None else [_scores(step) for step in steps],
        timings=timings(len(tokens), len(steps), first - start, end - first),
        speculation={"mode": spec if rounds.gate is not None else "off", **rounds.counters.as_dict()},
    )


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

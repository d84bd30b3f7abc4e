"""Replies: steps of a generation → OpenAI's objects. A whole answer is one piece; a streamed one is several of the same."""

from __future__ import annotations

import secrets
import time
from typing import Any

from ..generate import Step
from .asked import Asked


class Reply:
    """What has come and not yet been handed out, in the form of completions.

    push() takes a step; chunk() hands out what came since the last call, whole(), called once at the end, all of it.
    finish_reason is set with the last step.
    """

    object_whole = object_chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, asked: Asked, tokenizer: Any, model: str, fingerprint: str, prompt_tokens: int):
        self.asked, self.tokenizer = asked, tokenizer
        self.prompt_tokens, self.count, self.cached = prompt_tokens, 0, 0
        self.finish_reason: str | None = None
        self._text = ""
        self._length = 0  # characters handed out, and what came since
        self._scores: list[dict] = []
        self._rounds: list[dict] = []
        self._number = 0  # of the last round seen
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def push(self, step: Step) -> None:
        self.count += 1
        if step.round is not None and step.round.number != self._number:
            self._number = step.round.number
            self._rounds.append(_round(step.round))
        if step.usage is not None:
            self.cached = step.usage["cached_tokens"]
        if step.logprob is not None:
            self._scores.append(self._score(step))
        self.finish_reason = step.finish_reason
        self._add(step)

    def _add(self, step: Step) -> None:
        self._text += step.text

    @property
    def pending(self) -> bool:
        """Whether there is anything to hand out."""
        return bool(self._text or self._scores or self.finish_reason)

    def usage(self) -> dict:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.count,
            "total_tokens": self.prompt_tokens + self.count,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    # ------------------------------------------------------------------ objects
    def whole(self) -> dict:
        """The object of an answer in one piece."""
        return {**self._frame(self.object_whole, [self._choice("message")]), "usage": self.usage()}

    def chunk(self) -> dict:
        """A streamed object of what came since the last one."""
        frame = self._frame(self.object_chunk, [self._choice("delta")])
        return {**frame, "usage": None} if self.asked.include_usage else frame

    def last_chunk(self) -> dict:
        """The object after the last chunk of a choice, where usage was asked for."""
        return {**self._frame(self.object_chunk, []), "usage": self.usage()}

    def _frame(self, kind: str, choices: list[dict]) -> dict:
        frame = {**self._head, "object": kind, "choices": choices}
        if self.asked.rounds and choices:
            frame["dsv4_rounds"], self._rounds = self._rounds, []
        return frame

    def _choice(self, part: str) -> dict:
        text, self._text = self._text, ""
        self._length += len(text)
        return {"index": 0, "text": text, "logprobs": self._logprobs(), "finish_reason": self.finish_reason}

    def _logprobs(self) -> dict | None:
        if self.asked.sampling.logprobs is None:
            return None
        scores, self._scores = self._scores, []
        return {
            "tokens": [score["token"] for score in scores],
            "token_logprobs": [score["logprob"] for score in scores],
            "top_logprobs": [dict(score["top"]) for score in scores],
            "text_offset": [score["offset"] for score in scores],
        }

    def _score(self, step: Step) -> dict:
        return {
            "token": self._name(step.token),
            "logprob": step.logprob,
            "top": [(self._name(token), logprob) for token, logprob in step.top_logprobs],
            "offset": self._length + len(self._text),
        }

    def _name(self, token: int) -> str:
        """A token as text; one that is no whole UTF-8 by its bytes, as OpenAI's endpoint names it."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _round(record: Any) -> dict:
    """A round for whoever draws it: how many tokens were drafted, verified, accepted; the draft's confidences (logits)."""
    return {
        "drafted": len(record.drafted),
        "verified": record.verified,
        "accepted": record.accepted,
        "confidence": [round(float(value), 4) for value in record.confidence],
    }

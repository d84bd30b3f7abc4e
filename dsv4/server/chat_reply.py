"""Chat replies: the model's answer as reasoning, content and tool calls, whole or streamed."""

from __future__ import annotations

import secrets
from typing import Any

from ..chat import StreamParser
from ..generate import Step, StopMatcher
from .replies import Reply


class ChatReply(Reply):
    """A Reply in chat form. Stop texts are looked for in the content: what the model thinks, or passes to a tool, may hold
    them. logprobs has an entry for every token, whatever part of the answer it belongs to."""

    object_whole, object_chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, asked: Any, *arguments: Any):
        super().__init__(asked, *arguments)
        self._parser = StreamParser(thinking=asked.conversation.thinking)
        self._stops = StopMatcher(asked.stops)
        self._reasoning = ""
        self._calls: list[dict] = []
        self._called = False
        self._opened = False  # the first chunk, which names the role, is out

    def _add(self, step: Step) -> None:
        deltas = self._parser.feed(step.text) if step.text else []
        if step.finish_reason:
            deltas += self._parser.close()
        for delta in deltas:
            self._text += self._stops.push(delta.get("content", ""))
            if self._stops.found:
                self.finish_reason = "stop"
                return
            self._reasoning += delta.get("reasoning_content", "")
            self._calls += [{**call, "id": f"call_{secrets.token_hex(12)}"} for call in delta.get("tool_calls", ())]
        self._called |= bool(self._calls)
        if step.finish_reason:
            self._text += self._stops.finish()
            if self._called and step.finish_reason == "stop":
                self.finish_reason = "tool_calls"

    @property
    def pending(self) -> bool:
        return not self._opened or bool(self._reasoning or self._calls) or super().pending

    def _choice(self, part: str) -> dict:
        text, self._text = self._text, ""
        reasoning, self._reasoning = self._reasoning, ""
        calls, self._calls = self._calls, []
        if part == "message":
            message = {"role": "assistant", "content": text if text or not calls else None}
            calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        else:
            message = {} if self._opened else {"role": "assistant", "content": ""}
            self._opened = True
            message |= {"content": text} if text else {}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return {"index": 0, part: message, "logprobs": self._logprobs(), "finish_reason": self.finish_reason}

    def _logprobs(self) -> dict | None:
        if self.asked.sampling.logprobs is None:
            return None
        scores, self._scores = self._scores, []
        return {"content": scores, "refusal": None}

    def _score(self, step: Step) -> dict:
        top = [self._entry(token, logprob) for token, logprob in step.top_logprobs]
        return {**self._entry(step.token, step.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

"""Limits: what one server allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """max_tokens: the most that a request may ask for. max_body: bytes of a request. body_s: seconds for a
    request to arrive; request_s: for all of its answer; drain_s: for answers to end once the server is stopped."""

    max_tokens: int
    max_body: int = 4 << 20
    body_s: float = 30.0
    request_s: float = 600.0
    drain_s: float = 30.0

"""Logits of every position of a prompt: the most likely tokens as a record, all of them as a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .errors import InputError
from .files import replacing
from .generate import prompt_tokens
from .sampling import descending
from .session import remedy


def record(engine, prompt, k: int, out: Path | None = None, progress=None) -> dict:
    """{"prompt": ids, "topk": per position the k best {"token", "logit"}}; all logits also go to `out`, if given.

    `out` is a safetensors file of one tensor `logits`, float32 [T, vocab], written as the prompt runs, never whole in
    memory. Raises InputError for a bad prompt, one longer than the context, and where `out` cannot be written.
    """
    tokens = prompt_tokens(engine, prompt)
    if len(tokens) > engine.max_context:
        raise InputError(
            f"prompt: expected at most {engine.max_context} tokens (the context); found {len(tokens)}; {remedy(engine, 'shorten it')}"
        )
    if out is None:
        return {"prompt": tokens, "topk": _run(engine, tokens, k, None, progress)}
    try:
        with replacing(out) as file:
            file.write(_header((len(tokens), engine.config.vocab_size)))
            return {"prompt": tokens, "topk": _run(engine, tokens, k, file, progress)}
    except OSError as error:
        raise InputError(f"{out}: expected a file that can be written; {error.strerror}") from error


def _run(engine, tokens: list[int], k: int, file: BinaryIO | None, progress) -> list[list[dict]]:
    topk = []
    with engine.session() as session:
        for start in range(0, len(tokens), engine.chunk):
            part = tokens[start : start + engine.chunk]
            rows = session.forward(part, "all").logits
            topk += [_best(row, k) for row in rows]
            if file is not None:
                file.write(np.ascontiguousarray(rows, "<f4"))
            if progress:
                progress("prefill", start + len(part), len(tokens))
    return topk


def _best(row: np.ndarray, k: int) -> list[dict]:
    return [{"token": int(i), "logit": float(row[i])} for i in descending(row, k)]


def _header(shape: tuple[int, int]) -> bytes:
    """The front of a safetensors file with one float32 tensor `logits`: length of the JSON, then the JSON."""
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0] * shape[1]]}
    text = json.dumps({"logits": tensor}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def render(engine, result: dict) -> str:
    """A line per position: its token, and the candidates for the one after it with their logits."""

    def name(token: int) -> str:
        return str(token) if engine.tokenizer is None else f"{token} {engine.tokenizer.decode([token])!r}"

    lines = []
    for position, (token, best) in enumerate(zip(result["prompt"], result["topk"])):
        candidates = ", ".join(f"{name(item['token'])} {item['logit']:.4f}" for item in best)
        lines.append(f"{position:>6}  {name(token)} → {candidates}")
    return "\n".join(lines)

"""Rounds of speculation in a file, so that any rule can be replayed on them.

JSON: {"source": text, "note": text, "block_size": 5, "prompts": {name: [round, ..]}}. A round: "conf", the
draft's confidences (none where nothing was drafted); "k", how many drafted tokens were verified; "accept", how many of
those were right; optionally "margin" (of the committed token) and "draft_ms", "verify_ms", "plain_ms".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..errors import InputError
from ..files import replacing

OPTIONAL = ("margin", "draft_ms", "verify_ms", "plain_ms")


@dataclass(frozen=True)
class RecordedRound:
    conf: tuple[float, ...]
    k: int
    accept: int
    margin: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    plain_ms: float | None = None


@dataclass(frozen=True)
class Recording:
    block_size: int
    prompts: Mapping[str, Sequence[RecordedRound]]
    source: str = ""  # where and when: replay knows by it the rounds that the built-in prior was fitted to
    note: str = ""


def write_rounds(path: str | Path, recording: Recording) -> None:
    """Write a recording; a file at `path` is replaced only once all of it is written. Raises InputError."""
    prompts = {name: [_as_dict(one) for one in rounds] for name, rounds in recording.prompts.items()}
    head = {"source": recording.source, "note": recording.note, "block_size": recording.block_size}
    try:
        text = json.dumps({**head, "prompts": prompts}, indent=1, ensure_ascii=False, allow_nan=False)
        with replacing(path) as file:
            file.write(text.encode())
    except ValueError as error:
        raise InputError(f"{path}: expected finite numbers in every round; {error}") from error
    except OSError as error:
        raise InputError(f"{path}: expected a place to write rounds to; {error.strerror}") from error


def _as_dict(one: RecordedRound) -> dict[str, Any]:
    found = {"accept": one.accept, "k": one.k, "conf": list(one.conf)}
    return {**found, **{key: getattr(one, key) for key in OPTIONAL if getattr(one, key) is not None}}


def read_rounds(path: str | Path) -> Recording:
    """Read and check a recording. Raises InputError that names the file, the prompt and the round."""
    try:
        raw = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"{path}: expected a file of rounds; {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON; {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object with block_size and prompts; found {type(raw).__name__}")
    block = raw.get("block_size")
    if type(block) is not int or block < 1:
        raise InputError(f"{path}: block_size: expected an integer >= 1; found {block!r}")
    prompts = raw.get("prompts")
    if not isinstance(prompts, dict) or not prompts:
        raise InputError(f"{path}: prompts: expected an object of lists of rounds, at least one; found {prompts!r:.40}")
    for name, rounds in prompts.items():
        if not isinstance(rounds, list) or not rounds:
            raise InputError(f"{path}: prompts: {name}: expected a list of rounds, at least one; found {rounds!r:.40}")
    read = {
        name: tuple(_round(one, block, f"{path}: prompts: {name}: round {i}") for i, one in enumerate(rounds))
        for name, rounds in prompts.items()
    }
    return Recording(block, read, str(raw.get("source", "")), str(raw.get("note", "")))


def _round(raw: Any, block: int, where: str) -> RecordedRound:
    if not isinstance(raw, dict):
        raise InputError(f"{where}: expected an object; found {raw!r}")
    unknown = sorted(set(raw) - {"accept", "k", "conf", *OPTIONAL})
    if unknown:
        raise InputError(f"{where}: {unknown[0]}: unknown key; expected accept, k, conf, {', '.join(OPTIONAL)}")
    conf, k, accept = (raw.get(key) for key in ("conf", "k", "accept"))
    if not isinstance(conf, list) or len(conf) > block or not all(map(_number, conf)):
        raise InputError(f"{where}: conf: expected at most {block} numbers; found {conf!r}")
    if type(k) is not int or not 0 <= k <= len(conf):
        raise InputError(f"{where}: k: expected 0 .. {len(conf)}, the number of confidences; found {k!r}")
    if type(accept) is not int or not 0 <= accept <= k:
        raise InputError(f"{where}: accept: expected 0 .. k = {k}; found {accept!r}")
    for key in OPTIONAL:
        if raw.get(key) is not None and (not _number(raw[key]) or raw[key] < 0):
            raise InputError(f"{where}: {key}: expected a number >= 0; found {raw[key]!r}")
    return RecordedRound(tuple(map(float, conf)), k, accept, *(raw.get(key) for key in OPTIONAL))


def _number(value: Any) -> bool:
    return type(value) in (int, float) and -1e18 < value < 1e18  # neither infinite nor NaN, whatever its length

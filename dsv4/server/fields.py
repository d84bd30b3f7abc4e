"""Fields: a JSON object read field by field. What is wrong, missing or unknown is refused and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import close_to
from .faults import Fault, wrong

Check = tuple[str, Callable[[Any], bool]]  # what is expected, in words; whether a value is that


def _is_number(value: Any) -> bool:
    return type(value) is int or type(value) is float and math.isfinite(value)  # an int may be too large for isfinite


TEXT: Check = ("a string", lambda value: isinstance(value, str))
FLAG: Check = ("true or false", lambda value: isinstance(value, bool))
LIST: Check = ("a list", lambda value: isinstance(value, list))
OBJECT: Check = ("an object", lambda value: isinstance(value, dict))


def integer(low: int, high: int) -> Check:
    return f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high


def number(low: float, high: float) -> Check:
    return f"a number from {low} to {high}", lambda value: _is_number(value) and low <= value <= high


def one_of(*values: Any) -> Check:
    words = " or ".join(json.dumps(value) for value in values)
    return words, lambda value: any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values)


class Fields:
    """The fields of one object, taken one by one; null counts as absent. finish() refuses what nobody took."""

    def __init__(self, value: Any, where: str = ""):
        if not isinstance(value, dict):
            raise wrong(where or "body", "a JSON object", value)
        self._left, self.where = dict(value), where
        self._known: list[str] = []  # what was asked for so far

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str, check: Check, default: Any = None) -> Any:
        """The field's value, or `default`. Raises Fault 400 for a value that is not what is expected."""
        self._known.append(name)
        value = self._left.pop(name, None)
        if value is None:
            return default
        expected, holds = check
        if not holds(value):
            raise wrong(self.path(name), expected, value)
        return value

    def need(self, name: str, check: Check) -> Any:
        value = self.take(name, check)
        if value is None:
            raise Fault(400, f"{self.path(name)}: expected {check[0]}; found nothing", self.path(name), "missing_field")
        return value

    def neutral(self, settings: dict[str, tuple[Any, ...]]) -> None:
        """Fields of OpenAI's that have no effect here: accepted where they ask for none, refused otherwise."""
        self._known += settings
        for name, values in settings.items():
            expected, holds = one_of(*values)
            value = self._left.pop(name, None)
            if value is not None and not holds(value):
                raise wrong(self.path(name), f"{expected} (nothing else is supported)", value)

    def without(self, names: Iterable[str]) -> None:
        """Fields that are known and not supported."""
        for name in names:
            if self._left.pop(name, None) is not None:
                raise Fault(400, f"{self.path(name)}: not supported", self.path(name), "unsupported_field")

    def finish(self) -> None:
        for name in self._left:
            close = close_to(name, self._known)
            hint = f"; did you mean {self.path(close)!r}?" if close else ""
            raise Fault(400, f"{self.path(name)!r}: unknown field{hint}", self.path(name), "unknown_field")


def read_json(body: bytes) -> Any:
    """A body as JSON. Raises Fault 400; NaN, infinities and repeated fields are not JSON here."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise ValueError(f"field {twice!r} appears twice")
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=once, parse_constant=constant)
    except RecursionError as error:
        raise Fault(400, "body: expected JSON, found it nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise Fault(400, f"body: expected JSON in UTF-8; {error}", code="invalid_json") from error

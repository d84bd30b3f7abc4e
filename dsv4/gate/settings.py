"""What a user can set about the gate: DEEPSEEK_DSPARK_GATE and DEEPSEEK_DSPARK_GATE_*, or the same as arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ..config import environment
from ..errors import ConfigError, suggest

PREFIX = "DEEPSEEK_DSPARK_GATE"
LEAST_MS, MOST_MS = 1e-6, 1e12  # of a cost: sums and ratios of such numbers are numbers


@dataclass(frozen=True)
class GateSettings:
    """Field `margin` is variable DEEPSEEK_DSPARK_GATE_MARGIN, and so on; `on` is DEEPSEEK_DSPARK_GATE itself.

    Raises ConfigError, which names the field or variable, for a value that is out of range or does not parse.
    """

    on: bool = True  # False: always verify the whole block
    margin_threshold: float = 0.0  # draft nothing where the committed token's top1 - top2 logit is below; 0: off
    margin: float = 1.15  # how many times the whole block's rate a shorter draft must reach to be preferred
    min_draft: int = 0  # a round never verifies fewer tokens
    decay: float = 0.9  # weight of what was learned, one round later
    draft_ms: float = 196.0  # the costs: only their ratios matter
    verify_base_ms: float = 300.0
    verify_slope_ms: float = 109.0
    plain_ms: float = 303.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, field.name, getattr(self, field.name))

    @classmethod
    def from_env(cls, **overrides: Any) -> GateSettings:
        """Defaults, then the environment, then overrides that are not None."""
        known = {PREFIX + ("" if f.name == "on" else f"_{f.name.upper()}"): f for f in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environment(PREFIX).items():
            if variable not in known:
                raise ConfigError(f"{variable}: unknown variable; {suggest(variable, known)}")
            name = known[variable].name
            values[name] = _parse(variable, name, text)
        names = [f.name for f in known.values()]
        if unknown := sorted(set(overrides) - set(names)):
            raise ConfigError(f"gate settings: unknown argument {unknown[0]}; {suggest(unknown[0], names)}")
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)


def _parse(variable: str, name: str, text: str) -> bool | int | float:
    """The value of a variable; where the text is none, _check says what was expected."""
    value: bool | int | float | str = text
    try:
        if name == "on":
            value = {"0": False, "1": True}.get(text.strip(), text)
        else:
            value = int(text) if name == "min_draft" else float(text)
    except ValueError:
        pass
    _check(name, variable, value)
    return value


def _check(name: str, shown: str, value: Any) -> None:
    number = type(value) in (int, float) and math.isfinite(value)
    free = name in ("draft_ms", "verify_slope_ms")  # a draft or one row more may cost nothing
    within = number and LEAST_MS <= value <= MOST_MS
    cost = (within or (free and value == 0), f"milliseconds, {'0 or ' if free else ''}{LEAST_MS:g} to {MOST_MS:g}")
    holds, expected = {
        "on": (type(value) is bool, "0 or 1"),
        "margin_threshold": (number and value >= 0, "a number >= 0"),
        "margin": (number and value > 0, "a number > 0"),
        "min_draft": (type(value) is int and value >= 0, "an integer >= 0"),
        "decay": (number and 0 < value <= 1, "a number > 0 and <= 1"),
    }.get(name, cost)
    if not holds:
        raise ConfigError(f"{shown}: expected {expected}; found {value!r}")

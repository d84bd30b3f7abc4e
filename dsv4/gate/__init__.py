"""The gate: whether to draft at all, and how many drafted tokens to verify. Plain Python; it knows no engine.

It decides speed only. Whatever it chooses, the tokens are those of plain decoding.
"""

from __future__ import annotations

from .costs import Costs, Evidence, MeasuredCosts
from .rules import DEFAULT, RULES, Bucket, Calibrated, Fixed, Rule, make_rule, rule_of
from .settings import GateSettings

__all__ = [
    "DEFAULT", "RULES", "Bucket", "Calibrated", "Costs", "Evidence", "Fixed", "GateSettings", "MeasuredCosts", "Rule",
    "make_rule", "rule_of",
]  # fmt: skip

"""The words of the prompt format: special tokens, tags, and the texts that the model was trained with."""

from __future__ import annotations

import re
from collections.abc import Iterator

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
TURNS = (BOS, USER, ASSISTANT, REMINDER)  # what another turn begins with: no part of an answer
SPECIAL = (BOS, EOS, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML)

CALLS = f"<{DSML}tool_calls>"
END_CALLS = f"</{DSML}tool_calls>"
INVOKE = f'<{DSML}invoke name="'
END_INVOKE = f"</{DSML}invoke>"
PARAMETER = f'<{DSML}parameter name="'
END_PARAMETER = f"</{DSML}parameter>"
GAP = "\n\n"  # between an answer and its calls, and between the parts of a system text or of a user turn

EFFORTS = {
    "low": "",
    "high": (
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
        "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
        "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
        "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
        "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
    ),
    "max": (
        "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
        "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
        "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
        "cause rather than any surface symptom.\n"
        "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
        "that no assumption remains unchecked and no error remains undiscovered.\n\n"
    ),
}

TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "{CALLS}" block like the following:

{CALLS}
{INVOKE}$TOOL_NAME">
{PARAMETER}$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{END_PARAMETER}
...
{END_INVOKE}
{INVOKE}$TOOL_NAME2">
...
{END_INVOKE}
{END_CALLS}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


def split(text: str) -> Iterator[tuple[str, bool]]:
    """(part, is it a special token) of our own text; the parts, joined, are the text."""
    for i, part in enumerate(_SPECIAL.split(text)):
        if part:
            yield part, i % 2 == 1

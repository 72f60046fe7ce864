"""How a model writes tool calls and reasoning into its text. The formats come from outside: mlx-lm has them."""

from __future__ import annotations

from dataclasses import dataclass
from re import Pattern
from typing import Any, Protocol


class ToolParser(Protocol):
    """One format of tool calls; mlx-lm's ``tool_parsers`` modules have this shape.

    Attributes:
        tool_call_start: what a call begins with.
        tool_call_end: what it ends with; empty if it goes on until the next one, or the end of the text.
    """

    tool_call_start: str
    tool_call_end: str

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        """The call between the two marks, or a list of several: objects with ``name`` and ``arguments``.

        Raises:
            Exception: any, for a text that is no call.
        """
        ...


@dataclass(frozen=True)
class ReasoningMarks:
    """What reasoning is written between."""

    start: str
    end: str


@dataclass(frozen=True)
class Parsers:
    """A model's formats.

    Attributes:
        tool: None if the model's format of tool calls is not known, or must not be parsed.
        call_head: what a call's text begins with, its ``name`` a group, up to where its arguments begin, if it writes
            them as a JSON object and nothing of consequence after them; else None.
        reasoning: None if the model does not reason, or must be shown as it is.
        special: the marks are special tokens, so text without those would not have them.
        harmony: the format is gpt-oss's (:mod:`metal_engine.answers.harmony`).
        auto_tool_choice: whether requests may leave it to the model to call tools.
    """

    tool: ToolParser | None = None
    call_head: Pattern[str] | None = None
    reasoning: ReasoningMarks | None = None
    special: bool = False
    auto_tool_choice: bool = True
    harmony: bool = False


def begins_in_reasoning(marks: ReasoningMarks, prompt_end: str, *, continues: bool) -> bool:
    """Whether a prompt that ends like this has the model begin within its reasoning.

    Args:
        continues: the prompt ends within the assistant's own message; else only what the template wrote last counts.
    """
    at = prompt_end.rfind(marks.start)
    if at < 0 or prompt_end.rfind(marks.end) > at:
        return False
    return continues or not prompt_end[at + len(marks.start) :].strip()

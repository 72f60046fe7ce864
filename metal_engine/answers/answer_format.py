"""How a model writes tool calls and reasoning into its text. mlx-lm has the parsers of tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from re import Pattern
from typing import Any, Protocol


class ToolParser(Protocol):
    """One format of tool calls; mlx-lm's ``tool_parsers`` modules have this shape.

    Attributes:
        tool_call_start: what a call begins with.
        tool_call_end: what it ends with; empty if a call goes on until the next one, or the end of the text.
    """

    tool_call_start: str
    tool_call_end: str

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        """The call between the two marks, or a list of several: objects with ``name`` and ``arguments``.

        Raises:
            Exception: of any type, for a text that is not a call.
        """
        ...


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks between which a model writes its reasoning."""

    start: str
    end: str


@dataclass(frozen=True)
class AnswerFormat:
    """How one model writes its answers.

    Attributes:
        tool: parses tool calls; None if their format is not known, or if they are to be left in the text.
        call_head: matches what a call's text begins with, up to where its arguments begin; its group ``name`` is the
            tool's name. None for formats that do not write the arguments as a JSON object with nothing of
            consequence after it.
        reasoning: None if the model does not reason, or if reasoning is to be left in the text.
        special: whether marks are special tokens. Text without special tokens would lack them.
        harmony: whether the format is gpt-oss's (:mod:`metal_engine.answers.harmony`).
        finds_calls: whether calls are looked for at all; False where the settings say that they stay text.
    """

    tool: ToolParser | None = None
    call_head: Pattern[str] | None = None
    reasoning: ReasoningMarks | None = None
    special: bool = False
    harmony: bool = False
    finds_calls: bool = True


def begins_in_reasoning(marks: ReasoningMarks, prompt_end: str, *, continues: bool) -> bool:
    """Whether a prompt that ends like this has the model begin within its reasoning.

    Args:
        continues: whether the prompt ends within the assistant's own message. If not, only a mark that the template
            wrote last counts: one further up is somebody's text.
    """
    at = prompt_end.rfind(marks.start)
    if at < 0 or prompt_end.rfind(marks.end) > at:
        return False
    return continues or not prompt_end[at + len(marks.start) :].strip()

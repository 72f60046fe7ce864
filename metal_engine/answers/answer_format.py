"""How a model writes tool calls and reasoning into its text."""

from __future__ import annotations

from dataclasses import dataclass
from re import Pattern
from typing import Any, Protocol


class ToolParser(Protocol):
    """Parser of one format of tool calls. mlx-lm's ``tool_parsers`` modules have this shape, too.

    Attributes:
        tool_call_start: what a call begins with.
        tool_call_end: what it ends with; empty if a call goes on until the next one, or the end of the text.
    """

    tool_call_start: str
    tool_call_end: str

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        """Return the call between the two marks, or a list of calls: objects with ``name`` and ``arguments``.

        A text in the list is content that the model wrote beside its calls.

        Raises:
            Exception: of any type, for a text that is not a call.
        """
        ...


@dataclass(frozen=True)
class BareOpening:
    """Text with which a call begins if the model leaves out the opening mark.

    Attributes:
        before: text before the tool's name.
        after: text behind the tool's name.
        only_first: True if the call must be the first text of the content.
    """

    before: str
    after: str
    only_first: bool = False


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
        call_head: pattern for the start of a call, up to its arguments. The group ``name`` is the tool's name, an
            optional group ``id`` the call's id. None if the arguments are not one JSON object at the end of the call.
        bare: opening of a call without its mark. None if calls are looked for only behind marks.
        reasoning: None if the model does not reason, or if reasoning is to be left in the text.
        special: whether marks are special tokens. Text without special tokens would lack them.
        harmony: whether the format is gpt-oss's (:mod:`metal_engine.answers.harmony`).
        finds_calls: whether calls are looked for at all; False where the settings say that they stay text.
    """

    tool: ToolParser | None = None
    call_head: Pattern[str] | None = None
    bare: BareOpening | None = None
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

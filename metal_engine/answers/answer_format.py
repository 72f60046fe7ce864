"""Describes the formats in which models write tool calls and reasoning into their text."""

from __future__ import annotations

from dataclasses import dataclass
from re import Pattern
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from metal_engine.answers.call_syntaxes.syntax import CallSyntax


class ToolParser(Protocol):
    """Parser of one format of tool calls. mlx-lm's ``tool_parsers`` modules implement this protocol, too.

    Attributes:
        tool_call_start: mark that begins a call.
        tool_call_end: mark that ends a call; empty if a call ends at the next call or the end of the text.
    """

    tool_call_start: str
    tool_call_end: str

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        """Parse the text between the two marks. Return a call, or a list of calls and strings.

        A call is a dict with ``name``, ``arguments`` (a dict or its JSON text), and optionally ``id``. A string is
        content that the model wrote around its calls.

        Args:
            text: text between the marks, without the marks.
            tools: tools that may be called, in OpenAI's form.

        Raises:
            Exception: the text is not a call. The type of the exception varies.
        """
        ...


@dataclass(frozen=True)
class BareOpening:
    """Text with which a call begins if the model leaves out the opening mark.

    Attributes:
        before: text before the tool's name.
        after: text after the tool's name.
        only_first: True if the call must be the first text of the content.
    """

    before: str
    after: str
    only_first: bool = False


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks before and after a model's reasoning.

    Attributes:
        start: mark before the reasoning.
        end: mark after the reasoning.
        budget_text: text that is forced before ``end`` if the token budget ends the reasoning, as the model's authors
            recommend. Empty if they recommend none.
        dropped: marks that are removed from the content. Includes ``end`` for models that repeat this mark there.
        next_message: text between two messages of an output, ``<|start|>assistant`` for gpt-oss. Empty for all other
            formats, whose outputs are not divided into messages.
        content_start: text at the start of a message with content, for gpt-oss. Empty for all other formats.
    """

    start: str
    end: str
    budget_text: str = ""
    dropped: tuple[str, ...] = ()
    next_message: str = ""
    content_start: str = ""


@dataclass(frozen=True)
class AnswerFormat:
    """Output format of a model.

    Attributes:
        tool: parser of tool calls; None if their format is unknown, or if they are to be left in the text.
        call_head: pattern for the start of a call, up to its arguments. The group ``name`` is the tool's name, and
            the optional group ``id`` is the call's id. None if the arguments are not one JSON object at the call's end.
        syntax: exact form of the calls; None if their grammar is unknown.
        bare: opening of a call without its mark. None if calls are found only after marks.
        reasoning: marks of reasoning; None if the model does not reason, or if reasoning is to be left in the text.
        special: True if the marks are special tokens. Outputs must then be decoded with their special tokens.
        harmony: True for the format of gpt-oss (:mod:`metal_engine.answers.harmony`).
        finds_calls: True if tool calls are parsed; False if the settings leave them in the text.
    """

    tool: ToolParser | None = None
    call_head: Pattern[str] | None = None
    syntax: CallSyntax | None = None
    bare: BareOpening | None = None
    reasoning: ReasoningMarks | None = None
    special: bool = False
    harmony: bool = False
    finds_calls: bool = True


def begins_in_reasoning(marks: ReasoningMarks, prompt_end: str, *, continues: bool) -> bool:
    """Return True if the end of a prompt makes the output start within reasoning.

    Args:
        marks: marks of reasoning.
        prompt_end: text of the prompt's last tokens.
        continues: True if the prompt ends within the assistant's message. If False, an opening mark counts only at the
            very end of the prompt, where the template writes it. An earlier mark can be part of a message.
    """
    at = prompt_end.rfind(marks.start)
    if at < 0 or prompt_end.rfind(marks.end) > at:
        return False
    return continues or not prompt_end[at + len(marks.start) :].strip()


def is_past_reasoning(marks: ReasoningMarks, prompt_end: str, *, continues: bool) -> bool:
    """Return True if the output cannot begin with reasoning. Call it only if the prompt does not end within reasoning.

    The output cannot begin with reasoning in two cases:

    - The prompt ends with the end mark of reasoning. Chat templates write this mark if reasoning is turned off.
    - The output continues an assistant message. The reasoning of that message is over.

    The arguments are those of :func:`begins_in_reasoning`.
    """
    return continues or prompt_end.rstrip().endswith(marks.end)

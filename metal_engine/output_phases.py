"""Phases of an output: reasoning, content and tool calls, each with its rules. A field of the sampling parameters.

An output is free text until a mark appears in it. Marks are found in the text of the tokens, special tokens included::

    <think> free, at most `budget` tokens </think> content: free, or the structured output
    content, free <tool_call> the call's grammar </tool_call> content, free ...

Grammars are in llguidance's Lark syntax, with one addition: ``@"text"`` (a JSON string) stands for a text that may
contain special tokens. It becomes special tokens and strings for the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class CallEndSearch(Protocol):
    """Search for the end of one tool call."""

    def find(self, text: str) -> tuple[int, str] | None:
        """Return the position of the call's closing mark in ``text``, and the mark. None if ``text`` lacks the mark.

        Args:
            text: text of the call so far. It begins with the text of the previous search.
        """


@dataclass(frozen=True)
class CallText:
    """Marks that enclose the text of tool calls.

    Attributes:
        starts: marks that begin a call.
        end: function that returns a new search for the end of a call; None if calls last until the end of the output.
        first_starts: marks that begin a call only at the beginning of the content, after white space or reasoning.
    """

    starts: tuple[str, ...]
    end: Callable[[], CallEndSearch] | None = field(default=None, compare=False)
    first_starts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReasoningPhase:
    """Reasoning between two marks.

    Attributes:
        start: mark before the reasoning.
        end: mark after the reasoning. A structured output begins after this mark.
        begins_inside: True if the prompt ends within reasoning, so that the output begins with reasoning. Otherwise,
            the model writes ``start`` itself, or does not reason.
        budget: maximum number of tokens of the reasoning. At the budget, ``end_text`` and ``end`` are forced. None: no
            limit.
        end_text: text that is forced before ``end``.
        is_past: True if the prompt ends after the reasoning.
        calls: marks of tool calls. Within a call, ``start`` is ordinary text. Only the search for stop strings uses
            this attribute. None without stop strings or tools.
        next_message: text between messages, for a format whose outputs consist of messages; otherwise empty.
        content_start: text before a structured output, for a format whose outputs consist of messages. After a message,
            the model may write ``content_start`` or ``start``. Empty for other formats, and without a structured
            output.
    """

    start: str
    end: str
    begins_inside: bool = False
    budget: int | None = None
    end_text: str = ""
    is_past: bool = False
    calls: CallText | None = None
    next_message: str = ""
    content_start: str = ""

    @property
    def drops_end(self) -> bool:
        """True if end marks in the content are dropped, because a budget or the prompt may have ended the reasoning."""
        return self.budget is not None or self.is_past


@dataclass(frozen=True)
class ToolArguments:
    """Rule of a grammar for the arguments of one tool.

    Attributes:
        tool: name of the tool.
        rule: name of the rule.
        open_rule: name of the rule for arguments of any kind. It takes the place of ``rule`` if the grammar cannot be
            compiled with ``rule``.
    """

    tool: str
    rule: str
    open_rule: str


@dataclass(frozen=True)
class CallTrigger:
    """A mark that begins a tool call, and the grammar of the call.

    Attributes:
        mark: the mark.
        grammar: Lark rules. The rule ``call`` derives the text from the mark, exclusive, to the end of the call,
            inclusive. After the call, the output is free again.
        arguments: rules of ``grammar`` that depend on the schema of a tool. Each of these rules is one line of
            ``grammar``, ``rule: definition``.
        heads: pairs (text, name of a rule). A call begins with the mark and one of the texts. The text's rule derives
            the rest of the call. A mark that none of the texts follows is content. Empty: every mark begins a call.
        is_whole: True if the call is the whole content. The mark counts only at the beginning of the content, after
            white space or reasoning. The output ends after the call.
    """

    mark: str
    grammar: str
    arguments: tuple[ToolArguments, ...] = ()
    heads: tuple[tuple[str, str], ...] = ()
    is_whole: bool = False


@dataclass(frozen=True)
class CallPhase:
    """Tool calls that a model may begin.

    Attributes:
        triggers: marks that begin a call, each with the call's grammar. If a mark is the start of a longer mark, the
            longer mark comes first.
        parallel: True if several calls are allowed. Otherwise, the output ends after the first call.

    If a structured output is an alternative to the calls, all calls begin with the first trigger.
    """

    triggers: tuple[CallTrigger, ...]
    parallel: bool = True


@dataclass(frozen=True)
class OutputPhases:
    """Phases of an output.

    Attributes:
        reasoning: phase of the reasoning; None if the model does not reason.
        calls: tool calls whose text must match a grammar; None if the text of calls is free. With a structured output,
            the content is either the structured output or calls.
    """

    reasoning: ReasoningPhase | None = None
    calls: CallPhase | None = None

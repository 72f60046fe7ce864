"""Exact forms of tool calls: a grammar for each format, and a reader of all texts that the grammar allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from metal_engine.answers.answer_format import ToolParser
from metal_engine.answers.call_syntaxes.lark import NameNotExpressibleError
from metal_engine.answers.call_syntaxes.tool_schemas import ToolSchema, tool_schemas
from metal_engine.output_phases import CallTrigger


@dataclass(frozen=True)
class Quotes:
    """Forms of the quoted parts of a call, such as strings. In a quoted part, the mark that ends the call is text.

    Attributes:
        pairs: maps the text that begins a part to a regular expression. The expression matches the end of the part, or
            an escape within the part, which begins with a backslash.
        broken: regular expression for text that proves that the model left out the end of the part. Empty if no text
            proves this.
        after: characters that may follow a part and optional white space. Any other character proves that the model
            left out the end of the part. Empty if any character may follow.
        value: pattern for the text of a part before its value, such as an opening tag. The group ``name`` is the name
            of the value. None if values have no names.
        is_json: takes the name of a value. Returns True if the value is JSON whenever it begins with ``{`` or ``[``. A
            part with JSON ends at the first end that is not in a JSON string.
    """

    pairs: dict[str, str] = field(default_factory=dict)
    broken: str = ""
    after: str = ""
    value: re.Pattern[str] | None = None
    is_json: Callable[[Any], bool] = lambda name: False


NO_QUOTES = Quotes()
JSON_QUOTES = Quotes({'"': r'\\.|"'}, r"[\x00-\x1f]", ",:}]")


class CallSyntax(Protocol):
    """Exact form of the calls of one format: a grammar, and a reader of the texts that the grammar allows."""

    def quotes(self, tools: Sequence[ToolSchema]) -> Quotes:
        """Return the forms of the quoted parts in calls of ``tools``."""
        ...

    def triggers(self, tools: Sequence[ToolSchema], *, parallel: bool) -> tuple[CallTrigger, ...]:
        """Return the marks that begin calls, and their grammars.

        Args:
            tools: tools that may be called, at least one.
            parallel: True if one mark may begin several calls.

        Raises:
            NameNotExpressibleError: the format cannot express the name of a tool or of a required argument.
            ParameterError: a tool's parameters are not the schema of an object, or require a text that the format
                cannot express.
        """
        ...

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        """Return the calls in the text between two marks; None if the grammar does not allow the text.

        Each call is a dict with ``name``, ``arguments`` (JSON text) and optionally ``id``.

        Raises:
            Exception: the text contains invalid JSON, in some cases. The type varies.
        """
        ...


class ExactParser:
    """Parser that first tries the exact form of a format. It passes a text in another form to a lenient parser.

    If the lenient parser fails, too, the exact form is tried once more, with arguments of any type. The reason is that
    a grammar allows any arguments if it cannot express their schema.

    Args:
        syntax: exact form of the calls.
        parser: lenient parser. Its marks are the marks of this parser.
    """

    def __init__(self, syntax: CallSyntax, parser: ToolParser) -> None:
        self.tool_call_start = parser.tool_call_start
        self.tool_call_end = parser.tool_call_end
        self.syntax = syntax
        self._parser = parser

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        """Return the calls in a text. Raises the exception of the lenient parser, of any type, if all readings fail."""
        schemas = tool_schemas(tools or ())
        if calls := self._read(text, schemas):
            return calls
        untyped = [tool.untyped for tool in schemas]
        try:
            found = self._parser.parse_tool_call(text, tools)
            items = found if isinstance(found, list) else [found]
            if all(isinstance(item, str) or any(item["name"] == tool.name for tool in schemas) for item in items):
                return found
        except Exception:
            if calls := self._read(text, untyped):
                return calls
            raise
        return self._read(text, untyped) or found  # the caller refuses a call of an unknown tool

    def _read(self, text: str, tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
        try:
            return self.syntax.read(text, tools)
        except Exception:  # noqa: BLE001  (a client's schema may be invalid in any way)
            return None


def choice(options: Sequence[str]) -> str:
    """Return a Lark expression that matches any of the expressions in ``options``."""
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def checked_name(pattern: re.Pattern[str], name: str) -> str:
    """Return ``name`` unchanged. Raises NameNotExpressibleError if ``pattern`` does not match the whole name."""
    if pattern.fullmatch(name) is None:
        raise NameNotExpressibleError
    return name

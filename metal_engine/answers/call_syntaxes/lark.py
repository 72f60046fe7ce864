"""Builds grammars in llguidance's Lark dialect, with ``@"text"`` for text that may contain special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from metal_engine.errors import ParameterError
from metal_engine.output_phases import CallTrigger, ToolArguments

if TYPE_CHECKING:
    from metal_engine.answers.call_syntaxes.tool_schemas import ToolSchema

# Without a limit, small models can write white space forever.
_WHITESPACE = r"[ \t\r\n]{1,20}"
# White space between the parts of a call.
GAP = "gap"
_GAP_RULE = r"/[ \t\r\n]{0,8}/"


def string(text: str) -> str:
    """Return a text as a Lark string. ``@`` is escaped, because it begins references to marks."""
    return json.dumps(text, ensure_ascii=False).replace("@", "\\u0040")


def mark(text: str) -> str:
    """Return ``@"text"``, a placeholder for a text that may contain special tokens.

    :mod:`metal_engine.grammars.marks` replaces the placeholder by strings and special tokens of the model's vocabulary.
    """
    return "@" + json.dumps(text, ensure_ascii=False)


def json_value(schema: Any, *, strict: bool) -> str:
    """Return a Lark expression for a JSON value with at most 20 characters of white space between its tokens.

    Args:
        schema: JSON schema, which must contain the targets of its references.
        strict: True to make the compilation fail if llguidance cannot enforce a keyword of the schema. Otherwise,
            such keywords are ignored.
    """
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
    options["json_allow_general_unicode_escapes"] = True  # as in structured outputs
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    return "%json " + text.replace("@", "\\u0040")


def containing(text: str) -> str:
    """Return a regular expression, in slashes, for all texts that contain ``text``."""
    return f"/(?s:.*){escaped(text)}(?s:.*)/"


def escaped(text: str) -> str:
    """Return a regular expression, to be put between slashes, that matches exactly ``text``."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n").replace("@", r"\x40")


# Maximum length of the rules for the arguments of all tools, in characters. Copies of shared definitions can make the
# rules much longer than the tools.
_MAX_LENGTH = 4_000_000


class NotExpressibleError(Exception):
    """Raised if a grammar becomes too long, or cannot express a value or the name of a tool or of an argument."""


class NameNotExpressibleError(NotExpressibleError):
    """Raised if a grammar cannot express the name of a tool or of a required argument."""


class TextNotExpressibleError(NotExpressibleError):
    """Raised if every text that a schema allows contains a mark of the format.

    Args:
        marks: marks that texts cannot contain.
    """

    def __init__(self, *marks: str) -> None:
        listed = " or ".join(marks)
        super().__init__(f"requires a text with {listed}, which tool calls of this model cannot contain")


class GrammarRules:
    """Rules and terminals of one grammar. Equal definitions share a name."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._length = 0
        self._is_limited = False
        self._arguments: list[ToolArguments] = []
        self.add(GAP, "GAP?")
        self.add("GAP", _GAP_RULE.replace("{0,", "{1,"))

    def add(self, name: str, definition: str) -> str:
        """Define a rule or, with a name in capitals, a terminal. Return the name."""
        assert name not in self._named
        self._named[name] = definition
        return name

    def rule(self, definition: str) -> str:
        """Return the name of the rule with this definition. Adds the rule if it is new."""
        return self._shared("r", definition)

    def terminal(self, definition: str) -> str:
        """Return the name of the terminal with this definition. Adds the terminal if it is new."""
        return self._shared("T", definition)

    def reserve(self) -> str:
        """Return the name of a new rule without a definition, for recursive rules. :meth:`define` must define it."""
        name = f"r{len(self._named)}"
        self._named[name] = ""
        return name

    def define(self, name: str, definition: str) -> None:
        """Define a reserved rule."""
        assert self._named[name] == ""
        self._named[name] = definition

    def text_until(self, terminal: str, end: str) -> str:
        """Return the name of a rule for a text that matches ``terminal``, followed by the first ``end``."""
        return self._shared("r", terminal, f"[suffix={mark(end)}]")

    def arguments(self, tool: ToolSchema, expression: Callable[[ToolSchema], str]) -> str:
        """Return the name of a rule for the arguments of a tool.

        The rule allows arguments of any kind if ``expression`` raises NotExpressibleError for the tool, or if the
        grammar becomes too long.

        Args:
            tool: the tool.
            expression: takes a ToolSchema. Returns a Lark expression for the arguments that the schema allows.

        Raises:
            NameNotExpressibleError: the grammar cannot express the name of a required argument.
            ParameterError: every text that the schema allows for a required argument contains a mark of the format, or
                the tool's parameters are not the schema of an object.
        """
        open_rule = self.rule(expression(tool.opened))
        self._is_limited = True
        try:
            rule = self._shared("args", expression(tool))
        except NameNotExpressibleError:
            raise
        except TextNotExpressibleError as error:
            raise ParameterError(tool.place, str(error)) from error
        except NotExpressibleError:
            return open_rule
        finally:
            self._is_limited = False
        self._arguments.append(ToolArguments(tool.name, rule, open_rule))
        return rule

    def _shared(self, prefix: str, definition: str, attributes: str = "") -> str:
        key = prefix + attributes + definition
        if key not in self._names:
            self._length += len(definition)
            if self._is_limited and self._length > _MAX_LENGTH:
                raise NotExpressibleError
            name = f"{prefix}{len(self._named)}"
            self._names[key] = name
            self._named[name + attributes] = definition
        return self._names[key]

    def trigger(
        self, mark: str, call: str, heads: tuple[tuple[str, str], ...] = (), *, is_whole: bool = False
    ) -> CallTrigger:
        """Return a trigger whose grammar has all rules of this object, and the rule ``call``.

        Args:
            mark: mark that begins the call.
            call: definition of the rule ``call``.
            heads: attribute of :class:`metal_engine.output_phases.CallTrigger`.
            is_whole: attribute of ``CallTrigger``.
        """
        lines = [f"call: {call}"]
        for name, definition in self._named.items():
            lines.append(f"{name}: {definition}")
        return CallTrigger(mark, "\n".join(lines) + "\n", tuple(self._arguments), heads, is_whole)

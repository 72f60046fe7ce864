"""Builds the phases of an output (:mod:`metal_engine.output_phases`) for a model's own format.

The phases are reasoning, and tool calls with their grammars.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.call_end import CallEnd
from metal_engine.answers.call_syntaxes.lark import NameNotExpressibleError
from metal_engine.answers.call_syntaxes.syntax import NO_QUOTES, CallSyntax
from metal_engine.answers.call_syntaxes.tool_schemas import tool_schemas
from metal_engine.errors import ParameterError
from metal_engine.output_phases import CallPhase, CallText, ReasoningPhase

# Maximum number of characters of all cached grammars. The grammar of 50 tools has about 100,000.
_MAX_CACHED = 4_000_000


def call_phase(answer_format: AnswerFormat, tools: Sequence[dict[str, Any]], *, parallel: bool) -> CallPhase | None:
    """Return the marks and grammars of the calls that a model may begin.

    Caches the grammars, because agents send the same tools again.

    Return None in these cases:

    - There are no tools.
    - The grammar of the format is unknown.
    - The format cannot express the name of a tool or of a required argument.

    If the format cannot express a required value of a tool's schema, the grammar allows any arguments for that tool.

    Args:
        answer_format: output format of the model.
        tools: tools that may be called, in OpenAI's form.
        parallel: True if several calls are allowed.

    Raises:
        ParameterError: a tool's parameters are not the schema of an object, are nested too deeply, or require a text
            that the format cannot express.
    """
    syntax = answer_format.syntax
    if syntax is None or not tools:
        return None
    try:
        key = syntax, _digest(tools), parallel
        found, phase = _CACHE.get(key)
        if not found:
            phase = _made(syntax, tools, parallel=parallel)
            _CACHE.put(key, phase)
    except RecursionError as error:
        raise ParameterError("tools", "have a schema that is nested too deeply") from error
    return phase


def _made(syntax: CallSyntax, tools: Sequence[dict[str, Any]], *, parallel: bool) -> CallPhase | None:
    try:
        return CallPhase(syntax.triggers(tool_schemas(tools), parallel=parallel), parallel=parallel)
    except NameNotExpressibleError:
        return None


def _digest(tools: Sequence[dict[str, Any]]) -> bytes:
    """Return a hash of the tools' names, ``strict`` flags and parameters, including the order of properties."""
    functions = [tool["function"] for tool in tools]
    parts = [(one["name"], one.get("strict"), one.get("parameters")) for one in functions]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


class _PhaseCache:
    """LRU cache of the results of :func:`call_phase`, limited to ``_MAX_CACHED`` characters. Thread-safe."""

    def __init__(self) -> None:
        self._phases: OrderedDict[Hashable, CallPhase | None] = OrderedDict()  # least recently used first
        self._num_characters = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> tuple[bool, CallPhase | None]:
        """Return True and the phase of a key, which may be None. Return False and None if the key is unknown."""
        with self._lock:
            if key not in self._phases:
                return False, None
            self._phases.move_to_end(key)
            return True, self._phases[key]

    def put(self, key: Hashable, phase: CallPhase | None) -> None:
        """Add a phase. Drop the least recently used phases while the cache has more than ``_MAX_CACHED`` characters."""
        with self._lock:
            self._drop(key)
            self._phases[key] = phase
            self._num_characters += _size(phase)
            while self._num_characters > _MAX_CACHED:
                self._drop(next(iter(self._phases)))

    def _drop(self, key: Hashable) -> None:
        if key in self._phases:
            self._num_characters -= _size(self._phases.pop(key))


def _size(phase: CallPhase | None) -> int:
    """Return the number of characters of a phase's grammars, plus 1,000 for its entry in the cache."""
    return 1000 + sum(len(trigger.grammar) for trigger in (phase.triggers if phase is not None else ()))


_CACHE = _PhaseCache()


def call_text(answer_format: AnswerFormat, tools: Sequence[dict[str, Any]]) -> CallText:
    """Return the marks at which tool calls begin, and the search for the end of a call.

    Args:
        answer_format: output format of the model, with a parser of tool calls.
        tools: tools that may be called, in OpenAI's form.
    """
    parser, syntax, bare = answer_format.tool, answer_format.syntax, answer_format.bare
    assert parser is not None
    starts: tuple[str, ...] = (parser.tool_call_start,)
    first_starts: tuple[str, ...] = ()
    if bare is not None:
        openings = tuple(f"{bare.before}{tool['function']['name']}{bare.after}" for tool in tools)
        if bare.only_first:
            first_starts = openings
        else:
            starts += openings

    def end() -> CallEnd:
        quotes = NO_QUOTES if syntax is None else syntax.quotes(tool_schemas(tools))
        return CallEnd(quotes, (parser.tool_call_end,))

    return CallText(starts, end if parser.tool_call_end else None, first_starts)


def reasoning_phase(
    answer_format: AnswerFormat, *, begins_inside: bool, is_structured: bool, budget: int | None
) -> ReasoningPhase | None:
    """Return the reasoning phase of an output; None if the model does not reason.

    Args:
        answer_format: output format of the model.
        begins_inside: True if the prompt ends within reasoning.
        is_structured: True if a structured output follows the reasoning.
        budget: maximum number of tokens of the reasoning; None: no limit.
    """
    marks = answer_format.reasoning
    if marks is None:
        return None
    phase = ReasoningPhase(marks.start, marks.end, begins_inside, budget)
    if is_structured:
        return replace(phase, next_message=marks.next_message, content_start=marks.content_start)
    return phase

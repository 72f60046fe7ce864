"""Shortens llguidance's error messages to one line."""

from __future__ import annotations

import re

# Error about a regular expression: the expression, the line with ``^`` below the faulty part, and the problem.
_REGEX_ERROR = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^.*\nerror: (.*)")


def first_line(message: str) -> str:
    """Return the first line of a message, at most 500 characters."""
    return message.strip().partition("\n")[0][:500]


def compile_problem(message: str, regex: str | None) -> str:
    """Return one line that describes why a grammar cannot be compiled.

    For a faulty regular expression, the line has the number of the faulty character, from 1.

    Args:
        message: llguidance's message.
        regex: regular expression that is the whole grammar; None for other grammars.
    """
    found = _REGEX_ERROR.search(message)
    if found is None:
        return first_line(message)
    shown, at, problem = found[1], len(found[2]), found[3]
    column = at + 1 if regex is None else _position(regex, shown, at) + 1
    return f"the regular expression has a fault at character {column}, {shown[at : at + 40]!r}: {problem[:300]}"


def _position(text: str, escaped: str, at: int) -> int:
    """Convert the position ``at`` in ``escaped`` to the position of the same character in ``text``.

    ``escaped`` is ``text`` with some characters replaced by escapes of two characters.
    """
    position = i = 0
    while i < at and position < len(text):
        i += 1 if escaped[i] == text[position] else 2
        position += 1
    return position

"""Checks the names of models and adapters, which appear in responses, logs, web pages and shell commands."""

from __future__ import annotations

import unicodedata

from metal_engine.errors import ConfigError

# Fillers and blanks that Unicode counts as letters, marks or symbols.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\U0001d159")


def problem_of_name(name: str) -> str:
    """Return a description of the problem with a name, or "" if the name is valid.

    A name may have any character that is visible, and spaces inside. Control characters can forge lines of a log or end
    a line of a shell. Formatting characters, such as U+202E, make a name look like a different name.
    """
    hidden = next((char for char in name if not char.isprintable() or char in _BLANK), None)
    if hidden is not None:
        problem = f"has the character U+{ord(hidden):04X}, which is not visible"
    elif not name:
        problem = "is empty"
    elif all(char == " " or unicodedata.category(char).startswith("M") for char in name):
        problem = "has only characters that are not visible"
    elif name != name.strip(" "):
        problem = "begins or ends with a space"
    else:
        return ""
    return f"{name[:60]!a} {problem}: choose another name"


def check_name(flag: str, name: str) -> None:
    """Raise ConfigError if a name given with ``flag`` is empty, or has invisible characters or spaces at its ends."""
    if problem := problem_of_name(name):
        raise ConfigError(flag, problem)

"""Checks the names of models and adapters, which appear in responses, logs, web pages and shell commands."""

from __future__ import annotations

from metal_engine.errors import ConfigError


def problem_of_name(name: str) -> str:
    """Return a description of the problem with a name, or "" if the name is valid.

    A name may have any character that is visible, and spaces. Control characters can forge lines of a log or end a
    line of a shell. Formatting characters, such as U+202E, make a name look like a different name.
    """
    hidden = next((char for char in name if not char.isprintable()), None)
    if hidden is None:
        return ""
    return f"{name[:60]!a} has the character U+{ord(hidden):04X}, which is not visible: choose another name"


def check_name(flag: str, name: str) -> None:
    """Raise ConfigError if a name given with ``flag`` has invisible characters."""
    if problem := problem_of_name(name):
        raise ConfigError(flag, problem)

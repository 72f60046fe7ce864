"""What can go wrong with settings, models and requests, as types that carry fields.

Messages are for the user: one line that says what to do.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work. The message names the command-line flag to change."""


class ModelLoadError(Exception):
    """The model cannot be found, read or run."""


class UnsupportedModelError(ModelLoadError):
    """The model's architecture cannot run here; the message says what about it."""


class ParameterError(ValueError):
    """A request's parameter that cannot be served.

    Attributes:
        name: the parameter, as in ``top_p`` or ``structured_outputs.regex``.
        message: what is wrong with it, without the name.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name
        self.message = message


def one_line(error: BaseException, limit: int = 200) -> str:
    """An error's message as one line of bounded length, its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."

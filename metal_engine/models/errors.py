"""What can go wrong with a model before the first request. Messages are for the user: one line, what to do."""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be found, read or run."""


class UnsupportedModelError(ModelLoadError):
    """The model's architecture cannot run here; the message says what about it."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """An error's message as one line of bounded length, its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."

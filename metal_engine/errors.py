"""What can go wrong with settings, models and requests, as types that carry fields.

Messages are for the user: one line that says what to do. Code that needs to know what was at fault reads a field.
"""

from __future__ import annotations

from itertools import islice
from typing import Any


class ConfigError(ValueError):
    """Settings that cannot work.

    Args:
        flag: the setting at fault as the user gave it: ``--port``, or a variable of the environment; None where no
            single one is.
        message: what is wrong with it and what to do; the flag is put before a message that does not name it.

    Attributes:
        flag: as above.
    """

    def __init__(self, flag: str | None, message: str) -> None:
        super().__init__(message if flag is None or flag in message else f"{flag} {message}")
        self.flag = flag


class ModelLoadError(Exception):
    """The model cannot be found, read or run."""


class UnsupportedModelError(ModelLoadError):
    """The model's architecture cannot run here; the message says what about it."""


class ModelTooLargeError(ModelLoadError):
    """The model cannot be loaded beside or instead of others: the memory for all of them is less than it takes.

    Attributes:
        missing_bytes: by how much.
    """

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class NoRoomError(ModelLoadError):
    """The model does not fit beside those that are loaded, and none of them is to go."""


class LoadCancelledError(ModelLoadError):
    """The model was unloaded while it was being loaded. It may be asked for again."""


class AdapterError(ValueError):
    """An adapter cannot be read, does not fit the model, or there is no room for it; the message says what to do.

    Attributes:
        param: what is at fault: ``lora_path`` or ``lora_name``.
    """

    def __init__(self, message: str, param: str = "lora_path") -> None:
        super().__init__(message)
        self.param = param


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


class OverloadedError(RuntimeError):
    """What the request needs is taken by others. It may come again."""


class PromptError(ValueError):
    """A prompt that cannot be served as it is."""


class ContextLengthError(PromptError):
    """A prompt that does not fit into the model's context, alone or with its output.

    Attributes:
        name: what is too large: ``prompt``, or ``max_tokens`` where the prompt alone would fit.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def is_rust_panic(error: BaseException) -> bool:
    """True if an error is a panic of Rust code. Its type is not an Exception, and cannot be imported."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def one_line(error: BaseException, limit: int = 200) -> str:
    """An error's message as one line of bounded length; the name of its type if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short(value: Any, limit: int = 60) -> str:
    """A value as Python writes it, in ``limit`` characters at most; looks at no more of it than that takes."""
    text = repr(_beginning(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _beginning(value: Any, depth: int = 3) -> Any:
    if isinstance(value, str | bytes):
        return value[:1000]
    if isinstance(value, dict):
        first = dict(islice(value.items(), 20))
        return {k: _beginning(v, depth - 1) for k, v in first.items()} if depth else ...
    if isinstance(value, list | tuple):
        return [_beginning(v, depth - 1) for v in value[:20]] if depth else ...
    return value

"""Exceptions for faulty settings, models and requests.

The message is one line for the user, and says how to fix the fault. Code reads the cause from the exception's fields.
"""

from __future__ import annotations

import traceback
from itertools import islice
from typing import Any


class ConfigError(ValueError):
    """Settings that cannot work.

    Args:
        flag: faulty setting as the user gave it: a flag such as ``--port``, or an environment variable. None if no
            single setting is at fault.
        message: description of the fault and its fix. If the message does not contain the flag, the flag is prepended.

    Attributes:
        flag: faulty setting, or None, as passed to the constructor.
    """

    def __init__(self, flag: str | None, message: str) -> None:
        super().__init__(message if flag is None or flag in message else f"{flag} {message}")
        self.flag = flag


class ModelLoadError(Exception):
    """The model cannot be found, read or run."""


class UnsupportedModelError(ModelLoadError):
    """The model's architecture is not supported. The message names the unsupported part."""


class UnknownCacheError(UnsupportedModelError):
    """A layer stores its state in a kind of cache that a packed step does not support."""


class ModelTooLargeError(ModelLoadError):
    """The model cannot be loaded, even if other models are unloaded: the memory for all models is too small.

    Attributes:
        missing_bytes: size of the missing memory in bytes.
    """

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class InsufficientMemoryError(ModelLoadError):
    """There is no memory for the model, because the loaded models are in use or must stay loaded."""


class LoadCancelledError(ModelLoadError):
    """The load was cancelled, because a client unloads the model or no request waits for it. The client may retry."""


class AdapterError(ValueError):
    """An adapter cannot be loaded. The message describes the fix.

    Attributes:
        param: parameter at fault: ``lora_name`` if the name is invalid or taken, or no slot is free. Otherwise
            ``lora_path``.
    """

    def __init__(self, message: str, param: str = "lora_path") -> None:
        super().__init__(message)
        self.param = param


class ParameterError(ValueError):
    """A request cannot be served because of one of its parameters.

    Attributes:
        name: name of the parameter, such as ``top_p`` or ``structured_outputs.regex``.
        message: description of the fault, without the name.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name
        self.message = message


class OverloadedError(RuntimeError):
    """Other requests occupy the resources that the request needs. The client may retry."""


class PromptError(ValueError):
    """A prompt that cannot be served."""


class ContextLengthError(PromptError):
    """A prompt that exceeds the model's context length, alone or together with its output.

    Attributes:
        name: parameter that is too large: ``prompt``, or ``max_tokens`` if the prompt alone would fit.
        num_prompt_tokens: length of the prompt.
        max_tokens: requested length of the output in tokens; 0 if the prompt alone is too long.
        limit: maximum length in tokens: of the prompt if ``name`` is ``prompt``, otherwise of prompt and output
            together.
    """

    def __init__(self, name: str, message: str, *, num_prompt_tokens: int, max_tokens: int = 0, limit: int) -> None:
        super().__init__(message)
        self.name = name
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


def is_rust_panic(error: BaseException) -> bool:
    """Return True if the error is a panic of Rust code.

    The type of a panic is not a subclass of Exception and cannot be imported, so its name is compared.
    """
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return an error's message as one line of bounded length, or the name of its type if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short(value: Any, limit: int = 60) -> str:
    """Return the ``repr`` of a value, shortened to ``limit`` characters.

    Visits only the first 20 items of each list, tuple and dict, so that a large value takes little time.
    """
    try:
        text = repr(_beginning(value))
    except ValueError:  # Python limits the digits of integers
        text = "an integer with too many digits"
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


def clear_traceback_frames(error: BaseException) -> None:
    """Clear the local variables of an error's stack frames, and of the errors that led to it.

    The latter are found through ``__cause__``, or through ``__context__`` for an error without a cause. The variables
    can refer to weights or to arrays of the KV cache, and would keep these arrays in memory.
    """
    cleared: set[int] = set()  # errors may be causes of each other
    seen: BaseException | None = error
    while seen is not None and id(seen) not in cleared:
        traceback.clear_frames(seen.__traceback__)
        cleared.add(id(seen))
        seen = seen.__cause__ or seen.__context__

"""How a model writes tool calls and reasoning: told by its tokenizer, or by name. mlx-lm has the parsers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

from mlx_lm import tokenizer_utils
from transformers import PreTrainedTokenizerFast

from metal_engine.errors import ConfigError
from metal_engine.settings.args import REASONING_MARKS, REASONING_PARSER_ALIASES, TOOL_PARSER_ALIASES

# mlx-lm's parser -> what a call begins with, up to its arguments, where those are a JSON object as the model writes
# it. They can be passed on as they come.
_CALL_HEADS = {
    "json_tools": re.compile(
        r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
    ),
    "mistral": re.compile(r"\s*(?P<name>[\w-]{1,256})\s*\[ARGS\]\s*(?=\{)"),
}


def call_head(parser: Any | None) -> re.Pattern[str] | None:
    """What a call begins with in a format of mlx-lm's, up to its arguments; None where they are written otherwise."""
    return None if parser is None else _CALL_HEADS.get(parser.__name__.rpartition(".")[2])


def tool_parser(tokenizer: PreTrainedTokenizerFast, wanted: str) -> Any | None:
    """mlx-lm's module for a format of tool calls (``tool_call_start``, ``tool_call_end``, ``parse_tool_call``).

    Args:
        wanted: its name; ``auto`` for the one that the tokenizer asks for, if it does; ``none``.

    Raises:
        ConfigError: the tokenizer asks for one that this mlx-lm does not have.
    """
    if wanted == "none":
        return None
    name = TOOL_PARSER_ALIASES.get(wanted, wanted)
    if wanted == "auto":
        name = tokenizer.init_kwargs.get("tool_parser_type") or tokenizer_utils._infer_tool_parser(tokenizer)
        if name is None:
            return None
    try:
        return importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--tool-call-parser",
            f"the tokenizer asks for the tool parser {name!r}, which mlx-lm does not have: choose a --tool-call-parser",
        ) from error


def reasoning_marks(tokenizer: PreTrainedTokenizerFast, wanted: str) -> tuple[str, str] | None:
    """What reasoning is written between; ``wanted`` as in :func:`tool_parser`."""
    if wanted == "none":
        return None
    if wanted != "auto":
        return REASONING_MARKS[REASONING_PARSER_ALIASES.get(wanted, wanted)]
    wrapper = tokenizer_utils.TokenizerWrapper(tokenizer)
    if wrapper.has_thinking:
        return wrapper.think_start, wrapper.think_end
    vocabulary = tokenizer.get_vocab()
    known = (marks for marks in REASONING_MARKS.values() if all(mark in vocabulary for mark in marks))
    return next(known, None)


def any_special(tokenizer: PreTrainedTokenizerFast, marks: Iterable[str]) -> bool:
    """Whether some of the marks would be missing from text without special tokens."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(text in mark for mark in marks for text in special)

"""Checks the input of mlx-lm's parsers, which search a text for known patterns and ignore all other text.

The parsers alone would silently lose a value without a closing mark, or a second call in a block.
"""

from __future__ import annotations

import re
from typing import Any

from metal_engine.answers.answer_format import ToolParser
from metal_engine.answers.tool_parsers.json_calls import JSON_CALLS


class WholeCalls:
    """Parser that refuses a text if the wrapped parser would ignore part of the text.

    Args:
        parser: wrapped parser, from mlx-lm.
        shape: pattern that matches a text of calls without any other text.
        call: text that begins each call, to count the calls; empty if the wrapped parser never skips a call.
    """

    def __init__(self, parser: ToolParser, shape: re.Pattern[str], call: str = "") -> None:
        self.tool_call_start = parser.tool_call_start
        self.tool_call_end = parser.tool_call_end
        self._parser = parser
        self._shape = shape
        self._call = call

    def parse_tool_call(self, text: str, tools: Any | None = None, /) -> Any:
        """Return the calls in a text. Raises an exception of any type if the text does not consist of calls only.

        A text that does not match ``shape`` may also be calls as JSON objects.
        """
        if self._shape.fullmatch(text) is None:
            if text.lstrip().startswith(("{", "[")):
                return JSON_CALLS.parse_tool_call(text)
            raise ValueError("the text has parts outside of calls and arguments")
        parsed = self._parser.parse_tool_call(text, tools)
        num_calls = len(parsed) if isinstance(parsed, list) else 1
        if self._call and num_calls != text.count(self._call):
            raise ValueError("the parser skipped a call")
        return parsed


def _text_without(*marks: str) -> str:
    """Return a pattern for text that contains none of ``marks``, which all begin with ``<``."""
    return rf"[^<]*+(?:<(?!{'|'.join(re.escape(mark[1:]) for mark in marks)})[^<]*+)*+"


def _tagged_pairs(prefix: str) -> re.Pattern[str]:
    """Return a pattern for a call: a tool's name, then pairs of ``<arg_key>`` and ``<arg_value>`` elements.

    All tag names begin with ``prefix``.
    """
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    marks = (f"<{key}", f"</{key}", f"<{value}", f"</{value}")
    pair = rf"<{key}{_text_without(*marks)}</{key}(?:\\n|\s)*<{value}{_text_without(*marks)}</{value}\s*"
    return re.compile(rf"\s*[^\s<>]+\s*(?:{pair})*+")


def _invocations(prefix: str, name: str) -> re.Pattern[str]:
    """Return a pattern for ``<invoke>`` elements that contain ``<parameter>`` elements.

    Args:
        prefix: start of all tag names.
        name: pattern for the attribute that names the tool or the parameter.
    """
    invoke, parameter = f"{prefix}invoke", f"{prefix}parameter"
    value = _text_without(f"<{parameter}", f"</{parameter}>", f"<{invoke}", f"</{invoke}>")
    one = rf"<{parameter}{name}>{value}</{parameter}>\s*"
    return re.compile(rf"\s*(?:<{invoke}{name}>\s*(?:{one})*+</{invoke}>\s*)++")


def _kimi_k2() -> re.Pattern[str]:
    begin, end, argument = (re.escape(f"<|tool_call_{name}|>") for name in ("begin", "end", "argument_begin"))
    call = rf"\s*[^\s<>]+:\d+\s*{argument}{_text_without('<|tool_call')}"
    return re.compile(rf"(?:\s*{begin}{call}{end})++\s*|{call}")


def _kimi_k3() -> re.Pattern[str]:
    opening, closing, sep = (re.escape(f"<|{name}|>") for name in ("open", "close", "sep"))
    attributes, value = _text_without("<|sep|>", "<|open|>", "<|close|>"), _text_without("<|open|>", "<|close|>")
    argument, whole = (
        rf"{opening}{kind}{attributes}{sep}{value}{closing}{kind}{sep}\s*" for kind in ("argument", "json")
    )
    return re.compile(rf"\s*(?:{opening}call{attributes}{sep}\s*(?:{whole}|(?:{argument})*+){closing}call{sep}\s*)++")


def _minicpm5() -> re.Pattern[str]:
    name = r"""(?:"[^"]*"|'[^']*'|[^\s"'<>]+)\s*>"""
    value = _text_without("<param", "</param>")
    return re.compile(rf"\s*{name}\s*(?:<param\s+name\s*=\s*{name}{value}</param>\s*)*+")


def _function_gemma() -> re.Pattern[str]:
    flat = r"[^,{}<\[\]]*+"
    value = rf"<escape>{_text_without('<escape>')}<escape>|\[[^,{{}}<\[\]]*+\]|{flat}"
    argument = rf"[^:,{{}}<]+:(?:{value})"
    return re.compile(rf"\s*call:\w+\{{(?:{argument}(?:,{argument})*+)?\}}\s*")


def _gemma4() -> re.Pattern[str]:
    quote = re.escape('<|"|>')
    text = rf"{quote}{_text_without('<|' + chr(34) + '|>')}{quote}"
    inner = plain = rf'(?:[^{{}}<]++|<(?!\|"\|>)|{text})*+'
    for _ in range(8):  # maximum depth of nested values
        inner = rf"{plain}(?:\{{{inner}\}}{plain})*+"
    return re.compile(rf"\s*(?:call:[\w-]+\{{{inner}\}}\s*)++")


_SHAPES = {
    "glm47": _tagged_pairs(""),
    "laguna": _tagged_pairs(""),
    "longcat": _tagged_pairs("longcat_"),
    "minimax_m2": _invocations("", r" name=[^<>]+"),
    "muse_spark": _invocations("atem:", r"\b[^<>]*\bname=\"[^\"<>]+\"[^<>]*"),
    "kimi_k2": _kimi_k2(),
    "kimi_k3": _kimi_k3(),
    "minicpm5": _minicpm5(),
    "function_gemma": _function_gemma(),
    "gemma4": _gemma4(),
}
_CALLS = {"kimi_k3": "<|open|>call"}


def checked(name: str, parser: ToolParser) -> ToolParser:
    """Wrap mlx-lm's parser ``name`` in :class:`WholeCalls`. Return the parser itself if ``_SHAPES`` lacks the name."""
    shape = _SHAPES.get(name)
    return parser if shape is None else WholeCalls(parser, shape, _CALLS.get(name, ""))

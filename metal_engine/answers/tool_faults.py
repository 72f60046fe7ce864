"""Finds the tool whose schema makes a grammar of tool calls fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from metal_engine.errors import ParameterError

Tool = dict[str, Any]


def faulty_tool(tools: Sequence[Tool], compile_calls: Callable[[list[Tool]], object]) -> int | None:
    """Return the index of a tool whose grammar cannot be compiled. Return None if no such tool is found.

    For example, each tool may compile alone, while all tools together are too complex. This function halves the list
    repeatedly. Its work is at most twice the work of compiling all tools.

    Args:
        tools: tools whose common grammar failed to compile.
        compile_calls: takes some of the tools and compiles the grammar of their calls. Raises ParameterError on
            failure.
    """
    low, high = 0, len(tools)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            compile_calls(list(tools[low:middle]))
        except ParameterError:
            high = middle
        else:
            low = middle
    try:
        compile_calls(list(tools[low:high]))
    except ParameterError:
        return low
    return None

"""Converts the marks of grammars of tool calls, ``@"text"``, to special tokens and strings of a vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

_MARK = r'@("(?:[^"\\]|\\.)*")'
_MARK_PATTERN = re.compile(_MARK)
# Rule for a text up to a mark, inclusive.
_TEXT_UNTIL = re.compile(rf"^(\w+)\[suffix={_MARK}\]: (.*)$", re.MULTILINE)


def without_marks(grammar: str, special: Mapping[str, int]) -> str:
    """Return Lark rules in which special tokens and strings replace the marks.

    A rule ``name[suffix=mark]`` matches a text up to a mark. llguidance does not accept special tokens as suffixes. If
    the mark has a special token, the text becomes a terminal up to this token, because terminals never contain special
    tokens. The terminal also excludes the plain characters of the mark, because a parser of the output could not
    distinguish them from the mark.

    Args:
        grammar: Lark rules, as in :class:`metal_engine.output_phases.CallTrigger`.
        special: ids of the special tokens, by their texts.
    """
    tokens = _pattern(special)

    def text_until(found: re.Match[str]) -> str:
        name, end, terminal = found[1], json.loads(found[2]), found[3]
        first = tokens.search(end)
        if first is None:
            return f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]: {terminal}"
        text, upper = re.escape(end).replace("/", r"\/").replace("\n", "n"), name.upper()
        whole, before = f"{upper}_ALL & ~{upper}_END", json.dumps(end[: first.start()], ensure_ascii=False)
        body = f"{upper}_TEXT: {whole}" if not first.start() else f"{upper}_TEXT: ({whole}) {before}"
        return (
            f"{name}: {upper}_TEXT {_as_lark(end[first.start() :], special, tokens)}\n{body}\n"
            f"{upper}_ALL: {terminal}\n{upper}_END: /(?s:.*){text}(?s:.*)/"
        )

    grammar = _TEXT_UNTIL.sub(text_until, grammar)
    return _MARK_PATTERN.sub(lambda found: _as_lark(json.loads(found[1]), special, tokens), grammar)


def as_lark(text: str, special: Mapping[str, int]) -> str:
    """Return a Lark expression for a text that may contain special tokens.

    Args:
        special: ids of the special tokens, by their texts.
    """
    return _as_lark(text, special, _pattern(special))


def _as_lark(text: str, special: Mapping[str, int], tokens: re.Pattern[str]) -> str:
    parts, end = [], 0
    for found in tokens.finditer(text):
        parts += [json.dumps(text[end : found.start()], ensure_ascii=False)] if found.start() > end else []
        parts.append(f"<[{special[found[0]]}]>")
        end = found.end()
    if end < len(text):
        parts.append(json.dumps(text[end:], ensure_ascii=False))
    return f"({' '.join(parts)})"


def token_ranges(token_ids: Iterable[int]) -> str:
    """Return token ids as llguidance's ranges, such as ``3,5-7``."""
    ranges: list[list[int]] = []
    for token_id in sorted(set(token_ids)):
        if ranges and ranges[-1][1] == token_id - 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _pattern(special: Mapping[str, int]) -> re.Pattern[str]:
    """Return a pattern that finds special tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

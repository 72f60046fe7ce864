"""Converts structured output parameters to a grammar in llguidance's format. Loads no other package.

A *wanted grammar* is a dictionary with the fields of a structured output or of a tool call:

- A structured output has the fields of :class:`metal_engine.sampling_params.StructuredOutputsParams`. If it follows a
  mark, ``tail`` is the end of the mark, with which the grammar begins. ``tail`` may be empty.
- A tool call has ``call``, its Lark rules, and ``tails``. ``tails`` maps the end of each mark, with which the grammar
  begins, to the name of the rule that derives the text after the mark.

``special`` belongs to ``tail`` and ``tails``. It contains the special tokens of the vocabulary, as llguidance's ranges
of ids, and is empty if there are none.

These fields may accompany ``tail``. Texts are in Lark's syntax:

- ``content_start``: text before the structured output
- ``opening``: alternative to the structured output: this text, followed by any text
- ``calls``: alternative to the structured output: tool calls. ``mark`` is the text before each call, ``rules`` are the
  Lark rules of the text after the mark, and ``several`` is true if several calls are allowed.
- ``next_message``: optional text before the structured output or its alternatives
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import llguidance

from metal_engine.json_schemas.closed import closed

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Without a limit, small models can write white space forever.
_WHITESPACE = r"[ \t\r\n]{1,20}"


def is_segment(message: bytes) -> bool:
    """Return True if a wanted grammar, as JSON, is the grammar of a tool call, which other text may follow."""
    return "call" in json.loads(message)


def grammar_source(wanted: Mapping[str, Any]) -> str:
    """Return a wanted grammar in llguidance's format.

    Raises:
        ValueError: the grammar cannot be read.
        RecursionError: the grammar is nested too deeply.
    """
    if "call" in wanted:
        rules = f"{_after_mark(wanted['tails'], wanted['special'])}\n{wanted['call']}"
        return llguidance.LLMatcher.grammar_from_lark(rules)
    source = _structured_source(wanted)
    if "tail" not in wanted:
        return source
    outer = f"{_after_mark({wanted['tail']: 'begun'}, wanted['special'])}\n{_begun(wanted)}"
    return _nested(outer, source)


def _begun(wanted: Mapping[str, Any]) -> str:
    """Return the Lark rules of a structured output, and of the texts that may take its place."""
    space = "" if "content_start" in wanted else "WS?"
    options = [f"{wanted.get('content_start', space)} @content"]
    rules = ""
    if "opening" in wanted:
        options.append(f"{space} {wanted['opening']} REST")
        rules += "\nREST: /(?s:.*)/"
    if "calls" in wanted:
        calls = wanted["calls"]
        options.append(f"called+ {space}" if calls["several"] else f"called {space}")
        rules += f"\ncalled: {space} {calls['mark']} call\n{calls['rules']}"
    first = f"({wanted['next_message']})? " if "next_message" in wanted else ""
    return f"begun: {first}({' | '.join(options)}){rules}"


def _after_mark(rests: Mapping[str, str], special: str) -> str:
    """Return the Lark rules of a text that begins with the end of a mark.

    The grammar is used from the first characters of a mark on. Until the mark is complete, other text is allowed, too.

    Args:
        rests: text at the end of a mark -> Lark expression for the text after it.
        special: ids of the special tokens, which plain text does not contain.
    """
    if "" in rests:
        return f"start: {rests['']}"
    patterns = (re.escape(tail).replace("/", r"\/").replace("\n", r"\n") for tail in rests)
    options = (f"marked{i} {rest}" for i, rest in enumerate(rests.values()))
    return "\n".join(
        [
            f"start: UNMARKED {'other?' if special else ''} | {' | '.join(options)}",
            f"other: (<[{special}]> OTHER?)+\nOTHER: /(?s:.+)/" if special else "",
            *(f"marked{i}[suffix={json.dumps(tail)}]: /(?s:.*)/" for i, tail in enumerate(rests)),
            f"UNMARKED: /(?s:.*)/ & ~/(?s:.*)(?:{'|'.join(patterns)})(?s:.*)/",
        ]
    )


def _nested(outer: str, source: str) -> str:
    """Return a grammar whose Lark rules refer to another grammar as ``@content``."""
    inner = json.loads(source)["grammars"] if source.startswith('{"grammars"') else [{"lark_grammar": source}]
    inner[0]["name"] = "content"
    return json.dumps({"grammars": [{"lark_grammar": f"{outer}\nWS: /{_WHITESPACE}/\n"}, *inner]})


def _structured_source(wanted: Mapping[str, Any]) -> str:
    if wanted.get("regex") is not None:
        return llguidance.LLMatcher.grammar_from_regex(wanted["regex"])
    if wanted.get("choice"):
        return llguidance.LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted["choice"])
        )
    if wanted.get("grammar") is not None:
        return llguidance.grammar_from("grammar", wanted["grammar"])
    schema: Any = {"type": "object"}
    if wanted.get("json") is not None:
        schema = wanted["json"]
        if isinstance(schema, str):
            schema = json.loads(schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise ValueError("a JSON schema is an object (or true)")
        schema = closed(dict(schema), strict=bool(wanted.get("strict")))
    options: JsonCompileOptions = {"whitespace_pattern": wanted.get("whitespace_pattern") or _WHITESPACE}
    if wanted.get("disable_any_whitespace"):
        options = {"whitespace_flexible": False}
    # Models that write JSON in ASCII escape all other characters. By default, only control characters may be escaped.
    options["json_allow_general_unicode_escapes"] = True
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)

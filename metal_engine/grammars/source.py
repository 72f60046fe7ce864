"""Converts wanted grammars to llguidance's format. Loads no other package.

A *wanted grammar* is a dictionary with the fields of a structured output or of a tool call:

- A structured output has the fields of :class:`metal_engine.sampling_params.StructuredOutputsParams`. If it follows a
  mark, it also has ``tail``: the part of the mark after its last special token. The grammar begins with ``tail``, which
  may be empty.
- A tool call has ``call``, its Lark rules, and ``tails``. ``tails`` maps the tail of each mark to the name of the rule
  that derives the text after the mark.

``special`` accompanies ``tail`` and ``tails``. It has the ids of the vocabulary's special tokens as ranges in
llguidance's form, e.g. ``3,5-7``. It is empty if there are no special tokens.

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
    """Convert a wanted grammar to llguidance's format.

    Raises:
        ValueError: the schema or grammar of the client is invalid.
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
    """Return the Lark rule ``begun``: a structured output, or one of the alternatives that may take its place."""
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
    """Return the Lark rules of a text that begins with the tail of a mark.

    The grammar is used as soon as the output has the first characters of a tail. Therefore it also allows any text
    without a complete tail.

    Args:
        rests: Lark expression for the text after each tail.
        special: ids of the special tokens, as llguidance's ranges. Plain text does not contain them.
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
    """Return a grammar in llguidance's format: the Lark rules ``outer``, which refer to ``source`` as ``@content``."""
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

"""Converts structured output parameters to a grammar in llguidance's format. Loads no other package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import llguidance

from metal_engine.json_schemas.closed import closed

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Without a limit, small models can write white space forever.
_WHITESPACE = r"[ \t\r\n]{1,20}"


def grammar_source(wanted: Mapping[str, Any]) -> str:
    """Return the grammar for fields of :class:`metal_engine.sampling_params.StructuredOutputsParams`.

    Raises:
        ValueError: the grammar cannot be read.
        RecursionError: the grammar is nested too deeply.
    """
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
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)

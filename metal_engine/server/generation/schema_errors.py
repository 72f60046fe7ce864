"""Names the faulty part of a JSON schema in the error about a structured output."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from metal_engine.answers.forced_calls import moved
from metal_engine.errors import OverloadedError, ParameterError
from metal_engine.grammars.compiler import GrammarRefusedError
from metal_engine.json_schemas.document import DEFINITIONS, NAMED, Document, NotUnderstoodError
from metal_engine.json_schemas.faults import inner_schemas, schema_fault
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams

# Name of a schema in errors. The names of the faulty part follow, joined by dots.
SCHEMA = "structured_outputs.json"
# Limits of the search for the part that cannot be compiled. Most compilations take milliseconds.
_MAX_COMPILATIONS = 64
_MAX_SECONDS = 4.0
# Maximum length of a place in characters.
_MAX_PLACE = 300
# Place of the whole schema while its parts are compiled.
_ROOT = "#/$defs/0"

# Keywords, property names and list indexes that lead from the whole schema to a part.
_Names = tuple[str, ...]


def check_schema(structured: StructuredOutputsParams) -> None:
    """Raise ParameterError, naming the keyword, if a keyword of the JSON schema has a value of the wrong type."""
    fault = schema_fault(_schema_of(structured))
    if fault is not None:
        raise ParameterError(_place((fault.place,) if fault.place else ()), fault.problem)


def with_place(
    error: ParameterError,
    structured: StructuredOutputsParams | None,
    compile_grammar: Callable[[SamplingParams], object],
) -> ParameterError:
    """Return ``error`` with the place of the innermost part of the JSON schema that cannot be compiled.

    The search compiles parts of the schema for up to ``_MAX_SECONDS``. It needs a JSON schema that the compiler has
    refused. If the structured output is another grammar, or compilation exceeded a limit, ``error`` is returned.

    Args:
        error: error of compiling the structured output.
        compile_grammar: compiles the structured output of sampling parameters. Raises ParameterError on failure.
    """
    if not isinstance(error, GrammarRefusedError) or math.isinf(error.seconds) or structured is None:
        return error
    schema = _schema_of(structured)
    if not isinstance(schema, dict):
        return error

    def problem_of(part: dict[str, Any]) -> str | None:
        try:
            compile_grammar(SamplingParams(structured_outputs=replace(structured, json=part)))
        except GrammarRefusedError as refused:
            return None if math.isinf(refused.seconds) else refused.message
        except (ParameterError, OverloadedError):
            return None
        return None

    names, problem = _faulty_part(schema, problem_of)
    return ParameterError(_place(names), error.message if problem is None else problem)


def _schema_of(structured: StructuredOutputsParams) -> Any:
    """Return the JSON schema of a structured output.

    The result is True, the schema that accepts every value, if there is no schema or its text is not valid JSON.
    """
    given = structured.json
    if isinstance(given, Mapping):
        return dict(given)
    try:
        return json.loads(given) if isinstance(given, str) else True
    except (ValueError, RecursionError):  # the compiler describes the fault
        return True


def _place(names: _Names) -> str:
    return ".".join((SCHEMA, *names))[:_MAX_PLACE]


def _faulty_part(
    schema: dict[str, Any], problem_of: Callable[[dict[str, Any]], str | None]
) -> tuple[_Names, str | None]:
    """Return the names and the problem of the innermost part of a schema that cannot be compiled by itself.

    If no single part is at fault, the names are empty, and the problem is None.

    Args:
        problem_of: compiles a schema. Returns the problem, or None if the schema compiles or the problem is unknown.
    """
    deadline = time.monotonic() + _MAX_SECONDS
    root = _moved({key: value for key, value in schema.items() if key not in NAMED and key != "$schema"})
    document = Document(schema, strict=False)
    names: _Names = ()
    problem: str | None = None
    seen = {names}
    parts = _parts(document, names, schema)
    while (following := next(parts, None)) is not None and time.monotonic() < deadline:
        part_names, part = following
        if part_names in seen or not isinstance(part, dict) or not NAMED.isdisjoint(part):
            continue
        if len(seen) > _MAX_COMPILATIONS:
            break
        seen.add(part_names)
        own = {key: value for key, value in _moved(part).items() if key not in DEFINITIONS}
        found = problem_of({**own, "$defs": {"0": root}})
        if found is not None:
            names, problem = part_names, found.replace(_ROOT[1:], "", 1)
            parts = _parts(document, names, part)
    return names, problem


def _moved(part: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a part of a schema with references into ``_ROOT``: ``#/$defs/a`` -> ``#/$defs/0/$defs/a``."""
    copy: dict[str, Any] = moved(part, lambda reference: _ROOT + reference[1:])
    return copy


def _parts(document: Document, names: _Names, part: dict[str, Any]) -> Iterator[tuple[_Names, Any]]:
    """Yield the schemas directly within a part of a schema, and the schema that the part's ``$ref`` names.

    Args:
        names: names that lead from the whole schema to ``part``.

    Yields:
        The names that lead from the whole schema to a schema, and that schema.
    """
    for key, name, inner in inner_schemas(part):
        yield ((*names, key) if name is None else (*names, key, name)), inner
    if "$ref" in part:
        with suppress(NotUnderstoodError, ValueError):
            target = document.pointer_of(part)
            yield tuple(target.split("/")[1:]), document.resolve(target)

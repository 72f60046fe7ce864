"""Finds keywords of a JSON schema whose values have the wrong type, such as ``{"type": 5}``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# llguidance reads schemas that are nested up to 127 levels deep.
_MAX_DEPTH = 128
# Place of a schema: the place of the outer schema and the names from there on. None for the whole schema.
_Place = tuple["_Place | None", str] | None

_ONE = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "contains",
        "propertyNames", "not", "if", "then", "else")  # fmt: skip
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


# Keyword -> test of its value, and the text for the message.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _is_strings(value), "a string or a list of strings"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "required": (_is_strings, "a list of strings"),
    **dict.fromkeys(("$ref", "pattern", "format"), (lambda value: isinstance(value, str), "a string")),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "a number")),
    # Booleans in draft 4 of JSON Schema.
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), (lambda value: isinstance(value, int | float), "a number")
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "an integer of at least 0"),
    ),
}


def schema_fault(schema: Any) -> str | None:
    """Return the place and the problem of a keyword whose value has the wrong type; None if there is none.

    Unknown keywords, unknown types and references without a target are no faults. The inner schemas of a schema that is
    nested too deeply are not checked.
    """
    waiting: list[tuple[Any, _Place, int]] = [(schema, None, 0)]
    while waiting:
        one, place, depth = waiting.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            return _fault(place, "an object or a boolean")
        if depth > _MAX_DEPTH:
            continue
        for key, value in one.items():
            if (check := _CHECKS.get(key)) is not None:
                if not check[0](value):
                    return _fault((place, key), check[1])
            elif key in _ONE or (key == "items" and not isinstance(value, list)):
                waiting.append((value, (place, key), depth + 1))
            elif key in _NAMED:
                if not isinstance(value, dict):
                    return _fault((place, key), "an object of schemas")
                outer = place, key
                waiting += [(inner, (outer, name), depth + 1) for name, inner in value.items()]
            elif key in _LISTED or key == "items":
                if not isinstance(value, list):
                    return _fault((place, key), "a list of schemas")
                outer = place, key
                waiting += [(inner, (outer, str(i)), depth + 1) for i, inner in enumerate(value)]
    return None


def _fault(place: _Place, wanted: str) -> str:
    """Return the message about the value at a place."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(name[:100])
    return f"{'.'.join(reversed(names)) or 'the schema'} must be {wanted}"

"""Finds keywords of a JSON schema whose values have the wrong type, such as ``{"type": 5}``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from metal_engine.json_schemas.document import DEFINITIONS

# llguidance reads schemas that are nested up to 127 levels deep.
_MAX_DEPTH = 128
# Maximum number of characters of one name in a place.
_MAX_NAME = 100
# Place of a value: the place of the schema or object that contains the value, and the value's name. None: whole schema.
_Place = tuple["_Place | None", str] | None

_ONE = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "items", "contains",
        "propertyNames", "not", "if", "then", "else")  # fmt: skip
_NAMED = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


# Keyword -> test of its value, and the text for the message.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _is_strings(value), "a string or a list of strings"),
    "enum": (_is_list, "a list"),
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
    **dict.fromkeys(_NAMED, (_is_object, "an object of schemas")),
    **dict.fromkeys(_LISTED, (_is_list, "a list of schemas")),
}


@dataclass(frozen=True)
class SchemaFault:
    """Value in a schema that has the wrong type.

    Attributes:
        place: path of the value in the schema, e.g. ``properties.city.type``; empty for the whole schema.
        problem: description of the fault, without the place.
    """

    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place or 'the schema'} {self.problem}"


def schema_fault(schema: Any) -> SchemaFault | None:
    """Return the first keyword whose value has the wrong type; None if there is none.

    Unknown keywords, unknown types and references without a target are not faults. Schemas that are nested more than
    ``_MAX_DEPTH`` levels deep are not checked.
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
            if (check := _CHECKS.get(key)) is not None and not check[0](value):
                return _fault((place, key), check[1])
        for key, name, inner in inner_schemas(one):
            at: _Place = (place, key)
            waiting.append((inner, at if name is None else (at, name), depth + 1))
    return None


def inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Yield keyword, name and schema for each schema directly within a schema.

    For ``properties``, the name is the name of the property. For ``anyOf``, the name is the index, e.g. ``"0"``. For
    ``not``, whose value is itself a schema, the name is None. The values of keywords must have the right types.
    Definitions come last.
    """
    for key, value in sorted(schema.items(), key=lambda item: item[0] in DEFINITIONS):
        if key in _NAMED:
            yield from ((key, name, inner) for name, inner in value.items())
        elif key in _LISTED or (key == "items" and isinstance(value, list)):
            yield from ((key, str(i), inner) for i, inner in enumerate(value))
        elif key in _ONE:
            yield key, None, value


def _fault(place: _Place, wanted: str) -> SchemaFault:
    """Return the fault of the value at a place."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(name[:_MAX_NAME])
    return SchemaFault(".".join(reversed(names)), f"must be {wanted}")

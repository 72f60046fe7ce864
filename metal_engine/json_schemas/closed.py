"""JSON schemas whose objects have no other properties than those they name: :func:`closed`.

JSON Schema lets an object have any other property unless ``additionalProperties`` says otherwise. Who writes a schema
for a model's answer rarely means that, and a model that may invent names goes on inventing. So objects are closed, but
only where that takes answers away and adds none, and where it takes away nothing that the schema speaks of:

- An object that is alone at its place is closed by ``additionalProperties: false``.
- Several schemas that hold at one place (the members of ``allOf``, what stands beside a ``$ref`` or an ``anyOf``) stay
  open, each, and are closed together: by one more member of ``allOf`` with the names of all of them.
- What stands at a name that several of them have stays as it is, and so do branches of ``oneOf`` that no property tells
  apart: narrowing one of those may let an answer through that two of them matched before.
- A schema that says itself what other names there are, or how many, stays as it is.

References lead to copies of what they refer to: a closed one, and where it is a part of something, an open one.
"""

from __future__ import annotations

from typing import Any

from metal_engine.json_schemas.document import (
    APPLICATORS,
    ITEMS,
    LIST,
    NAMED,
    OPAQUE,
    SPEAKING,
    Document,
    Names,
    NotUnderstoodError,
    Schema,
    is_composed,
    required,
)

_DEFINITIONS = ("$defs", "definitions")


def closed(schema: Schema, *, strict: bool = False) -> Schema:
    """The schema with its objects closed; the same object if there is nothing to close.

    Whatever validates under it validates under ``schema``. Schemas with an ``$id`` or an anchor within them, with
    references to other documents, or with references that lead nowhere, are returned as they are.

    Args:
        strict: whether objects are closed that name no properties, too. They have none then.

    Raises:
        ValueError: it is nested too deeply, or has so many references and compositions that this takes too long.
    """
    closing = _Closing(schema, strict)
    try:
        result = closing.run()
    except NotUnderstoodError:
        return schema
    return result if closing.has_changed else schema


class _Role:
    """What a schema is at its place.

    Attributes:
        is_whole: nothing else holds there.
        shared: names at which other schemas of the place hold, too; None for all of them, so that nothing is closed.
    """

    def __init__(self, is_whole: bool, shared: frozenset[Any] | None) -> None:
        self.is_whole = is_whole
        self.shared = shared
        self.key = (is_whole, shared)

    def at(self, name: Any) -> _Role:
        """Of what stands at a name."""
        return _PLAIN if self.shared is None or name in self.shared else _WHOLE


_WHOLE = _Role(True, frozenset())
_PLAIN = _Role(False, None)


class _Closing:
    """One schema's closing.

    Attributes:
        has_changed: whether anything has been closed.
    """

    def __init__(self, schema: Schema, strict: bool) -> None:
        self.has_changed = False
        self._document = Document(schema, strict=strict)
        # Where a reference leads, and as what -> its name among the new definitions.
        self._names: dict[tuple[str, Any], str] = {}
        self._waiting: list[tuple[str, _Role]] = []

    def run(self) -> Schema:
        result = self._schema(self._document.root, _WHOLE, 0)
        definitions: Schema = {}
        while self._waiting:
            pointer, role = self._waiting.pop()
            definitions[self._names[pointer, role.key]] = self._schema(self._document.resolve(pointer), role, 1)
        return {**result, "$defs": definitions} if definitions else result

    def _copy_of(self, pointer: str, role: _Role) -> str:
        """A reference to a copy of what ``pointer`` leads to."""
        key = pointer, role.key
        if key not in self._names:
            self._document.resolve(pointer)
            self._names[key] = f"{len(self._names)}"
            self._waiting.append((pointer, role))
        return "#/$defs/" + self._names[key]

    # --- copies ---

    def _schema(self, schema: Any, role: _Role, depth: int) -> Any:
        """A copy of a schema for its role, with references to copies."""
        self._document.spend(depth)
        if not isinstance(schema, dict):
            return schema
        if schema is not self._document.root and not NAMED.isdisjoint(schema):
            raise NotUnderstoodError
        if role is not _PLAIN and not OPAQUE.isdisjoint(schema):
            role = _PLAIN
        closer = None
        if role is _WHOLE and is_composed(schema):
            names = self._document.names_of(schema, (), depth)
            role = _PLAIN if names.shared is None else _Role(True, names.shared)
            closer = self._closer(names)
        copy = {
            key: self._value(key, value, schema, role, depth + 1)
            for key, value in schema.items()
            if key not in _DEFINITIONS
        }
        if closer is not None:
            copy["allOf"] = [*copy.get("allOf", ()), closer]
        elif role is _WHOLE:
            self._close(copy)
        return copy

    def _value(self, key: str, value: Any, schema: Schema, role: _Role, depth: int) -> Any:
        """A copy of what a keyword holds."""
        if key == "$ref":
            return self._copy_of(self._document.pointer_of(schema), self._part(schema, role))
        if key == "properties" and isinstance(value, dict):
            if "patternProperties" in schema:  # a name may have both
                role = _PLAIN
            return {name: self._schema(one, role.at(name), depth) for name, one in value.items()}
        if key in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
            part = self._part(schema, role)
            if key == "oneOf" and part is not _PLAIN and not self._document.are_apart(value, depth):
                part = _PLAIN
            return [self._schema(one, part, depth) for one in value]
        if key in ITEMS:
            at = role.at(LIST)
            if isinstance(value, list):
                return [self._schema(one, at, depth) for one in value]
            return self._schema(value, at, depth)
        if key == "additionalProperties":
            return self._schema(value, _WHOLE if role is _WHOLE else _PLAIN, depth)
        if key in ("patternProperties", "dependentSchemas") and isinstance(value, dict):
            alone = role is _WHOLE and "properties" not in schema
            return {name: self._schema(one, _WHOLE if alone else _PLAIN, depth) for name, one in value.items()}
        if key in (
            "not",
            "if",
            "then",
            "else",
            "contains",
            "propertyNames",
            "unevaluatedProperties",
            "unevaluatedItems",
        ):
            return self._schema(value, _PLAIN, depth)
        return value

    @staticmethod
    def _part(schema: Schema, role: _Role) -> _Role:
        """The role of what an applicator of a schema holds."""
        if role.is_whole and is_composed(schema):
            return _Role(False, role.shared)
        return role

    # --- closing ---

    def _close(self, schema: Schema) -> None:
        """Close an object that is alone at its place."""
        if (
            not SPEAKING.isdisjoint(schema)
            or not APPLICATORS.isdisjoint(schema)
            or not self._document.is_object(schema)
        ):
            return
        properties = schema.get("properties", {})
        missing = [name for name in required(schema) if name not in properties]
        if missing:
            schema["properties"] = {**properties, **dict.fromkeys(missing, True)}
        schema["additionalProperties"] = False
        self.has_changed = True

    def _closer(self, names: Names) -> Schema | None:
        """What closes schemas that hold together; None if they stay open."""
        if not names.has_object or names.is_open or not names.is_known:
            return None
        self.has_changed = True
        properties = dict.fromkeys((name for name in names.count if name is not LIST), True)
        self._document.spend(0, len(properties))
        return {"properties": properties, "additionalProperties": False}

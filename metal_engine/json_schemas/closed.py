"""Closes the objects of a JSON schema, so that they may only have properties that the schema names: :func:`closed`.

JSON Schema allows an object any other property unless ``additionalProperties`` forbids it. Authors of a response schema
rarely intend that, and a model that may invent property names keeps inventing them. Objects are therefore closed, but
closing must only shrink the set of valid values, and must not forbid a property that the schema mentions:

- An object schema that is the only schema for its value is closed by ``additionalProperties: false``.
- Several schemas can apply to one value: the members of ``allOf``, or keywords beside a ``$ref`` or an ``anyOf``. Each
  of them stays open. One more member of ``allOf``, with the property names of all of them, closes them together.
- The value of a property that several of these schemas define stays unchanged.
- The branches of a ``oneOf`` stay unchanged unless their types, or the values of a required property, exclude each
  other. If a value matched two branches before, narrowing one branch could make the value valid.
- A schema that limits the names or the number of its properties itself stays unchanged.

References point to copies of their targets: a closed copy, or an open copy if the target is one of several schemas for
a value.
"""

from __future__ import annotations

from typing import Any

from metal_engine.json_schemas.document import (
    APPLICATORS,
    DEFINITIONS,
    ITEMS,
    LIMITING,
    LIST,
    NAMED,
    OPAQUE,
    Document,
    Names,
    NotUnderstoodError,
    Schema,
    is_composed,
    required,
)


def closed(schema: Schema, *, strict: bool = False) -> Schema:
    """Return a copy of the schema with its objects closed. Return ``schema`` itself if there is nothing to close.

    Every value that is valid under the result is valid under ``schema``. ``schema`` itself is also returned if it has a
    nested ``$id`` or anchor, a reference to another document, or a reference without a target.

    Args:
        schema: JSON schema.
        strict: True to also close objects whose schema names no properties. Such objects must then be empty.

    Raises:
        ValueError: the schema is nested too deeply, or has so many references and compositions that closing takes
            too long.
    """
    closing = _Closing(schema, strict)
    try:
        result = closing.run()
    except NotUnderstoodError:
        return schema
    return result if closing.has_changed else schema


class _Role:
    """Relation of a schema to the other schemas that apply to the same value.

    Attributes:
        is_whole: True if no other schema applies to the value.
        shared: names of properties that several schemas of the value define. Their values are not closed. None stands
            for all names.
    """

    def __init__(self, is_whole: bool, shared: frozenset[Any] | None) -> None:
        self.is_whole = is_whole
        self.shared = shared
        self.key = (is_whole, shared)

    def at(self, name: Any) -> _Role:
        """Return the role of the schema for the property ``name``. ``LIST`` stands for the items of a list."""
        return _PLAIN if self.shared is None or name in self.shared else _WHOLE


# ``_WHOLE``: the only schema of its value, to be closed. ``_PLAIN``: nothing within the schema is closed.
_WHOLE = _Role(True, frozenset())
_PLAIN = _Role(False, None)


class _Closing:
    """State while one schema is closed.

    Attributes:
        has_changed: True if an object has been closed.
    """

    def __init__(self, schema: Schema, strict: bool) -> None:
        self.has_changed = False
        self._document = Document(schema, strict=strict)
        # (target of a reference, role key of the copy) -> name of the copy among the new definitions.
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
        """Return a reference to a copy of the target of ``pointer``. Schedule the copy if it does not exist yet."""
        key = pointer, role.key
        if key not in self._names:
            self._document.resolve(pointer)
            self._names[key] = f"{len(self._names)}"
            self._waiting.append((pointer, role))
        return "#/$defs/" + self._names[key]

    # --- copies ---

    def _schema(self, schema: Any, role: _Role, depth: int) -> Any:
        """Copy a schema for its role. References in the copy point to copies.

        Raises:
            NotUnderstoodError: the targets of references cannot be determined.
            ValueError: a limit is exceeded, as in :meth:`Document.spend`.
        """
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
            if key not in DEFINITIONS
        }
        if closer is not None:
            copy["allOf"] = [*copy.get("allOf", ()), closer]
        elif role is _WHOLE:
            self._close(copy)
        return copy

    def _value(self, key: str, value: Any, schema: Schema, role: _Role, depth: int) -> Any:
        """Return a copy of the value of a keyword, closed as the role of ``schema`` allows.

        Args:
            key: the keyword.
            value: value of the keyword in ``schema``.
            schema: schema that has the keyword.
            role: role of ``schema``.
            depth: nesting depth of the value.
        """
        if key == "$ref":
            return self._copy_of(self._document.pointer_of(schema), self._part(schema, role))
        if key == "properties" and isinstance(value, dict):
            if "patternProperties" in schema:  # a name may match both keywords
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
        """Return the role of subschemas for the same value as ``schema``: members of ``allOf``, the target of ``$ref``.

        ``role`` is the role of ``schema`` itself.
        """
        if role.is_whole and is_composed(schema):
            return _Role(False, role.shared)
        return role

    # --- closing ---

    def _close(self, schema: Schema) -> None:
        """Close the copy of an object's schema in place.

        Leaves a schema unchanged if it limits its properties itself, or if other schemas apply to the same object.
        """
        if (
            not LIMITING.isdisjoint(schema)
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
        """Return one more member of ``allOf``, which closes all schemas of a value together; None if they stay open.

        Args:
            names: property names in all schemas of the value.
        """
        if not names.has_object or names.is_open or not names.is_known:
            return None
        self.has_changed = True
        properties = dict.fromkeys((name for name in names.count if name is not LIST), True)
        self._document.spend(0, len(properties))
        return {"properties": properties, "additionalProperties": False}

"""Analyzes JSON schemas: the property names that apply to one value, and whether branches exclude each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# llguidance reads schemas that are nested up to 127 levels deep.
_MAX_DEPTH = 128
# Maximum number of schemas visited, including names and copies. llguidance has the same limit.
_MAX_EFFORT = 50_000

# Keywords that limit the properties or the values. A schema with one of them is not closed.
LIMITING = frozenset(
    {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties", "const", "enum"}
)
# Keywords whose schemas decide whether other schemas apply. These schemas are not closed. A schema with one of the
# keywords is not closed either.
OPAQUE = frozenset(
    {
        "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "contains",
        "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
# The schemas under these keywords apply to the same value as the schema itself.
APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
ITEMS = ("items", "prefixItems", "additionalItems")
# Keywords that, beside an applicator, constrain the same objects and lists as the applicator.
_OWN = LIMITING | OPAQUE | {"properties", "required", *ITEMS}
# Keywords whose values contain schemas for references.
DEFINITIONS = ("$defs", "definitions")
# Keywords that give a schema a name or a base URI for references.
NAMED = frozenset({"$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
# Key in Names.count that stands for the items of a list.
LIST = object()


class NotUnderstoodError(Exception):
    """Raised if the targets of references in a schema cannot be determined."""


class Names:
    """Property names in the schemas that apply to one value.

    Attributes:
        count: for each name, the number of schemas that define the property and apply together; 0 if the name is only
            listed as required. The key ``LIST`` stands for the items of a list.
        has_object: True if one of the schemas describes objects that can be closed.
        is_open: True if one of the schemas limits the properties or values itself.
        is_known: True if ``count`` has all names. False for recursive schemas, and for keywords such as ``not``.
    """

    def __init__(self) -> None:
        self.count: Counter[Any] = Counter()
        self.has_object = False
        self.is_open = False
        self.is_known = True

    def add(self, other: Names) -> None:
        """Add the names of another schema that applies to the value."""
        for name, count in other.count.items():
            self.count[name] += count
        self._join(other)

    def add_choice(self, branches: list[Names]) -> None:
        """Add the names of alternative schemas, one of which applies to the value."""
        most: Counter[Any] = Counter()
        for branch in branches:
            for name, count in branch.count.items():
                most[name] = max(most[name], count)
            self._join(branch)
        for name, count in most.items():
            self.count[name] += count

    def _join(self, other: Names) -> None:
        self.has_object |= other.has_object
        self.is_open |= other.is_open
        self.is_known &= other.is_known

    @property
    def shared(self) -> frozenset[Any] | None:
        """Names that several schemas define; None if the names are not complete."""
        return frozenset(name for name, count in self.count.items() if count > 1) if self.is_known else None


class Document:
    """JSON schema, with methods that follow its references. Together, they may visit at most ``_MAX_EFFORT`` schemas.

    Args:
        root: the schema.
        strict: True if objects whose schema names no properties can be closed, too.
    """

    def __init__(self, root: Schema, *, strict: bool) -> None:
        self.root = root
        self._strict = strict
        self._effort = 0

    def spend(self, depth: int, effort: int = 1) -> None:
        """Count ``effort`` more visited schemas.

        Raises:
            ValueError: ``depth`` exceeds ``_MAX_DEPTH``, or the number of visited schemas exceeds ``_MAX_EFFORT``.
        """
        self._effort += effort
        if depth > _MAX_DEPTH:
            raise ValueError("the schema is nested too deeply")
        if self._effort > _MAX_EFFORT:
            raise ValueError("the schema has too many references and compositions")

    def resolve(self, pointer: str) -> Any:
        """Return the target of a reference within the document.

        Raises:
            NotUnderstoodError: the target does not exist.
            ValueError: the limit on the effort is exceeded, as in :meth:`spend`.
        """
        found: Any = self.root
        for part in pointer.removeprefix("#").split("/")[1:]:
            self.spend(0)
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and len(key) < 10 and int(key) < len(found):
                found = found[int(key)]
            else:
                raise NotUnderstoodError
        return found

    @staticmethod
    def pointer_of(schema: Schema) -> str:
        """Return the ``$ref`` of a schema: ``#``, or a JSON pointer that begins with ``#/``. Does not resolve it.

        Raises:
            NotUnderstoodError: the reference has another form, such as a reference to another document.
        """
        reference = schema["$ref"]
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise NotUnderstoodError
        return reference

    def is_object(self, schema: Schema) -> bool:
        """Return True if the schema describes objects that can be closed."""
        if "properties" in schema:
            return isinstance(schema["properties"], dict)
        kind = schema.get("type")
        return self._strict and (kind == "object" or (isinstance(kind, list) and "object" in kind))

    def names_of(self, schema: Any, within: tuple[str, ...], depth: int) -> Names:
        """Return the property names in a schema, and in all schemas that it applies to the same value.

        Args:
            schema: the schema.
            within: references that have been followed to reach the schema.
            depth: nesting depth of the schema.

        Raises:
            NotUnderstoodError: the target of a reference cannot be determined.
            ValueError: a limit is exceeded, as in :meth:`spend`.
        """
        self.spend(depth)
        names = Names()
        if not isinstance(schema, dict):
            return names
        names.is_known = OPAQUE.isdisjoint(schema) and not _narrows_others(schema)
        names.is_open = not LIMITING.isdisjoint(schema)
        names.has_object = self.is_object(schema)
        properties = schema.get("properties")
        own = dict.fromkeys(properties, 1) if isinstance(properties, dict) else {}
        names.count.update({**dict.fromkeys(required(schema), 0), **own})
        self.spend(depth, len(names.count))
        if any(key in schema for key in ITEMS):
            names.count[LIST] = 1
        if "$ref" in schema:
            pointer = self.pointer_of(schema)
            if pointer in within:
                names.is_known = False
            else:
                names.add(self.names_of(self.resolve(pointer), (*within, pointer), depth + 1))
        for one in listed(schema, "allOf"):
            names.add(self.names_of(one, within, depth + 1))
        for key in ("anyOf", "oneOf"):
            names.add_choice([self.names_of(one, within, depth + 1) for one in listed(schema, key)])
        self.spend(depth, len(names.count))
        return names

    def are_apart(self, branches: list[Any], depth: int) -> bool:
        """Return True if no value can match two of the branches.

        Two branches exclude each other if they have no type in common, or no value in common for a required property.
        Return False if this cannot be determined. Raises the errors of :meth:`names_of`.
        """
        resolved = [self._followed(one) for one in branches]
        self.spend(depth, len(resolved) ** 2)
        return all(self._is_apart(one, other) for one, other in combinations(resolved, 2))

    def _followed(self, schema: Any) -> Any:
        for _ in range(_MAX_DEPTH):
            if not (isinstance(schema, dict) and "$ref" in schema):
                break
            self.spend(0)
            schema = self.resolve(self.pointer_of(schema))
        return schema

    def _is_apart(self, one: Any, other: Any) -> bool:
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        if _types(one).isdisjoint(_types(other)):
            return True
        if not (_types(one) == _types(other) == {"object"}):
            return False
        ours, theirs = one.get("properties"), other.get("properties")
        if not isinstance(ours, dict) or not isinstance(theirs, dict):
            return False
        for name in {*required(one), *required(other)}:
            self.spend(0)
            values, others = _values(ours.get(name)), _values(theirs.get(name))
            if values is not None and others is not None and values.isdisjoint(others):
                return True
        return False


_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def is_composed(schema: Schema) -> bool:
    """Return True if several schemas apply to the value that ``schema`` describes."""
    applied = [key for key in APPLICATORS if key in schema]
    if not applied:
        return False
    return len(applied) > 1 or not _OWN.isdisjoint(schema) or len(listed(schema, "allOf")) > 1


def _narrows_others(schema: Schema) -> bool:
    """Return True if a schema also constrains the values of properties that it does not name."""
    return "patternProperties" in schema or not isinstance(schema.get("additionalProperties", True), bool)


def listed(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def required(schema: Schema) -> Iterator[str]:
    return (name for name in listed(schema, "required") if isinstance(name, str))


def _types(schema: Schema) -> frozenset[str]:
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else _TYPES
    return frozenset("number" if one == "integer" else one for one in kinds if isinstance(one, str))


def _values(schema: Any) -> frozenset[str | bool] | None:
    """Return the values that ``const`` or ``enum`` of a schema allows; None unless all are strings and booleans."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str | bool) for value in values):
        return None
    return frozenset(values)

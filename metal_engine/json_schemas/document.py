"""What a JSON schema says of one place in a value: the names there, and whether two branches can both match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# What llguidance reads is nested 127 levels deep at most.
_MAX_DEPTH = 128
# Schemas looked at, names and copies included; as many as llguidance reads.
_MAX_EFFORT = 50_000

# These say themselves what properties there are, or which values.
SPEAKING = frozenset(
    {"additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties", "const", "enum"}
)
# What these hold is not narrowed, nor is anything beside them: whether it matches may decide about other things.
OPAQUE = frozenset(
    {
        "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "contains",
        "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
# What these hold stands at the same place.
APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
ITEMS = ("items", "prefixItems", "additionalItems")
# Beside one of the applicators, these are about the same objects and lists.
_OWN = SPEAKING | OPAQUE | {"properties", "required", *ITEMS}
# These give a schema a name or a base that references may go by.
NAMED = frozenset({"$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
# Stands for lists among the names of a place.
LIST = object()


class NotUnderstoodError(Exception):
    """A schema has something of which it is not known what it refers to."""


class Names:
    """The names that the schemas of one place speak of.

    Attributes:
        count: how many of the schemas that hold together have each name; 0 for one that is only required.
        has_object: whether they are about objects that can be closed.
        is_open: whether one of them says itself what other names there are.
        is_known: whether that is all there is to know of them.
    """

    def __init__(self) -> None:
        self.count: Counter[Any] = Counter()
        self.has_object = False
        self.is_open = False
        self.is_known = True

    def add(self, other: Names) -> None:
        """Another schema holds, too."""
        for name, count in other.count.items():
            self.count[name] += count
        self._join(other)

    def add_choice(self, branches: list[Names]) -> None:
        """One of several schemas holds, too."""
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
        return frozenset(name for name, count in self.count.items() if count > 1) if self.is_known else None


class Document:
    """A schema and all that its references lead to. Looking at it is bounded.

    Args:
        strict: whether objects that name no properties can be closed, too.
    """

    def __init__(self, root: Schema, *, strict: bool) -> None:
        self.root = root
        self._strict = strict
        self._effort = 0

    def spend(self, depth: int, effort: int = 1) -> None:
        self._effort += effort
        if depth > _MAX_DEPTH:
            raise ValueError("the schema is nested too deeply")
        if self._effort > _MAX_EFFORT:
            raise ValueError("the schema has too many references and compositions")

    def resolve(self, pointer: str) -> Any:
        """What a reference within the document leads to."""
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
        """Where a schema's ``$ref`` leads."""
        reference = schema["$ref"]
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise NotUnderstoodError
        return reference

    def is_object(self, schema: Schema) -> bool:
        """Whether a schema is about objects that can be closed."""
        if "properties" in schema:
            return isinstance(schema["properties"], dict)
        kind = schema.get("type")
        return self._strict and (kind == "object" or (isinstance(kind, list) and "object" in kind))

    def names_of(self, schema: Any, within: tuple[str, ...], depth: int) -> Names:
        """The names that a schema speaks of, and all that holds with it.

        Args:
            within: references that led here.
        """
        self.spend(depth)
        names = Names()
        if not isinstance(schema, dict):
            return names
        names.is_known = OPAQUE.isdisjoint(schema) and not _narrows_others(schema)
        names.is_open = not SPEAKING.isdisjoint(schema)
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
        """Whether no value matches two of the branches, because of their types or of a property's values."""
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
    """Whether several schemas hold at a schema's place."""
    applied = [key for key in APPLICATORS if key in schema]
    if not applied:
        return False
    return len(applied) > 1 or not _OWN.isdisjoint(schema) or len(listed(schema, "allOf")) > 1


def _narrows_others(schema: Schema) -> bool:
    """Whether a schema says what stands at names of other schemas."""
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
    """The texts, true or false that a schema takes, if it takes nothing else."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str | bool) for value in values):
        return None
    return frozenset(values)

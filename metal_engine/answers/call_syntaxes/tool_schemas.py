"""Reads the JSON schemas of tools: their arguments, and the types and values that an argument may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from metal_engine.answers.call_syntaxes.lark import NotExpressibleError
from metal_engine.answers.forced_calls import moved, tool_parameters
from metal_engine.errors import ParameterError
from metal_engine.json_schemas.closed import closed
from metal_engine.json_schemas.document import Document, NotUnderstoodError, listed, required

Schema = dict[str, Any]

KINDS = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# References and compositions are followed to this depth. Deeper schemas allow all types.
_MAX_DEPTH = 32
# Maximum number of definitions that a part of a schema refers to. Each of them is copied.
_MAX_REFERENCES = 200
# Keywords that limit numbers. :func:`ToolSchema.allows` evaluates them.
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": lambda value, limit: value % limit == 0,
}
# Keywords that :func:`ToolSchema.allows` does not evaluate.
_UNKNOWN = frozenset({"not", "if", "then", "else", "$dynamicRef", "$recursiveRef"})


@dataclass(frozen=True)
class Argument:
    """Argument of a tool.

    Attributes:
        name: name of the argument.
        schema: schema of the value. Its references are relative to the tool's schema.
        is_required: True if a call must have the argument.
    """

    name: str
    schema: Any
    is_required: bool


class ToolSchema:
    """Tool that may be called, and the schema of its arguments.

    Args:
        index: position of the tool in the request.
        tool: tool in OpenAI's form.

    Attributes:
        name: name of the tool.
        is_strict: True if the tool requests that calls match the schema exactly.
        place: path of the schema in the request for error messages, e.g. ``tools[0].function.parameters``.
    """

    def __init__(self, index: int, tool: dict[str, Any]) -> None:
        self.name: str = tool["function"]["name"]
        self.is_strict = tool["function"].get("strict") is True
        self.place = f"tools[{index}].function.parameters"
        self._index = index
        self._tool = tool

    @cached_property
    def opened(self) -> ToolSchema:
        """The same tool with a schema that allows all arguments."""
        return ToolSchema(self._index, {"function": {"name": self.name, "parameters": {"type": "object"}}})

    @property
    def untyped(self) -> ToolSchema:
        """The same tool with a schema that lists the same arguments. They are optional and may have any value.

        The schema also allows all other arguments.
        """
        try:
            listed, _ = self.arguments()
        except ParameterError:
            return self.opened
        parameters = {"type": "object", "properties": {one.name: {} for one in listed}, "additionalProperties": True}
        return ToolSchema(self._index, {"function": {"name": self.name, "parameters": parameters}})

    @cached_property
    def schema(self) -> Schema:
        """Schema of the object of arguments, after :func:`metal_engine.json_schemas.closed.closed`.

        Raises:
            ParameterError: the parameters are not the schema of an object, or cannot be closed.
        """
        schema = tool_parameters(self._index, self._tool)
        try:
            return closed(schema)
        except (ValueError, RecursionError) as error:
            raise ParameterError(self.place, str(error)) from error

    @cached_property
    def _document(self) -> Document:
        return Document(self.schema, strict=False)

    def resolve(self, schema: Schema) -> Any:
        """Return the target of a schema's ``$ref``. If there is no target, return True, which allows any value."""
        try:
            return self._document.resolve(self._document.pointer_of(schema))
        except (NotUnderstoodError, ValueError):
            return True

    def alone(self, schema: Any) -> Any:
        """Return a self-contained copy of a part of the tool's schema.

        ``$defs`` of the copy has copies of all schemas to which the part refers, directly or indirectly.

        Raises:
            NotExpressibleError: the part refers to more than ``_MAX_REFERENCES`` schemas.
        """
        pointers: dict[str, str] = {}

        def copy_of(reference: str) -> str:
            return "#/$defs/" + pointers.setdefault(reference, str(len(pointers)))

        copy = moved(schema, copy_of)
        definitions: Schema = {}
        while len(definitions) < len(pointers):
            if len(pointers) > _MAX_REFERENCES:
                raise NotExpressibleError
            reference = list(pointers)[len(definitions)]
            definitions[pointers[reference]] = moved(self.resolve({"$ref": reference}), copy_of)
        return {**copy, "$defs": definitions} if definitions else copy

    # --- arguments ---

    def arguments(self, schema: Any = None) -> tuple[list[Argument], Any]:
        """Return the listed properties of an object, and the schema of all other properties.

        The second schema is False if the object may have no other properties. For ``anyOf`` and ``oneOf``, the result
        includes the properties of all branches. A property that only some branches require is then optional.

        Args:
            schema: part of the tool's schema that describes the object; None for the arguments.

        Raises:
            ParameterError: the tool's schema is invalid, as for :attr:`schema`.
        """
        found = _Properties()
        self._collect(self.schema if schema is None else schema, found, 0)
        names = [*found.schemas, *(name for name in found.required if name not in found.schemas)]
        properties = [Argument(name, found.schema_of(name), name in found.required) for name in names]
        return properties, found.others

    def _collect(self, schema: Any, found: _Properties, depth: int) -> None:
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return
        if "$ref" in schema:
            self._collect(self.resolve(schema), found, depth + 1)
        for one in listed(schema, "allOf"):
            self._collect(one, found, depth + 1)
        properties = schema.get("properties")
        for name, one in (properties if isinstance(properties, dict) else {}).items():
            found.schemas.setdefault(name, []).append(one)
        found.required |= dict.fromkeys(required(schema))
        if "additionalProperties" in schema:
            found.others = schema["additionalProperties"] if found.others is not False else False
        for key in ("anyOf", "oneOf"):
            branches = []
            for one in listed(schema, key):
                branch = _Properties()
                self._collect(one, branch, depth + 1)
                branches.append(branch)
            found.add_choice(branches)

    # --- values ---

    def kinds(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the JSON types that a schema may allow. Keywords such as ``not`` may exclude some of them."""
        if not isinstance(schema, dict):
            return KINDS if schema else frozenset()
        if depth > _MAX_DEPTH:
            return KINDS
        kinds = KINDS
        named = schema.get("type")
        if named is not None:
            kinds = frozenset(_wider(_named(named)))
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(values, list):
                kinds &= frozenset(_wider(kind_of(value) for value in values))
        if "$ref" in schema:
            kinds &= self.kinds(self.resolve(schema), depth + 1)
        for one in listed(schema, "allOf"):
            kinds &= self.kinds(one, depth + 1)
        for key in ("anyOf", "oneOf"):
            if branches := listed(schema, key):
                kinds &= frozenset().union(*(self.kinds(one, depth + 1) for one in branches))
        return kinds

    def allows(self, schema: Any, value: bool | int | float | None, depth: int = 0) -> bool:
        """Return True if a schema is sure to allow ``value``. Return False if not, or if this method cannot decide."""
        if not isinstance(schema, dict):
            return bool(schema)
        if depth > _MAX_DEPTH or not _UNKNOWN.isdisjoint(schema):
            return False
        named = schema.get("type")
        if named is not None and kind_of(value) not in _wider(_named(named)):
            return False
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(values, list) and not any(_is_equal(value, one) for one in values):
                return False
        if isinstance(value, int | float) and not isinstance(value, bool):
            for key, is_within in _LIMITS.items():
                try:
                    if key in schema and not is_within(value, schema[key]):
                        return False
                except (TypeError, ArithmeticError):
                    return False
        if "$ref" in schema and not self.allows(self.resolve(schema), value, depth + 1):
            return False
        if not all(self.allows(one, value, depth + 1) for one in listed(schema, "allOf")):
            return False
        choices = (listed(schema, key) for key in ("anyOf", "oneOf"))
        return all(any(self.allows(one, value, depth + 1) for one in choice) for choice in choices if choice)


class _Properties:
    """Properties of one object, collected from all schemas that apply to the object.

    Attributes:
        schemas: maps the name of each property to the schemas that its value must all match.
        required: names of the required properties in their order. The values are None.
        others: schema of unlisted properties; False if none are allowed.
    """

    def __init__(self) -> None:
        self.schemas: dict[str, list[Any]] = {}
        self.required: dict[str, None] = {}
        self.others: Any = True

    def add_choice(self, branches: Sequence[_Properties]) -> None:
        """Add the properties of the branches of ``anyOf`` or ``oneOf``.

        A property becomes required if all branches require it.
        """
        if not branches:
            return
        for name in {name: None for branch in branches for name in branch.schemas}:
            options = [branch.schema_of(name) for branch in branches if name in branch.schemas]
            self.schemas.setdefault(name, []).append(options[0] if len(options) == 1 else {"anyOf": options})
        common = [name for name in branches[0].required if all(name in branch.required for branch in branches)]
        self.required |= dict.fromkeys(common)
        if all(branch.others is False for branch in branches):
            self.others = False

    def schema_of(self, name: str) -> Any:
        schemas = [schema for schema in self.schemas.get(name, ()) if schema is not True]
        if len(schemas) < 2:
            return schemas[0] if schemas else True
        return {"allOf": schemas}


def kind_of(value: Any) -> str:
    """Return the JSON type of a value. A float without a fraction, such as 1.0, is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = {float: "number", str: "string", list: "array", tuple: "array"}
    return kinds.get(type(value), "object")


def _named(kinds: Any) -> list[str]:
    """Return the types in the value of the keyword ``type``, a string or a list. Unknown types are left out."""
    return [one for one in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(one, str) and one in KINDS]


def _wider(kinds: Any) -> Iterator[str]:
    """Yield the given types, and ``integer`` after ``number``, because an integer is a number."""
    for kind in kinds:
        yield kind
        if kind == "number":
            yield "integer"


def _is_equal(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def tool_schemas(tools: Sequence[dict[str, Any]]) -> list[ToolSchema]:
    return [ToolSchema(i, tool) for i, tool in enumerate(tools)]

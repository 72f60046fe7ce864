"""Closed schemas: the objects that are closed, no new valid values, and limited work."""

from __future__ import annotations

import json
from typing import Any, Literal

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from metal_engine.grammars.source import grammar_source
from metal_engine.json_schemas.closed import closed
from tests.support.json_schemas import SCHEMAS
from tools.fixtures.fake_engine import EOS, VOCAB_SIZE, tiny_tokenizer

Schema = dict[str, Any]
INT: Schema = {"type": "integer"}


def obj(*required: str, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def refs(schema: Schema, **definitions: Schema) -> Schema:
    return {**schema, "$defs": definitions}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


A, B = obj(a=INT), obj(b=INT)
TREE = obj(value=INT, kids={"type": "array", "items": ref("tree")})
# Schema, values that stay valid, and values that are no longer valid.
CASES: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "plain": (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    "no type": ({"properties": {"a": INT}}, [1, {"a": 1}], [{"b": 1}]),
    "no properties": (obj(), [{}], [{"a": 1}]),
    "nested": (obj(x=A, y={"items": A}), [{"x": {"a": 1}, "y": [{}]}], [{"x": {"b": 1}}, {"y": [{"b": 1}]}]),
    "map of objects": ({"additionalProperties": A}, [{"x": {"a": 1}}], [{"x": {"b": 1}}]),
    "required alone": (obj("z", a=INT), [{"z": 1}, {"a": 1, "z": "x"}], [{"z": 1, "y": 1}]),
    "reference": (refs(obj(x=ref("a")), a=A), [{"x": {"a": 1}}], [{"x": {"b": 1}}]),
    "recursion": (refs(ref("tree"), tree=TREE), [{"kids": [{"value": 1}]}], [{"kids": [{"x": 1}]}, {"x": 1}]),
    "to the root": (obj(next={"$ref": "#"}), [{"next": {"next": {}}}], [{"next": {"x": 1}}]),
    "choice": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"c": 1}]),
    "or null": ({"anyOf": [A, {"type": "null"}], "default": None}, [None, {"a": 1}], [{"b": 1}]),
    "allOf of one": (refs({"allOf": [ref("a")], "title": "A"}, a=A), [{"a": 1}], [{"b": 1}]),
    "allOf": ({"allOf": [A, B]}, [{"a": 1, "b": 1}, {"b": 1}], [{"c": 1}]),
    "allOf with a reference": (
        refs({"allOf": [ref("a"), obj("b", b=INT)]}, a=A), [{"a": 1, "b": 1}, {"b": 1}], [{"b": 1, "c": 1}],
    ),
    "beside a reference": (refs({**ref("a"), **obj("b", b=INT)}, a=A), [{"a": 1, "b": 1}], [{"b": 1, "c": 1}]),
    "a part and by itself": (
        refs(obj(x=ref("a"), y={"allOf": [ref("a"), B]}), a=A),
        [{"x": {"a": 1}, "y": {"a": 1, "b": 1}}],
        [{"x": {"b": 1}}, {"y": {"c": 1}}],
    ),
    "beside a choice": (
        {**obj(k=INT), "anyOf": [obj("a", a=INT), obj("b", b=INT)]}, [{"k": 1, "a": 1}, {"b": 1}], [{"a": 1, "c": 1}],
    ),
    "the same name twice": (
        {"allOf": [obj(x=A), obj(x=obj("b", b=INT))]}, [{"x": {"a": 1, "b": 1}}, {}], [{"y": 1}],
    ),
    "a name of one part": ({"allOf": [obj(x=A), B]}, [{"x": {"a": 1}, "b": 1}], [{"x": {"c": 1}}]),
    "told apart": (
        {"oneOf": [obj("t", t={"const": "a"}, a=INT), obj("t", t={"enum": ["b", "c"]}, b=INT)]},
        [{"t": "a", "a": 1}, {"t": "c", "b": 1}],
        [{"t": "a", "b": 1}, {"t": "b", "x": 1}],
    ),
    "told apart by type": ({"oneOf": [A, {"type": "null"}, INT]}, [None, 1, {"a": 1}], [{"b": 1}]),
}  # fmt: skip
# Schemas that stay unchanged.
LEFT_ALONE: dict[str, Schema] = {
    "any object": {"type": "object"},
    "says so": {**A, "additionalProperties": True},
    "of a type": {**A, "additionalProperties": INT},
    "patterns": {**A, "patternProperties": {"^x": INT}},
    "names": {**A, "propertyNames": {"maxLength": 3}},
    "as many": {**A, "minProperties": 2},
    "values": {"properties": {"a": {}}, "enum": [{"b": 1}]},
    "unevaluated": {"allOf": [A, B], "unevaluatedProperties": False},
    "one part says so": {"allOf": [A, {**B, "additionalProperties": True}]},
    "not": {"not": A},
    "conditions": {**A, "if": obj("a", a=INT), "then": obj("b", b=INT)},
    "not told apart": {"oneOf": [obj("a", a=INT), obj("b", b=INT)]},
    "told apart by what is open": {"oneOf": [obj("x", x=A), obj("x", x=obj("b", b=INT))]},
    "an identifier": obj(x={**A, "$id": "http://localhost/x"}),
    "an anchor": refs(obj(x={"$ref": "#here"}), a={**A, "$anchor": "here"}),
    "elsewhere": obj(x={"$ref": "http://localhost/x"}),
    "nowhere": obj(x=ref("missing")),
    "data": {"const": A, "default": A, "examples": [A]},
}


def is_valid(schema: Any, value: Any) -> bool:
    return Draft202012Validator(schema).is_valid(value)


@pytest.fixture(scope="module")
def accepts() -> Any:
    """Return a function that checks if a grammar accepts a JSON value in compact form."""
    tokenizer = tiny_tokenizer()
    ll_tokenizer = llguidance.LLTokenizer(tokenizer.serialized.decode(), n_vocab=VOCAB_SIZE, eos_token=EOS)

    def check(wanted: dict[str, Any], value: Any) -> bool:
        matcher = llguidance.LLMatcher(ll_tokenizer, grammar_source(wanted), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(json.dumps(value, separators=(",", ":")))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


@pytest.mark.parametrize("name", CASES)
def test_closed_schemas_reject_undeclared_properties(accepts: Any, name: str) -> None:
    """Grammars accept the same values."""
    schema, kept, gone = CASES[name]
    before = json.dumps(schema)
    result = closed(schema)
    Draft202012Validator.check_schema(result)
    assert json.dumps(schema) == before
    for value in kept:
        assert is_valid(schema, value) and is_valid(result, value), value
        assert accepts({"json": schema}, value) and accepts({"json": before}, value), value
    for value in gone:
        assert is_valid(schema, value) and not is_valid(result, value), value
        assert not accepts({"json": schema}, value) and not accepts({"json": before}, value), value
    again = closed(result)
    assert all(is_valid(again, value) for value in kept)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_schemas_that_must_not_be_closed_are_returned_unchanged(name: str) -> None:
    assert closed(LEFT_ALONE[name]) is LEFT_ALONE[name]


def test_strict() -> None:
    assert not is_valid(closed({"type": "object"}, strict=True), {"a": 1})
    assert is_valid(closed({"type": ["object", "null"]}, strict=True), None)
    nested = obj(x={"type": "object"}, y={"type": "object", "additionalProperties": True})
    result = closed(nested, strict=True)
    assert is_valid(result, {"x": {}, "y": {"a": 1}}) and not is_valid(result, {"x": {"a": 1}})
    assert is_valid(closed(nested), {"x": {"a": 1}})


class Street(BaseModel):
    name: str


class Address(BaseModel):
    street: Street
    other: list[Street] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    toys: dict[str, Street] = {}


class Person(BaseModel):
    name: str
    address: Address
    former: Address | None = None
    pets: list[Cat] = []


def test_a_pydantic_schema_is_closed_at_each_level() -> None:
    schema = Person.model_json_schema()
    assert "$defs" in schema
    result = closed(schema)
    value: dict[str, Any] = {
        "name": "x",
        "address": {"street": {"name": "a"}, "other": [{"name": "b"}]},
        "former": {"street": {"name": "c"}},
        "pets": [{"kind": "cat", "toys": {"any": {"name": "d"}}}],
    }
    assert is_valid(result, value)
    places = [
        value, value["address"], value["address"]["street"], value["address"]["other"][0], value["former"],
        value["former"]["street"], value["pets"][0], value["pets"][0]["toys"]["any"],
    ]  # fmt: skip
    for place in places:
        place["invented"] = 1
        assert is_valid(schema, value) and not is_valid(result, value)
        del place["invented"]
    assert is_valid(result, value)


# --- nothing new gets through ---

NAMES = ["a", "b", "x"]
LEAVES = [INT, {"type": "string"}, {}, True, {"const": "k"}, {"enum": ["k", "l"]}, {"type": "null"}, {"type": "object"}]


def _bigger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    several = st.lists(inner, min_size=1, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["object", ["object", "array", "null"]]),
        "properties": properties,
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "items": inner,
        "additionalProperties": st.one_of(st.booleans(), inner),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "x"]), inner, max_size=1),
        "$ref": st.sampled_from(["#/$defs/one", "#/$defs/two"]),
    }
    return st.one_of(
        properties.map(lambda given: {"type": "object", "properties": given}),
        st.fixed_dictionaries({}, optional=keywords),  # type: ignore[arg-type]
        several.map(lambda given: {"allOf": given}),
        several.map(lambda given: {"oneOf": given}),
        st.fixed_dictionaries({"$ref": keywords["$ref"], "properties": properties}),
    )


schemas = st.recursive(st.sampled_from(LEAVES), _bigger, max_leaves=8)
values = st.recursive(
    st.sampled_from([None, 1, "k", "l", {}]),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from([*NAMES, "z"]), inner, max_size=3), st.lists(inner, max_size=2)
    ),
    max_leaves=6,
)


def ends(schema: Any, definitions: Schema, within: tuple[str, ...] = ()) -> bool:
    """Return True if no reference leads to itself for one value. Otherwise, validators would not terminate."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in within or not ends(definitions[name], definitions, (*within, name)):
            return False
    here = [one for key in ("allOf", "anyOf", "oneOf") for one in schema.get(key, [])]
    here += [schema[key] for key in ("not", "if", "then") if key in schema]
    return all(ends(one, definitions, within) for one in here)


Given = tuple[Any, Any, Any, list[Any], bool]
GIVEN = st.tuples(schemas, schemas, schemas, st.lists(values, min_size=1, max_size=8), st.booleans())


@settings(max_examples=25)
@given(GIVEN)
def test_values_valid_for_the_closed_schema_are_valid_for_the_original(given: Given) -> None:
    check_narrower(*given)


@pytest.mark.full
@settings(max_examples=1000)
@given(GIVEN)
def test_values_valid_for_many_closed_schemas_are_valid_for_the_originals(given: Given) -> None:
    check_narrower(*given)


def check_narrower(root: Any, one: Any, two: Any, given_values: list[Any], strict: bool) -> None:
    definitions = {"one": one, "two": two}
    schema = {**(root if isinstance(root, dict) else {"items": root}), "$defs": definitions}
    if not all(ends(each, definitions) for each in (schema, one, two)):
        return
    result = closed(schema, strict=strict)
    for value in given_values:
        assert not is_valid(result, value) or is_valid(schema, value)


# --- grammars ---


def test_grammars_of_strict_schemas(accepts: Any) -> None:
    assert accepts({"json": {"type": "object"}}, {"a": 1})
    assert not accepts({"json": {"type": "object"}, "strict": True}, {"a": 1})


# --- bounds ---


def nested(depth: int) -> Schema:
    schema: Schema = INT
    for _ in range(depth):
        schema = {"items": schema}
    return {"properties": {"a": schema}}


def chain(depth: int) -> Schema:
    """Return nested objects with a reference to each of them, so that each copy has the rest of the chain."""
    schema: Schema = {"type": "object", "properties": {}}
    pointer = "#"
    references = []
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema, **{f"n{i}": {} for i in range(40)}}}
        pointer += "/properties/x"
        references.append({"$ref": pointer})
    schema["properties"]["all"] = {"anyOf": references}
    return schema


def widening(num: int) -> Schema:
    """Return many schemas for one value with the names of one large part."""
    part = obj(**{f"n{i}": {} for i in range(num)})
    return refs(obj(**{f"p{i}": {**ref("part"), "required": ["z"]} for i in range(num)}), part=part)


@pytest.mark.parametrize(
    "schema",
    [nested(3000), chain(110), widening(700), refs({"oneOf": [obj(a=INT)] * 1000})],
    ids=["deep", "copies", "names", "branches"],
)
def test_work_is_bounded(schema: Schema) -> None:
    with pytest.raises(ValueError, match="too"):
        closed(schema)


@pytest.mark.parametrize("schema", [nested(100), chain(20), widening(100)], ids=["deep", "copies", "names"])
def test_and_suffices(schema: Schema) -> None:
    assert closed(schema) is not schema


@pytest.mark.parametrize("strict", [False, True])
def test_schemas_stay_schemas(strict: bool) -> None:
    for schema in SCHEMAS:
        result = closed(schema, strict=strict)
        if result is not schema:
            Draft202012Validator.check_schema(result)

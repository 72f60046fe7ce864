"""Keywords of a JSON schema whose values have the wrong type."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, SchemaError

from metal_engine.json_schemas.faults import schema_fault
from tests.support.json_schemas import SCHEMAS


@pytest.mark.parametrize(("schema", "place"), [
    ({"type": 5}, "type"),
    ({"type": ["string", 5]}, "type"),
    ({"properties": {"a": {"type": {}}}}, "properties.a.type"),
    ({"properties": []}, "properties"),
    ({"properties": {"a": "string"}}, "properties.a"),
    ({"properties": {"a": {"items": [{"enum": "x"}]}}}, "properties.a.items.0.enum"),
    ({"required": True}, "required"),
    ({"required": [5]}, "required"),
    ({"items": 5}, "items"),
    ({"$ref": 5}, "$ref"),
    ({"$defs": {"a": {"pattern": 5}}}, "$defs.a.pattern"),
    ({"anyOf": {}}, "anyOf"),
    ({"allOf": [5]}, "allOf.0"),
    ({"not": []}, "not"),
    ({"additionalProperties": "no"}, "additionalProperties"),
    ({"minimum": "1"}, "minimum"),
    ({"maximum": True}, "maximum"),
    ({"minLength": -1}, "minLength"),
    ({"maxItems": 1.5}, "maxItems"),
    ({"maxItems": float("inf")}, "maxItems"),
    (5, "the schema"),
])  # fmt: skip
def test_wrong_types(schema: Any, place: str) -> None:
    fault = schema_fault(schema)
    assert fault is not None and fault.problem.startswith("must be ")
    assert str(fault) == f"{place} {fault.problem}" and fault.place == ("" if place == "the schema" else place)


@pytest.mark.parametrize("schema", [
    True, {}, {"type": "any"}, {"type": ["string", "null"]}, {"$ref": "#/nowhere"}, {"pattern": "("}, {"x": 5},
    {"exclusiveMinimum": True}, {"items": [{}, True]}, {"maxItems": 2.0}, {"enum": [], "const": {"type": 5}},
    {"default": {"type": 5}}, {"properties": {"type": {"type": "string"}, "required": {}}},
])  # fmt: skip
def test_no_faults(schema: Any) -> None:
    assert schema_fault(schema) is None


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_valid_schemas(schema: dict[str, Any]) -> None:
    assert schema_fault(schema) is None


KEYWORDS = st.sampled_from(["type", "properties", "items", "required", "enum", "anyOf", "minimum", "maxLength", "not"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["string", "object", 1.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYWORDS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYWORDS, VALUES, max_size=3))
def test_schemas_with_a_fault_are_invalid(schema: dict[str, Any]) -> None:
    if schema_fault(schema) is not None:
        with pytest.raises(SchemaError):
            Draft202012Validator.check_schema(schema)


def test_deep_and_long_schemas() -> None:
    schema: Any = {"type": 5}
    for _ in range(100_000):
        schema = {"items": schema}
    assert schema_fault(schema) is None
    schema = {"properties": {"a" * 1_000_000: {"properties": {str(i): {} for i in range(50_000)} | {"x": 5}}}}
    fault = schema_fault(schema)
    assert fault is not None and fault.place.endswith(".properties.x") and len(fault.place) < 300
    assert fault.problem == "must be an object or a boolean"

"""Structured output: a hundred schemas, and refused schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from metal_engine.errors import ParameterError
from metal_engine.grammars.compiler import GrammarCompiler
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from metal_engine.settings.config import SpeculativeConfig
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import MakeEngine
from tests.support.json_schemas import SCHEMAS
from tests.support.tiny_engine import run_all, tiny_engine, token_ids
from tools.fixtures.fake_engine import EOS, VOCAB_SIZE, byte_ids, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine

SPECULATIVE = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain() -> SteppedEngine:
    return tiny_engine()


@pytest.fixture(scope="module")
def drafting() -> SteppedEngine:
    return tiny_engine(speculative=SPECULATIVE)


def check(schema: dict[str, Any], text: str) -> None:
    """Parse strict JSON (no NaN, no duplicate keys), and validate it, including formats."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {text}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), text
        return dict(pairs)

    value = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)


def test_there_are_a_hundred_different_valid_schemas() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS) == 100
    for schema in SCHEMAS:
        Draft202012Validator.check_schema(schema)


def complete_outputs(engine: Any, requests: list[tuple[list[int], SamplingParams]]) -> list[str | None]:
    """Return the texts of complete outputs; None for outputs cut off at their length."""
    texts: list[str | None] = []
    for outputs in run_all(engine, requests):
        assert outputs[-1].finish_reason in ("stop", "length"), outputs[-1].error
        texts.append("".join(output.text for output in outputs) if outputs[-1].finish_reason == "stop" else None)
    return texts


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.full)])
def test_schemas_hold_a_random_model(step: int) -> None:
    """A model with random weights writes unusual outputs. All that the mask allows must validate."""
    engine = tiny_engine(num_blocks=4096, max_num_batched_tokens=256)
    requests = []
    schemas = SCHEMAS[::step]
    for i, schema in enumerate(schemas):
        params = SamplingParams(
            seed=i,
            max_tokens=300,
            temperature=(0.7, 1.5)[i % 2],
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        requests.append((byte_ids(f"schema {i}"), params))
    assert check_all(schemas, complete_outputs(engine, requests)) >= 0.75 * len(schemas)


def demo_outputs(
    make_engine: MakeEngine, tokenizer: Tokenizer, schemas: list[dict[str, Any]], max_tokens: int
) -> list[str | None]:
    requests = []
    for i, schema in enumerate(schemas):
        question = f"Answer with one short JSON value of this schema: {json.dumps(schema, ensure_ascii=False)}"
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        params = SamplingParams(
            seed=i,
            temperature=(0.0, 0.8)[i % 2],
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        requests.append((prompt, params))
    # In a batch with an unconstrained request.
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "Tell me about Paris."}])
    requests.append((plain, SamplingParams(temperature=0, max_tokens=20)))
    return complete_outputs(make_engine(num_blocks=2048), requests)[:-1]


class Street(BaseModel):
    name: str
    number: int


class Person(BaseModel):
    name: str
    age: int
    lives_in: Street | None = None


@pytest.mark.parametrize("kind", [Street, pytest.param(Person, marks=pytest.mark.full)])
def test_the_demo_model_completes_objects_of_pydantic_schemas(
    make_engine: MakeEngine, demo_tokenizer: Tokenizer, kind: type[BaseModel]
) -> None:
    """Schemas as sent by Instructor in its mode JSON_SCHEMA. In open objects, the model invents endless names."""
    question = f"Extract a {kind.__name__}: Jason Miller is 25 years old and lives in 12 Main Street."
    prompt = demo_tokenizer.apply_chat_template([{"role": "user", "content": question}])
    structured = StructuredOutputsParams(json=kind.model_json_schema())
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=structured)
    (text,) = complete_outputs(make_engine(), [(prompt, params)])
    assert text is not None
    kind.model_validate_json(text)
    assert json.loads(text).keys() <= kind.model_fields.keys()


def check_all(schemas: list[dict[str, Any]], texts: list[str | None]) -> int:
    for schema, text in zip(schemas, texts, strict=True):
        if text is not None:
            check(schema, text)
    return sum(text is not None for text in texts)


@pytest.mark.full
def test_the_demo_model_keeps_to_all_schemas(make_engine: MakeEngine, demo_tokenizer: Tokenizer) -> None:
    num_complete = 0
    for start in range(0, len(SCHEMAS), 20):
        schemas = SCHEMAS[start : start + 20]
        num_complete += check_all(schemas, demo_outputs(make_engine, demo_tokenizer, schemas, 150))
    assert num_complete >= 85


@pytest.mark.parametrize("params", [
    {"json": {"type": 5}},
    {"json": {"type": "object", "unevaluatedProperties": False}},
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "#/nowhere"}},
    {"json": {"$ref": "http://localhost/schema.json"}},
    {"json": "[1]"},
    {"json": "no json"},
    {"json": False},
    {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
    {"regex": "("},
    {"regex": "(?=look)ahead"},
    {"regex": r"(a)\1"},
    {"grammar": "start: nothing"},
    {"grammar": "%%%"},
    {"json": {"type": "object"}, "whitespace_pattern": "("},
], ids=str)  # fmt: skip
def test_structured_outputs_that_cannot_be_enforced_are_refused(
    compiler: GrammarCompiler, params: dict[str, Any]
) -> None:
    with pytest.raises(ParameterError, match=r"^structured_outputs "):
        compiler.compile(StructuredOutputsParams(**params))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("params", [
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "((a|b|c|d|e){100,2000}x){50}"},
    {"regex": "(.*a){1000}.{1000}b"},
    {"regex": "((((a*)*)*)*)*b"},
    {"json": nested(60)},
    {"json": nested(3000)},
    {"json": {"anyOf": [{"type": "object", "properties": {f"p{i}": nested(3)}} for i in range(300)]}},
    {"json": {"type": "array", "items": {"type": "string", "minLength": 10**6}, "maxItems": 10**9}},
    {"json": {"enum": [f"value {i}" for i in range(4000)]}},
    {"grammar": 'start: a a a a a a\na: b b b b b b | \nb: c c c c | \nc: "x"* | '},
], ids=range(10))  # fmt: skip
def test_large_ones_are_compiled_or_refused_and_fail_alone(plain: SteppedEngine, params: dict[str, Any]) -> None:
    """The grammar's process limits the effort. A request that exceeds the limit fails alone."""
    engine = plain
    try:
        params_of_it = SamplingParams(seed=0, max_tokens=20, structured_outputs=StructuredOutputsParams(**params))
        engine.prepare(byte_ids("a"), params_of_it)
    except ParameterError as error:
        assert error.name.partition(".")[0] == "structured_outputs"
        return
    outputs, others = run_all(
        engine, [(byte_ids("a"), params_of_it), (byte_ids("b"), SamplingParams(seed=1, max_tokens=9, ignore_eos=True))]
    )
    assert outputs[-1].finish_reason in ("stop", "length", "error")
    assert others[-1].finish_reason == "length"


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutputsParams(json={"type": "object"}))
    assert compiler.compile(StructuredOutputsParams(json={"type": "object"})) is first
    assert compiler.compile(StructuredOutputsParams(json_object=True)) is first
    assert compiler.compile(StructuredOutputsParams(regex="a")) is not first


@pytest.mark.parametrize("wanted", [
    {"json": {"enum": ["<|im_end|>"]}},
    {"json": {"type": "object", "properties": {"<|im_end|>": {"const": "a <|im_end|> b"}}, "required": ["<|im_end|>"]}},
    {"choice": ("<|im_end|>",)},
    {"choice": ("a<|im_end|>b", "a<|im_start|>")},
    {"regex": r"<\|im_end\|>{1,2}"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("engine", ["plain", "drafting"])
def test_texts_of_special_tokens(wanted: dict[str, Any], engine: str, request: pytest.FixtureRequest) -> None:
    """The texts are written as plain tokens, so the end-of-sequence token comes only at the end."""
    structured = StructuredOutputsParams(**wanted, disable_any_whitespace=True)
    params = SamplingParams(max_tokens=60, seed=1, structured_outputs=structured)
    (outputs,) = run_all(request.getfixturevalue(engine), [(byte_ids("<|im_end|> <|im_end|>"), params)])
    assert outputs[-1].finish_reason == "stop", outputs[-1].error
    text = "".join(output.text for output in outputs)
    assert "<|im_" in text and EOS not in token_ids(outputs)[:-1] and token_ids(outputs)[-1] == EOS
    if "json" in wanted:
        check(wanted["json"], text)
    elif "choice" in wanted:
        assert text in wanted["choice"]

"""Converts a request body to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metal_engine.errors import ParameterError, short
from metal_engine.sampling_params import PARAMETER_NAMES, SamplingParams, StructuredOutputsParams
from metal_engine.server.errors import APIError, invalid
from metal_engine.server.generation.schema_errors import SCHEMA, check_schema
from metal_engine.server.protocol import ChatCompletionBody, GenerationBody

# Parameters that are not copied from fields of the same name.
_MADE_HERE = {"max_tokens", "logprobs", "prompt_logprobs", "structured_outputs", "phases"}
_COPIED = tuple(name for name in PARAMETER_NAMES if name not in _MADE_HERE)


def sampling_params(body: GenerationBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of the body. ``defaults`` has the values of parameters that the body omits.

    Raises:
        APIError: status 400, naming the parameter at fault.
    """
    given = {name: value for name in _COPIED if (value := getattr(body, name, None)) is not None}
    given["max_tokens"] = body.token_limit
    given["logprobs"] = body.num_logprobs
    given["prompt_logprobs"] = body.num_prompt_logprobs
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not available when stream is true", param="prompt_logprobs")
    if isinstance(body, ChatCompletionBody) and body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", param="top_logprobs")
    try:
        given["structured_outputs"] = structured = _structured_outputs(body)
        if structured is not None:
            check_schema(structured)
        return SamplingParams(**{**defaults, **given})
    except ParameterError as error:
        raise parameter_error(error, body) from error


def parameter_error(error: ParameterError, body: GenerationBody, *, is_forced: bool = False) -> APIError:
    """Convert an error about a parameter to an APIError with status 400 and the body's name of the parameter.

    Args:
        body: body of the request.
        is_forced: True if the structured output is the grammar of tool calls.
    """
    if error.name == "prompt":
        return invalid(f" {error.message}", where=body.prompt_field)
    field = error.name.partition(".")[0]
    if field.partition("[")[0] == "tools" and "tools" in type(body).model_fields:
        return invalid(f" {error.message}", where=error.name)
    if field == "structured_outputs" and body.structured_outputs is None:
        if not is_forced and error.name.startswith(SCHEMA):
            return invalid(f" {error.message}", where=_schema_field(body) + error.name.removeprefix(SCHEMA))
        return invalid(f": {error.message}", where="tools" if is_forced else "response_format")
    name = {"max_tokens": body.max_tokens_field, "logprobs": body.logprobs_field}.get(error.name, error.name)
    if name.partition(".")[0] not in type(body).model_fields:
        return invalid(f"{name} {error.message}")
    return invalid(f" {error.message}", where=name)


def _schema_field(body: GenerationBody) -> str:
    """Return the place of the JSON schema in ``response_format``."""
    is_object = body.response_format is not None and body.response_format.get("type") == "json_object"
    return "response_format.schema" if is_object else "response_format.json_schema.schema"


def _structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    made = _of_response_format(body.response_format)
    wanted = body.structured_outputs
    if not wanted:
        return made
    if made is not None:
        raise invalid("response_format and structured_outputs exclude each other", param="structured_outputs")
    known = StructuredOutputsParams.__dataclass_fields__
    for name in wanted:
        if name not in known:
            raise ParameterError(f"structured_outputs.{name[:100]}", "is not supported")
    return StructuredOutputsParams(**{k: v for k, v in wanted.items() if v is not None})


def _of_response_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            if response_format.get("schema") is None:
                return StructuredOutputsParams(json_object=True)
            return StructuredOutputsParams(json=_schema(response_format["schema"], "response_format.schema"))
        case "json_schema":
            wrapper = response_format.get("json_schema")
            asked = wrapper if isinstance(wrapper, Mapping) else {}
            schema = _schema(asked.get("schema"), "response_format.json_schema.schema")
            return StructuredOutputsParams(json=schema, strict=asked.get("strict") is True)
        case other:
            problem = f" must be text, json_object or json_schema, got {short(other)}"
            raise invalid(problem, where="response_format.type")


def _schema(given: Any, place: str) -> Mapping[str, Any] | bool:
    if not isinstance(given, Mapping | bool):
        raise invalid(f" must be a JSON schema, got {short(given)}", where=place)
    return given

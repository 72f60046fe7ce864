"""From a request body to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metal_engine.sampling_params import PARAMETER_NAMES, SamplingParams, StructuredOutputsParams
from metal_engine.server.errors import APIError, invalid
from metal_engine.server.openai.protocol import ChatCompletionBody, GenerationBody

# Not copied from the body field for field.
_MADE_HERE = {"max_tokens", "logprobs", "prompt_logprobs", "structured_outputs"}
_COPIED = tuple(name for name in PARAMETER_NAMES if name not in _MADE_HERE)


def sampling_params(body: GenerationBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the body asks for; ``defaults`` for parameters that it does not mention.

    Raises:
        APIError: 400, naming the parameter at fault.
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
        given["structured_outputs"] = _structured_outputs(body)
        return SamplingParams(**{**defaults, **given})
    except ValueError as error:
        raise parameter_error(error, body) from error


def parameter_error(
    error: ValueError, body: GenerationBody, adjusted: GenerationBody | None = None
) -> APIError:
    """What to tell the client about an error whose message begins with a parameter's name.

    Args:
        adjusted: the body with what its tools ask for, if that is at fault too.
    """
    name, _, rest = str(error).partition(" ")
    if name == "max_tokens":
        name = body.max_tokens_field
    param = name.partition(".")[0]
    if param == "structured_outputs" and body.structured_outputs is None:
        is_tools = adjusted is not None and adjusted.structured_outputs is not None
        param = "tools" if is_tools else "response_format"
        return invalid(f"{param}: {rest}", param=param)
    if param == "logprobs" and body.logprobs_field != param:
        name = param = body.logprobs_field
    return invalid(f"{name} {rest}", param=param if param in type(body).model_fields else None)


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
            raise ValueError(f"structured_outputs.{name[:100]} is not supported")
    return StructuredOutputsParams(**{k: v for k, v in wanted.items() if v is not None})


def _of_response_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            wrapper = response_format.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
            if not isinstance(schema, Mapping | bool):
                raise invalid(
                    "response_format.json_schema.schema must be a JSON schema", param="response_format"
                )
            return StructuredOutputsParams(json=schema)
        case other:
            raise invalid(
                f"response_format.type must be text, json_object or json_schema, got {str(other)[:60]!r}",
                param="response_format",
            )

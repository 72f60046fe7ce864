"""Requests to all APIs of the server. Each is greedy or has a seed, so that its body determines its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_TOPICS = ("a lighthouse", "the number seven", "rain in the desert", "an old bicycle", "bread", "two brothers")
_CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
_CITY |= {"required": ["city", "days"], "additionalProperties": False}


@dataclass(frozen=True)
class MixedRequest:
    """Request to a server.

    Attributes:
        name: unique name, with the kind of the request.
        path: path of the endpoint.
        body: JSON of the body.
    """

    name: str
    path: str
    body: dict[str, Any]

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def mixed_requests(model: str, num_each: int, max_tokens: int) -> list[MixedRequest]:
    """Return ``num_each`` requests of every kind, with different prompts and seeds.

    Args:
        max_tokens: maximum number of tokens of an output.
    """
    return [
        MixedRequest(f"{model}: {kind} {i}", path, {"model": model, **body})
        for i in range(num_each)
        for kind, path, body in _kinds(f"Tell a story about {_TOPICS[i % len(_TOPICS)]}.", i, max_tokens)
    ]


def _kinds(prompt: str, seed: int, num: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the path and the body of one request of each kind, with at most ``num`` tokens of output."""
    messages = [{"role": "user", "content": prompt}]
    greedy = {"temperature": 0.0, "max_tokens": num}
    random: dict[str, Any] = {"temperature": 0.9, "seed": seed, "max_tokens": num}
    stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    function = {"name": "forecast", "description": "Weather of a city.", "parameters": _CITY}
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY, "strict": True}}

    chat = {"messages": messages}
    path = "/v1/chat/completions"
    yield "chat, greedy", path, {**chat, **greedy, **stream, "logprobs": True, "top_logprobs": 2}
    yield "chat, n", path, {**chat, **random, "n": 2, "logprobs": True}
    yield "chat, n in a stream", path, {**chat, **random, **stream, "n": 2, "stop": [" was", "ing the"]}
    yield "chat, tools", path, {**chat, **random, **stream, **tools}
    yield "chat, forced call", path, {**chat, **random, **stream, **tools, "tool_choice": "required"}
    yield "chat, schema", path, {**chat, **random, "response_format": schema}
    yield "chat, schema in a stream", path, {**chat, **random, **stream, "response_format": schema}

    text = {"prompt": prompt}
    path = "/v1/completions"
    penalties = {"presence_penalty": 0.7, "repetition_penalty": 1.1, "logit_bias": {"65": 2.0}}
    yield "completion", path, {**text, **random, **stream, **penalties, "logprobs": 2}
    yield "completion, prompts", path, {**random, "prompt": [prompt, prompt[5:]], "prompt_logprobs": 1, "min_tokens": 3}
    yield "completion, regex", path, {**text, **random, **stream, "structured_outputs": {"regex": "[a-f ]{20,30}"}}

    asked: dict[str, Any] = {"input": prompt, "max_output_tokens": num, "temperature": 0.0, "store": False}
    yield "response", "/v1/responses", {**asked, "stream": True}
    call = {"tools": [{"type": "function", **function}], "tool_choice": "required"}
    yield "response, forced call", "/v1/responses", {**asked, **call, "stream": True}

    yield "message", "/v1/messages", {**chat, **greedy, "stream": True, "stop_sequences": ["."]}
    call = {"tools": [{"name": "forecast", "input_schema": _CITY}], "tool_choice": {"type": "any"}}
    yield "message, forced call", "/v1/messages", {**chat, **greedy, **call}

    options = {"options": {"temperature": 0.8, "seed": seed, "num_predict": num}}
    yield "Ollama chat", "/api/chat", {**chat, **options, "stream": True}
    yield "Ollama schema", "/api/generate", {**text, **options, "stream": True, "format": _CITY}

"""JSON values of any size for fields that expect another type, and request bodies that contain them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from metal_engine.server.anthropic.protocol import CountTokensBody, MessagesBody
from metal_engine.server.embeddings.protocol import EmbeddingBody, RerankBody, ScoreBody
from metal_engine.server.ollama.protocol import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from metal_engine.server.openai.responses_protocol import ResponsesBody
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody
from metal_engine.server.tokenization import DetokenizeBody, TokenizeBody

USER = [{"role": "user", "content": "a"}]


@dataclass(frozen=True)
class Endpoint:
    """Route that takes a body.

    Attributes:
        small: body that gets status 200.
    """

    path: str
    model: type[BaseModel]
    small: Mapping[str, Any]

    @property
    def fields(self) -> list[str]:
        return list(self.model.model_fields)


COMPLETIONS = Endpoint("/v1/completions", CompletionBody, {"prompt": "a", "max_tokens": 2})
CHAT = Endpoint("/v1/chat/completions", ChatCompletionBody, {"messages": USER, "max_tokens": 2})
RESPONSES = Endpoint("/v1/responses", ResponsesBody, {"input": "a", "max_output_tokens": 2})
MESSAGES = Endpoint("/v1/messages", MessagesBody, {"model": "tiny", "messages": USER, "max_tokens": 2})
COUNT_TOKENS = Endpoint("/v1/messages/count_tokens", CountTokensBody, {"model": "tiny", "messages": USER})
TOKENIZE = Endpoint("/tokenize", TokenizeBody, {"prompt": "a"})
DETOKENIZE = Endpoint("/detokenize", DetokenizeBody, {"tokens": [1]})
EMBEDDINGS = Endpoint("/v1/embeddings", EmbeddingBody, {"input": "a"})
RERANK = Endpoint("/v1/rerank", RerankBody, {"query": "a", "documents": ["a"]})
SCORE = Endpoint("/score", ScoreBody, {"text_1": "a", "text_2": ["a"]})
POOLING = (EMBEDDINGS, RERANK, SCORE)
TWO_TOKENS = {"stream": False, "options": {"num_predict": 2}}
OLLAMA_CHAT = Endpoint("/api/chat", OllamaChatBody, {"messages": USER, **TWO_TOKENS})
OLLAMA_GENERATE = Endpoint("/api/generate", OllamaGenerateBody, {"prompt": "a", **TWO_TOKENS})
OLLAMA_SHOW = Endpoint("/api/show", OllamaShowBody, {})
OLLAMA_EMBED = Endpoint("/api/embed", OllamaEmbedBody, {"input": "a"})
OLLAMA_EMBEDDINGS = Endpoint("/api/embeddings", OllamaEmbeddingsBody, {"prompt": "a"})
OF_OLLAMA = (OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW, OLLAMA_EMBED, OLLAMA_EMBEDDINGS)
ENDPOINTS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE, *POOLING, *OF_OLLAMA)


def repeated(element: str, size: int) -> str:
    """Return a list of about ``size`` bytes, with at least one element."""
    return "[" + ",".join([element] * max(size // (len(element) + 1), 1)) + "]"


def names(size: int) -> str:
    """Return an object of about ``size`` bytes."""
    return "{" + ",".join(f'"k{i}":0' for i in range(max(size // 10, 1))) + "}"


# Kind of filler -> function from a size in bytes to JSON text of about that size.
FILLERS: dict[str, Callable[[int], str]] = {
    "numbers": lambda size: repeated("7", size),
    "texts": lambda size: repeated('"ab"', size),
    "lists": lambda size: repeated("[7]", size),
    "messages": lambda size: repeated('{"role":"user","content":"a"}', size),
    "parts": lambda size: repeated('{"type":"text","text":"a"}', size),
    "wrong objects": lambda size: repeated("{}", size),
    "names": names,
    "depth": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "text": lambda size: json.dumps("a" * size),
}


def with_field(endpoint: Endpoint, field: str, text: str) -> bytes:
    """Return the endpoint's small body with ``text`` as the JSON value of the field."""
    rest = {name: value for name, value in endpoint.small.items() if name != field}
    return f"{json.dumps(rest)[:-1]}{', ' if rest else ''}{json.dumps(field)}: {text}}}".encode()


def with_fields(endpoint: Endpoint, **fields: Any) -> bytes:
    """Return the endpoint's small body with changed fields. None removes a field."""
    body = {**endpoint.small, **fields}
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


def _unknown_names(endpoint: Endpoint) -> Callable[[int], bytes]:
    return lambda size: with_fields(endpoint, **json.loads(names(size)))


def _in_message(field: str, value: Callable[[int], Any]) -> Callable[[int], bytes]:
    return lambda size: with_fields(CHAT, messages=[{"role": "user", "content": "a", field: value(size)}])


def _parts(size: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "a", f"k{i}": 0} for i in range(max(size // 35, 1))]


# Bodies that grow in another place than a field -> function that makes a body of about the given size.
SHAPES: dict[str, tuple[Endpoint, Callable[[int], bytes]]] = {
    **{f"{endpoint.path}, unknown names": (endpoint, _unknown_names(endpoint)) for endpoint in ENDPOINTS},
    "unknown fields of a part": (
        CHAT,
        _in_message("content", lambda size: [{"type": "text", "text": "a", **json.loads(names(size))}]),
    ),
    "parts with an unknown field each": (CHAT, _in_message("content", _parts)),
    "unknown stream options": (
        CHAT,
        lambda size: with_fields(CHAT, stream=True, stream_options=json.loads(names(size))),
    ),
    "unknown options": (
        OLLAMA_CHAT,
        lambda size: with_fields(OLLAMA_CHAT, options={**json.loads(names(size)), "num_predict": 2}),
    ),
    "allowed tokens and n": (
        COMPLETIONS,
        lambda size: with_fields(COMPLETIONS, n=128, temperature=1, max_tokens=1, allowed_token_ids=[7] * (size // 3)),
    ),
    "arguments of a call": (
        CHAT,
        lambda size: with_fields(
            CHAT,
            messages=[
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": repeated("1", size)}}]}
            ],
        ),
    ),
}

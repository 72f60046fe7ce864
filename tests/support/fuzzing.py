"""Random and mutated request bodies: valid bodies with one error, and arbitrary JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.fillers import FILLERS

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": None, "prompt": "hello", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9,
                         "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["x"], "stop_token_ids": [5], "n": 1,
                         "stream": False, "logprobs": None, "echo": False, "ignore_eos": True, "priority": 1,
                         "logit_bias": {}, "user": "me", "cache_salt": "s"}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 3, "stream": True,
                         "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": 4, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}, *USER,
                                           {"role": "assistant", "content": None, "tool_calls": [
                                               {"id": "c", "type": "function",
                                                "function": {"name": "f", "arguments": "{}"}}]},
                                           {"role": "tool", "tool_call_id": "c", "content": "r"}],
                              "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto",
                              "parallel_tool_calls": False, "response_format": {"type": "text"}}),
    ("/v1/chat/completions", {"messages": [*USER, {"role": "assistant", "content": "I"}], "max_tokens": 2,
                              "continue_final_message": True, "add_generation_prompt": False}),
    ("/v1/responses", {"input": "hi", "instructions": "i", "max_output_tokens": 4, "stream": False,
                       "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                       "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "store": True}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                                 {"type": "reasoning", "summary": [], "content": []},
                                 {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                 {"type": "function_call_output", "call_id": "c", "output": "r"}],
                       "max_output_tokens": 3, "stream": True, "previous_response_id": None}),
    ("/v1/messages", {"model": "org/fake-model", "max_tokens": 4, "messages": USER, "system": "s",
                      "stop_sequences": ["x"], "stream": False, "top_k": 4,
                      "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}}),
    ("/v1/messages", {"model": "org/fake-model", "max_tokens": 3, "stream": True, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
                                          {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}}),
    ("/v1/messages/count_tokens", {"model": "org/fake-model", "messages": USER}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/tokenize", {"messages": USER, "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embeddings", {"model": None, "input": [[1, 2], [3]], "dimensions": 4, "encoding_format": "base64",
                        "truncate_prompt_tokens": 2, "priority": 1, "cache_salt": "s", "user": "u"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": -1}),
    ("/api/chat", {"model": "org/fake-model:latest", "messages": [{"role": "system", "content": "s"}, *USER],
                   "stream": False, "format": "", "think": False, "keep_alive": "5m", "tools": [TOOL],
                   "options": {"num_predict": 3, "temperature": 0.5, "num_ctx": 64, "stop": ["x"], "seed": 1}}),
    ("/api/chat", {"messages": [*USER, {"role": "assistant", "thinking": "t", "content": "", "tool_calls": [
                       {"function": {"name": "f", "arguments": {"a": 1}}}]},
                       {"role": "tool", "tool_name": "f", "content": "r"}], "options": {"num_predict": 3}}),
    ("/api/generate", {"prompt": "hi", "system": "s", "raw": False, "context": [1], "images": [],
                       "options": {"num_predict": 3}}),
    ("/api/generate", {"prompt": "hi", "raw": True, "suffix": "", "options": {"num_predict": 3, "top_k": 5}}),
    ("/api/show", {"model": "org/fake-model"}),
    ("/api/embed", {"model": "org/fake-model", "input": ["a", "b"], "truncate": True, "dimensions": 4}),
    ("/api/embeddings", {"prompt": "a", "options": {"num_ctx": 8}}),
]  # fmt: skip

# Written as JSON text, because some of it is not JSON that Python would write.
ODD = [
    "null", "true", "false", "0", "-1", "1", "2", "0.5", "-0.0", "1e999", "1e-999", "NaN", "-Infinity", "9" * 30,
    "9" * 5000, "9223372036854775807", "-9223372036854775809", '""', '"a"', '"\\u0000"', '"\\ud800"', '"\\udc00x"',
    '"\U0001f600"', '"é\u2028"', '"<|im_end|>"', '"<think>"', '"<tool_call>{}</tool_call>"', "[]", "[null]", "[[]]",
    "[{}]", "{}", '{"":{}}', '{"type":"function"}', '{"type":"text"}', '{"type":["a"]}', '[1,"a",null]', "[-1]",
    "[99999999]", '["a","b"]', "[" * 60 + "]" * 60, "[" * 900 + "]" * 900, '{"a":' * 300 + "1" + "}" * 300,
    json.dumps("x" * 3000), json.dumps(["y"] * 3000), json.dumps({str(i): i for i in range(500)}),
]  # fmt: skip


class _Raw:
    """JSON text that is inserted unchanged."""

    def __init__(self, text: str) -> None:
        self.text = text


def bodies(seed: int, number: int) -> list[tuple[str, bytes]]:
    """Return ``number`` pairs of a path and a body. Equal seeds give equal bodies."""
    rng = random.Random(seed)
    return [_body(rng) for _ in range(number)]


@dataclass(frozen=True)
class Growing:
    """Valid body with one place that can grow. Calling it with a size makes the body.

    Attributes:
        place: keys and indices that lead to the growing place.
        filler: kind of value at this place, one of :data:`tests.support.fillers.FILLERS`.
    """

    path: str
    body: dict[str, Any]
    place: tuple[str | int, ...]
    filler: str

    def __call__(self, size: int) -> bytes:
        content: Any = json.loads(json.dumps(self.body))
        inner = content
        for key in self.place[:-1]:
            inner = inner[key]
        inner[self.place[-1]] = _Raw(FILLERS[self.filler](size))
        return _dump(content).encode()


def growing(seed: int, number: int) -> list[Growing]:
    """Return bodies that grow at a valid place or in an unknown field, the same for the same seed."""
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        path, body = rng.choice(SEEDS)
        place = rng.choice([*_places(body), *((*place, "unknown") for place in _places(body, of=dict))])
        made.append(Growing(path, body, place, rng.choice(list(FILLERS))))
    return made


def _places(value: Any, of: type = object) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all inner values of one type."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        if isinstance(one, of):
            yield (key,)
        yield from ((key, *rest) for rest in _places(one, of))


def _body(rng: random.Random) -> tuple[str, bytes]:
    path, body = rng.choice(SEEDS)
    content: Any = json.loads(json.dumps(body))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
        content = _mutate(rng, content)
    text = _dump(content).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        text = _damage(rng, text)
    return path, text


def _mutate(rng: random.Random, value: Any) -> Any:
    """Return the value with one random change inside it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[rng.choice(("model", "x", "", "n", "prompt", "type", "logprobs", "\u2028", key + "_"))] = _odd(
                    rng
                )
            case 2:
                other = rng.choice(rng.choice(SEEDS)[1:])
                value[key] = json.loads(json.dumps(rng.choice(list(other.values()))))  # type: ignore[union-attr]
            case _:
                value[key] = _mutate(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                del value[i]
            case 1:
                value.append(value[i])
            case _:
                value[i] = _mutate(rng, value[i])
        return value
    return _odd(rng)


def _odd(rng: random.Random) -> _Raw:
    return _Raw(rng.choice(ODD))


def _dump(value: Any) -> str:
    if isinstance(value, _Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dump, value)) + "]"
    return json.dumps(value)


def _damage(rng: random.Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    match rng.randrange(4):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + bytes([rng.randrange(256)]) + text[at:]
        case 2:
            return text[:at] + text[at + 1 :]
        case _:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))

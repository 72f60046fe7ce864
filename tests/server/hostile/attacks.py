"""Handwritten hostile requests that did or could block the server, fill its memory, or make it fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.server.hostile.cases import Case, attack, raw
from tests.support.fillers import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    ENDPOINTS,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    USER,
    Endpoint,
    with_fields,
)

VOCAB_SIZE = 49_152
TEXT_BYTES = 15_000_000
GENERATING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
CHATS = (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS)

# --- texts -------------------------------------------------------------------------------------------------

TEXTS: dict[str, str] = {
    "one letter": "a",
    "spaces": " ",
    "special tokens": "<|im_start|>",
    "multi-byte characters": "語",
    "astral characters": "\U0001f600",
    "combining marks": "e\u0301\u0301\u0301",
    "lines": "\n",
    "digits": "1234567890",
    "NUL": "\x00",
    "bidirectional marks": "\u202e\u2066",
    "halves of tags": "<|im_",
    "tool calls": "<tool_call>{}</tool_call>",
}


def of_text(unit: str, size: int) -> Callable[[], str]:
    """Return a function that makes a text of ``size`` bytes in UTF-8."""
    return lambda: unit * (size // len(unit.encode()))


def in_prompt(endpoint: Endpoint, text: str) -> dict[str, Any]:
    """Return the endpoint's fields for a prompt of this text."""
    if endpoint in (COMPLETIONS, TOKENIZE, OLLAMA_GENERATE):
        return {"prompt": text}
    return {"input": text} if endpoint is RESPONSES else {"messages": [{"role": "user", "content": text}]}


def text_case(endpoint: Endpoint, name: str, size: int, **fields: Any) -> Case:
    make = of_text(TEXTS[name], size)

    def body() -> bytes:
        return json.dumps({**endpoint.small, **in_prompt(endpoint, make()), **fields}, ensure_ascii=False).encode()

    extra = "".join(f", {field}" for field in fields)
    return Case(f"{endpoint.path}: {size} bytes of {name}{extra}", "POST", endpoint.path, body)


def texts() -> list[Case]:
    cases = [text_case(COMPLETIONS, name, size) for name in TEXTS for size in (1_000, TEXT_BYTES)]
    cases += [text_case(CHAT, name, 100_000) for name in TEXTS]
    for endpoint in (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, OLLAMA_CHAT, OLLAMA_GENERATE):
        cases += [text_case(endpoint, name, TEXT_BYTES) for name in ("one letter", "spaces", "special tokens")]
    cases += [text_case(TOKENIZE, name, 1_000_000) for name in TEXTS]
    for endpoint in (COMPLETIONS, CHAT):
        cases += [text_case(endpoint, name, TEXT_BYTES, truncate_prompt_tokens=10) for name in ("one letter", "digits")]
    return cases


def beside_content() -> list[Case]:
    """Return cases with spellings of control tokens in template inputs other than the messages' content."""

    def called(text: str, **function: Any) -> list[dict[str, Any]]:
        call = {"id": text, "type": "function", "function": {"name": "f", "arguments": "{}"} | function}
        return [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def result(text: str) -> dict[str, Any]:
        return {"role": "tool", "content": "r", "tool_call_id": text}

    def use(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "tool_use", "id": text, "name": "f", "input": {}}]}

    def item(text: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": text, "name": "f", "arguments": "{}"}

    # Name of the place -> its endpoint, and a function that makes the fields from the text.
    places: dict[str, tuple[Endpoint, Callable[[str], dict[str, Any]]]] = {
        "a name": (CHAT, lambda text: {"messages": [{**USER[0], "name": text}]}),
        "a tool_call_id": (CHAT, lambda text: {"messages": [*called("c"), result(text)]}),
        "a call's id": (CHAT, lambda text: {"messages": [*called(text), *USER]}),
        "a call's name": (CHAT, lambda text: {"messages": [*called("c", name=text), *USER]}),
        "a call's arguments": (CHAT, lambda text: {"messages": [*called("c", arguments=json.dumps([text])), *USER]}),
        "reasoning": (CHAT, lambda text: {"messages": [*USER, {"role": "assistant", "reasoning": text}, *USER]}),
        "a variable": (CHAT, lambda text: {"chat_template_kwargs": {"a": [text]}}),
        "a variable's name": (CHAT, lambda text: {"chat_template_kwargs": {text: 1}}),
        "a tool's description": (CHAT, lambda text: {"tools": [tool(0, description=text)]}),
        "a name to count": (TOKENIZE, lambda text: {"prompt": None, "messages": [{**USER[0], "name": text}]}),
        "a call_id": (RESPONSES, lambda text: {"input": [item(text)]}),
        "a use's id": (MESSAGES, lambda text: {"messages": [*USER, use(text), *USER]}),
        "a use's id to count": (COUNT_TOKENS, lambda text: {"messages": [*USER, use(text), *USER]}),
        "a tool_name": (OLLAMA_CHAT, lambda text: {"messages": [{"role": "tool", "content": "r", "tool_name": text}]}),
    }

    def case(place: str, number: int, status: int | None) -> Case:
        endpoint, fields = places[place]
        title = f"{endpoint.path}: {number} special tokens in {place}"
        make = lambda: with_fields(endpoint, **fields(TEXTS["special tokens"] * number))  # noqa: E731
        return Case(title, "POST", endpoint.path, make, status)

    # The longest body allowed, and a length that is still rendered.
    return [case(place, number, status) for place in places for number, status in ((1_000_000, 400), (40_000, None))]


# --- many of something -------------------------------------------------------------------------------------


def unknown_names(number: int) -> dict[str, int]:
    return {f"unknown_{i}": 0 for i in range(number)}


def with_unknown_names(endpoint: Endpoint, number: int) -> Case:
    name = f"{endpoint.path}: {number} unknown names"
    return Case(name, "POST", endpoint.path, lambda: with_fields(endpoint, **unknown_names(number)))


def messages(number: int, **fields: Any) -> Callable[[], Any]:
    return lambda: [{"role": "user", "content": "a", **fields}] * number


def tool(i: int, **function: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters, **function}}


def calls(number: int, arguments: str) -> Callable[[], Any]:
    """Return a function that makes messages with tool calls."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return lambda: [*USER, {"role": "assistant", "tool_calls": [call] * number}, *USER]


def many() -> list[Case]:
    n = 60_000
    cases = [with_unknown_names(endpoint, number) for endpoint in ENDPOINTS for number in (1_000, 30_000, n)]
    cases += [
        attack("100,000 inputs", EMBEDDINGS, 400, input=lambda: ["a"] * 100_000),
        attack("2,048 inputs", EMBEDDINGS, 200, input=lambda: ["a"] * 2048),
        attack("a million token ids", EMBEDDINGS, 400, input=lambda: [1] * 1_000_000),
        attack("a long query", RERANK, query=lambda: "a b " * 500_000, documents=["a"] * 9),
        attack("100,000 documents", RERANK, 400, documents=lambda: ["a"] * 100_000),
        attack("100,000 pairs", SCORE, 400, text_1=lambda: ["a"] * 100_000, text_2=lambda: ["a"] * 100_000),
    ]
    part = {"type": "text", "text": "a"}
    one_each = lambda: [{"role": "user", "content": [{**part, f"unknown_{i}": 0} for i in range(n // 2)]}]  # noqa: E731
    cases += [
        attack("a part with 30,000 unknown fields", CHAT, messages=messages(1, content=[part | unknown_names(n // 2)])),
        attack("30,000 parts with an unknown field each", CHAT, messages=one_each),
        attack("a message with 30,000 unknown fields", CHAT, messages=messages(1, **unknown_names(n // 2))),
        attack("30,000 unknown stream options", CHAT, stream=True, stream_options=lambda: unknown_names(n // 2)),
        attack("30,000 messages", CHAT, messages=messages(n // 2)),
        attack("60,000 messages", MESSAGES, messages=messages(n)),
        attack("30,000 parts", CHAT, messages=lambda: [{"role": "user", "content": [part] * (n // 2)}]),
        attack("20,000 calls", CHAT, messages=calls(20_000, "{}")),
        attack("300 calls with 3,000 numbers each", CHAT, messages=calls(300, "[" + "1," * 3_000 + "1]")),
        attack("10,000 tools", CHAT, tools=lambda: [tool(i) for i in range(10_000)]),
        attack("10,000 tools, one required", CHAT, tools=lambda: [tool(i) for i in range(10_000)],
               tool_choice="required"),
        attack("10,000 tools of one name", CHAT, tools=lambda: [tool(0)] * 10_000),
        attack("10,000 tools", RESPONSES, tools=lambda: [{"type": "function", **tool(i)["function"]}
                                                          for i in range(10_000)]),
        attack("10,000 tools", MESSAGES, tools=lambda: [{"name": f"tool_{i}", "input_schema": {"type": "object"}}
                                                        for i in range(10_000)]),
        attack("100,000 prompts", COMPLETIONS, 400, prompt=lambda: ["a"] * 100_000),
        attack("60,000 prompts of tokens", COMPLETIONS, 400, prompt=lambda: [[1]] * n),
        attack("60,000 empty prompts", COMPLETIONS, 400, prompt=lambda: [[]] * n),
        attack("128 prompts of 100 tokens", COMPLETIONS, 200, prompt=lambda: [[7] * 100] * 128),
        attack("2,048 prompts of 500 tokens", COMPLETIONS, 200, prompt=lambda: [[7] * 500] * 2_048, echo=True),
        attack("a prompt of 5,000,000 tokens", COMPLETIONS, 400, prompt=lambda: [7] * 5_000_000),
        attack("prompts of two kinds", COMPLETIONS, 400, prompt=lambda: [1] * n + ["a"]),
        attack("all tokens allowed, n 128", COMPLETIONS, 200, n=128, temperature=1,
               allowed_token_ids=lambda: list(range(VOCAB_SIZE))),
        attack("294,000 tokens allowed, n 128", COMPLETIONS, 400, n=128, temperature=1,
               allowed_token_ids=lambda: list(range(VOCAB_SIZE)) * 6),
        attack("16,384 stop tokens, n 128", COMPLETIONS, 200, n=128, temperature=1,
               stop_token_ids=lambda: list(range(16_384))),
        attack("16,384 biases, n 128", COMPLETIONS, 200, n=128, temperature=1,
               logit_bias=lambda: dict.fromkeys(range(16_384), 1)),
        attack("100,000 biases", COMPLETIONS, 400, logit_bias=lambda: dict.fromkeys(range(100_000), 1)),
        attack("16,384 stops", COMPLETIONS, 200, stop=lambda: ["\u2603"] * 16_384, max_tokens=64),
        attack("a stop of 16,384 characters", COMPLETIONS, 200, stop="\u2603" * 16_384, max_tokens=64),
        attack("100,000 stops", COMPLETIONS, 400, stop=lambda: ["ab"] * 100_000),
        attack("1,024 bad words, n 128", COMPLETIONS, 200, n=128, temperature=1,
               bad_words=lambda: [f"word {i}" for i in range(1_024)]),
        attack("a bad word of 16,384 characters", COMPLETIONS, bad_words=["a b " * 4_096]),
        attack("100,000 bad words", COMPLETIONS, 400, bad_words=lambda: ["ab"] * 100_000),
        attack("n 8, 20 log probabilities of 500 tokens", COMPLETIONS, 200, n=8, temperature=1, logprobs=20, echo=True,
               prompt=lambda: [7] * 500),
        attack("log probabilities of 1,000 tokens", COMPLETIONS, 200, prompt_logprobs=20, prompt=lambda: [7] * 1_000),
        attack("an echo of 1,000 tokens, n 8", COMPLETIONS, 200, n=8, temperature=1, echo=True, max_tokens=0,
               prompt=lambda: [7] * 1_000),
        attack("a stream, n 128", CHAT, 200, n=128, temperature=1, stream=True, max_tokens=16),
        attack("100,000 to include", RESPONSES, include=lambda: ["ab"] * 100_000),
        attack("metadata of 30,000", RESPONSES, metadata=lambda: dict.fromkeys(map(str, range(n // 2)), "a")),
        attack("metadata of 15 MB", RESPONSES, metadata=lambda: {"a": "b" * TEXT_BYTES}),
        attack("30,000 items", RESPONSES, input=messages(n // 2)),
        attack("20,000 calls", RESPONSES, input=lambda: [{"type": "function_call", "call_id": "c", "name": "f",
                                                          "arguments": "{}"}] * 20_000),
        attack("30,000 reasonings", RESPONSES, input=lambda: [{"type": "reasoning", "summary": [], "content": []}]
               * (n // 2)),
        attack("30,000 blocks of the system", MESSAGES, system=lambda: [{"type": "text", "text": "a"}] * (n // 2)),
        attack("30,000 blocks of the system", COUNT_TOKENS, system=lambda: [{"type": "text", "text": "a"}] * (n // 2)),
        attack("20,000 results", MESSAGES, messages=lambda: [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "r"}] * 20_000}]),
        attack("20,000 uses", MESSAGES, messages=lambda: [*USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": {}}] * 20_000}, *USER]),
        attack("10,000 calls", OLLAMA_CHAT, messages=lambda: [*USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": {}}}] * 10_000}, *USER]),
        attack("7,000 calls", OLLAMA_CHAT, messages=lambda: [*USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": {}}}] * 7_000}, *USER]),
        attack("arguments of 15 MB", OLLAMA_CHAT, 400, messages=lambda: [*USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": "b" * TEXT_BYTES}}}]}, *USER]),
        attack("30,000 messages", OLLAMA_CHAT, messages=messages(n // 2)),
        attack("10,000 tools", OLLAMA_CHAT, tools=lambda: [tool(i) for i in range(10_000)]),
        attack("30,000 images", OLLAMA_CHAT, 400, messages=messages(1, images=["a"] * (n // 2))),
        attack("30,000 unknown options", OLLAMA_CHAT, options=lambda: {**unknown_names(n // 2), "num_predict": 2}),
        attack("100,000 stops", OLLAMA_CHAT, 400, options=lambda: {"stop": ["ab"] * 100_000}),
        attack("a context of 5,000,000 tokens", OLLAMA_GENERATE, context=lambda: [7] * 5_000_000),
        attack("a suffix for 20,000 prompts", COMPLETIONS, 400, suffix="a" * 1_000, prompt=lambda: ["a"] * 20_000),
        attack("100,000 stop sequences", MESSAGES, 400, stop_sequences=lambda: ["ab"] * 100_000),
        attack("30,000 messages", TOKENIZE, prompt=None, messages=messages(n // 2)),
        attack("5,000,000 tokens", DETOKENIZE, tokens=lambda: [7] * 5_000_000),
        attack("60,000 special tokens", DETOKENIZE, tokens=lambda: [1, 2] * (n // 2)),
        raw("60,000 times one key", COMPLETIONS, lambda: b'{"prompt": "a"' + b', "user": "b"' * n + b"}", None),
    ]  # fmt: skip
    for endpoint in CHATS:
        name = "input" if endpoint is RESPONSES else "messages"
        for number in (500_000, 5_000_000):
            cases.append(attack(f"{number} numbers for {name}", endpoint, 400, **{name: lambda k=number: [0] * k}))
    return cases

"""Grammars by phase on a model with random weights: content after a limited reasoning, and calls that parse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken

from metal_engine.text.tokenizer import Tokenizer
from tests.server.openai.test_forced_calls import TOOLS, check_calls, tool
from tests.support.serving import Served, serve
from tests.support.splitting import answer_format
from tests.support.tiny_engine import tiny_engine
from tools.fixtures.fake_engine import CHAT_TEMPLATE, EOS, TOOL_TEMPLATE, in_thread, tiny_tokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BUDGET = 12
# Own tokens for marks: a bias can make the model begin a call.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
# A random model might end its output within the reasoning.
LIMITED: dict[str, Any] = {
    "seed": 3, "max_tokens": 120, "thinking_token_budget": BUDGET, "logit_bias": {str(EOS): -100}
}  # fmt: skip


def tokenizer(template: str) -> Tokenizer:
    hf: Any = tiny_tokenizer(template).hf_tokenizer
    hf.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return Tokenizer(hf)


def serving(template: str) -> Iterator[Served]:
    own = tokenizer(template)
    sizes = {"max_model_len": 2048, "num_blocks": 4096, "max_num_batched_tokens": 1024}
    engine = in_thread(lambda: tiny_engine(tokenizer=own, vocab_size=len(own.hf_tokenizer), ahead=True, **sizes))
    with serve(engine=engine, answer_format=answer_format("json_tools")) as served:
        yield served


@pytest.fixture(scope="module")
def begun() -> Iterator[Served]:
    """Yield a server whose template begins the reasoning."""
    yield from serving(f"{CHAT_TEMPLATE}<think>\n")


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    """Yield a server whose model begins the reasoning itself, if at all."""
    yield from serving(TOOL_TEMPLATE)


def choices(served: Served, **body: Any) -> list[dict[str, Any]]:
    response = served.post(CHAT, {"messages": USER, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_json_after_the_reasoning(begun: Served) -> None:
    num_complete = 0
    for choice in choices(begun, n=4, response_format=JSON_SCHEMA, **LIMITED):
        message = choice["message"]
        assert message["reasoning"]
        if choice["finish_reason"] == "stop":
            Draft202012Validator(SCHEMA).validate(json.loads(message["content"]))
            num_complete += 1
    assert num_complete >= 2


@pytest.mark.parametrize("budget", [0, 1, 12])
def test_the_budget_is_kept(begun: Served, budget: int) -> None:
    answer = begun.post(CHAT, {"messages": USER, "seed": 1, "max_tokens": 60, "thinking_token_budget": budget}).json()
    # The end mark is one token, which counts.
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 1
    (choice,) = answer["choices"]
    assert choice["message"]["content"]
    assert bool(choice["message"].get("reasoning")) <= (budget > 0)


def test_required_calls_after_the_reasoning(begun: Served) -> None:
    num_complete = 0
    tools = TOOLS[:2]
    for choice in choices(begun, n=4, tools=tools, tool_choice="required", parallel_tool_calls=False, **LIMITED):
        message = choice["message"]
        assert message["reasoning"] and not message["content"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        if choice["finish_reason"] == "tool_calls":
            check_calls(calls, tools)
            num_complete += 1
    assert num_complete >= 2


def biases(served: Served) -> dict[str, float]:
    """Return biases that make the model begin calls, and write little white space in them."""
    (start,) = served.tokenizer.encode("<tool_call>", add_special_tokens=False)
    return {str(start): 8} | {str(ord(space)): -10 for space in " \n\r\t"}


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_the_model_begins(calling: Served, parallel: bool) -> None:
    """A bias makes a model begin calls that was never trained for them. All calls that end are valid."""
    body: dict[str, Any] = {
        "n": 3, "seed": 2, "max_tokens": 150, "tools": TOOLS, "parallel_tool_calls": parallel,
        "logit_bias": biases(calling),
    }  # fmt: skip
    num_calls = 0
    for choice in choices(calling, **body):
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls") or ()]
        check_calls(calls, TOOLS)
        # Only the token limit can leave a call in the text.
        assert "<tool_call>" not in (choice["message"]["content"] or "") or choice["finish_reason"] == "length"
        assert parallel or len(calls) <= 1
        num_calls += len(calls)
    assert num_calls >= 2


def test_a_schema_that_cannot_be_compiled(calling: Served) -> None:
    """Only the arguments of that tool are open. The names and the other tools' arguments are constrained."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)b"}}, "required": ["a"]}
    tools = [*TOOLS[:2], tool("open", schema)]
    body: dict[str, Any] = {"n": 6, "seed": 2, "max_tokens": 150, "tools": tools, "logit_bias": biases(calling)}
    called = set()
    for choice in choices(calling, **body):
        for call in choice["message"].get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            check_calls([(name, arguments)], [*TOOLS[:2], tool("open", None)])
            called.add(name)
    assert len(called) >= 2
    assert calling.engine.metrics.num_unconstrained_calls == 0

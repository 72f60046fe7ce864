"""/v1/messages/count_tokens: the number that /v1/messages reports for the same body."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.calling import CLAUDE_TOOLS
from tests.support.chat_templates import QWEN
from tests.support.serving import DEADLINE, MODEL, Served, serve
from tests.support.splitting import answer_format
from tests.support.sweeps import sweep
from tools.fixtures.fake_engine import CHAT_TEMPLATE, TOOL_TEMPLATE, fake_config, tiny_tokenizer

CONFIG = fake_config(max_model_len=8192, num_blocks=2048, max_num_batched_tokens=2048)
# Shared, because making a client takes longer than most requests.
HTTP = httpx.Client(timeout=DEADLINE)
# A template that begins reasoning in the prompt, and one that shows an effort.
THINKING = CHAT_TEMPLATE + (
    "{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
EFFORT = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}\n{% endif %}" + TOOL_TEMPLATE
TEMPLATES = {"plain": CHAT_TEMPLATE, "tools": TOOL_TEMPLATE, "qwen": QWEN, "thinking": THINKING, "effort": EFFORT}

CALL = {"type": "tool_use", "id": "t0", "name": CLAUDE_TOOLS[0]["name"], "input": {"city": "Paris"}}
CONVERSATIONS: list[list[Any]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t0", "content": "sunny"}]},
    ],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}],
]
SYSTEMS = [None, "Be brief.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]]
THINKINGS = [None, {"type": "enabled", "budget_tokens": 1}, {"type": "disabled"}, {"type": "adaptive"}]
NAME = CLAUDE_TOOLS[1]["name"]
CHOICES: list[Any] = [
    *(None, {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}),
    *({"type": "tool", "name": NAME}, {"type": "none"}),
]


@pytest.fixture(scope="module", params=sweep(TEMPLATES, lambda name: name in ("tools", "thinking")))
def templated(request: pytest.FixtureRequest) -> Iterator[Served]:
    tokenizer = tiny_tokenizer(TEMPLATES[request.param])
    with serve(config=CONFIG, tokenizer=tokenizer, answer_format=answer_format("json_tools")) as served:
        yield served
        served.wait_until_idle()


def post(served: Served, path: str, body: Any) -> httpx.Response:
    return HTTP.post(served.url + path, json=body)


def check(served: Served, **fields: Any) -> int:
    """Check that both endpoints count the same tokens, and return their number."""
    given = {name: value for name, value in fields.items() if value is not None}
    counted = post(served, "/v1/messages/count_tokens", {"model": MODEL, **given})
    assert counted.status_code == 200, counted.text
    answered = post(served, "/v1/messages", {"model": MODEL, "max_tokens": 2, **given})
    assert answered.status_code == 200, answered.text
    usage = answered.json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    return counted.json()["input_tokens"]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_conversations(templated: Served, messages: list[Any]) -> None:
    settings = itertools.product((None, CLAUDE_TOOLS), THINKINGS)
    for system, (tools, thinking) in zip(itertools.cycle(SYSTEMS), settings, strict=False):
        check(templated, messages=messages, system=system, thinking=thinking, tools=tools)


@pytest.mark.parametrize("choice", CHOICES)
def test_tool_choices(templated: Served, choice: dict[str, Any] | None) -> None:
    for thinking in THINKINGS[1:3]:
        more = {"messages": CONVERSATIONS[0], "system": "Be brief.", "thinking": thinking}
        with_tools = check(templated, tools=CLAUDE_TOOLS, tool_choice=choice, **more)
        without = check(templated, **more)
        assert (with_tools == without) == (choice == {"type": "none"})


def test_efforts_and_formats(templated: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for effort, thinking in (("low", None), ("max", THINKINGS[1])):
        config = {"effort": effort, "format": {"type": "json_schema", "schema": schema}}
        check(templated, messages=CONVERSATIONS[0], output_config=config, thinking=thinking)


def test_the_settings_matter() -> None:
    """Otherwise, equal numbers would say little."""
    with serve(config=CONFIG, tokenizer=tiny_tokenizer(THINKING)) as served:
        on, off = (check(served, messages=CONVERSATIONS[0], thinking=thinking) for thinking in THINKINGS[1:3])
        assert off > on
    with serve(config=CONFIG, tokenizer=tiny_tokenizer(EFFORT)) as served:
        low, high = (
            check(served, messages=CONVERSATIONS[0], output_config={"effort": effort}) for effort in ("low", "high")
        )
        assert high == low + 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "nothing"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"thinking": {"type": "sometimes"}}, "thinking"),
    ({"system": [{"type": "image"}]}, "system"),
]


@pytest.mark.parametrize(("fields", "name"), BAD)
def test_the_same_errors(templated: Served, fields: dict[str, Any], name: str) -> None:
    body = {"model": MODEL, "messages": CONVERSATIONS[0], **fields}
    counted = post(templated, "/v1/messages/count_tokens", body)
    answered = post(templated, "/v1/messages", {**body, "max_tokens": 2})
    assert counted.status_code == answered.status_code == 400
    assert counted.json() == answered.json() and name in counted.json()["error"]["message"]

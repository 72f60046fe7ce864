"""A model that thinks, says something and calls two tools: its output, and its tools in the form of each API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat
from tests.support.golden import GoldenCase
from tests.support.serving import Served, serve
from tests.support.splitting import answer_format
from tests.support.tool_formats import TOOLS, TRAINS, WEATHER
from tools.fixtures.fake_engine import TOOL_TEMPLATE, fake_config, script, tiny_tokenizer

CONFIG = fake_config(max_model_len=4096, num_blocks=2048, max_num_batched_tokens=2048)
USER: list[Any] = [{"role": "user", "content": "hi"}]
RECORD = GoldenCase(
    "json_tools", "think", "text before two calls", frozenset(), "Let me look: 1 < 2.\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "find_trains", "arguments": {"city": "Rome"}}\n</tool_call>',
    content="Let me look: 1 < 2.", calls=[WEATHER, TRAINS],
)  # fmt: skip
ANSWER = f"<think>\nhm\n</think>\n\n{RECORD.text}"
# The tools in the form of /v1/responses, and of /v1/messages.
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE_TOOLS: list[Any] = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in FLAT_TOOLS
]


@contextmanager
def answering(
    text: str, known: AnswerFormat | None = None, template: str = TOOL_TEMPLATE, **options: Any
) -> Iterator[Served]:
    """Yield a server whose model writes this text. The default format is Hermes' with reasoning."""
    known = known or answer_format("json_tools")
    options = {"config": CONFIG, "tokenizer": tiny_tokenizer(template), "answer_format": known, **options}
    with serve(script(text), **options) as served:
        yield served
        served.wait_until_idle()

"""docs/api.md is true: its commands print what it says, its endpoints are the server's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx

from metal_engine.server.pooling.protocol import EmbeddingBody, RerankBody, ScoreBody
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody
from tests.cli.test_docs import as_pattern, commands
from tests.support.serving import Served, serve
from tests.support.splitting import answer_format
from tools.fixtures.fake_engine import EOS, TOOL_TEMPLATE, byte_ids, fake_config, tiny_tokenizer

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


def answer(tokens: list[int], num_prompt_tokens: int) -> int:
    """A call if the prompt has a tool, else the capital."""
    has_tool = b'"parameters"' in bytes(token for token in tokens[:num_prompt_tokens] if token < 256)
    text = byte_ids(CALL if has_tool else "Paris.")
    at = len(tokens) - num_prompt_tokens
    return text[at] if at < len(text) else EOS


def run(served: Served, command: str) -> str:
    command = command.replace("http://127.0.0.1:8000", served.url)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_commands_print_what_the_page_says() -> None:
    config = fake_config(max_model_len=2048, num_blocks=1024)
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)
    num_commands = 0
    with serve(
        answer, config=config, tokenizer=tokenizer, names=("demo",), answer_format=answer_format("json_tools")
    ) as served:
        for block in re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
            for command, expected in commands(block):
                printed = run(served, command)
                assert as_pattern(expected).search(printed), f"$ {command}\n{printed}\nexpected:\n{expected}"
                num_commands += 1
        paths = httpx.get(served.url + "/openapi.json").json()["paths"]
        served.settle()
    assert num_commands >= 9
    section = TEXT[TEXT.index("## Endpoints") : TEXT.index("### Streams")]
    documented = set(re.findall(r"(/[\w/{}]+)", section)) - {"/docs", "/openapi", "/json"}
    served_paths = {re.sub(r"{\w+(:path)?}", "{id}", path) for path in paths}
    assert served_paths == documented


def test_every_parameter_is_on_the_page() -> None:
    section = TEXT[TEXT.index("## Parameters") : TEXT.index("## Errors")]
    names = set(re.findall(r"`(\w+)`", section))
    bodies = (CompletionBody, ChatCompletionBody, EmbeddingBody, RerankBody, ScoreBody)
    declared = {name for body in bodies for name in body.model_fields} - {"model", "prompt", "messages"}
    assert declared <= names, declared - names

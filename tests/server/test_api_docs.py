"""Checks docs/api.md: commands print what the page shows with the demo model, and the endpoints are the server's."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from metal_engine.build import build_engine
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.server.embeddings.protocol import EmbeddingBody, RerankBody, ScoreBody
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody
from metal_engine.settings.args import EngineArgs
from tests.cli.test_docs import as_pattern, commands
from tests.support.serving import Served, serve

# Pages and an endless stream. Programs that try every path of the schema would wait for the stream.
OUTSIDE_THE_SCHEMA = {"/docs", "/openapi", "/json", "/watch"}
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo_server(demo_path: Path) -> Iterator[Served]:
    """Yield a server on the demo model.

    Steps and caches are small, because an engine clears and tries them at its start.
    """
    args = EngineArgs(model="demo", max_num_batched_tokens=128, max_num_seqs=8, num_gpu_blocks_override=256)
    engine = AsyncEngine(EngineThread(lambda: build_engine(args)))
    engine.start()
    with serve(engine=engine, names=("demo",)) as served:
        yield served


def run(served: Served, command: str) -> str:
    command = command.replace("http://127.0.0.1:8000", served.url)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, check=True).stdout


def test_the_commands_print_what_the_page_says(demo_server: Served) -> None:
    num_commands = 0
    for block in re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        for command, expected in commands(block):
            printed = run(demo_server, command)
            assert as_pattern(expected).search(printed), f"$ {command}\n{printed}\nexpected:\n{expected}"
            num_commands += 1
    demo_server.wait_until_idle()
    assert num_commands >= 9


def test_every_endpoint_is_on_the_page(demo_server: Served) -> None:
    paths = httpx.get(demo_server.url + "/openapi.json").json()["paths"]
    section = TEXT[TEXT.index("## Endpoints") : TEXT.index("### Streams")]
    documented = set(re.findall(r"(/[\w/{}]+)", section)) - OUTSIDE_THE_SCHEMA
    served_paths = {re.sub(r"{\w+(:path)?}", "{id}", path) for path in paths}
    assert served_paths == documented


def test_every_parameter_is_on_the_page() -> None:
    section = TEXT[TEXT.index("## Parameters") : TEXT.index("## Errors")]
    names = set(re.findall(r"`(\w+)`", section))
    bodies = (CompletionBody, ChatCompletionBody, EmbeddingBody, RerankBody, ScoreBody)
    declared = {name for body in bodies for name in body.model_fields} - {"model", "prompt", "messages"}
    assert declared <= names, declared - names

"""Checks docs/api.md: the endpoints and parameters are those of the server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from metal_engine.server.embeddings.protocol import EmbeddingBody, RerankBody, ScoreBody
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody
from tests.support.serving import Served

# Pages and an endless stream. Programs that try every path of the schema would wait for the stream.
OUTSIDE_THE_SCHEMA = {"/docs", "/openapi", "/json", "/watch"}
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_endpoint_is_on_the_page(served: Served) -> None:
    paths = httpx.get(served.url + "/openapi.json").json()["paths"]
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

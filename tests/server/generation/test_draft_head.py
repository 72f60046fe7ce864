"""Answers with a draft head over HTTP equal the answers of a server without drafts, in all dialects and in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.engine_thread import EngineThread
from tests.server.status.test_metrics import scrape, value
from tests.support.draft_heads import head_engine
from tests.support.serving import MODEL, Served, serve

MESSAGES = {"messages": [{"role": "user", "content": "a b"}]}
# Some drafts of a random head are right if few tokens are allowed.
FEW = {"allowed_token_ids": [97, 98, 99]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (path, {"model": MODEL, "max_tokens": 24, **body, **sampling, "stream": stream})
    for path, body in (
        ("/v1/completions", {"prompt": "a b", "n": 2, **FEW}),
        ("/v1/chat/completions", {**MESSAGES, **FEW, "logprobs": True}),
        ("/v1/responses", {"input": "a b"}),
        ("/v1/messages", MESSAGES),
    )
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 3})
    for stream in (False, True)
]
# Rounding of log probabilities depends on the other requests of a step.
VOLATILE = {"id", "created", "created_at", "completed_at", "logprob"}
# Numbers that depend on the prefix cache
VOLATILE |= {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "input_tokens"}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    engine = AsyncEngine(EngineThread(lambda: head_engine(num_blocks=512)))
    engine.start()
    with serve(engine=engine) as served:
        yield served


def answer(served: Served, path: str, body: dict[str, Any]) -> Any:
    """Return what an answer says: its content without ids and times, or the joined text of a stream by choice."""
    body = {key: one for key, one in body.items() if not (path == "/v1/responses" and key == "max_tokens")}
    response = served.post(path, body | ({"max_output_tokens": 24} if path == "/v1/responses" else {}))
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return lasting(response.json())
    texts: dict[int, str] = {}
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for choice in event.get("choices", [event]):
                delta = choice.get("delta", choice.get("text"))
                text = delta.get("content") or delta.get("text") or "" if isinstance(delta, dict) else delta or ""
                index = choice.get("index", 0)
                texts[index] = texts.get(index, "") + text
    return texts


def lasting(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: lasting(one) for key, one in found.items() if key not in VOLATILE}
    return [lasting(one) for one in found] if isinstance(found, list) else found


def test_answers_are_those_without_drafts(tiny: Served, drafting: Served) -> None:
    expected = [answer(tiny, *request) for request in REQUESTS]
    assert all(expected) and any("a" in str(one) for one in expected)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        found = list(pool.map(lambda request: answer(drafting, *request), REQUESTS))
    assert found == expected
    drafting.wait_until_idle()
    assert [httpx.get(f"{one.url}/health").json().get("speculation") for one in (tiny, drafting)] == [None, "mtp"]
    metrics = scrape(drafting)
    assert value(metrics, "spec_decode_num_draft_tokens_total") > 100
    assert value(metrics, "spec_decode_num_accepted_tokens_total") > 0

"""Random requests: no 5xx, and every response matches the served OpenAPI schema."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from metal_engine.settings.config import PoolerConfig
from tests.support.fuzzing import bodies
from tests.support.serving import DEADLINE, Served, serve
from tests.support.splitting import answer_format
from tools.fixtures.fake_engine import TOOL_TEMPLATE, fake_config, tiny_tokenizer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    config = fake_config(max_model_len=128, num_blocks=512, pooler=PoolerConfig(is_embedder=True))
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)
    with serve(config=config, tokenizer=tokenizer, answer_format=answer_format("json_tools")) as served:
        yield served


@pytest.mark.parametrize("num_examples", [3, pytest.param(200, marks=pytest.mark.full)])
def test_api(small: Served, num_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 16
    for operation in operations:

        @settings(
            max_examples=num_examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        check()


SEED = 20261121


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_random_bodies(small: Served, number: int) -> None:
    """No request hangs, and no state of it remains."""

    async def send(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[int, bytes]:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        return response.status_code, response.content

    async def run() -> Counter[int]:
        counts: Counter[int] = Counter()
        everything = bodies(SEED, number)
        async with httpx.AsyncClient(base_url=small.url, timeout=DEADLINE) as client:
            for start in range(0, number, 16):
                some = everything[start : start + 16]
                answers = await asyncio.gather(*(send(client, *one) for one in some))
                for (path, body), (status, content) in zip(some, answers, strict=True):
                    assert status in (200, 400, 404), (path, body, status, content)
                    if status != 200:
                        error = json.loads(content)["error"]
                        assert error if path.startswith("/api/") else error["message"], (path, body)
                    counts[status] += 1
        return counts

    counts = asyncio.run(run())
    # Both accepted and rejected mutants must be common.
    assert counts[200] > number / 20 and counts[400] > number / 4, counts

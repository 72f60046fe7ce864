"""Fuzzed bodies: every request gets a response without a 5xx or a hang, and no state of it remains."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from metal_engine.settings.config import PoolerConfig
from tests.support.fuzzing import bodies
from tests.support.serving import DEADLINE, serve
from tests.support.splitting import answer_format
from tools.fixtures.fake_engine import TOOL_TEMPLATE, fake_config, tiny_tokenizer

SEED = 20261121


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_random_bodies(number: int) -> None:
    pooler = PoolerConfig(is_embedder=True)
    config = fake_config(max_model_len=128, num_blocks=512, max_num_batched_tokens=512, pooler=pooler)
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)
    with serve(config=config, tokenizer=tokenizer, answer_format=answer_format("json_tools")) as served:

        async def send(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[int, bytes]:
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            return response.status_code, response.content

        async def run() -> dict[int, int]:
            counts: dict[int, int] = {}
            everything = bodies(SEED, number)
            async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE) as client:
                for start in range(0, number, 16):
                    some = everything[start : start + 16]
                    answers = await asyncio.gather(*(send(client, *one) for one in some))
                    for (path, body), (status, content) in zip(some, answers, strict=True):
                        assert status in (200, 400, 404), (path, body, status, content)
                        if status != 200:
                            error = json.loads(content)["error"]
                            assert error if path.startswith("/api/") else error["message"], (path, body)
                        counts[status] = counts.get(status, 0) + 1
            return counts

        counts = asyncio.run(run())
        served.wait_until_idle()
        # Both accepted and rejected mutants must be common.
        assert counts[200] > number / 20 and counts[400] > number / 4, counts

"""schemathesis on the served OpenAPI schema: no 5xx, and every response matches the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from tests.support.serving import Served, serve
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
def _small_server() -> Iterator[Served]:
    config = fake_config(max_model_len=64, num_blocks=256, pooler=PoolerConfig(is_embedder=True))
    tokenizer = tiny_tokenizer(TOOL_TEMPLATE)
    with serve(config=config, tokenizer=tokenizer, answer_format=answer_format("json_tools")) as served:
        yield served


@pytest.mark.parametrize("num_examples", [3, pytest.param(200, marks=pytest.mark.full)])
def test_api(_small_server: Served, num_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{_small_server.url}/openapi.json")
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
    _small_server.wait_until_idle()

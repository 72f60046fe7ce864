"""Usage and metrics of KV that was loaded from a store."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from metal_engine.engine.core import EngineCore
from tests.support.fake_kv_transfer import FakeTransfer
from tests.support.serving import MODEL, Served, serve
from tools.fixtures import fake_engine

# 40 tokens, one per byte. Blocks of the fake engine hold 8 tokens.
PROMPT = "0123456789" * 4


class Everything(dict[bytes, np.ndarray]):
    """Store that contains every block. The fake runner ignores their contents."""

    def __contains__(self, block_hash: object) -> bool:
        return True

    def __missing__(self, block_hash: bytes) -> np.ndarray:
        return np.zeros(8, np.uint8)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    transfer = FakeTransfer()
    transfer.store = Everything()
    transfer.answer_at_once()
    monkeypatch.setattr(
        fake_engine, "EngineCore", lambda config, runner: EngineCore(config, runner, transfer.connector())
    )
    with serve() as served:
        yield served


def test_usage_and_metrics_report_prompt_tokens_from_the_kv_store(served: Served) -> None:
    def usage() -> tuple[int, int, int]:
        answer = served.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        details = answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens, details.cached_tokens or 0, details.kv_store_tokens  # type: ignore[attr-defined]

    assert usage() == (40, 32, 32), "the last token is always computed, and with it its block"
    assert usage() == (40, 32, 0), "now it is in the KV cache"
    served.wait_until_idle()
    counts = httpx.get(f"{served.url}/health").json()["kv_transfer"]
    assert (counts["prompt_tokens_store"], counts["prompt_tokens_local"]) == (32, 32)
    assert counts["prompt_tokens_computed"] == 16
    metrics = httpx.get(f"{served.url}/metrics").text
    assert f'metal_engine:kv_transfer_prompt_tokens_store_total{{model_name="{MODEL}"}} 32.0' in metrics


def test_health_and_metrics_omit_kv_transfer_without_a_store() -> None:
    with serve() as served:
        assert "kv_transfer" not in httpx.get(f"{served.url}/health").json()
        assert "kv_transfer" not in httpx.get(f"{served.url}/metrics").text

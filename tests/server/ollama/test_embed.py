"""Ollama's embeddings: the same vectors as /v1/embeddings, in Ollama's shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_engine.pooling_params import PoolingParams
from metal_engine.settings.config import PoolerConfig
from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import HIDDEN_SIZE, byte_ids, fake_config, pooled

EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"


def vector(text: str, dimensions: int | None = None) -> np.ndarray:
    return pooled(byte_ids(text), PoolingParams(normalize=True, dimensions=dimensions))


def embed(served: Served, path: str = EMBED, **body: Any) -> dict[str, Any]:
    response = served.post(path, {"model": MODEL, **body})
    assert response.status_code == 200 and response.headers["content-type"] == "application/json", response.text
    return response.json()


@pytest.mark.parametrize("given", ["a fox", ["a fox"], ["a fox", "Zürich \u2603", "c"]])
def test_embed(served: Served, given: str | list[str]) -> None:
    texts = [given] if isinstance(given, str) else given
    for dimensions in (None, 3):
        answer = embed(
            served, input=given, dimensions=dimensions, truncate=True, keep_alive="5m", options={"num_ctx": 8}
        )
        assert answer["model"] == MODEL and answer["load_duration"] == 0 and answer["total_duration"] > 0
        assert answer["prompt_eval_count"] == sum(len(byte_ids(text)) for text in texts)
        assert np.array_equal(np.array(answer["embeddings"], np.float32), [vector(text, dimensions) for text in texts])
    assert embed(served, model=f"{MODEL}:latest", input=given)["model"] == f"{MODEL}:latest"


def test_the_older_form(served: Served) -> None:
    answer = embed(served, EMBEDDINGS, prompt="a fox")
    assert answer.keys() == {"embedding"}
    assert np.array_equal(np.array(answer["embedding"], np.float32), vector("a fox"))


def test_empty_input_returns_no_embeddings(served: Served) -> None:
    for given in ({}, {"input": ""}, {"input": []}):
        answer = embed(served, **given)
        assert (answer["embeddings"], answer["prompt_eval_count"]) == ([], 0)
    assert embed(served, EMBEDDINGS) == embed(served, EMBEDDINGS, prompt="") == {"embedding": []}


def test_a_large_batch_returns_the_expected_embeddings(served: Served) -> None:
    """The response has enough numbers to be encoded in a thread."""
    found = np.array(embed(served, input=[f"t{i}" for i in range(2048)])["embeddings"], np.float32)
    assert found.shape == (2048, HIDDEN_SIZE)
    assert np.array_equal(found[[0, 2047]], [vector("t0"), vector("t2047")])


@pytest.mark.parametrize(("path", "body", "status", "named"), [
    (EMBED, {"input": 5}, 400, "input"),
    (EMBED, {"input": [5]}, 400, "input"),
    (EMBED, {"input": ["a", ""]}, 400, "no tokens"),
    (EMBED, {"input": "a" * 600}, 400, "context"),
    (EMBED, {"input": "a", "dimensions": 0}, 400, "dimensions"),
    (EMBED, {"input": ["a"] * 3000}, 400, "input"),
    (EMBED, {"input": "a", "model": "other"}, 404, "other"),
    (EMBEDDINGS, {"prompt": ["a"]}, 400, "prompt"),
    (EMBEDDINGS, {"prompt": "a" * 600}, 400, "context"),
    (EMBEDDINGS, {"prompt": "a", "model": "other"}, 404, "other"),
])  # fmt: skip
def test_errors(served: Served, path: str, body: dict[str, Any], status: int, named: str) -> None:
    response = served.post(path, {"model": MODEL, **body})
    assert response.status_code == status and response.json().keys() == {"error"}, response.text
    assert named in response.json()["error"]


def test_embedding_capability_is_shown_and_refusals_name_the_reason() -> None:
    with serve(config=fake_config(pooler=PoolerConfig(is_embedder=True))) as served:
        assert "embedding" in served.post("/api/show", {"model": MODEL}).json()["capabilities"]
    problem = "it looks both ways"
    with serve(config=fake_config(pooler=PoolerConfig(problem=problem))) as served:
        response = served.post(EMBED, {"model": MODEL, "input": "a"})
        assert response.status_code == 400 and problem in response.json()["error"]

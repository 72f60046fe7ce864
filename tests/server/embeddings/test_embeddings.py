"""``/v1/embeddings``: requests of OpenAI's client, limits, errors, and cleanup after a client disconnects."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from metal_engine.pooling_params import PoolingParams
from metal_engine.settings.config import PoolerConfig
from metal_engine.settings.server_args import ServerArgs
from tests.server.test_errors import check_error
from tests.support.serving import MODEL, Served, serve, wait_until
from tools.fixtures.fake_engine import HIDDEN_SIZE, byte_ids, fake_config, pooled


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as served:
        yield served


def vector(tokens: list[int], dimensions: int | None = None) -> np.ndarray:
    return pooled(tokens, PoolingParams(normalize=True, dimensions=dimensions))


def embeddings(served: Served, **body: Any) -> list[np.ndarray]:
    response = served.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    return [np.array(entry["embedding"], np.float32) for entry in response.json()["data"]]


def test_the_official_client_is_content(served: Served) -> None:
    texts = ["A fox", "", "Ünïcode ☃"][::2]
    with served.client() as client:
        answer = client.embeddings.create(model=MODEL, input=texts)  # the client requests base64
        floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert answer.object == "list" and answer.model == MODEL
    num_tokens = sum(len(served.tokenizer.encode(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    for found in (answer, floats):
        assert [entry.index for entry in found.data] == [0, 1]
        assert {entry.object for entry in found.data} == {"embedding"}
        for entry, text in zip(found.data, texts, strict=True):
            assert np.array_equal(np.array(entry.embedding, np.float32), vector(served.tokenizer.encode(text)))


@pytest.mark.parametrize("given", ["A fox", ["A fox"], byte_ids("A fox"), [byte_ids("A fox")]])
def test_all_forms_of_input(served: Served, given: Any) -> None:
    (found,) = embeddings(served, input=given)
    assert np.array_equal(found, vector(served.tokenizer.encode("A fox")))


def test_base64_is_little_endian_float32(served: Served) -> None:
    (entry,) = served.post("/v1/embeddings", {"input": [1, 2, 3], "encoding_format": "base64"}).json()["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(entry["embedding"]), "<f4"), vector([1, 2, 3]))


def test_dimensions_and_truncation(served: Served) -> None:
    (cut,) = embeddings(served, input=[1, 2, 3], dimensions=3)
    assert np.array_equal(cut, vector([1, 2, 3], 3)) and abs(np.linalg.norm(cut) - 1) < 1e-6
    (last,) = embeddings(served, input=[1, 2, 3, 4], truncate_prompt_tokens=2)
    assert np.array_equal(last, vector([3, 4]))
    (longest,) = embeddings(served, input=[7] * 600, truncate_prompt_tokens=-1)
    assert np.array_equal(longest, vector([7] * 512))


@pytest.mark.parametrize(("body", "param"), [
    *(({"input": one}, "input") for one in (None, [], "", ["a", ""], [[]], ["a", 1], [1 << 20], [-1], ["a"] * 2049)),
    ({}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
    ({"input": "a", "dimensions": "8"}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"input": "a", "cache_salt": "x" * 1025}, "cache_salt"),
    ({"input": "a", "priority": 0.5}, "priority"),
])  # fmt: skip
def test_bad_bodies_name_the_field(served: Served, body: dict[str, Any], param: str) -> None:
    assert "max_tokens" not in check_error(served.post("/v1/embeddings", body), 400, param=param)["message"]


def test_other_errors(served: Served) -> None:
    check_error(served.post("/v1/embeddings", {"input": "a", "model": "other"}), 404, "model", "model_not_found")
    for given in ("x" * 600, [7] * 513, ["a", "x" * 600]):
        check_error(served.post("/v1/embeddings", {"input": given}), 400, param="input", code="context_length_exceeded")
    with served.client() as client, pytest.raises(openai.BadRequestError, match="context length"):
        client.embeddings.create(model=MODEL, input="x" * 600)


def test_the_tokens_of_all_prompts_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_engine.server.embeddings.pooling.MAX_PROMPT_TOKENS", 5)
    with served.client() as client, pytest.raises(openai.BadRequestError, match="input has 6 tokens, but the limit is"):
        client.embeddings.create(model=MODEL, input="x" * 6)


def test_a_whole_batch_and_a_whole_context(served: Served) -> None:
    found = embeddings(served, input=[[i % 256, i // 256] for i in range(2048)])
    assert len(found) == 2048
    assert all(np.array_equal(found[i], vector([i % 256, i // 256])) for i in range(0, 2048, 97))
    (long,) = embeddings(served, input=[9] * 512)
    assert np.array_equal(long, vector([9] * 512))


def test_a_client_that_leaves_is_forgotten(served: Served) -> None:
    served.runner.running.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + "/v1/embeddings", json={"input": ["a", "b", "c"]}, timeout=0.3)
    wait_until(lambda: served.engine.num_open_requests == 0, "the requests to be dropped")
    served.runner.running.set()


def test_a_request_over_the_request_timeout_gets_a_504() -> None:
    with serve(args=ServerArgs(shutdown_timeout=1, request_timeout=0.2)) as served:
        served.runner.running.clear()
        check_error(served.post("/v1/embeddings", {"input": ["a", "b"]}), 504, code="timeout")
        served.runner.running.set()


def test_a_step_that_fails_is_an_error(served: Served) -> None:
    served.runner.error_for = lambda tokens: RuntimeError("as asked")
    check_error(served.post("/v1/embeddings", {"input": ["a", "b"]}), 500, code="generation_failed")
    served.wait_until_idle()
    served.runner.error_for = None
    assert len(embeddings(served, input="a")) == 1


def test_an_answer_has_a_largest_size() -> None:
    config = fake_config()
    config = replace(config, model=replace(config.model, hidden_size=1 << 16))
    with serve(config=config) as served:
        fits, too_many = [[1]] * 32, [[1]] * 33
        assert len(embeddings(served, input=fits)) == 32
        check_error(served.post("/v1/embeddings", {"input": too_many}), 400, param="input")
        assert served.post("/v1/embeddings", {"input": too_many, "encoding_format": "base64"}).status_code == 200
        assert served.post("/v1/embeddings", {"input": too_many, "dimensions": 8}).status_code == 200


def test_salts_and_priorities_reach_the_engine(served: Served) -> None:
    hits = served.engine.metrics.num_cache_hits
    tokens = [17] * 30
    embeddings(served, input=tokens, cache_salt="one")
    embeddings(served, input=tokens, cache_salt="two", priority=3)
    assert served.engine.metrics.num_cache_hits == hits
    embeddings(served, input=tokens, cache_salt="two")
    assert served.engine.metrics.num_cache_hits == hits + 24


def test_a_checkpoint_decides_how_to_pool_or_why_not() -> None:
    config = fake_config(pooler=PoolerConfig(pooling_type="MEAN", normalize=False, is_embedder=True))
    with serve(config=config) as served:
        embeddings(served, input="a")
        (seen,) = served.runner.seen_pooling
        assert (seen.pooling_type, seen.normalize) == ("MEAN", False)
    with serve(config=fake_config(pooler=PoolerConfig(is_embedder=True, problem="a module Dense follows"))) as served:
        assert "Dense" in check_error(served.post("/v1/embeddings", {"input": "a"}), 400, param="model")["message"]

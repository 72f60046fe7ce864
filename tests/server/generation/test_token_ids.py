"""vLLM's ``return_token_ids`` and ``return_tokens_as_token_ids`` in whole responses and streams of both endpoints."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.test_errors import sse_events
from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import EOS, generated

PATHS = ("/v1/completions", "/v1/chat/completions")


def body_for(path: str, text: str = "One, two") -> dict[str, Any]:
    prompt = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    return {"model": MODEL, "max_tokens": 12, **prompt}


def post(served: Served, path: str, body: dict[str, Any]) -> Any:
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    return sse_events(served.post(path, {**body, "stream": True}).text)


def prompt_ids(served: Served, path: str, body: dict[str, Any]) -> list[int]:
    if path == PATHS[0]:
        return served.tokenizer.encode(body["prompt"])
    return served.tokenizer.apply_chat_template(body["messages"])


@pytest.mark.parametrize("path", PATHS)
def test_whole_answers_and_streams_have_the_ids(served: Served, path: str) -> None:
    body = {**body_for(path), "n": 2, "return_token_ids": True}
    prompt = prompt_ids(served, path, body)
    expected = generated(prompt, 12)
    answer = post(served, path, body)
    for choice in answer["choices"]:
        assert choice["token_ids"] == expected
        assert path != PATHS[0] or choice["prompt_token_ids"] == prompt
    assert path == PATHS[0] or answer["prompt_token_ids"] == prompt
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts: dict[int, list[list[int]]] = {0: [], 1: []}
    for chunk in chunks(served, path, body):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice.get("token_ids", [])
        told = (choice if path == PATHS[0] else chunk).get("prompt_token_ids")
        prompts[choice["index"]] += [told] if told is not None else []
    assert streamed == {0: expected, 1: expected}
    assert prompts == {0: [prompt], 1: [prompt]}


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_include_the_token_that_ends_the_response(path: str) -> None:
    half = ord("é".encode()[:1].decode("latin-1"))
    with serve(lambda tokens, num_prompt: [65, half, EOS][len(tokens) - num_prompt]) as served:
        body = {**body_for(path), "return_token_ids": True}
        assert post(served, path, body)["choices"][0]["token_ids"] == [65, half, EOS]
        told = [chunk["choices"][0].get("token_ids", []) for chunk in chunks(served, path, body)]
        assert [token_id for ids in told for token_id in ids] == [65, half, EOS]


@pytest.mark.parametrize("path", PATHS)
def test_responses_have_no_token_ids_unless_requested(served: Served, path: str) -> None:
    for given in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        for answer in (post(served, path, body_for(path) | given), *chunks(served, path, body_for(path) | given)):
            assert "token_ids" not in json.dumps(answer)


@pytest.mark.parametrize("path", PATHS)
def test_log_probabilities_name_tokens_by_their_ids(tiny: Served, path: str) -> None:
    asked = {"logprobs": 2, "echo": True} if path == PATHS[0] else {"logprobs": True, "top_logprobs": 2}
    body = {**body_for(path), **asked, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body["return_tokens_as_token_ids"] = True
    prompt = prompt_ids(tiny, path, body)
    answer = post(tiny, path, body)
    generated = answer["choices"][0]["token_ids"]
    expected = prompt + generated if path == PATHS[0] else generated
    assert len(generated) == 12
    for part in ([answer], chunks(tiny, path, body)):
        told = [choice["logprobs"] for one in part for choice in one["choices"] if choice["logprobs"]]
        if path == PATHS[0]:
            assert [name for one in told for name in one["tokens"]] == [f"token_id:{i}" for i in expected]
            tops = [top for one in told for top in one["top_logprobs"] if top]
            assert all(f"token_id:{i}" in top for i, top in zip(expected[1:], tops, strict=True))
        else:
            content = [token for one in told for token in one["content"]]
            assert [token["token"] for token in content] == [f"token_id:{i}" for i in expected]
            assert [bytes(token["bytes"]) for token in content] == list(map(tiny.tokenizer.token_bytes, expected))
            assert all(top["token"].startswith("token_id:") for token in content for top in token["top_logprobs"])


@pytest.mark.parametrize("name", ["return_token_ids", "return_tokens_as_token_ids"])
def test_other_endpoints_reject_the_token_id_options(served: Served, name: str) -> None:
    message = [{"role": "user", "content": "a"}]
    bodies = {
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": message, "max_tokens": 2},
        "/api/chat": {"messages": message, "stream": False},
    }
    for path, body in bodies.items():
        answer = httpx.post(served.url + path, json={"model": MODEL, **body, name: True})
        assert answer.status_code == 400 and f"{name} is not supported" in answer.text, answer.text
        assert httpx.post(served.url + path, json={"model": MODEL, **body, name: False}).status_code == 200


def test_ids_of_the_wrong_type_are_refused(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={**body_for(PATHS[0]), "return_token_ids": "yes"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_token_ids"

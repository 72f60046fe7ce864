"""Texts that exceed the limits of a tokenizer's regular expressions get a 400 everywhere. The server keeps running."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Regex, pre_tokenizers

from metal_engine.text.tokenizer import Tokenizer
from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import tiny_tokenizer

HOSTILE = "x" * 4000  # slow for a backtracking regular expression
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": HOSTILE},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": HOSTILE}]},
    "/v1/responses": {"input": HOSTILE},
    "/v1/embeddings": {"input": HOSTILE},
    "/tokenize": {"prompt": HOSTILE},
}


def panicking_tokenizer() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    backend = tokenizer.hf_tokenizer.backend_tokenizer
    slow = pre_tokenizers.Split(Regex("(?:x+x+)+y"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([slow, backend.pre_tokenizer])
    return tokenizer


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(tokenizer=panicking_tokenizer()) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_a_text_that_panics_is_a_400(served: Served, path: str) -> None:
    answer = httpx.post(served.url + path, json={"model": MODEL, **BODIES[path]}, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and "cannot tokenize this text" in error["message"]
    assert error["param"] in ("prompt", "messages", "input")
    fine = httpx.post(served.url + "/v1/completions", json={"model": MODEL, "prompt": "xxy", "max_tokens": 2})
    assert fine.status_code == 200 and fine.json()["usage"]["completion_tokens"] == 2


def test_a_parameter_that_panics_is_a_400(served: Served) -> None:
    body = {"model": MODEL, "prompt": "a", "bad_words": [HOSTILE]}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "bad_words", answer.text


def test_the_offline_api_raises_value_error() -> None:
    tokenizer = panicking_tokenizer()
    with pytest.raises(ValueError, match="cannot tokenize this text"):
        tokenizer.encode(HOSTILE)
    assert tokenizer.decode(tokenizer.encode("xxy")) == "xxy"

"""Texts that exceed the limits of a tokenizer's regular expressions get a 400 everywhere. The server keeps running."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from metal_engine.text.tokenizer import Tokenizer
from tests.server.test_errors import check_error
from tests.support.serving import MODEL, serve
from tools.fixtures.fake_engine import tiny_tokenizer

HOSTILE = "x" * 4000  # slow for a backtracking regular expression
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": HOSTILE}, "prompt"),
    ("/v1/completions", {"prompt": "a", "bad_words": [HOSTILE]}, "bad_words"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HOSTILE}]}, "messages"),
    ("/v1/responses", {"input": HOSTILE}, "input"),
    ("/v1/embeddings", {"input": HOSTILE}, "input"),
    ("/tokenize", {"prompt": HOSTILE}, "prompt"),
]


def panicking_tokenizer() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    backend = tokenizer.hf_tokenizer.backend_tokenizer
    slow = pre_tokenizers.Split(Regex("(?:x+x+)+y"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([slow, backend.pre_tokenizer])
    return tokenizer


def test_a_text_that_panics_is_a_400() -> None:
    with serve(tokenizer=panicking_tokenizer()) as served:
        for path, body, param in BODIES:
            error = check_error(served.post(path, {"model": MODEL, **body}), 400, param)
            assert "cannot tokenize this text" in error["message"]
            fine = served.post("/v1/completions", {"model": MODEL, "prompt": "xxy", "max_tokens": 2})
            assert fine.status_code == 200 and fine.json()["usage"]["completion_tokens"] == 2


def test_the_offline_api_raises_value_error() -> None:
    tokenizer = panicking_tokenizer()
    with pytest.raises(ValueError, match="cannot tokenize this text"):
        tokenizer.encode(HOSTILE)
    assert tokenizer.decode(tokenizer.encode("xxy")) == "xxy"

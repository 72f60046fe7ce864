"""`suffix` in /v1/completions: the text between a prompt and a suffix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from metal_engine.text.tokenizer import Tokenizer
from tests.server.test_errors import check_error, sse_events
from tests.support.serving import Served, serve
from tests.support.tiny_engine import log_softmax, reference_logits, tiny_engine, tiny_reference
from tools.fixtures.fake_engine import VOCAB_SIZE, byte_ids, fake_config, generated, in_thread, tiny_tokenizer

PATH = "/v1/completions"
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PREFIX, SUFFIX, MIDDLE, PAD = range(VOCAB_SIZE, VOCAB_SIZE + len(MARKS))
VOCAB = VOCAB_SIZE + len(MARKS)


def fim_tokenizer() -> Tokenizer:
    hf = tiny_tokenizer().hf_tokenizer
    hf.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])  # type: ignore[arg-type]
    return Tokenizer(hf)


def prompt_ids(prefix: str, suffix: str) -> list[int]:
    return [PREFIX, *byte_ids(prefix), SUFFIX, *byte_ids(suffix), MIDDLE]


def expected(prefix: str, suffix: str, num_tokens: int) -> str:
    return "".join(map(chr, generated(prompt_ids(prefix, suffix), num_tokens)))


@pytest.fixture(scope="module")
def filling() -> Iterator[Served]:
    with serve(config=fake_config(vocab_size=VOCAB), tokenizer=fim_tokenizer()) as served:
        yield served


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    """Yield a server on a model with random weights, for log probabilities."""
    core = tiny_engine(tokenizer=fim_tokenizer(), vocab_size=VOCAB)
    with serve(engine=in_thread(lambda: core)) as served:
        yield served


@pytest.mark.parametrize(("prefix", "suffix"), [("def f(", "return 1"), ("", "x"), ("a", " ")])
@pytest.mark.parametrize("echo", [False, True])
def test_the_middle(filling: Served, prefix: str, suffix: str, echo: bool) -> None:
    body = {"prompt": prefix, "suffix": suffix, "max_tokens": 9, "echo": echo}
    answer = filling.post(PATH, body).json()
    text = (prefix if echo else "") + expected(prefix, suffix, 9)
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids(prefix, suffix))
    events = sse_events(filling.post(PATH, {**body, "stream": True}).text)
    assert "".join(event["choices"][0]["text"] for event in events) == text


def test_lists_of_prompts_and_n(filling: Served) -> None:
    body = {"prompt": ["ab", "c"], "suffix": "yz", "max_tokens": 5, "n": 2, "temperature": 1, "echo": True}
    choices = filling.post(PATH, body).json()["choices"]
    texts = [prefix + expected(prefix, "yz", 5) for prefix in ("ab", "ab", "c", "c")]
    assert [choice["text"] for choice in choices] == texts
    body["prompt"] = [byte_ids("ab"), byte_ids("c")]
    assert [choice["text"] for choice in filling.post(PATH, body).json()["choices"]] == texts


def test_an_empty_suffix_gives_a_plain_completion(filling: Served) -> None:
    for suffix in (None, ""):
        answer = filling.post(PATH, {"prompt": "ab", "suffix": suffix, "max_tokens": 5}).json()
        assert answer["choices"][0]["text"] == "".join(map(chr, generated(byte_ids("ab"), 5)))


def test_control_tokens_in_the_texts_are_read_as_in_any_raw_prompt(filling: Served) -> None:
    answer = filling.post(PATH, {"prompt": "<|im_end|>", "suffix": "a<|im_start|>", "max_tokens": 3}).json()
    assert answer["usage"]["prompt_tokens"] == 3 + 1 + 2


def test_an_infilling_stops_at_the_infilling_end_token() -> None:
    text = [*byte_ids("done"), PAD, *byte_ids("more")]

    def next_token(tokens: list[int], num_prompt_tokens: int) -> int:
        return text[(len(tokens) - num_prompt_tokens) % len(text)]

    with serve(next_token, config=fake_config(vocab_size=VOCAB), tokenizer=fim_tokenizer()) as served:
        body: dict[str, Any] = {"prompt": "a", "suffix": "b", "max_tokens": 8, "skip_special_tokens": False}
        (choice,) = served.post(PATH, body).json()["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("done", "stop", PAD)
        for other in ({"ignore_eos": True}, {"suffix": ""}):
            (choice,) = served.post(PATH, {**body, **other}).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("done<|fim_pad|>mor", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(tiny: Served, stream: bool) -> None:
    """Log probabilities of the prompt belong to its own tokens. Each is conditioned on all tokens before it."""
    body = {"prompt": "né", "suffix": "xyz", "echo": True, "logprobs": 0, "max_tokens": 4, "stream": stream}
    response = tiny.post(PATH, {**body, "ignore_eos": True, "allowed_token_ids": byte_ids("ab")})
    if stream:
        parts = [event["choices"][0]["logprobs"] for event in sse_events(response.text)]
        keys = ("tokens", "token_logprobs", "text_offset")
        logprobs: dict[str, Any] = {key: [value for part in parts if part for value in part[key]] for key in keys}
    else:
        logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    tokens = [*prompt_ids("né", "xyz"), *byte_ids("".join(logprobs["tokens"][3:]))]
    reference = log_softmax(reference_logits(tiny_reference(vocab_size=VOCAB), tokens))
    wanted = [reference[place - 1, tokens[place]] for place in [1, 2, 3, *range(len(tokens) - 4, len(tokens))]]
    assert np.abs(np.array(logprobs["token_logprobs"]) - wanted).max() < 1e-4


def test_prompt_logprobs_cover_all_infilling_prompt_tokens(tiny: Served) -> None:
    body = {"prompt": "ab", "suffix": "c", "prompt_logprobs": 0, "max_tokens": 1}
    (choice,) = tiny.post(PATH, body).json()["choices"]
    assert [int(key) for entry in choice["prompt_logprobs"][1:] for key in entry] == prompt_ids("ab", "c")[1:]


def test_unsupported_or_invalid_suffixes_get_a_400(served: Served, filling: Served) -> None:
    body = {"prompt": "a", "suffix": "b", "max_tokens": 2}
    error = check_error(served.post(PATH, body), 400, "suffix", code="unsupported_parameter")
    assert "filling in the middle" in error["message"]
    chat = {"messages": [{"role": "user", "content": "a"}], "suffix": "b"}
    check_error(filling.post("/v1/chat/completions", chat), 400, "suffix", code="unsupported_parameter")
    check_error(filling.post(PATH, {**body, "truncate_prompt_tokens": 5}), 400, "truncate_prompt_tokens")
    check_error(filling.post(PATH, {**body, "suffix": ["b"]}), 400, "suffix")
    check_error(filling.post(PATH, {**body, "suffix": "b" * 600}), 400, "prompt", code="context_length_exceeded")
    check_error(filling.post(PATH, {**body, "prompt": ["a"] * 20_000, "suffix": "b" * 400}), 400, "suffix")
    check_error(filling.post(PATH, {**body, "suffix": "c" * 6_000_000}), 400, "suffix", code="context_length_exceeded")

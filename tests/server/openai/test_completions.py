"""/v1/completions, driven by the official client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_engine.sampling_params import SamplingParams
from tests.server.test_errors import sse_events
from tests.support.serving import MODEL, Served
from tests.support.sweeps import sweep
from tools.fixtures.fake_engine import EOS, byte_ids, generated

TEXTS = ["Once upon a time", "the thing", "é", "日本語 😀 text", "x" * 300]


def expected_text(served: Served, prompt: str | list[int], num_tokens: int) -> str:
    ids = served.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return "".join(map(chr, generated(ids, num_tokens)))


@pytest.mark.parametrize("prompt", [*TEXTS, byte_ids("token ids"), [300 - 299, 262, 0]])
def test_completion(served: Served, prompt: str | list[int]) -> None:
    completion = served.client().completions.create(model=MODEL, prompt=prompt, max_tokens=20)
    (choice,) = completion.choices
    assert choice.text == expected_text(served, prompt, 20)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert completion.id.startswith("cmpl-") and completion.object == "text_completion"
    assert completion.model == MODEL and completion.created > 1_700_000_000
    num_prompt_tokens = len(served.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt_tokens, 20)
    assert usage.total_tokens == num_prompt_tokens + 20
    assert usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("prompt", TEXTS)
def test_stream_equals_completion(served: Served, prompt: str) -> None:
    stream = served.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected_text(served, prompt, 50)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.object, chunk.model) for chunk in [*chunks, last]}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 50


def test_event_stream_format(served: Served) -> None:
    """The model is optional, there are 16 tokens by default, and a stream has the usage only on request."""
    answer = served.post("/v1/completions", {"prompt": "a"}).json()
    assert (answer["model"], answer["usage"]["completion_tokens"]) == (MODEL, 16)
    response = served.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": True})
    assert '"usage":{' not in response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    assert all(event.startswith("data: ") for event in response.text.strip().split("\n\n"))


PROMPT_LISTS = [
    ["first", "the second", "third one"],
    [byte_ids("a"), byte_ids("bcd"), byte_ids("e")],
    ["only one"],
    [f"prompt {i}" for i in range(20)],
]


@pytest.mark.parametrize("prompts", PROMPT_LISTS)
@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(served: Served, prompts: list[str] | list[list[int]], stream: bool) -> None:
    client = served.client()
    texts = [""] * len(prompts)
    reasons: list[list[str]] = [[] for _ in prompts]
    if stream:
        with client.completions.create(model=MODEL, prompt=prompts, max_tokens=30, stream=True) as chunks:
            choices = [choice for chunk in chunks for choice in chunk.choices]
    else:
        answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=30)
        choices = answer.choices
        assert [choice.index for choice in choices] == list(range(len(prompts)))
    for choice in choices:
        texts[choice.index] += choice.text
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [expected_text(served, prompt, 30) for prompt in prompts]
    assert reasons == [["length"]] * len(prompts)
    if not stream:
        assert answer.usage is not None and answer.usage.completion_tokens == 30 * len(prompts)


LENGTH = {"ignore_eos": True, "max_tokens": 9}


@pytest.mark.parametrize(("fields", "text", "reason", "stop_reason"), [
    ({}, "é: abc", "stop", None),
    ({"stop": ["c", "zz"]}, "é: ab", "stop", "c"),
    ({"stop": "bcd"}, "é: abc", "stop", None),
    ({"stop_token_ids": [ord("b"), EOS]}, "é: a", "stop", ord("b")),
    (LENGTH, "é: abc", "length", None),
    ({**LENGTH, "skip_special_tokens": False}, "é: abc<|im_end|><|im_end|>", "length", None),
])  # fmt: skip
def test_the_end_of_an_output(
    echoing: Served, fields: dict[str, Any], text: str, reason: str, stop_reason: Any
) -> None:
    body = {"prompt": byte_ids("é: abc"), "max_tokens": 50, **fields}
    choice = echoing.post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop_reason)
    events = sse_events(echoing.post("/v1/completions", body | {"stream": True}).text)
    chunks = [event["choices"][0] for event in events]
    assert "".join(chunk["text"] for chunk in chunks) == text
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (reason, stop_reason)


def test_sampling_parameters_reach_the_runner(served: Served) -> None:
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 42, "stop": ["\x01", "\x02"],
        "stop_token_ids": [3], "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 2,
    }  # fmt: skip
    assert served.post("/v1/completions", {"prompt": "a", **body}).status_code == 200
    assert served.runner.seen_params[-1] == SamplingParams(**body)  # type: ignore[arg-type]
    nulls = dict.fromkeys(body, None)
    assert served.post("/v1/completions", {"prompt": "a", **nulls}).status_code == 200
    assert replace(served.runner.seen_params[-1], seed=None) == SamplingParams()


def test_neutral_and_harmless_parameters_are_accepted(served: Served) -> None:
    body = {
        "n": 1, "best_of": 1, "echo": False, "logprobs": None, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "suffix": None, "user": "me", "store": True, "metadata": {"a": "b"},
        "service_tier": "auto", "some_unknown_field": [1, 2], "response_format": {"type": "text"},
        "tools": [],
    }  # fmt: skip
    response = served.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **body})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("seed", sweep(range(6), lambda seed: seed < 2))
@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets(tiny: Served, echo: bool, seed: int) -> None:
    """Offsets of characters in several tokens, and of text that is held back or cut off, equal in streams and
    responses.
    """
    prompt = "né "
    body: dict[str, Any] = {
        "prompt": prompt, "echo": echo, "logprobs": 0, "stop": ["aba", "bb"], "max_tokens": 40, "seed": seed,
        "temperature": 2.0, "ignore_eos": True, "allowed_token_ids": [*b"ab", *"é".encode(), EOS],
    }  # fmt: skip
    whole = tiny.post("/v1/completions", body).json()["choices"][0]
    with tiny.client().completions.create(
        model=MODEL, prompt=prompt, stream=True, extra_body={**body, "stream": True}
    ) as stream:
        parts = [chunk.choices[0].logprobs for chunk in stream]
    tokens, offsets = whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]
    assert [token for part in parts if part for token in part.tokens or ()] == tokens
    assert [offset for part in parts if part for offset in part.text_offset or ()] == offsets
    spelled = {"<|im_end|>": EOS, "bytes:\\xc3": 0xC3, "bytes:\\xa9": 0xA9}
    ids = [spelled[token] if token in spelled else ord(token) for token in tokens]
    begin = len(byte_ids(prompt)) if echo else 0
    assert ids[:begin] == (byte_ids(prompt) if echo else [])
    assert offsets[:begin] == [0, 1, 1, 2][:begin]
    detokenizer = tiny.tokenizer.detokenizer(byte_ids(prompt), True)
    expected = [len(prompt) if echo else 0]
    for token_id in ids[begin:]:
        expected.append(expected[-1] + len(detokenizer.add(token_id)))
    assert offsets[begin:] == expected[:-1]
    assert expected[-1] >= len(whole["text"]) and (offsets[-1] <= len(whole["text"]))

"""/v1/completions, driven by the official client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.sampling_params import SamplingParams
from tests.support.serving import MODEL, Served, serve
from tests.support.sweeps import sweep
from tests.support.tiny_engine import tiny_engine
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


def test_stream_without_usage(served: Served) -> None:
    chunks = list(served.client().completions.create(model=MODEL, prompt="a", max_tokens=3, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_event_stream_format(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    assert all(event.startswith("data: ") for event in response.text.strip().split("\n\n"))


def test_max_tokens_defaults_to_16(served: Served) -> None:
    completion = served.client().completions.create(model=MODEL, prompt="a")
    assert completion.usage is not None and completion.usage.completion_tokens == 16


def test_model_is_optional(served: Served) -> None:
    assert served.post("/v1/completions", {"prompt": "a"}).json()["model"] == MODEL


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
        choices = client.completions.create(model=MODEL, prompt=prompts, max_tokens=30).choices
        assert [choice.index for choice in choices] == list(range(len(prompts)))
    for choice in choices:
        texts[choice.index] += choice.text
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [expected_text(served, prompt, 30) for prompt in prompts]
    assert reasons == [["length"]] * len(prompts)


def test_several_prompts_sum_their_usage(served: Served) -> None:
    completion = served.client().completions.create(model=MODEL, prompt=[[1, 2], [3, 4, 5]], max_tokens=7)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 14)


def test_end_of_sequence(echoing: Served) -> None:
    completion = echoing.client().completions.create(model=MODEL, prompt=byte_ids("abc"), max_tokens=50)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("abc", "stop")
    assert choice.stop_reason is None  # type: ignore[attr-defined]
    assert completion.usage is not None and completion.usage.completion_tokens == 4


def test_ignore_eos(echoing: Served) -> None:
    body = {"prompt": byte_ids("abc"), "max_tokens": 6, "ignore_eos": True}
    choice = echoing.post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    choice = echoing.post("/v1/completions", {**body, "skip_special_tokens": False}).json()["choices"][0]
    assert choice["text"] == "abc" + "<|im_end|>" * 3


def test_stop_token_ids(echoing: Served) -> None:
    body = {"prompt": byte_ids("abcd"), "max_tokens": 50, "stop_token_ids": [ord("c"), EOS]}
    choice = echoing.post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", ord("c"))


def stop_tokenizations() -> list[list[int]]:
    """Return `see: STOP now`, with STOP as every mix of single bytes and the merges ST (261) and OP (262)."""
    first = [byte_ids("ST"), [261]]
    second = [byte_ids("OP"), [262]]
    return [byte_ids("see: ") + a + b + byte_ids(" now") for a, b in itertools.product(first, second)]


@pytest.mark.parametrize("prompt", stop_tokenizations())
@pytest.mark.parametrize("stop", ["STOP", ["TO", "never"], ["STOP now", "OP n"], ["P", "STOP"], [" now"]])
def test_stop_strings_never_leak(echoing: Served, prompt: list[int], stop: str | list[str]) -> None:
    text = "see: STOP now"
    stops = [stop] if isinstance(stop, str) else stop
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    _, at, reason = min(ends)
    body = {"prompt": prompt, "max_tokens": 50, "stop": stop}
    choice = echoing.post("/v1/completions", body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:at], "stop", reason)
    chunks = list(
        echoing.client().completions.create(model=MODEL, prompt=prompt, max_tokens=50, stop=stop, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:at]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_beginning_of_a_stop_string_is_shown_at_the_end(echoing: Served) -> None:
    for max_tokens, shown in ((4, "a ST"), (50, "a STO")):
        choice = echoing.post(
            "/v1/completions", {"prompt": byte_ids("a STO"), "max_tokens": max_tokens, "stop": "STOP"}
        ).json()["choices"][0]
        assert choice["text"] == shown


@pytest.mark.parametrize(
    "text", ["é", "naïve 日本語", "😀👩‍👩‍👧‍👦 done", "a\u2028b\x85c\r\n\td\x0be\x00f", "\ufffd real"]
)
def test_characters_are_never_broken(echoing: Served, text: str) -> None:
    prompt = byte_ids(text)
    chunks = list(echoing.client().completions.create(model=MODEL, prompt=prompt, max_tokens=100, stream=True))
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert echoing.post("/v1/completions", {"prompt": prompt, "max_tokens": 100}).json()["choices"][0]["text"] == text


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


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    """Yield a server on a model with random weights, for log probabilities."""
    core = tiny_engine()
    engine = AsyncEngine(EngineThread(lambda: core))
    engine.start()
    with serve(engine=engine) as served:
        yield served
        served.wait_until_idle()


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

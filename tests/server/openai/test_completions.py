"""/v1/completions and /v1/chat/completions, driven by the official client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_engine.sampling_params import SamplingParams
from tests.server.test_errors import sse_events
from tests.support.serving import MODEL, Served, serve
from tests.support.sweeps import sweep
from tools.fixtures.fake_engine import EOS, byte_ids, echo, fake_config, generated, tiny_tokenizer

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


@pytest.mark.parametrize("prompts", [
    ["first", "the second", "third one"],
    [byte_ids("a"), byte_ids("bcd"), byte_ids("e")],
    ["only one"],
    [f"prompt {i}" for i in range(20)],
])  # fmt: skip
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
    ({"stop": "bcd", **LENGTH}, "é: abc", "length", None),
    ({"stop": "c", "max_tokens": 7}, "é: ab", "stop", "c"),
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
    assert served.post("/v1/completions", {"prompt": "a", **dict.fromkeys(body, None)}).status_code == 200
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


NOW = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, str]]]] = [
    # messages of a client, messages passed to the template
    ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
    (
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]},
        ],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two\nparts"}],
    ),
    (
        [
            {"role": "system", "content": "日本語"},
            {"role": "user", "content": "what time is it?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [NOW]},
            {"role": "tool", "content": "noon", "tool_call_id": "1"},
        ],
        [
            {"role": "system", "content": "日本語"},
            {"role": "user", "content": "what time is it?"},
            # The template supports neither calls nor results, so they are written as text.
            {"role": "assistant", "content": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'},
            {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"},
        ],
    ),
]


def expected_answer(served: Served, messages: list[dict[str, str]], num_tokens: int) -> str:
    return "".join(map(chr, generated(served.tokenizer.apply_chat_template(messages), num_tokens)))


@pytest.mark.parametrize(("messages", "given"), CONVERSATIONS)
def test_chat(served: Served, messages: Any, given: list[dict[str, str]]) -> None:
    """The newer name of the limit wins."""
    create = served.client().chat.completions.create
    completion = create(model=MODEL, messages=messages, max_tokens=50, max_completion_tokens=25)
    text, num_prompt_tokens = expected_answer(served, given, 25), len(served.tokenizer.apply_chat_template(given))
    (choice,) = completion.choices
    assert choice.message.content == text
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert completion.id.startswith("chatcmpl-") and completion.object == "chat.completion"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (num_prompt_tokens, 25)
    stream = create(model=MODEL, messages=messages, max_tokens=25, stream=True, stream_options={"include_usage": True})
    first, *middle, finish, usage = list(stream)
    assert first.choices[0].delta.role == "assistant" and not first.choices[0].delta.content
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == text
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * len(middle)
    assert finish.choices[0].finish_reason == "length" and finish.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 25
    assert {chunk.object for chunk in (first, *middle, finish, usage)} == {"chat.completion.chunk"}


def test_without_a_limit_the_answer_fills_the_context() -> None:
    with serve(config=fake_config(max_model_len=96)) as served:
        completion = served.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert completion.usage is not None and completion.usage.total_tokens == 96
        assert completion.choices[0].finish_reason == "length"


def test_special_tokens_are_no_text(echoing: Served) -> None:
    body = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 200}
    message = echoing.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] == "user\né"  # the prompt up to its first end of turn


def test_a_model_without_a_template_refuses_chat_but_completes() -> None:
    with serve(echo, tokenizer=tiny_tokenizer(chat_template=None)) as served:
        response = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert response.status_code == 400 and "/v1/completions" in response.json()["error"]["message"]
        assert served.post("/v1/completions", {"prompt": byte_ids("ab")}).json()["choices"][0]["text"] == "ab"


def test_the_end_of_the_prompt(served: Served) -> None:
    """A prefill continues the last message. Without a generation prompt, the prompt ends with the last message."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, I "}]
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, I "
    for fields, end in (
        ({"continue_final_message": True}, ""),
        ({"continue_final_message": True, "add_generation_prompt": False}, ""),
        ({"add_generation_prompt": False}, "<|im_end|>\n"),
    ):
        answer = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 20, **fields}).json()
        ids = served.tokenizer.encode(prompt + end)
        assert answer["choices"][0]["message"]["content"] == "".join(map(chr, generated(ids, 20)))
        assert answer["usage"]["prompt_tokens"] == len(ids)

"""Every parameter over HTTP, sent by the official client to a tiny model with real logits, and options of requests."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from metal_engine.request import RequestOptions
from tests.support.serving import MODEL, Served, serve
from tests.support.tiny_engine import log_softmax, reference_logits, tiny_reference
from tools.fixtures.fake_engine import EOS, byte_ids, echo, fake_config, tiny_tokenizer

PROMPT = "the thing in the string"
USER: Any = [{"role": "user", "content": "hi"}]


def complete(served: Served, prompt: Any = PROMPT, **params: Any) -> Any:
    """Return a completion. Parameters unknown to OpenAI's client are sent in its ``extra_body``."""
    known = {"n", "echo", "logprobs", "stop", "seed", "temperature", "top_p", "max_tokens", "stream", "logit_bias",
             "presence_penalty", "frequency_penalty", "stream_options"}  # fmt: skip
    extra = {name: params.pop(name) for name in list(params) if name not in known}
    params = {"temperature": 0, "max_tokens": 10, **params}
    return served.client().completions.create(model=MODEL, prompt=prompt, extra_body=extra, **params)


def text_of(served: Served, **params: Any) -> str:
    return complete(served, **params).choices[0].text


# --- n, echo, log probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_n(tiny: Served, stream: bool) -> None:
    params: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1.5, "ignore_eos": True}
    prompts = ["one", "another"]
    texts = [""] * 6
    if stream:
        for chunk in complete(tiny, prompts, stream=True, **params):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = complete(tiny, prompts, **params)
        assert [choice.index for choice in answer.choices] == list(range(6))
        texts = [choice.text for choice in answer.choices]
        num_prompt = sum(len(tiny.tokenizer.encode(prompt)) for prompt in prompts)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 60)
    assert len(set(texts)) == 6
    for i in range(6):
        assert texts[i] == complete(tiny, prompts[i // 3], **{**params, "n": 1, "seed": 11 + i % 3}).choices[0].text


def check_values(served: Served, prompt: list[int], output: list[int], values: list[float]) -> np.ndarray:
    rows = log_softmax(reference_logits(tiny_reference(), prompt + output[:-1])[len(prompt) - 1 :])
    assert values == pytest.approx([row[token] for row, token in zip(rows, output, strict=True)], abs=1e-4)
    return rows


def ids_of(served: Served, tokens: list[str]) -> list[int]:
    """Return the ids of tokens as spelled in log probabilities."""
    spelled: dict[str, int] = {}
    for token_id in range(EOS + 1):
        data = served.tokenizer.token_bytes(token_id)
        try:
            spelled[data.decode()] = token_id
        except UnicodeDecodeError:
            spelled["bytes:" + "".join(f"\\x{byte:02x}" for byte in data)] = token_id
    return [spelled[token] for token in tokens]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_completions(tiny: Served, stream: bool, echo: bool) -> None:
    params: dict[str, Any] = {"logprobs": 3, "echo": echo, "max_tokens": 20}
    params["allowed_token_ids"] = list(range(32, 127))
    text, tokens, values, tops, offsets = "", [], [], [], []
    for answer in complete(tiny, stream=True, **params) if stream else [complete(tiny, **params)]:
        (choice,) = answer.choices
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            values += choice.logprobs.token_logprobs
            tops += choice.logprobs.top_logprobs
            offsets += choice.logprobs.text_offset
    prompt = tiny.tokenizer.encode(PROMPT)
    ids = ids_of(tiny, tokens)
    if echo:
        assert text.startswith(PROMPT) and ids[: len(prompt)] == prompt
        assert values[0] is None and tops[0] is None
        check_values(tiny, prompt[:1], ids[1:], values[1:])
        values, tops, ids = values[len(prompt) :], tops[len(prompt) :], ids[len(prompt) :]
    rows = check_values(tiny, prompt, ids, values)
    assert len(ids) == 20 == len(tops)
    for row, top, token, value in zip(rows, tops, tokens[-20:], values, strict=True):
        assert 3 <= len(top) <= 4 and top[token] == value
        assert sorted(top.values())[-3:] == pytest.approx(np.sort(row)[-3:].tolist(), abs=1e-4)
    assert [text[start : start + len(token)] for start, token in zip(offsets, tokens, strict=True)] == tokens


def test_echo(tiny: Served) -> None:
    assert text_of(tiny, echo=True) == PROMPT + text_of(tiny)
    assert text_of(tiny, prompt=byte_ids(PROMPT), echo=True).startswith(PROMPT)
    only = complete(tiny, echo=True, max_tokens=0, logprobs=1)
    assert only.choices[0].text == PROMPT
    assert only.usage.completion_tokens == 0 and only.choices[0].finish_reason == "length"
    assert len(only.choices[0].logprobs.tokens) == len(tiny.tokenizer.encode(PROMPT))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(tiny: Served, stream: bool) -> None:
    params: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    params["extra_body"] = {"ignore_eos": True}
    create = tiny.client().chat.completions.create
    if stream:
        chunks = list(create(model=MODEL, messages=USER, stream=True, **params))
        content = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    else:
        (choice,) = create(model=MODEL, messages=USER, **params).choices
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
    prompt = tiny.tokenizer.apply_chat_template(USER)
    data = [bytes(entry.bytes or ()) for entry in content]
    by_bytes = {tiny.tokenizer.token_bytes(i): i for i in range(EOS + 1)}
    rows = check_values(tiny, prompt, [by_bytes[each] for each in data], [entry.logprob for entry in content])
    assert len(content) == 20
    for entry, row in zip(content, rows, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(np.sort(row)[::-1][:2].tolist(), abs=1e-4)
        assert entry.token == entry.top_logprobs[0].token


def test_prompt_logprobs(tiny: Served) -> None:
    (choice,) = complete(tiny, prompt_logprobs=1).choices
    found = choice.prompt_logprobs
    prompt = tiny.tokenizer.encode(PROMPT)
    rows = log_softmax(reference_logits(tiny_reference(), prompt[:-1]))
    assert len(found) == len(prompt) and found[0] is None
    for entry, token, row in zip(found[1:], prompt[1:], rows, strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(row[token], abs=1e-4)
        best = min(entry.values(), key=lambda each: each["rank"])
        assert best["rank"] == 1 and best["logprob"] == pytest.approx(row.max(), abs=1e-4)
    answer = tiny.post("/v1/chat/completions", {"messages": USER, "max_tokens": 2, "prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    refused = tiny.post("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


# --- what may be generated ----------------------------------------------------------------------------------

A = {"97": 100}


def test_logit_bias_and_allowed_tokens(tiny: Served) -> None:
    assert text_of(tiny, logit_bias=A) == "a" * 10
    assert re.fullmatch("[xyz]{10}", text_of(tiny, allowed_token_ids=byte_ids("xyz")))


def test_penalties(tiny: Served) -> None:
    # too far apart for the model's own logits to change the order, but not for penalties
    bias = {"97": 100.0, "98": 80.0}
    plain = text_of(tiny, logit_bias=bias)
    assert plain == "a" * 10
    assert text_of(tiny, logit_bias=bias, presence_penalty=-2) == plain
    assert "b" in text_of(tiny, logit_bias=bias, frequency_penalty=2, max_tokens=40)
    assert text_of(tiny, logit_bias=bias, repetition_penalty=10).startswith("ab")


def test_bad_words(tiny: Served) -> None:
    assert text_of(tiny, logit_bias={"97": 100, "98": 99}, bad_words=["a"]) == "b" * 10


def test_min_tokens_and_stops(tiny: Served) -> None:
    bias = {str(EOS): 100}
    assert complete(tiny, logit_bias=bias).usage.completion_tokens == 1
    answer = complete(tiny, logit_bias=bias, min_tokens=5)
    assert answer.usage.completion_tokens == 6 and answer.choices[0].finish_reason == "stop"
    assert text_of(tiny, logit_bias=A, stop="aa", include_stop_str_in_output=True) == "aa"
    assert text_of(tiny, logit_bias=A, stop="aa") == ""
    assert text_of(tiny, logit_bias=A, stop_token_ids=[97]) == ""
    assert text_of(tiny, logit_bias=A, stop_token_ids=[97], include_stop_str_in_output=True) == "a"
    assert text_of(tiny, logit_bias=bias, ignore_eos=True, skip_special_tokens=False) == "<|im_end|>" * 10
    assert text_of(tiny, logit_bias=bias, ignore_eos=True) == ""


def test_truncated_prompt(tiny: Served) -> None:
    answer = complete(tiny, prompt=byte_ids("0123456789"), truncate_prompt_tokens=4, echo=True)
    assert answer.choices[0].text.startswith("6789") and answer.usage.prompt_tokens == 4
    assert complete(tiny, prompt=byte_ids("x" * 1000), truncate_prompt_tokens=-1).usage.total_tokens == 512


def test_priority_and_salt(tiny: Served) -> None:
    prompt = byte_ids("a prompt of more than two blocks of eight tokens")
    first = complete(tiny, prompt=prompt, cache_salt="x", priority=3)
    again = complete(tiny, prompt=prompt, cache_salt="x", priority=-3)
    other = complete(tiny, prompt=prompt, cache_salt="y")
    cached = [each.usage.prompt_tokens_details.cached_tokens for each in (first, again, other)]
    assert cached[0] == 0 == cached[2] and cached[1] > 0


# --- structured output --------------------------------------------------------------------------------------


def test_structured_outputs(tiny: Served) -> None:
    for seed in range(3):
        params: dict[str, Any] = {"temperature": 1, "seed": seed, "max_tokens": 100}
        assert re.fullmatch("[0-9]{4}", text_of(tiny, structured_outputs={"regex": "[0-9]{4}"}, **params))
        assert text_of(tiny, structured_outputs={"choice": ["yes", "no"]}, **params) in ("yes", "no")
        grammar = 'start: "(" start ")" | "x"'
        assert re.fullmatch(r"\(*x\)*", text_of(tiny, structured_outputs={"grammar": grammar}, **params))
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        assert json.loads(text_of(tiny, structured_outputs={"json": schema}, **params)) in ({"a": True}, {"a": False})


@pytest.mark.parametrize("stream", [False, True])
def test_response_format(tiny: Served, stream: bool) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}
    formats: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "three", "schema": schema, "strict": True}},
        {"type": "text"},
    ]
    create = tiny.client().chat.completions.create
    texts = []
    for response_format in formats:
        answer: Any = create(
            model=MODEL, messages=USER, seed=1, max_tokens=150, response_format=response_format, stream=stream
        )
        if stream:
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in answer))
        else:
            texts.append(answer.choices[0].message.content)
    assert len(json.loads(texts[0])) == 3
    body = {"messages": USER, "response_format": {"type": "json_object"}, "seed": 5, "max_tokens": 200}
    choice = tiny.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


# --- templates ----------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if shout %}!{{ shout }}{% endif %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
)


def test_template_parameters() -> None:
    with serve(echo, tokenizer=tiny_tokenizer(TEMPLATE)) as served:
        create = served.client().chat.completions.create
        kwargs = {"chat_template_kwargs": {"shout": "hey"}}
        for effort, extra, text in ((None, {}, "hi"), ("low", kwargs, "hi!hey[low]")):
            told = create(model=MODEL, messages=USER, max_tokens=50, reasoning_effort=effort, extra_body=extra)
            assert told.choices[0].message.content == text


def test_an_effort_that_the_template_has_no_setting_for_is_ignored_and_noted(caplog: pytest.LogCaptureFixture) -> None:
    with serve(echo, tokenizer=tiny_tokenizer("{{ messages[0]['content'] }}")) as served:
        for effort in ("none", "high", "low"):
            body = {"messages": USER, "max_tokens": 50, "reasoning_effort": effort}
            response = served.post("/v1/chat/completions", body)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["message"]["content"] == "hi"
        body = {"input": "hi", "reasoning": {"effort": "high"}}
        assert served.post("/v1/responses", body).status_code == 200
    notes = [message for message in caplog.messages if "reasoning_effort" in message]
    assert notes == ["ignoring reasoning_effort: the model's chat template has no such setting"]


RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
# 40 tokens, one per byte, because no merge applies. Blocks of the fake engine hold 8 tokens.
DIGITS = "0123456789" * 4


PROMPTS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}


def cached_tokens(served: Served, **body: object) -> int:
    completion = served.client().completions.create(model=MODEL, prompt=DIGITS, max_tokens=3, extra_body=body)
    assert completion.usage is not None and completion.usage.prompt_tokens == 40
    return completion.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]


def test_usage_reports_cached_prompt_tokens() -> None:
    with serve() as served:
        assert cached_tokens(served) == 0
        assert cached_tokens(served) == 32, "all full blocks but the last: one token is always computed"
        stream = served.client().completions.create(
            model=MODEL, prompt=DIGITS, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage for chunk in stream if chunk.usage is not None][-1]
        assert usage.prompt_tokens_details.cached_tokens == 32  # type: ignore[union-attr]

    with serve() as served:
        messages: list[dict[str, str]] = [{"role": "user", "content": DIGITS}]
        cached = []
        for _ in range(3):
            answer = served.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=20)  # type: ignore[arg-type]
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "and?"})
        assert cached[0] == 0 and 40 < cached[1] < cached[2]


def test_options_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(config=fake_config(scheduling_policy="priority")) as served:
        scheduler = served.core.scheduler
        seen: list[tuple[RequestOptions, str]] = []
        add = scheduler.add_request
        monkeypatch.setattr(scheduler, "add_request", lambda r: (add(r), seen.append((r.options, r.cache_salt))))
        kv = [{"kv_transfer_params": {f"do_remote_{what}": True}} for what in ("prefill", "decode")]
        for given in ({"priority": -7, "cache_salt": "s"}, *kv):
            served.client().completions.create(model=MODEL, prompt="a", extra_body=given)
        options = (
            RequestOptions(priority=-7),
            RequestOptions(do_remote_prefill=True),
            RequestOptions(do_remote_decode=True),
        )
        assert [one for one, _ in seen] == list(options) and seen[0][1] == "s"
        for field in ("priority", "cache_salt"):
            response = served.post("/v1/completions", {"prompt": "a", field: [1]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("role", "asked", "told"), [
    ("kv_producer", None, True),
    ("kv_producer", {"do_remote_decode": True}, True),
    ("kv_both", {"do_remote_decode": True}, True),
    ("kv_both", None, False),
    ("kv_consumer", {"do_remote_decode": True}, False),
    (None, {"do_remote_decode": True}, False),
])  # fmt: skip
def test_only_responses_of_kv_producers_have_kv_transfer_params(
    role: str | None, asked: dict[str, bool] | None, told: bool
) -> None:
    with serve(config=replace(fake_config(), kv_role=role)) as served:
        options = {} if asked is None else {"kv_transfer_params": asked}
        for path, prompt in PROMPTS.items():
            answer = served.post(path, {**prompt, **options, "max_tokens": 1}).json()
            assert answer["choices"]
            wanted = {"kv_transfer_params": {"do_remote_prefill": True}} if told else {}
            assert {key: answer[key] for key in answer if key == "kv_transfer_params"} == wanted


def test_omitted_sampling_parameters_use_checkpoint_recommendations() -> None:
    """Without a recommendation, the defaults are OpenAI's."""
    config = fake_config()
    told = replace(config, model=replace(config.model, default_sampling=RECOMMENDED))
    openais = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for asked_of, expected in ((config, openais), (told, RECOMMENDED)):
        with serve(config=asked_of) as served:
            for path, prompt in PROMPTS.items():
                # Neutral values count as explicit.
                for given in ({}, {"temperature": 1.0, "top_k": 0}):
                    assert served.post(path, {"max_tokens": 2, **prompt, **given}).status_code == 200
                    seen = served.runner.seen_params[-1]
                    assert {name: getattr(seen, name) for name in expected} == expected | given

"""Large bodies are parsed like small ones, within limits, outside the event loop. `hostile` measures the delays."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from metal_engine.engine.preparer import RequestPreparer
from metal_engine.json_values import parts
from metal_engine.sampling_params import SamplingParams
from metal_engine.server import large_bodies
from metal_engine.server.anthropic.protocol import MessagesBody
from metal_engine.server.large_bodies import (
    MAX_CONTAINERS,
    MAX_MEMBERS,
    MAX_STRINGS,
    MAX_TEXT_BYTES,
    MAX_VALUES,
    ContentLimits,
    TooComplexError,
)
from metal_engine.server.openai.responses_protocol import ResponsesBody
from metal_engine.server.protocol import ChatCompletionBody, CompletionBody
from metal_engine.server.tokenization import DetokenizeBody, TokenizeBody
from tests.support.serving import Served
from tools.fixtures.fake_engine import byte_ids, generated

# --- reading ------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(st.integers()) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def _count(value: Any, kind: Callable[[Any], bool]) -> int:
    return sum(kind(one) for one in parts(value))


@given(VALUES, st.sampled_from([None, 0, 2]))
@settings(max_examples=20)
def test_content_is_counted(value: Any, indent: int | None) -> None:
    """A text may reach the limit of each kind. Quotes and brackets in strings are not counted."""
    text = json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    num_members = sum(len(one) for one in parts(value) if isinstance(one, dict))
    counts = {
        "MAX_CONTAINERS": _count(value, lambda one: isinstance(one, list | dict)),
        "MAX_MEMBERS": num_members,
        "MAX_STRINGS": _count(value, lambda one: isinstance(one, str)) - num_members,
    }
    for name, count in counts.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(large_bodies, name, count)
            ContentLimits().check(text)
            if count:
                patch.setattr(large_bodies, name, count - 1)
                with pytest.raises(TooComplexError):
                    ContentLimits().check(text)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_large_bodies_are_parsed_like_small_ones(encoding: str) -> None:
    value = {"text": '"[{,:\\' * 20_000 + "\N{GRINNING FACE}\u2222\u2c5b", "numbers": [-3, 0, 1.5] * 20_000}
    assert large_bodies.loads(json.dumps(value, ensure_ascii=False).encode(encoding)) == value


def test_json_beyond_the_memory_limits_is_rejected() -> None:
    members = ",".join(f'"{i}":1' for i in range(MAX_MEMBERS + 1))
    for text, problem in (
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", "arrays and objects"),
        (b"{" + members.encode() + b"}", "members"),
        (b"[" + b'"",' * MAX_STRINGS + b'""]', "strings"),
        (b"[" + b'"",' * (MAX_STRINGS + MAX_MEMBERS) + b'""]', "strings"),
        (b"[" + b"1.5," * MAX_VALUES + b"1]", "values"),
        (("\N{GRINNING FACE}" + "a" * (MAX_TEXT_BYTES // 4)).encode().join([b'"', b'"']), "beyond U\\+FFFF"),
        (b'"' + b"\\ud83d\\ude00" + b"a" * (MAX_TEXT_BYTES // 4) + b'"', "beyond U\\+FFFF"),
        (b'"' + b"\\u4e2d" + b"a" * (MAX_TEXT_BYTES // 2) + b'"', "beyond U\\+00FF"),
    ):
        with pytest.raises(TooComplexError, match=problem):
            large_bodies.loads(text)


def test_validation_in_pieces_gives_the_same_values_and_errors() -> None:
    ids = list(range(100_000))
    assert CompletionBody(prompt=ids).prompt == ids
    nested = [[i, i + 1] for i in range(50_000)]
    assert CompletionBody(prompt=nested).prompt == nested
    messages: list[Any] = [{"role": "user", "content": str(i)} for i in range(10_000)]
    assert [m.content for m in ChatCompletionBody(messages=messages).messages[::999]] == [
        str(i) for i in range(0, 10_000, 999)
    ]
    messages[7_777] = {"role": "nobody"}
    with pytest.raises(ValidationError) as caught:
        ChatCompletionBody(messages=messages)
    (error,) = caught.value.errors()
    assert error["loc"] == ("messages", 7_777, "role")
    with pytest.raises(ValidationError) as caught:
        CompletionBody(prompt="a", allowed_token_ids=[*ids, "b"])
    (error,) = caught.value.errors()
    assert error["loc"] == ("allowed_token_ids", 100_000)


def test_half_a_surrogate_pair_is_not_valid_unicode() -> None:
    assert large_bodies.loads(b'["\\ud83d\\ude00"]') == ["\N{GRINNING FACE}"]
    for text in (b'["\\ud83d"]', b'["\\uDE00"]', b'["\xed\xa0\xbd"]'):
        with pytest.raises(UnicodeError):
            large_bodies.loads(text)


@pytest.mark.parametrize(("model", "body"), [
    (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(10_000)), "x")}),
    (CompletionBody, {"prompt": [0.5] * 10_000}),
    (CompletionBody, {"prompt": "a", "stop": [0] * 10_000}),
    (ChatCompletionBody, {"messages": [0] * 10_000}),
    (ChatCompletionBody, {"messages": [{"role": "user", "content": [0] * 10_000}]}),
    (ChatCompletionBody, {"messages": [{"role": "user", "tool_calls": [0] * 10_000}]}),
    (ChatCompletionBody, {"messages": [{"role": "user"}], "tools": [0] * 10_000}),
    (ResponsesBody, {"input": [0] * 10_000}),
    (ResponsesBody, {"input": "a", "metadata": dict.fromkeys(map(str, range(10_000)), 0)}),
    (ResponsesBody, {"input": "a", "tools": [0] * 10_000, "include": [0] * 10_000}),
    (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [0] * 10_000, "system": [0] * 10_000}),
    (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [0] * 10_000}]}),
    (TokenizeBody, {"messages": [0] * 10_000}),
    (DetokenizeBody, {"tokens": ["a"] * 10_000}),
])  # fmt: skip
def test_a_field_with_many_invalid_items_gives_few_errors(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 5  # one error for each type that a field accepts


# --- serving ------------------------------------------------------------------------------------------------


def test_a_request_is_checked_once_and_not_in_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check, prepare = SamplingParams.__post_init__, RequestPreparer.prepare_all

    def counted_check(self: SamplingParams) -> None:
        checked.append(threading.current_thread().name)
        check(self)

    def counted_prepare(self: RequestPreparer, *args: Any) -> Any:
        prepared.append(threading.current_thread().name)
        return prepare(self, *args)

    prepared: list[str] = []
    monkeypatch.setattr(SamplingParams, "__post_init__", counted_check)
    monkeypatch.setattr(RequestPreparer, "prepare_all", counted_prepare)
    body = {"prompt": ["a", "b"], "n": 5, "temperature": 1, "max_tokens": 2, "allowed_token_ids": list(range(200))}
    assert served.post("/v1/completions", body).status_code == 200
    assert len(checked) == len(prepared) == 1
    assert {*checked, *prepared}.isdisjoint({"server", "engine", "MainThread"})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_large_body_is_answered_like_a_small_one(served: Served, path: str) -> None:
    text = "abc"
    prompt = {"prompt": text} if path.endswith("v1/completions") else {"messages": [{"role": "user", "content": text}]}
    filler = {"metadata": {"a": [0] * 40_000}}
    small = served.post(path, {**prompt, "max_tokens": 5}).json()
    large = served.post(path, {**prompt, "max_tokens": 5, **filler}).json()
    assert small["choices"] == large["choices"] and small["usage"]["completion_tokens"] == 5
    if "prompt" in prompt:
        assert byte_ids(large["choices"][0]["text"]) == generated(byte_ids(text), 5)


@pytest.mark.parametrize(("body", "message"), [
    (b'{"prompt": [' + b"1," * 40_000, "not valid JSON"),
    (b'{"prompt": [' + b"1," * 40_000 + b"NaN]}", "NaN is not a JSON number"),
    (b'{"prompt": [' + b"1," * 40_000 + b"9" * 5_000 + b"]}", "too many digits"),
    (b'{"prompt": "\\ud800", "a": [' + b"1," * 40_000 + b"1]}", "not valid Unicode"),
    (b'{"prompt": ' + b"[" * 30_000 + b"1," * 40_000, "nested too deeply"),
    (b'{"prompt": [' + b"[]," * MAX_CONTAINERS + b"1]}", "arrays and objects"),
    (b"[" + b"1," * 40_000 + b"1]", "must be a JSON object"),
], ids=range(7))  # fmt: skip
def test_broken_large_bodies(served: Served, body: bytes, message: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.server.port)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert message in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_texts_of_json_in_one_body_count_together() -> None:
    """Each text is small, but its parsed value takes thirty times its bytes."""
    text = "[" + "{}," * 10_000 + "{}]"
    limits = ContentLimits()
    with pytest.raises(TooComplexError, match="arrays and objects"):
        for _ in range(30):
            assert len(limits.loads(text)) == 10_001
    limits = ContentLimits()
    for i in range(1000):
        assert limits.loads(json.dumps({"path": "a" * 1000, "i": i})) == {"path": "a" * 1000, "i": i}

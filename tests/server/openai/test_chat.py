"""/v1/chat/completions, driven by the official client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.serving import MODEL, Served, serve
from tools.fixtures.fake_engine import byte_ids, echo, fake_config, generated, tiny_tokenizer

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


def expected_text(served: Served, messages: list[dict[str, str]], num_tokens: int) -> str:
    return "".join(map(chr, generated(served.tokenizer.apply_chat_template(messages), num_tokens)))


@pytest.mark.parametrize(("messages", "given"), CONVERSATIONS)
def test_chat(served: Served, messages: Any, given: list[dict[str, str]]) -> None:
    """The newer name of the limit wins."""
    create = served.client().chat.completions.create
    completion = create(model=MODEL, messages=messages, max_tokens=50, max_completion_tokens=25)
    text, num_prompt_tokens = expected_text(served, given, 25), len(served.tokenizer.apply_chat_template(given))
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
        messages: Any = [{"role": "user", "content": "hi"}]
        completion = served.client().chat.completions.create(model=MODEL, messages=messages)
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
        text = served.post("/v1/completions", {"prompt": byte_ids("ab")}).json()["choices"][0]["text"]
        assert text == "ab"


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

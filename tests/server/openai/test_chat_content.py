"""Chat content in the forms that clients send, with a real model's template and with a custom template."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.errors import ConfigError
from metal_engine.server.logs import Notices
from metal_engine.server.openai.chat import ChatEndpoint
from metal_engine.server.protocol import ChatCompletionBody
from metal_engine.text.chat_template_file import read_chat_template
from metal_engine.text.tokenizer import Tokenizer

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"

CASES: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"role": "user", "content": "hi"}], {}, f"{SYSTEM}<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        {},
        f"{SYSTEM}<|im_start|>user\na\nb<|im_end|>\n{ASSISTANT}",
    ),
    (
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        {},
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}",
    ),
    (
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "now"}}]},
            {"role": "tool", "content": "noon", "tool_call_id": "1"},
        ],
        {},
        # The template supports neither calls nor results, so they are written as text.
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\ntime?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n{ASSISTANT}",
    ),
    (
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}],
        {"continue_final_message": True},
        f"{SYSTEM}<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}Well, ",
    ),
    (
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}],
        {"add_generation_prompt": False},
        f"{SYSTEM}<|im_start|>user\nhi<|im_end|>\n{ASSISTANT}Well<|im_end|>\n",
    ),
]


@pytest.mark.parametrize(("messages", "fields", "text"), CASES)
def test_the_demo_models_template(demo_tokenizer: Tokenizer, messages: Any, fields: dict[str, Any], text: str) -> None:
    body = ChatCompletionBody(messages=messages, **fields)
    served = SimpleNamespace(
        answer_format=AnswerFormat(), auto_tool_choice=True, tool_grammar="auto", notices=Notices()
    )
    (ids,) = ChatEndpoint(served).tokenize(body, demo_tokenizer)
    assert demo_tokenizer.decode(ids) == text
    assert ids == demo_tokenizer.encode(text, add_special_tokens=False)


def test_a_template_from_a_file_or_as_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_chat_template(str(file)) == file.read_text()
    assert read_chat_template("{{ messages[0].content }}") == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no/such/file.jinja", "cannot read --chat-template no/such/file.jinja: No such file"),
        (".", "cannot read --chat-template"),
        ("{% for m in messages %}", "--chat-template is not valid Jinja: line 1"),
    ],
)
def test_templates_that_cannot_be_used(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as info:
        read_chat_template(given)
    assert message in str(info.value)

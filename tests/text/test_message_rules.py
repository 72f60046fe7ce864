"""Message rules of chat templates, and contents with images in the form that templates accept."""

from __future__ import annotations

from typing import Any

import pytest

from metal_engine.server.openai import template_messages
from metal_engine.server.openai.message_order import in_accepted_order
from metal_engine.server.protocol import ContentPart
from metal_engine.text import content_parts
from metal_engine.text.content_parts import IMAGE, joined, text_part, without_images
from metal_engine.text.message_rules import MessageRules
from tests.support.chat_templates import GEMMA, LLAMA, QWEN
from tests.support.image_serving import IMAGE as IMAGE_ID
from tests.support.image_serving import TEMPLATE, seeing_tokenizer
from tools.fixtures.fake_engine import CHAT_TEMPLATE, tiny_tokenizer

SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
) + CHAT_TEMPLATE
# As in the templates of Mistral and Gemma.
ALTERNATING = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
) + CHAT_TEMPLATE
# As in gpt-oss's template: messages are dropped if they are not first and have an unknown role.
LEAVES_OUT = (
    "{% for m in messages %}{% if loop.first or m.role in ['user', 'assistant', 'tool'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
# As in templates that collect all system messages in one block.
SYSTEM_TO_FRONT = (
    "<|im_start|>system\n{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}<|im_end|>\n"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
# As in gpt-oss's template.
CONTENT_OR_THINKING = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.thinking }}|{{ m.content }}<|im_end|>\n{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + LEAVES_OUT


@pytest.mark.parametrize(("template", "again", "later", "user"), [
    (CHAT_TEMPLATE, True, True, True),
    (QWEN, True, True, True),
    (LLAMA, True, True, True),
    (GEMMA, True, True, True),
    (SYSTEM_FIRST, False, False, True),
    (ALTERNATING, False, True, False),
    (LEAVES_OUT, False, False, True),
    (SYSTEM_TO_FRONT, True, False, True),
    (NO_SYSTEM, False, False, True),
    (None, False, False, False),
])  # fmt: skip
def test_rules(template: str | None, again: bool, later: bool, user: bool) -> None:
    rules = tiny_tokenizer(template).message_rules
    assert (rules.takes_system_again, rules.takes_system_later, rules.takes_user_again) == (again, later, user)


def test_later_system_messages_leave_the_prefix_alone() -> None:
    """A prompt with a later system message starts with the previous turn's prompt."""
    tokenizer = tiny_tokenizer(SYSTEM_TO_FRONT)
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "system", "content": "Reminder."},
        {"role": "user", "content": "more"},
    ]
    prompts = [
        tokenizer.apply_chat_template(in_accepted_order(turns[:count], tokenizer.message_rules)) for count in (2, 5)
    ]
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_a_template_is_tried_once() -> None:
    """The template is tried only once for all copies of the tokenizer, and not before first use."""
    tokenizer = tiny_tokenizer(SYSTEM_FIRST)
    assert tokenizer.limited(100).message_rules is tokenizer.message_rules
    tried = []
    rules = MessageRules(lambda messages: tried.append(messages) or "")  # type: ignore[func-returns-value]
    assert not tried
    assert not rules.takes_user_again and not rules.takes_user_again
    assert len(tried) == 1


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_content_before_tool_calls_joins_reasoning_if_only_one_is_rendered(name: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": "Let me look.", name: "So."}

    def rendered(template: str, message: dict[str, Any]) -> str:
        tokenizer = tiny_tokenizer(template)
        messages = [{"role": "user", "content": "hi"}, message]
        return tokenizer.decode(tokenizer.apply_chat_template(messages)).partition("assistant\n")[2]

    assert rendered(CONTENT_OR_THINKING, {**said, "tool_calls": [call]}).startswith("So.\n\nLet me look.|<|im_end|>")
    assert rendered(CONTENT_OR_THINKING, said).startswith("So.|Let me look.<|im_end|>")
    without = {"role": "assistant", "content": "Let me look.", "tool_calls": [call]}
    assert rendered(CONTENT_OR_THINKING, without).startswith("|Let me look.<|im_end|>")
    takes_both = CONTENT_OR_THINKING.replace("m.content and m.thinking", "false")
    assert rendered(takes_both, {**said, "tool_calls": [call]}).startswith("So.|Let me look.<|im_end|>")
    parts = [{"type": "text", "text": "Let me look."}]
    assert "So.|" in rendered(takes_both, {**said, "content": parts, "tool_calls": [call]})


# As in Mistral's templates.
SHORT_IDS = (
    "{% for m in messages %}{% set ids = [m.tool_call_id] if m.tool_call_id else m.tool_calls | map(attribute='id') %}"
    "{% for id in ids %}{% if id | length != 9 %}{{ raise_exception('ids should have length 9') }}{% endif %}{{ id }} "
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("template", "expected"), [
    (SHORT_IDS, ["c557a85a0", "abcDEF123", "c557a85a0", "abcDEF123"]),
    (SHORT_IDS.replace("id | length != 9", "false"), ["call_0", "abcDEF123", "call_0", "abcDEF123"]),
])  # fmt: skip
def test_ids_of_calls_are_short_if_the_template_requires_it(template: str, expected: list[str]) -> None:
    calls = [{"id": one, "function": {"name": "f", "arguments": {}}} for one in ("call_0", "abcDEF123")]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    tokenizer = tiny_tokenizer(template)
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)).split() == expected


# As in SmolVLM's template: a content that is a text is read as a list, so nothing is written.
PARTS_ONLY = (
    "{% for m in messages %}{{ m['role'] }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|image_pad|>{% endif %}{% endfor %} {% endfor %}"
)


def test_contents_are_joined() -> None:
    assert joined(["a", "b"], "\n") == "a\nb"
    assert joined(["a", [IMAGE, text_part("b")], "c"], "\n") == [text_part("a\n"), IMAGE, text_part("b\nc")]
    assert joined([[IMAGE], [IMAGE]], "") == [IMAGE, IMAGE]


def test_many_texts_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of copied characters grows linearly with the number of texts."""
    lengths: list[int] = []

    def counted(text: str) -> content_parts.Part:
        lengths.append(len(text))
        return text_part(text)

    for module in (content_parts, template_messages):
        monkeypatch.setattr(module, "text_part", counted)
    joined([[IMAGE], *["a"] * 100], "")
    template_messages._content(0, [ContentPart(type="text", text="a")] * 100)
    assert sum(lengths) < 1000


def test_without_images_separates_text_and_images() -> None:
    assert without_images("a") == ("a", [])
    assert without_images([text_part("a"), IMAGE, text_part("b")]) == ("ab", [IMAGE])


def test_templates_that_need_parts_get_parts() -> None:
    tokenizer = seeing_tokenizer(PARTS_ONLY)
    assert tokenizer.message_rules.needs_parts
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": [IMAGE, text_part("see")]}]
    ids = tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(ids) == "system: brief user:<|image_pad|>see " and ids.count(IMAGE_ID) == 1


@pytest.mark.parametrize("template", [TEMPLATE, CHAT_TEMPLATE])
def test_other_templates_get_texts(template: str) -> None:
    assert not tiny_tokenizer(template).message_rules.needs_parts


def test_images_of_results_are_found_by_trial() -> None:
    assert seeing_tokenizer().message_rules.takes_tool_images
    assert not tiny_tokenizer(CHAT_TEMPLATE).message_rules.takes_tool_images  # writes the list as it is
    assert not seeing_tokenizer(TEMPLATE.replace("== 'image'", "== 'picture'")).message_rules.takes_tool_images


def test_messages_with_images_are_reordered() -> None:
    template = "{% for m in messages %}{% if loop.index > 1 and m.role == messages[loop.index0 - 1].role %}"
    template += "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    rules = tiny_tokenizer(template).message_rules
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [IMAGE, text_part("b")]}]
    assert in_accepted_order(messages, rules) == [
        {"role": "user", "content": [text_part("a\n\n"), IMAGE, text_part("b")]}
    ]

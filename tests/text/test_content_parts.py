"""Contents with images: joined, split, and given to templates in the form that they accept."""

from __future__ import annotations

import pytest

from metal_engine.server.openai.message_order import in_accepted_order
from metal_engine.text.content_parts import IMAGE, joined, text_part, without_images
from tests.support.image_serving import IMAGE as IMAGE_ID
from tests.support.image_serving import TEMPLATE, seeing_tokenizer
from tools.fixtures.fake_engine import CHAT_TEMPLATE, tiny_tokenizer

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


def test_images_are_taken_out() -> None:
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
    tokenizer = tiny_tokenizer(template)
    assert not tokenizer.message_rules.needs_parts


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

"""Chat templates of ``--chat-template``: from a file or as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from metal_engine.errors import ConfigError
from metal_engine.text.chat_template_file import read_chat_template


def test_a_template_from_a_file_or_as_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert read_chat_template(str(file)) == file.read_text()
    for text in ("{{ messages[0].content }}", "{% generation %}{{ messages[0].content }}{% endgeneration %}"):
        assert read_chat_template(text) == text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no/such/file.jinja", "cannot read --chat-template no/such/file.jinja: No such file"),
        ("~nosuchuser/x", "cannot read --chat-template ~nosuchuser/x: No such file or directory"),
        (".", "cannot read --chat-template"),
        ("{% for m in messages %}", "--chat-template is not valid Jinja: line 1"),
        ("{% if messages add_generation_prompt %}{% endif %}", "--chat-template is not valid Jinja: line 1"),
    ],
)
def test_templates_that_cannot_be_used(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as info:
        read_chat_template(given)
    assert message in str(info.value)

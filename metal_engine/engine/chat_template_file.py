"""The chat template that ``--chat-template`` names."""

from __future__ import annotations

from pathlib import Path

import jinja2

from metal_engine.errors import ConfigError


def read_chat_template(given: str) -> str:
    """The chat template that ``--chat-template`` names: the content of a file, or the Jinja text itself.

    Raises:
        ConfigError: it is neither, or no valid Jinja.
    """
    text = given
    if "{{" not in given and "{%" not in given:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ConfigError("--chat-template", f"cannot read --chat-template {given}: {reason}") from error
    try:
        # Extensions that templates of published models use.
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        if "generation" not in str(error):  # a tag of transformers' own
            raise ConfigError("--chat-template", f"is not valid Jinja: line {error.lineno}: {error.message}") from error
    return text

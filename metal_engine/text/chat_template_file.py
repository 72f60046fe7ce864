"""Reads the file that ``--chat-template`` names, and checks the limits of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import nodes

from metal_engine.errors import ConfigError
from metal_engine.local_paths import local_path
from metal_engine.text.template_sandbox import syntax_tree

# Limits on the characters of all chat templates of a tokenizer, and on the nodes of a template's syntax tree. Published
# templates reach at most a third of either limit. The compiler needs up to 10 KiB of memory for each node.
_MAX_SOURCE, _MAX_NODES = 1 << 17, 1 << 14


def read_chat_template(given: str) -> str:
    """Return the chat template that ``--chat-template`` names: the content of a file, or the Jinja text itself.

    Raises:
        ConfigError: the file cannot be read, or the template is invalid or too large.
    """
    text = given
    if "{{" not in given and "{%" not in given:
        try:
            text = local_path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ConfigError("--chat-template", f"cannot read --chat-template {given}: {reason}") from error
    try:
        check_templates({"default": text})
        # Extensions that templates of published models use.
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag 'generation'" not in str(error):  # a tag that only transformers defines
            raise ConfigError("--chat-template", f"is not valid Jinja: line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ConfigError("--chat-template", "is nested too deeply") from error
    except ValueError as error:
        raise ConfigError("--chat-template", f"cannot be used: {error}") from error
    return text


def check_templates(templates: Mapping[str, Any]) -> None:
    """Refuse chat templates that take long or much memory to compile.

    This accepts a template with a syntax error. Requests that need the template get that error.

    Args:
        templates: sources by name.

    Raises:
        ValueError: the templates are too large, a template is nested too deeply, or a template is not a text.
    """
    if not all(isinstance(source, str) for source in templates.values()):
        raise ValueError("the chat template is not a text")
    if sum(map(len, templates.values())) > _MAX_SOURCE:
        raise ValueError(f"the chat template has more than {_MAX_SOURCE:,} characters")
    for source in templates.values():
        try:
            num_nodes = sum(1 for _ in syntax_tree(source).find_all(nodes.Node))
        except RecursionError as error:
            raise ValueError("the chat template is nested too deeply") from error
        except (jinja2.TemplateError, ValueError):  # ValueError: a number of more digits than Python reads
            continue
        if num_nodes > _MAX_NODES:
            raise ValueError(f"the chat template has {num_nodes:,} expressions and statements, {_MAX_NODES:,} at most")

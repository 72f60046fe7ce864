"""Renders conversations to text with the model's chat template, as ``transformers`` does, with a limit on the work."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from metal_engine.cancellation import Cancelled
from metal_engine.text.template_budget import STEP, Budget, TemplateBudgetError, spending
from metal_engine.text.template_sandbox import BoundedEnvironment, syntax_tree

# Work limit of a rendering: a constant of some seconds, plus an amount proportional to the size of the messages.
# Templates read a text about ten times.
_WORK = 1 << 28
_WORK_PER_SIZE = 64

# Field names of a message's reasoning. Each template reads one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Tag appended to the last message if the model must continue that message.
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "

# Reserved names, which template variables cannot have because Jinja or the sandbox defines them.
RESERVED_NAMES = frozenset(
    {"self", "loop", "caller", "super", "varargs", "kwargs", "range", "dict", "cycler", "joiner", "namespace"}
    | {"raise_exception", "strftime_now", "lipsum"}
)

# Variables of templates that turn reasoning on or off. Most templates have only one.
REASONING_SWITCHES = ("enable_thinking", "thinking")

Message = dict[str, Any]


class RenderedTooLongError(ValueError):
    """Raised if a rendered text has more than ``max_chars`` characters (see :func:`render`)."""


def render(
    hf_tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    variables: dict[str, Any],
    max_chars: int | None = None,
) -> str:
    """Render a conversation with the model's chat template. Return the text of the prompt.

    Args:
        messages: plain data from :func:`plain_messages`.
        variables: other variables of the template, as plain data. The template does not get
            ``continue_final_message``. If it is True, the prompt ends with the content of the last message. If it is
            the name of a field, the prompt ends with that field of the last message.
        max_chars: maximum length of the rendered text in characters; None: no limit.

    Raises:
        ValueError: the template is invalid, refuses the messages, or takes too long for them.
        RenderedTooLongError: the text is longer than ``max_chars``.
        Cancelled: the request was cancelled.
    """
    variables = dict(variables)
    continued = variables.pop("continue_final_message", False)
    try:
        source = hf_tokenizer.get_chat_template(None, variables.get("tools"))
        budget = Budget(_WORK + _WORK_PER_SIZE * _size([messages, variables]))
        with spending(budget):
            template = compiled(source)
            final = None
            if continued:
                messages, final = _to_continue(messages, continued, variables, source)
            given = {**hf_tokenizer.special_tokens_map, "documents": None, "tools": None, **variables}
            text = _written(template, {**given, "messages": messages}, max_chars)
            return text if final is None else _cut(text, final)
    except (Cancelled, RenderedTooLongError):
        raise
    except TemplateBudgetError as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        raise ValueError(f"the chat template refused the messages: {error}") from error


def _written(template: jinja2.Template, variables: dict[str, Any], max_chars: int | None) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if max_chars is not None and length > max_chars:
            raise RenderedTooLongError
        pieces.append(piece)
    return template.environment.concat(pieces)


_compiling = threading.Lock()


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return BoundedEnvironment().from_string(source)


def compiled(source: str) -> jinja2.Template:
    """Compile a template, or return it from the cache. Compiling has its own work budget.

    Raises:
        TemplateBudgetError: compiling takes too long.
        jinja2.TemplateSyntaxError: the source is not a valid template.
    """
    with _compiling, spending(Budget(_WORK)):
        return _compiled(source)


def templates_of(hf_tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the sources of a tokenizer's chat templates by name."""
    template = hf_tokenizer.chat_template
    return template if isinstance(template, dict) else {"default": template or ""}


def texts_of_template(source: str) -> tuple[list[str], list[str]]:
    """Return two lists of texts in a template's source.

    The first list has all texts. The second list has the texts that the template may search for in its input: constants
    in comparisons, and in arguments of calls, filters and tests. Both lists are empty if the source cannot be parsed.
    """
    try:
        tree = syntax_tree(source)
    except (jinja2.TemplateError, ValueError):
        return [], []
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += _constants(tree)
    sought: list[str] = []
    for compare in tree.find_all(nodes.Compare):
        sought += [text for one in (compare.expr, *(operand.expr for operand in compare.ops)) for text in _own(one)]
    calls: Iterator[Any] = tree.find_all((nodes.Call, nodes.Filter, nodes.Test))
    sought += [text for call in calls for one in call.args or () for text in _own(one)]
    return texts, sought


def _own(node: nodes.Expr) -> list[str]:
    """Return the texts among the constants in a constant, list or tuple; empty for all other expressions."""
    listed = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return [one.value for one in listed if isinstance(one, nodes.Const) and isinstance(one.value, str)]


def _constants(tree: nodes.Node) -> list[str]:
    return [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


# --- input of a template -----------------------------------------------------------------------------


def plain_messages(messages: list[Any]) -> list[Message]:
    """Convert messages to the form that templates read.

    The result is plain data (see :func:`plain`), without fields that are None. The reasoning of a message may be in the
    field ``reasoning_content``, ``thinking`` or ``reasoning``. The result has it in ``reasoning_content`` and
    ``thinking``.

    Raises:
        ValueError: there are no messages, or a message is not a mapping.
    """
    if not messages:
        raise ValueError("a conversation needs at least one message")
    result = []
    for message in messages:
        given = plain(message)
        if not isinstance(given, dict):
            raise ValueError(f"a chat message must be a dictionary, not {type(message).__name__}")
        given = {key: value for key, value in given.items() if value is not None}
        reasoning = next((given[key] for key in _REASONING if key in given), None)
        if reasoning is not None:
            given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
        result.append(given)
    return result


def plain_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Convert template variables to plain data (see :func:`plain`). Functions among the tools become JSON schemas.

    Raises:
        Exception: a function has no docstring or no type hints. The types are those of ``transformers``.
    """
    tools = variables.get("tools")
    if tools is not None:
        tools = [get_json_schema(one) if inspect.isroutine(one) else one for one in tools]
        variables = {**variables, "tools": tools}
    return {name: plain(value) for name, value in variables.items()}


def plain(value: Any) -> Any:
    """Convert a value to plain data: JSON types only. Other objects could have methods that the sandbox does not check.

    Tuples stay tuples. A value of an unsupported type becomes the text ``<TypeName>``.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    for kind in (str, int, float):
        if isinstance(value, kind):  # for example an enum
            return kind(str.__str__(value) if kind is str else value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _size(value: Any) -> int:
    """Return the cost of reading a whole value, in the units of work of :class:`Budget`."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        total += STEP
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
    return total


# --- a last message to be continued -----------------------------------------------------------------------


def _to_continue(
    messages: list[Message], field: Any, variables: dict[str, Any], source: str
) -> tuple[list[Message], str]:
    """Append the tag ``_CONTINUE_HERE`` to the last message's text. Return the messages, and the text without the tag.

    The rendered text is later cut at the tag, so that the prompt ends with the message.

    Args:
        messages: messages as plain data. They stay unchanged.
        field: name of the field to continue; True for ``content``.
        variables: variables of the template.
        source: source of the chat template.

    Raises:
        ValueError: the last message has no text in the field, the template does not use the field, or a generation
            prompt is requested, too.
    """
    if variables.get("add_generation_prompt"):
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    field = field if isinstance(field, str) else "content"
    last = dict(messages[-1])
    text = last.get(field)
    if text is None:
        raise ValueError(f'the final message has no "{field}" to continue')
    fields = [name for name in _REASONING if last.get(name) == text] if field in _REASONING else [field]
    if not any(name in source for name in fields):
        raise ValueError(f'the chat template does not know a message\'s "{field}"')
    if isinstance(text, list | tuple):
        at = next((i for i in reversed(range(len(text))) if "text" in text[i]), None)
        if at is None:
            raise ValueError("the final message has no text to continue")
        part = text[at]
        last[field] = [*text[:at], {**part, "text": part["text"] + _CONTINUE_HERE}, *text[at + 1 :]]
        text = part["text"]
    else:
        last |= {name: last[name] + _CONTINUE_HERE for name in fields}
    return [*messages[:-1], last], text


def _cut(rendered: str, final: str) -> str:
    """Return the rendered text up to the tag ``_CONTINUE_HERE``.

    Args:
        rendered: text that the template has rendered.
        final: text of the last message.

    Raises:
        ValueError: ``rendered`` lacks the tag or ``final``.
    """
    at = rendered.rfind(_CONTINUE_HERE.strip())
    if at < 0 or final.strip() not in rendered:
        raise ValueError("the chat template leaves out the final message, so it cannot be continued")
    is_whole = rendered.startswith(_CONTINUE_HERE, at)
    # If the template trimmed the space at the end of the tag, it trims messages: trim the end of this message, too.
    return rendered[:at] if is_whole else rendered[:at].rstrip()

"""Sandbox in which chat templates run: jinja2's sandbox as ``transformers`` sets it up, with a budget per rendering.

A rendering is Python code that jinja2 generates. Every loop, call, filter, comparison and operator first spends its
cost: a fixed amount for the step, and the size of its inputs or result. No rendering, and no single C call in it, can
therefore take long or need much memory. The outcome depends only on the request, not on timing.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from metal_engine.text.template_budget import STEP, TemplateBudgetError, check_bits, current_budget, length
from metal_engine.text.template_growth import (
    FILTER_GROWTH,
    LINEAR_TEXT_METHODS,
    METHOD_GROWTH,
    dated,
    formatted,
    number,
    sum_of_numbers,
)

# Stand-ins: characters that may replace other characters during rendering (:mod:`metal_engine.text.control_tokens`).
# Hardly any text contains these symbols (Braille, Sutton's sign writing, Byzantine notes), and changing case, trimming
# and quoting do not alter them. Braille is first: the other symbols lie beyond U+FFFF, for which Python needs twice the
# memory.
_STAND_IN_RANGES = (range(0x2801, 0x2900), range(0x1D800, 0x1DA00), range(0x1D000, 0x1D0F6))
STAND_INS = "".join(chr(code) for codes in _STAND_IN_RANGES for code in codes)

# Filters and tests whose cost grows with the value and all its contents. The cost of all other filters and tests grows
# only with the number of items or characters of the value, or is fixed.
_DEEP = frozenset(
    {
        "capitalize", "center", "dictsort", "e", "escape", "forceescape", "format", "groupby", "indent", "join",
        "lower", "max", "min", "replace", "sort", "string", "striptags", "title", "tojson", "trim", "truncate",
        "unique", "upper", "urlencode", "wordcount", "wordwrap", "xmlattr",
        "in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">",
        "ge", ">=",
    }
)  # fmt: skip
# Filters that read neither the value nor its length.
_FREE = frozenset({"length", "count", "default", "d", "first", "last", "attr", "safe"})
# Arguments that jinja2 adds to calls inside loops and blocks, and removes before the call.
_OF_JINJA = ("_loop_vars", "_block_vars")
# Filters without a bound on their cost. Templates do not use them.
_LEFT_OUT_FILTERS = ("urlize", "pprint")


def _bounded(name: str, function: Callable[..., Any], growth: Callable[..., int] | None = None) -> Callable[..., Any]:
    """Return a filter or test that spends its cost and then calls ``function``.

    Args:
        name: name of the filter or test in templates.
        function: the filter or test.
        growth: takes the arguments of the filter. Returns the additional cost in characters
            (:mod:`metal_engine.text.template_growth`).
    """
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    is_deep, is_free = name in _DEEP, name in _FREE

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        listed = [list(_each(arg)) if isinstance(arg, Iterator) else arg for arg in args]
        budget.spend(STEP)
        if not is_free:
            pay = budget.read if is_deep else budget.glance
            for value in (*listed[first:], *kwargs.values()):
                pay(value)
        if growth is not None:
            budget.spend(4 * growth(*listed[first:], **kwargs))
        return _paid(function(*listed, **kwargs))

    return bounded


def _paid(result: Any) -> Any:
    """Return ``result``. First spend twice the length of a text, because escaping can write 12 characters for one."""
    if isinstance(result, str):
        current_budget().spend(2 * len(result))
    return result


def _each(items: Iterable[Any]) -> Iterator[Any]:
    budget = current_budget()
    for item in items:
        budget.spend(STEP)
        yield item


def _weighed(value: Any) -> Any:
    """Spend the cost of reading the whole value. Return the value."""
    current_budget().read(value)
    return value


def _glanced(value: Any) -> Any:
    """Spend the cost of copying or searching the value (:meth:`Budget.glance`). Return the value."""
    current_budget().glance(value)
    return value


def _concat(pieces: Iterable[str]) -> str:
    parts = list(_each(pieces))
    current_budget().spend(sum(map(len, parts)))
    return "".join(parts)


def _concatenated(values: list[Any]) -> str:
    """Return the result of Jinja's operator ``~``, which converts values to text and joins them."""
    current_budget().read(values)
    return "".join(map(str, values))


class _Counted(NodeTransformer):
    """Adds filters to a template's syntax tree. They spend the cost of native operations, such as loops and ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("_each", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("_concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        # A comparison with a constant reads at most the length of the constant. A search for a constant reads the whole
        # text.
        name = "_glanced" if any(isinstance(one, nodes.Const) for one in operands[:-1]) else "_weighed"
        if isinstance(operands[-1], nodes.Const) and len(operands) == 2 and node.ops[0].op not in ("in", "notin"):
            return node
        node.expr = _through(name, node.expr)
        for operand in node.ops:
            operand.expr = _through(name, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):  # other subscripts call getitem() of the environment
            node.node = _through("_glanced", node.node)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise jinja2.TemplateSyntaxError("autoescape is not for chat templates", node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _through("_weighed", node.key)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if len(node.items) < 2 else _through("_made", node)


def _through(name: str, node: Any) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _made(value: Any) -> Any:
    """Spend the cost of the memory of a list that the template has just created. Return the list.

    The cost of its contents is already spent.
    """
    current_budget().spend(STEP * len(value))
    return value


class _GenerationTag(Extension):
    """Support for ``{% generation %}``, which marks assistant text for training.

    Renders only the content of the tag.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


_SYNTAX: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [_GenerationTag, loopcontrols]}


def syntax_tree(source: str) -> nodes.Template:
    """Return the syntax tree of a template, without the operations that spend from a budget.

    Raises:
        jinja2.TemplateSyntaxError: the template is not valid.
        ValueError: a number has more digits than Python reads.
        RecursionError: the template is nested too deeply.
    """
    return jinja2.Environment(**_SYNTAX).parse(source)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja environment of ``transformers`` with a budget, from which every operation spends."""

    intercepted_binops = frozenset(SandboxedEnvironment.default_binop_table)
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(**_SYNTAX, finalize=_weighed, optimized=False)
        self.filters["tojson"] = to_json
        self.filters = {
            name: _bounded(name, cast(Callable[..., Any], function), FILTER_GROWTH.get(name))
            for name, function in self.filters.items()
            if name not in _LEFT_OUT_FILTERS
        }
        internal: tuple[Callable[..., Any], ...] = (_each, _weighed, _glanced, _concatenated, _made)
        self.filters |= {one.__name__: one for one in internal}
        self.tests = {name: _bounded(name, cast(Callable[..., Any], function)) for name, function in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": dict,
            "namespace": TemplateNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.spend(4 * STEP)
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(__obj, LoopContext):
            return super().call(__context, __obj, *(_each(arg) for arg in args))
        # Macros and methods of mappings do not read their arguments. Methods of texts and lists do.
        reads = isinstance(owner, str | bytes | list | tuple | LoopContext)
        budget.glance(owner)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Iterator) and owner is not None:
                raise jinja2.TemplateRuntimeError("a chat template cannot hand an iterator to a method")
            (budget.read if reads else budget.glance)(value)
        if isinstance(owner, list | tuple):
            budget.read(owner)
        name = getattr(method, "__name__", "")
        if owner is not None and name in METHOD_GROWTH:
            given = {key: value for key, value in kwargs.items() if key not in _OF_JINJA}
            budget.spend(4 * METHOD_GROWTH[name](owner, *args, **given))
        elif isinstance(owner, str | bytes) and name not in LINEAR_TEXT_METHODS:
            raise TemplateBudgetError(f"the chat template may not use {name!r} of a text")
        result = super().call(__context, __obj, *args, **kwargs)
        return _paid(result) if isinstance(owner, str) else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        is_escaped = isinstance(text, Markup)
        formatter = _EscapingFormatter(self, escape=text.escape) if is_escaped else _SpendingFormatter(self)

        @wraps(value)
        def bounded(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            current_budget().read(text)
            kind: type[str] = type(text)
            return kind(formatter.vformat(text, args, kwargs))

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget()
        budget.glance(left)
        budget.glance(right)
        if operator == "*":
            budget.spend(4 * STEP * (length(left) * number(right) + length(right) * number(left)))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        elif operator == "%":
            budget.spend(4 * formatted(left, right))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        current_budget().read(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        current_budget().spend(2 * STEP)
        return super().getattr(obj, attribute)


class _SpendingFormatter(SandboxedFormatter):
    """A formatter for ``str.format`` that spends the cost of each field, once the field's width is known."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        current_budget().read(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        budget = current_budget()
        budget.read(value)
        budget.spend(4 * (length(value) + len(format_spec) + sum_of_numbers(format_spec)))
        return super().format_field(value, format_spec)


class _EscapingFormatter(_SpendingFormatter, SandboxedEscapeFormatter):
    """Spending formatter for texts that are escaped for HTML."""


class TemplateNamespace(Namespace):
    """Namespace of a template. Refuses names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attrs = dict(*args, **kwargs)
        for name in attrs:
            _check_name(name)
        Namespace.__init__(self, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template cannot set {name!r} on a namespace")


def _strftime_now(format: str) -> str:
    current_budget().spend(dated(format))
    return datetime.datetime.now().strftime(format)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Convert a value to JSON, as the ``tojson`` filter of ``transformers`` does: without escaping for HTML.

    Stand-ins are not escaped even with ``ensure_ascii``, because they are later replaced by ASCII characters.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    text = "".join(encoder.iterencode(value))
    return _BEYOND_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


# Written as ranges: the regular expression would compare single characters one by one.
_BEYOND_ASCII = re.compile(f"[^\x00-\x7f{''.join(f'{chr(one[0])}-{chr(one[-1])}' for one in _STAND_IN_RANGES)}]+")

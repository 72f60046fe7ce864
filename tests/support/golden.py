"""Reads the cases in ``tests/answers/golden``: outputs of models, each with the answer that it must be parsed to.

Each file has the outputs of one format, after lines with the names of its tool call parsers and its reasoning parser::

    === name of the case [options]
    text of the output, as the model writes it
    --->
    content: "JSON string"
    reasoning: "JSON string"
    call: NAME {"argument": "value"}
    id: ID of the call before

Options: ``begun`` if the prompt opens the reasoning, ``past`` if the prompt also closes it, ``cut`` if the token limit
cuts the output off, ``free`` if the grammar of the format refuses the calls.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tool_formats import TOOLS, Call

FOLDER = Path(__file__).parents[1] / "answers" / "golden"
_HEAD = re.compile(r"(.+?)((?: \[\w+\])*)\n")


def _tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


_TEXT = {"type": "string"}
_STOP = {"type": "object", "properties": {"name": _TEXT, "minutes": {"type": "number"}}}
GOLDEN_TOOLS = [
    _tool("tide_table", ["port"], port=_TEXT, days={"type": "integer"}, metric={"type": "boolean"}),
    _tool(
        "save_note", ["path", "text"], path=_TEXT, text=_TEXT, tags={"type": "array", "items": _TEXT},
        pinned={"type": "boolean"},
    ),
    _tool(
        "plan_route", [], stops={"type": "array", "items": _STOP}, options={"type": "object"},
        start={"anyOf": [_TEXT, {"type": "null"}]}, factor={"type": "number"},
    ),
    {"type": "function", "function": {"name": "list_ports", "description": "A tool."}},
    *TOOLS,
]  # fmt: skip


@dataclass
class GoldenCase:
    """Output of a model, and its answer.

    Attributes:
        parser: name of the tool call parser.
        reasoning_parser: name of the reasoning parser.
        name: name of the case.
        options: options of the case.
        text: text of the output.
        content: content of the answer; None if it consists of calls only.
        reasoning: reasoning of the answer; None if there is none.
        calls: names and arguments of the calls.
        ids: ids that the model gave to calls, by the index of the call.
    """

    parser: str
    reasoning_parser: str
    name: str
    options: frozenset[str]
    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)
    ids: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.parser}: {self.name}"


def golden_cases() -> list[GoldenCase]:
    """Return the cases of all files."""
    return [case for path in sorted(FOLDER.glob("*.txt")) for case in _cases(path)]


def calling_cases() -> list[GoldenCase]:
    """Return one case of each parser: without reasoning, and with as many calls as any."""
    cases = [c for c in golden_cases() if c.calls and not c.options and c.reasoning is None and c.parser != "auto"]
    return list({c.parser: c for c in sorted(cases, key=lambda c: len(c.calls))}.values())


def _cases(path: Path) -> list[GoldenCase]:
    head, *sections = re.split(r"\n+^=== ", path.read_text().rstrip("\n"), flags=re.MULTILINE)
    named = dict(line.split(": ", 1) for line in head.split("\n")[1:])
    parsers = named["tools"].split()
    return [_case(parser, named["reasoning"], section) for section in sections for parser in parsers]


def _case(parser: str, reasoning_parser: str, section: str) -> GoldenCase:
    found = _HEAD.match(section)
    assert found is not None, section
    text, _, expected = section[found.end() :].rpartition("\n--->\n")
    case = GoldenCase(parser, reasoning_parser, found[1], frozenset(re.findall(r"\w+", found[2])), text)
    for line in expected.split("\n"):
        kind, value = line.split(": ", 1)
        if kind == "call":
            name, arguments = value.split(" ", 1)
            case.calls.append((name, json.loads(arguments)))
        elif kind == "id":
            case.ids[len(case.calls) - 1] = value
        elif kind == "content":
            case.content = json.loads(value)
        else:
            assert kind == "reasoning", line
            case.reasoning = json.loads(value)
    if not case.calls and case.content is None:
        case.content = ""
    return case

"""The scripted model: reads a prompt and returns the text that the model generates, tool calls included.

The prompts are rendered with :data:`TEMPLATE`, and calls are written in Hermes' format. The names and the parameters of
the tools are taken from the prompt, because each agent has its own tools. The user's message says what to do, see
:func:`task`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Fields of the calls in the prompt have the order and the spaces of `json.dumps`, as in the model's text.
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not loop.first or message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "<|im_end|>")

Tool = dict[str, Any]
Call = tuple[str, dict[str, Any]]

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_TASK = re.compile(
    r"Turn (\d+): (answer|run|read|both)\. Command: `([^`]*)` File: `([^`]*)` Look for: ([\w-]+) ([\w-]+)"
)
# Answer to a request without a task, for example for the title of a session. It follows the schemas of such requests.
_OTHER = '{"title": "Soak"}'


def task(turn: int, file: str) -> str:
    """Return the user's message of a turn, from 1 on. Four consecutive turns contain every kind of output.

    Args:
        file: path of the file to read. It contains the second text to look for.
    """
    kind = ("both", "answer", "run", "read")[turn % 4]
    command = f"test 1 -lt 2 && echo 'é😀 <b>' \"ran-$(({turn} * 7))\""
    return f"Turn {turn}: {kind}. Command: `{command}` File: `{file}` Look for: ran-{turn * 7} {note(turn)}"


def note(turn: int) -> str:
    """Return the content of the turn's file."""
    return f"note-{turn}-end"


def done(turn: int) -> str:
    """Return the last text of a turn whose calls were all run by the agent."""
    return f"Turn {turn} is done."


@dataclass(frozen=True)
class Output:
    """Text that the model generates, and its parts as a client must receive them.

    Attributes:
        text: text, marks included.
        content: text for the user.
        calls: names and arguments of the tool calls.
        turn: number of the turn; None for a request outside the turns, for example for a title.
        reasoning: reasoning before the content.
    """

    text: str
    content: str
    calls: tuple[Call, ...] = ()
    turn: int | None = None
    reasoning: str = ""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, parsed: the tools, and the role and the content of each message."""

    tools: list[Tool]
    messages: list[tuple[str, str]]


def parse_prompt(text: str) -> Prompt:
    """Parse a prompt that was rendered with :data:`TEMPLATE`. The start of the output is not a message."""
    messages = [(match[1], match[2]) for match in _MESSAGE.finditer(text)]
    tools: list[Tool] = []
    if messages and messages[0][0] == "system" and messages[0][1].endswith("\n</tools>"):
        listed = messages[0][1].rpartition("# Tools\n\n<tools>\n")[2].removesuffix("\n</tools>")
        tools = [json.loads(line)["function"] for line in listed.splitlines()]
    return Prompt(tools, messages)


def next_output(text: str) -> Output:
    """Return what the model generates after a prompt."""
    prompt = parse_prompt(text)
    at, found = _last_task(prompt.messages)
    if found is None or not prompt.tools:
        return Output(_OTHER, _OTHER)
    turn, kind, command, file, *wanted = found.groups()
    later = prompt.messages[at + 1 :]
    if kind == "answer" or any(role == "assistant" for role, _ in later):
        results = "".join(content for role, content in later if role == "tool")
        expected = {"answer": [], "run": wanted[:1], "read": wanted[1:], "both": wanted}[kind]
        missing = [one for one in expected if one not in results]
        content = f"Turn {turn} lacks {missing}." if missing else done(int(turn))
        return _output(content, (), int(turn), content)
    calls = []
    if kind in ("run", "both"):
        calls.append(run_call(prompt.tools, command))
    if kind in ("read", "both"):
        calls.append(read_call(prompt.tools, file))
    content = "" if int(turn) % 3 == 0 else "Let me look: 1 < 2."
    written = [f"<tool_call>\n{json.dumps(_as_json(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
    return _output(content, tuple(calls), int(turn), "\n".join([content] * bool(content) + written))


def _output(content: str, calls: tuple[Call, ...], turn: int, text: str) -> Output:
    """Return the output of a turn's request. In every fifth turn, it begins with reasoning."""
    if turn % 5:
        return Output(text, content, calls, turn)
    reasoning = f"Turn {turn}: <tool> {len(calls)}"
    return Output(f"<think>\n{reasoning}\n</think>\n\n{text}", content, calls, turn, reasoning)


def _last_task(messages: Sequence[tuple[str, str]]) -> tuple[int, re.Match[str] | None]:
    for at in reversed(range(len(messages))):
        role, content = messages[at]
        if role == "user" and (found := list(_TASK.finditer(content))):
            return at, found[-1]
    return 0, None


def _as_json(call: Call) -> dict[str, Any]:
    return {"name": call[0], "arguments": call[1]}


def run_call(tools: Sequence[Tool], command: str) -> Call:
    """Return a call that runs a shell command.

    Raises:
        LookupError: no tool runs commands.
    """
    for name in ("command", "cmd"):
        for tool in tools:
            schema = _properties(tool).get(name)
            if schema is not None and re.search("bash|shell|exec|terminal|command", tool["name"], re.IGNORECASE):
                value = ["bash", "-c", command] if schema.get("type") == "array" else command
                return tool["name"], _arguments(tool, {name: value})
    raise LookupError(f"no tool runs commands: {[tool['name'] for tool in tools]}")


def read_call(tools: Sequence[Tool], file: str) -> Call:
    """Return a call that reads a file, with a shell command if no tool reads files."""
    for tool in tools:
        if re.fullmatch("read|read_?file", tool["name"], re.IGNORECASE):
            for name in ("file_path", "filePath", "filepath", "path"):
                if name in _properties(tool):
                    return tool["name"], _arguments(tool, {name: file})
    return run_call(tools, f"cat '{file}'")


def _properties(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = (tool.get("parameters") or {}).get("properties") or {}
    return found


def _arguments(tool: Tool, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call: the given ones, and a value for each other required parameter."""
    required = tool["parameters"].get("required") or []
    values = {"string": "soak", "integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}
    rest = {name: schema for name, schema in _properties(tool).items() if name in required and name not in given}
    return given | {
        name: schema["enum"][0] if "enum" in schema else values.get(schema.get("type"), "soak")
        for name, schema in rest.items()
    }

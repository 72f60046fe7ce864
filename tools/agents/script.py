"""The scripted model: reads a prompt and returns the text that the model generates, tool calls included.

Prompts and texts have one of the formats of :mod:`tools.agents.formats`. The names and the parameters of the tools are
taken from the prompt, because each agent has its own tools. The user's message says what to do, see :func:`task`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tools.agents.formats import Answer, Call, Format

Tool = dict[str, Any]

_TOOLS = "# Tools\n\n<tools>\n"
_TASK = re.compile(
    r"Turn (\d+): (answer|run|read|both)\. Command: `([^`]*)` File: `([^`]*)` Look for: ([\w-]+) ([\w-]+)"
)
# Answer to a request without a task, for example for the title of a session. It follows the agents' schemas of titles.
_OTHER = '{"title": "Soak"}'


def task(turn: int, file: str) -> str:
    """Return the user's message of a turn. It asks for an answer, a command, a file to read, or for command and file.

    Four consecutive turns contain each of these four kinds.

    Args:
        turn: number of the turn, from 1 on.
        file: path of the file to read. Its content, :func:`note`, is the second text to look for.
    """
    kind = ("both", "answer", "run", "read")[turn % 4]
    command = f"test 1 -lt 2 && echo 'é😀 <b>' \"ran-$(({turn} * 7))\""
    return f"Turn {turn}: {kind}. Command: `{command}` File: `{file}` Look for: ran-{turn * 7} {note(turn)}"


def note(turn: int) -> str:
    """Return the content of the file that the agent reads in a turn."""
    return f"note-{turn}-end"


def done(turn: int) -> str:
    """Return the model's last text in a turn. The model writes it if the prompt has the results of all calls."""
    return f"Turn {turn} is done."


@dataclass(frozen=True)
class Output:
    """Text that the model generates, and its parts as a client must receive them.

    Attributes:
        text: text, marks included, except the mark that ends the output.
        end: mark that ends the output. It follows ``text``.
        content: text for the user.
        calls: names and arguments of the tool calls.
        turn: number of the turn; None for a request without a task, for example for a title.
        reasoning: reasoning before the content.
    """

    text: str
    end: str
    content: str
    calls: tuple[Call, ...] = ()
    turn: int | None = None
    reasoning: str = ""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, parsed: the tools, and the role and the text of each message.

    The roles are user, assistant, tool and other. The text of a message goes up to the next message.
    """

    tools: list[Tool]
    messages: list[tuple[str, str]]


def parse_prompt(text: str, answer_format: Format) -> Prompt:
    """Parse a prompt that was rendered with the template of a format.

    The prompt ends with the head of the message that the model is to write. This head is not returned as a message.
    """
    heads = list(answer_format.heads.finditer(text))
    messages = [(head.lastgroup or "", text[head.end() : following.start()]) for head, following in pairwise(heads)]
    tools: list[Tool] = []
    first = next((head.start() for head in heads if head.lastgroup == "user"), 0)
    _, mark, listed = text[:first].rpartition(_TOOLS)
    if mark:
        listed = listed.rpartition("\n</tools>")[0]
        tools = [json.loads(line)["function"] for line in listed.splitlines()]
    return Prompt(tools, messages)


def next_output(text: str, answer_format: Format) -> Output:
    """Return the output that the model generates after a prompt.

    A prompt without a task or without tools gets a title as JSON.

    Raises:
        LookupError: the task needs a tool that runs commands or reads files, and the prompt lists none.
    """
    prompt = parse_prompt(text, answer_format)
    at, found = _last_task(prompt.messages)
    if found is None or not prompt.tools:
        return _output(answer_format, Answer(_OTHER), None)
    turn, kind, command, file, *wanted = found.groups()
    number = int(turn)
    later = prompt.messages[at + 1 :]
    calls = []
    if kind in ("run", "both"):
        calls.append(run_call(prompt.tools, command))
    if kind in ("read", "both"):
        calls.append(read_call(prompt.tools, file))
    if answer_format.is_parallel:
        calls = [] if any(role == "assistant" for role, _ in later) else calls
    else:
        calls = calls[sum(role == "tool" for role, _ in later) :][:1]
    if calls:
        content = "" if number % 3 == 0 else "Let me look: 1 < 2."
    else:
        expected = {"answer": [], "run": wanted[:1], "read": wanted[1:], "both": wanted}[kind]
        results = "".join(text for role, text in later if role == "tool")
        missing = [one for one in expected if one not in results]
        content = f"Turn {turn} lacks {missing}." if missing else done(number)
    every = answer_format.reasons_every
    reasoning = f"Turn {turn}: <tool> {len(calls)}" if every and number % every == 0 else ""
    num_earlier_calls = sum(role == "tool" for role, _ in prompt.messages)
    return _output(answer_format, Answer(content, tuple(calls), reasoning, num_earlier_calls), number)


def _output(answer_format: Format, answer: Answer, turn: int | None) -> Output:
    end = answer_format.call_end if answer.calls else answer_format.end
    text = answer_format.written(answer)
    return Output(text, end, answer.content, answer.calls, turn, answer.reasoning)


def _last_task(messages: Sequence[tuple[str, str]]) -> tuple[int, re.Match[str] | None]:
    for at in reversed(range(len(messages))):
        role, content = messages[at]
        if role == "user" and (found := list(_TASK.finditer(content))):
            return at, found[-1]
    return 0, None


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
    """Return a call that reads a file, with a shell command if no tool reads files.

    Raises:
        LookupError: no tool reads files or runs commands.
    """
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

"""Tests docs/cli.md and `--help`: tables, messages and flags match the program."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metal_engine.bench.args import BenchLatencyArgs, BenchServeArgs, BenchThroughputArgs
from metal_engine.cli.options import help_text
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.chat_args import ChatArgs
from metal_engine.settings.fields import Listing, Setting, settings_of
from metal_engine.settings.multi_model import RegistryArgs
from metal_engine.settings.server_args import ServerArgs
from tools.docs.cli import PAGE, with_tables

ROOT = Path(__file__).resolve().parents[2]
TEXT = PAGE.read_text(encoding="utf-8")
ANYTHING = "…"


def test_the_tables_are_up_to_date() -> None:
    assert with_tables(TEXT) == TEXT, "run `python -m tools.docs.cli`"


def messages_in(folder: Path) -> list[str]:
    """Every text in the sources of a folder, with `…` for what is filled in."""
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConfigError":
                found.append(" ".join(text_of(argument) for argument in node.args))  # the flag and its message
            elif isinstance(node, ast.expr):
                found.append(text_of(node))
    return found


def text_of(node: ast.expr) -> str:
    """Return the text of an expression, with `…` for placeholders and other values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else ANYTHING for p in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", ANYTHING)
    return ANYTHING


def test_the_messages_are_the_programs() -> None:
    messages = messages_in(ROOT / "metal_engine")
    rows = re.findall(r"^\| `([^`]+)` \| ", TEXT[TEXT.index("## When something goes wrong") :], re.MULTILINE)
    assert len(rows) >= 10
    for row in rows:
        # A flag may be a placeholder in the source: `{flag(name)} {value} exceeds ...`.
        wanted = as_pattern(row.strip(ANYTHING).strip())
        assert any(wanted.search(message) for message in messages), row


def as_pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*?".join(map(re.escape, text.split(ANYTHING))), re.DOTALL)


COMMANDS: dict[str, tuple[type, ...]] = {
    "": (),
    "serve": (ServerArgs, EngineArgs, RegistryArgs),
    "chat": (ChatArgs, EngineArgs),
    "pull": (),
    "list": (),
    "show": (),
    "rm": (),
    "doctor": (),
    "launch": (),
    "ps": (),
    "bench": (),
    "bench serve": (BenchServeArgs,),
    "bench throughput": (BenchThroughputArgs, EngineArgs),
    "bench latency": (BenchLatencyArgs, EngineArgs),
}
# Runs commands in one process. Prints status, text, and the slow packages that were imported so far, after each.
HELP = """
import json, sys
from typer.testing import CliRunner
from metal_engine.cli.main import app
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments.split())
    slow = [name for name in ("mlx", "transformers", "fastapi") if name in sys.modules]
    print(json.dumps([done.exit_code, done.stdout, slow]))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, Any]:
    asked = [f"{name} {option}".strip() for name in COMMANDS for option in ("--help", "--help-all")]
    env = {**os.environ, "COLUMNS": "250"}
    command = [sys.executable, "-c", HELP, json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=60, check=True)
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("name", "classes"), COMMANDS.items())
def test_help(helps: dict[str, Any], name: str, classes: tuple[type, ...]) -> None:
    """``--help`` and ``--help-all`` list their flags, show no Python types, and import nothing heavy."""
    settings = settings_of(*classes)
    shown = {Listing.HELP}
    for option in ("--help", "--help-all"):
        status, text, slow = helps[f"{name} {option}".strip()]
        assert status == 0 and slow == []
        listed = re.findall(r"^│ (--[\w-]+)", text, re.MULTILINE)
        assert [one.flag for one in settings if (one.flag in listed) != (one.listing in shown)] == []
        assert "--help " in text and not re.search(r"<\w+", text)
        assert ("--help-all" in listed) == (Listing.HELP_ALL in {one.listing for one in settings})
        if "--help-all" not in listed:
            return
        num_flags = sum(one.has_flag for one in settings)
        assert f"Show all {num_flags} flags" in text
        shown.add(Listing.HELP_ALL)


def test_help_is_short() -> None:
    assert sum(one.listing is Listing.HELP for one in settings_of(EngineArgs, ServerArgs, RegistryArgs)) == 25


def test_help_is_in_groups_and_shows_every_default() -> None:
    command = [sys.executable, "-m", "metal_engine", "serve", "--help-all"]
    env = {**os.environ, "COLUMNS": "80"}
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=60, check=True).stdout
    assert max(map(len, text.splitlines())) <= 80
    boxes = re.findall(r"^╭─ (.+?) ─+╮\n(.*?)^╰", text, re.MULTILINE | re.DOTALL)
    groups = {heading: " ".join(re.sub("[│\n]", " ", body).split()) for heading, body in boxes}
    order = ["Arguments", "Options", "Model", "Memory", "Scheduling", "KV transfer", "LoRA adapters"]
    order.append("Several machines")
    assert list(groups) == [*order, "Server", "Security", "Limits", "Answers", "Logging", "Several models"]
    assert len([box for box, _ in boxes]) == len(groups)  # each is there once
    for one in settings_of(EngineArgs, ServerArgs, RegistryArgs):
        if not one.has_flag:
            assert one.flag not in text
            continue
        body = groups[one.group]
        assert one.flag in body
        if one.kind == "bool":
            value = {True: r"on\.", False: r"off\.", None: "on with Metal"}[one.default]
            assert re.search(rf"{one.flag} / --no-{one.flag[2:]} .*?Default: {value}", body), one.flag
        assert help_text(one) in body, one.flag


def test_help_texts_show_defaults_in_readable_form() -> None:
    def default(kind: str, value: object) -> str:
        return help_text(Setting("name", kind, value, "Help."))

    assert default("size", 20 << 30) == "Help. Default: 20GiB."
    assert default("size", 64 << 10) == "Help. Default: 64KiB."
    assert default("float", 15.0) == "Help. Default: 15."
    assert default("list", ("99",)) == "Help. Default: 99."
    assert default("bool", False) == "Help. Default: off."
    assert default("list", ()) == default("str", None) == "Help."

"""Tests docs/cli.md: its commands run and print the shown output, and its tables and messages match the program."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from metal_engine.bench.args import BenchLatencyArgs, BenchServeArgs, BenchThroughputArgs
from metal_engine.cli.options import help_text
from metal_engine.settings.args import EngineArgs, ServerArgs
from metal_engine.settings.chat_args import ChatArgs
from metal_engine.settings.fields import Listing, Setting, settings_of
from metal_engine.settings.multi_model import RegistryArgs
from tools.docs.cli import PAGE, with_tables
from tools.fixtures.ports import free_port

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


class Terminal:
    """Runs the page's commands in a separate folder. Servers run until the end.

    The page sends requests to the server that it started last. The same command means the same server again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Keys are the commands that started the servers.
        self.servers: dict[str, subprocess.Popen[str]] = {}
        self.ports: dict[str, int] = {}
        self.port = 0
        # As `make` leaves it, with a script that puts it on the path.
        bin = folder / ".venv" / "bin"
        bin.mkdir(parents=True)
        for name, program in (("metal-engine", " -m metal_engine"), ("python", "")):
            command = bin / name
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}"{program} "$@"\n')
            command.chmod(0o755)
        (bin / "activate").write_text(f'PATH="{bin}:$PATH"\n')
        path = f"{bin}{os.pathsep}{os.environ['PATH']}"
        # An engine tries its largest step when it starts, and clears its KV cache: seconds for the default sizes.
        small = {
            "METAL_ENGINE_MAX_NUM_BATCHED_TOKENS": "128",
            "METAL_ENGINE_MAX_NUM_SEQS": "8",
            "METAL_ENGINE_KV_CACHE_MEMORY_BYTES": "512MiB",
        }
        self.env = {**os.environ, **small, "PATH": path, "PYTHONPATH": str(ROOT)}

    def local(self, text: str) -> str:
        """Replace the port in a text of the page by the server's real port."""
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")

    @staticmethod
    def recipe(command: str) -> list[str]:
        """Return the commands that a `make` command would run, with everything installed."""
        of_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MODEL", "HOST", "PORT", "ARGS")  # one may be running the tests
        done = subprocess.run(
            ["make", "--dry-run", "--old-file", ".venv/.installed", *shlex.split(command, comments=True)[1:]],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in of_make},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.strip().removeprefix(".venv/bin/") for line in done.stdout.splitlines()]

    def run(self, command: str, expected: str) -> None:
        if command.startswith("make "):
            (command,) = self.recipe(command)
        if " serve " in command and "URL:" in expected:
            printed = self.serve(command)
        else:
            done = subprocess.run(
                ["bash", "-c", self.local(command)],
                cwd=self.folder,
                env=self.env,
                capture_output=True,
                text=True,
                timeout=120,
            )
            printed = done.stdout + done.stderr
            assert (done.returncode != 0) == expected.startswith("error:"), printed
        lines = self.local(expected).splitlines()
        pattern = "\n".join(".*" if line == ANYTHING else as_pattern(line).pattern for line in lines)
        assert re.search(pattern, printed, re.DOTALL), f"$ {command}\n{printed}\nexpected:\n{self.local(expected)}"

    def log(self, command: str) -> Path:
        return self.folder / f"server-{self.ports[command]}.log"

    def serve(self, command: str) -> str:
        """Start the server, or select the one that this command has started. Return its output."""
        if command in self.servers:
            self.port = self.ports[command]
            return self.log(command).read_text()
        self.port = self.ports[command] = free_port()
        shell = command.replace("metal-engine serve", "exec metal-engine serve")
        env = dict(self.env)
        if "--config" in command:  # the file's own setting must apply
            del env["METAL_ENGINE_KV_CACHE_MEMORY_BYTES"]
        with self.log(command).open("w") as stderr:
            self.servers[command] = server = subprocess.Popen(
                ["bash", "-c", f"{shell} --port {self.port}"], cwd=self.folder, env=env, stderr=stderr, text=True
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/health").raise_for_status()
                return self.log(command).read_text()
            except httpx.HTTPError:
                assert server.poll() is None and time.monotonic() < deadline, self.log(command).read_text()
                time.sleep(0.2)

    def stop(self) -> None:
        """Stop the servers with a signal, and check that they end well."""
        for command, server in self.servers.items():
            server.send_signal(signal.SIGTERM)
            status = server.wait(60)
            log = self.log(command).read_text()
            assert status == 0 and "Traceback" not in log, log

    def kill(self) -> None:
        for server in self.servers.values():
            server.kill()
            server.wait()


def commands(block: str) -> list[tuple[str, str]]:
    """Return the command and its expected output for each `$` line. A command ends when its quotes are closed."""
    result = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.rstrip("\n").split("\n")
        length = 1
        while "\n".join(lines[:length]).count("'") % 2:
            length += 1
        result.append(("\n".join(lines[:length]), "\n".join(lines[length:])))
    return result


def test_the_commands_run(demo_path: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"console", "yaml"}
    terminal = Terminal(tmp_path)
    num_commands = 0
    try:
        for kind, block in blocks:
            if kind == "yaml":
                name = block.splitlines()[0].removeprefix("# ")
                (tmp_path / name).write_text(block)
                continue
            for command, expected in commands(block):
                terminal.run(command, expected)
                num_commands += 1
        terminal.stop()
    finally:
        terminal.kill()
    assert num_commands >= 10


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("", ()),
        ("serve", (ServerArgs, EngineArgs, RegistryArgs)),
        ("chat", (ChatArgs, EngineArgs)),
        ("pull", ()),
        ("list", ()),
        ("show", ()),
        ("rm", ()),
        ("doctor", ()),
        ("launch", ()),
        ("ps", ()),
        ("bench", ()),
        ("bench serve", (BenchServeArgs,)),
        ("bench throughput", (BenchThroughputArgs, EngineArgs)),
        ("bench latency", (BenchLatencyArgs, EngineArgs)),
    ],
)
def test_help(name: str, classes: tuple[type, ...]) -> None:
    """``--help`` and ``--help-all`` list their flags, show no Python types, and import nothing heavy."""
    settings = settings_of(*classes)
    shown = {Listing.HELP}
    for option in ("--help", "--help-all"):
        command = [sys.executable, "-X", "importtime", "-m", "metal_engine", *name.split(), option]
        env = {**os.environ, "COLUMNS": "250"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == 0
        listed = re.findall(r"^│ (--[\w-]+)", done.stdout, re.MULTILINE)
        assert [one.flag for one in settings if (one.flag in listed) != (one.listing in shown)] == []
        assert "--help " in done.stdout and not re.search(r"<\w+", done.stdout)
        assert not re.search(r"\| +(mlx|transformers|fastapi)(\.|$)", done.stderr, re.MULTILINE)
        assert ("--help-all" in listed) == (Listing.HELP_ALL in {one.listing for one in settings})
        if "--help-all" not in listed:
            return
        num_flags = sum(one.has_flag for one in settings)
        assert f"Show all {num_flags} flags" in done.stdout
        shown.add(Listing.HELP_ALL)


def test_help_is_short() -> None:
    settings = settings_of(EngineArgs, ServerArgs, RegistryArgs)
    assert sum(one.listing is Listing.HELP for one in settings) == 25


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
            shown = rf"{one.flag} / --no-{one.flag[2:]} .*?Default: {value}"
            assert re.search(shown, body), one.flag
        assert help_text(one) in body, one.flag


def test_defaults_are_written_as_users_would() -> None:
    def default(kind: str, value: object) -> str:
        return help_text(Setting("name", kind, value, "Help."))

    assert default("size", 20 << 30) == "Help. Default: 20GiB."
    assert default("size", 64 << 10) == "Help. Default: 64KiB."
    assert default("float", 15.0) == "Help. Default: 15."
    assert default("list", ("99",)) == "Help. Default: 99."
    assert default("bool", False) == "Help. Default: off."
    assert default("list", ()) == default("str", None) == "Help."

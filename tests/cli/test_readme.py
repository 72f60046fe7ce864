"""The commands of README.md, getting-started.md, cli.md and api.md run as written and print the shown output."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.test_docs import ANYTHING, ROOT, as_pattern
from tools.docs.cli import PAGE
from tools.fixtures.ports import free_port

README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
PAGES = {"README": README + START, "cli.md": PAGE.read_text(encoding="utf-8")}
PAGES["api.md"] = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
# Minutes under load, and the tests run it at a smaller size.
LONG = "tools/repro_block_exhaustion.py"


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Terminal:
    """Runs the page's commands in a separate folder. Servers run until the end.

    A page sends requests to the server that it started last. A repeated command selects its server.
    The host and the port of a `make` command are ignored, because they are the defaults.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Keys are the commands that started the servers, without the flags of `make`.
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
        key = command.removesuffix(" --host 127.0.0.1 --port 8000")
        if key in self.servers:
            self.port = self.ports[key]
            return self.log(key).read_text()
        self.port = self.ports[key] = free_port()
        shell = command.replace("metal-engine serve", "exec metal-engine serve")
        env = dict(self.env)
        if "--config" in command:  # the file's own setting must apply
            del env["METAL_ENGINE_KV_CACHE_MEMORY_BYTES"]
        with self.log(key).open("w") as stderr:
            self.servers[key] = server = subprocess.Popen(
                ["bash", "-c", f"{shell} --port {self.port}"], cwd=self.folder, env=env, stderr=stderr, text=True
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/health").raise_for_status()
                return self.log(key).read_text()
            except httpx.HTTPError:
                assert server.poll() is None and time.monotonic() < deadline, self.log(key).read_text()
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


@pytest.fixture(scope="module")
def terminal(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("terminal"))
    try:
        yield terminal
        terminal.stop()
    finally:
        terminal.kill()


@pytest.mark.parametrize(("page", "least"), [("README", 12), ("cli.md", 10), ("api.md", 9)])
def test_the_commands_run(terminal: Terminal, page: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "api.md":
        terminal.serve("metal-engine serve demo")
    num_commands = 0
    for kind, block in re.findall(r"^```(console|yaml)\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL):
        if kind == "yaml" and block.startswith("# "):
            (terminal.folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
        for command, expected in commands(block):
            if LONG in command:
                continue
            terminal.run(command, expected)
            num_commands += 1
            if "METAL_ENGINE_URL" not in terminal.env:  # the chat and the benchmark use the first server by default
                for name in ("METAL_ENGINE_URL", "METAL_ENGINE_BASE_URL"):
                    monkeypatch.setitem(terminal.env, name, terminal.local("http://127.0.0.1:8000"))
    assert num_commands >= least


def test_the_python_example_prints_the_output_in_the_docs(demo_path: Path, tmp_path: Path) -> None:
    (program,) = blocks(START, "python")
    (expected,) = blocks(START, "text")
    terminal = Terminal(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=terminal.env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


@pytest.mark.full
def test_the_long_command_runs(demo_path: Path, tmp_path: Path) -> None:
    ((command, expected),) = [pair for block in blocks(START, "console") for pair in commands(block) if LONG in pair[0]]
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    Terminal(tmp_path).run(command, expected)


def test_repro_tool_reruns_in_the_checkout_venv_if_the_engine_is_missing(tmp_path: Path) -> None:
    """The tool uses the checkout's .venv. If that folder is missing, the tool prints the command for creating it."""
    tool = tmp_path / "tools" / "repro_block_exhaustion.py"
    tool.parent.mkdir()
    tool.write_text((ROOT / LONG).read_text())
    bare = [sys.executable, "-S", "-I", str(tool)]  # without site-packages
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "run `make serve` once" in done.stderr and len(done.stderr.splitlines()) == 1
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\necho "with $2 $3"\n')
    own.chmod(0o755)
    done = subprocess.run([*bare, "--seed", "3"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "with --seed 3\n", done.stderr


def test_other_models_are_served_by_make() -> None:
    (command,) = re.findall(r"`(make serve MODEL=\S+)`", START)
    assert Terminal.recipe(command) == ["python -m metal_engine serve Qwen/Qwen3-0.6B --host 127.0.0.1 --port 8000"]
    (command,) = re.findall(r"`(make serve PORT=\S+)`", START)
    assert Terminal.recipe(command) == ["python -m metal_engine serve demo --host 127.0.0.1 --port 8001"]


def test_wrong_output_is_noticed() -> None:
    assert all(as_pattern(text).search("a\nb") for text in ("a", f"a{ANYTHING}b"))
    assert not as_pattern("b…a").search("a\nb")

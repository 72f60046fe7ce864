"""Tests the ``launch`` command with fake tools that print their arguments and environment."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from metal_engine.cli.launch_tools import TOOLS
from metal_engine.cli.main import app
from metal_engine.settings.server_args import ServerArgs
from tests.support.http_server import QuietHandler, http_server
from tests.support.serving import Served, serve
from tests.support.several_models import FakeModel, serve_models
from tools.fixtures.fake_engine import fake_config
from tools.fixtures.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 4096
NAME = 'org/a model\'s $(touch hurt) `touch hurt` "name" \\ 🦙'
# Prints its arguments and its environment as one line of JSON.
FAKE = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = ServerArgs(shutdown_timeout=1, api_key=("k'ey", "other"))
    config = fake_config(max_model_len=LENGTH, num_blocks=2048, max_num_batched_tokens=2048)
    with serve(config=config, names=(NAME, "other"), args=args) as served:
        yield served


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs: the only folder on the PATH of the command."""
    for name in [name for name in os.environ if name.startswith("METAL_ENGINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, program: str) -> None:
    (folder / program).write_text(FAKE)
    (folder / program).chmod(0o755)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["launch", *arguments])


def expected(tool: str, url: str) -> dict[str, Any]:
    """Return the variables that the tools' own documentation demands for a server."""
    output = str(LENGTH // 4)
    match tool:
        case "claude":
            names = ["ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"]
            names += [f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")]
            address = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "k'ey", "ANTHROPIC_API_KEY": ""}
            return {**address, **dict.fromkeys(names, NAME), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": output}
        case "codex":
            return {"OPENAI_API_KEY": "k'ey"}
        case "aider":
            return {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "k'ey", "AIDER_MODEL": f"openai/{NAME}"}
    return {}


def check_config(tool: str, environment: dict[str, str], arguments: list[str], url: str) -> None:
    """Check settings that are not plain variables."""
    if tool == "opencode":
        config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
        provider, _, model = config["model"].partition("/")
        one = config["provider"][provider]
        assert one["npm"] == "@ai-sdk/openai-compatible"
        assert one["options"] == {"baseURL": f"{url}/v1", "apiKey": "k'ey"}
        assert model == NAME and one["models"][model]["limit"] == {"context": LENGTH, "output": LENGTH // 4}
    if tool == "codex":
        flags, values = arguments[0::2], arguments[1::2]
        assert set(flags) == {"-c"}
        config = tomllib.loads("\n".join(values))
        provider = config["model_providers"][config["model_provider"]]
        assert (provider["base_url"], provider["wire_api"]) == (f"{url}/v1", "responses")
        assert provider["env_key"] == "OPENAI_API_KEY"
        assert (config["model"], config["model_context_window"]) == (NAME, LENGTH)
        assert config["web_search"] == "disabled" and not any(config["features"].values())
    else:
        assert arguments == []


@pytest.mark.parametrize("tool", TOOLS)
def test_the_printed_commands_run_in_a_shell(server: Served, path: Path, tool: str) -> None:
    result = run(tool, "--url", f"{server.url}/v1/", "--api-key", "k'ey")
    assert result.exit_code == 0, result.stderr
    assert f"{TOOLS[tool].program} is not installed: {TOOLS[tool].install}" in result.stderr
    # An alias applies to later lines only.
    script = f"shopt -s expand_aliases\n{result.stdout}{TOOLS[tool].program}"
    install(path, TOOLS[tool].program)
    done = subprocess.run(["/bin/bash", "-c", script], env={"PATH": str(path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    assert expected(tool, server.url).items() <= environment.items()
    check_config(tool, environment, arguments, server.url)
    assert not Path("hurt").exists()


@pytest.mark.parametrize(("tool", "how"), [("claude", ["--exec"]), ("codex", ["--", "exec", "-m", "say 'hi'"])])
def test_the_tool_is_run(server: Served, path: Path, tool: str, how: list[str]) -> None:
    install(path, tool)
    command = [sys.executable, "-m", "metal_engine", "launch", tool, "--port", str(server.server.port), *how]
    mine = {**os.environ, "PYTHONPATH": str(ROOT), "METAL_ENGINE_API_KEY": "k'ey,other", "ANTHROPIC_API_KEY": "mine"}
    done = subprocess.run(command, env=mine, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    own = how[1:]
    assert arguments[len(arguments) - len(own) :] == own
    assert expected(tool, server.url).items() <= environment.items()
    check_config(tool, environment, arguments[: len(arguments) - len(own)], server.url)


def test_launch_errors_are_one_line_and_exit_with_status_1(server: Served, path: Path) -> None:
    nobody = free_port()
    for arguments, wanted in [
        (["emacs"], "choose one of claude, codex, opencode, aider"),
        (["claude", "--port", str(nobody)], f"`metal-engine serve demo --port {nobody}`"),
        (["claude", "--url", f"http://127.0.0.1:{nobody}"], "`metal-engine serve demo`"),
        (["claude", "--url", server.url], f"the server at {server.url} requires a key: add --api-key KEY"),
        (["claude", "--url", server.url, "--api-key", "no"], "--api-key is not a key of the server"),
        (["claude", "--url", f"{server.url}/nowhere", "--api-key", "other"], "responds with status 404"),
        (["claude", "--url", "localhost:8000"], "--url must be like http://"),
        (["claude", "--url", "http://localhost:port"], "--url must be like http://"),
        (["claude", "--url", "http://a b"], "--url"),
        (["aider", "--url", server.url, "--api-key", "other", "--exec"], "aider is not installed: python -m pip"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 1 and result.stdout == "", arguments
        lines = [line for line in result.stderr.splitlines() if not line.startswith("note:")]
        assert len(lines) == 1 and lines[0].startswith("error: ") and wanted in lines[0], result.stderr


@pytest.mark.parametrize("name", ["a\nb", "a\u202eb", "a\x1b[2J"])
def test_a_name_that_is_not_visible_is_not_printed(path: Path, name: str) -> None:
    """The server that responds may be another program."""
    with serve(names=(name,)) as served:
        result = run("claude", "--url", served.url)
    assert result.exit_code == 1 and result.stdout == "" and "not visible" in result.stderr
    assert result.stderr.rstrip("\n").isascii() and result.stderr.rstrip("\n").isprintable()


def test_a_server_without_keys(path: Path) -> None:
    """Tools refuse to run without a key, so they get a placeholder.

    A note reports a context length that is too short for a tool's first prompt.
    """
    with serve() as served:
        result = run("claude", "--url", served.url)
        variables = dict(
            line.removeprefix("export ").split("=", 1) for line in shlex.split(result.stdout, posix=True) if "=" in line
        )
        assert variables["ANTHROPIC_AUTH_TOKEN"] == "metal-engine"
        assert "512" in result.stderr and "20,300" in result.stderr
        assert run("aider", "--url", served.url).stderr.count("note:") == 1


def test_a_server_that_has_not_loaded_a_model(path: Path) -> None:
    """The context length is unknown before the first load: the message has a command that loads a model."""
    with serve_models({"org/it's a": FakeModel(1).source, "b": FakeModel(2).source}, 200) as served:
        for address in (["--port", str(served.server.port)], ["--url", served.url]):
            result = run("claude", *address)
            assert result.exit_code == 1 and result.stdout == ""
            assert result.stderr.startswith(f"error: the server at {served.url} has not loaded a model yet")
            _, command, end = result.stderr.split("`")
            echo, _, chat = command.partition(" | ")
            assert shlex.split(chat) == ["metal-engine", "chat", "org/it's a", "--url", served.url]
            assert echo == "echo hello" and "repeat" in end
        assert served.post("/v1/completions", {"model": "b", "prompt": "x", "max_tokens": 1}).status_code == 200
        result = run("claude", "--port", str(served.server.port))
        assert result.exit_code == 0 and "ANTHROPIC_MODEL=b" in result.stdout


class _OtherServer(QuietHandler):
    """Server of another program, whose models have no context length."""

    cards: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.send_body(json.dumps({"data": self.cards}).encode())


@pytest.mark.parametrize("command", [["launch", "claude"], ["ps"]])
def test_errors_name_only_flags_that_were_given(
    path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_OtherServer, "cards", [{"id": "x", "owned_by": "library"}])
    with http_server(_OtherServer) as url:
        port = url.rpartition(":")[2]
        by_port = CliRunner().invoke(app, [*command, "--port", port])
        by_url = CliRunner().invoke(app, [*command, "--url", url])
        monkeypatch.setattr(_OtherServer, "cards", [])
        empty = CliRunner().invoke(app, ["launch", "claude", "--port", port])
    assert by_port.stderr == f"error: {url} does not respond like a metal-engine server\n"
    assert by_url.stderr == f"error: --url {url} does not respond like a metal-engine server\n"
    assert empty.stderr == f"error: {url} serves no model\n"

"""The agents: their packages on npm, their settings for a server, and the commands of a turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metal_engine.cli.launch_tools import TOOLS, RunningServer
from metal_engine.device.cache_dir import cache_dir

_INSTALL_SECONDS = 1800


@dataclass(frozen=True)
class Agent:
    """A coding agent with a command line.

    Attributes:
        name: name for the options of the soak.
        title: common name.
        package: package on npm.
        program: name of its executable.
        settings: function of the server and a home folder. It writes the agent's settings into the folder and returns
            environment variables for the agent.
        first: function of the server and the user's message. It returns the program's arguments for the first turn.
        later: like ``first``, for a later turn, which continues the conversation.
    """

    name: str
    title: str
    package: str
    program: str
    settings: Callable[[RunningServer, Path], dict[str, str]]
    first: Callable[[RunningServer, str], list[str]]
    later: Callable[[RunningServer, str], list[str]]

    @property
    def folder(self) -> Path:
        return cache_dir() / "agents" / self.name

    @property
    def path(self) -> Path:
        """Path of the executable."""
        return self.folder / "node_modules" / ".bin" / self.program


def install(agent: Agent) -> None:
    """Install the newest version into the cache folder, unless the agent is installed.

    Raises:
        RuntimeError: npm is missing, failed, or took longer than ``_INSTALL_SECONDS``. If it failed, the message is the
            last line of its error output.
    """
    if agent.path.exists():
        return
    print(f"installing {agent.package} into {agent.folder} ...", file=sys.stderr, flush=True)
    agent.folder.mkdir(parents=True, exist_ok=True)
    (agent.folder / "package.json").write_text('{"private": true}')
    npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        run = subprocess.run(
            [*npm, agent.package], cwd=agent.folder, capture_output=True, text=True, timeout=_INSTALL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"npm: {error}") from error
    if run.returncode != 0:
        raise RuntimeError((run.stderr.strip().splitlines() or [f"npm: exit status {run.returncode}"])[-1])


def version_of(agent: Agent) -> str:
    """Return the installed version."""
    package = agent.folder / "node_modules" / agent.package / "package.json"
    return str(json.loads(package.read_text(encoding="utf-8"))["version"])


def environment(agent: Agent, server: RunningServer, home: Path) -> dict[str, str]:
    """Return the environment variables of the agent. Creates ``home`` and writes the agent's settings into it.

    The agent gets only PATH from this shell's environment, and therefore no settings or keys of the user.
    """
    home.mkdir(parents=True, exist_ok=True)
    basic = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "SHELL": "/bin/bash", "NO_COLOR": "1"}
    return basic | agent.settings(server, home)


def _claude(server: RunningServer, home: Path) -> dict[str, str]:
    more = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return TOOLS["claude"].environment(server) | more


def _codex(server: RunningServer, home: Path) -> dict[str, str]:
    return TOOLS["codex"].environment(server)


def _codex_arguments(server: RunningServer) -> list[str]:
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["exec", *TOOLS["codex"].arguments(server), *options]


def _opencode(server: RunningServer, home: Path) -> dict[str, str]:
    return TOOLS["opencode"].environment(server) | {"OPENCODE_DISABLE_AUTOUPDATE": "1"}


def _continue(server: RunningServer, home: Path) -> dict[str, str]:
    folder = home / ".continue"
    folder.mkdir(exist_ok=True)
    model = {
        "name": "metal-engine",
        "provider": "openai",
        "model": server.model,
        "apiBase": f"{server.url}/v1",
        "apiKey": server.api_key,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": server.max_model_len, "maxTokens": server.max_output_tokens},
    }
    # JSON is valid YAML.
    config = {"name": "local", "version": "0.0.1", "schema": "v1", "models": [model]}
    (folder / "config.yaml").write_text(json.dumps(config))
    return {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}


_CLAUDE_OPTIONS = ["--allowedTools", "Bash", "Read"]
_CONTINUE_OPTIONS = ["--auto"]

AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude",
            "Claude Code",
            "@anthropic-ai/claude-code",
            "claude",
            _claude,
            lambda server, text: ["-p", text, *_CLAUDE_OPTIONS],
            lambda server, text: ["-c", "-p", text, *_CLAUDE_OPTIONS],
        ),
        Agent(
            "codex",
            "Codex",
            "@openai/codex",
            "codex",
            _codex,
            lambda server, text: [*_codex_arguments(server), text],
            lambda server, text: [*_codex_arguments(server), "resume", "--last", text],
        ),
        Agent(
            "opencode",
            "opencode",
            "opencode-ai",
            "opencode",
            _opencode,
            lambda server, text: ["run", text],
            lambda server, text: ["run", "-c", text],
        ),
        Agent(
            "continue",
            "Continue",
            "@continuedev/cli",
            "cn",
            _continue,
            lambda server, text: ["-p", text, *_CONTINUE_OPTIONS],
            lambda server, text: ["--resume", "-p", text, *_CONTINUE_OPTIONS],
        ),
    )
}

"""Checks docs/several-macs.md and docs/launchd/: launchd can read the files, and the programs accept the commands."""

from __future__ import annotations

import argparse
import json
import plistlib
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx._distributed_utils import launch
from smg.launch_router import parse_router_args
from smg.router_args import RouterArgs
from typer.testing import CliRunner

from metal_engine.cli import main
from metal_engine.kv_transfer.settings import kv_transfer_config
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.server_args import ServerArgs
from tools.gateway.processes import ROUTING_FLAGS

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "several-macs.md").read_text(encoding="utf-8")


def load(name: str) -> dict[str, Any]:
    loaded = plistlib.loads((DOCS / "launchd" / f"org.metal-engine.{name}.plist").read_bytes())
    assert loaded["Label"] == f"org.metal-engine.{name}"
    return dict(loaded)


@pytest.mark.parametrize("name", ["server", "gateway", "group"])
def test_launchd_plists_have_valid_types_and_restart_rules(name: str) -> None:
    """Values have launchd's types. A server restarts after a crash, but not after a requested shutdown.

    A group always restarts, because the status of its launcher is meaningless.
    """
    plist = load(name)
    assert plist["RunAtLoad"] is True
    assert plist["KeepAlive"] == (True if name == "group" else {"SuccessfulExit": False})
    assert plist["ProcessType"] == "Interactive" and isinstance(plist["ThrottleInterval"], int)
    assert all(isinstance(argument, str) for argument in plist["ProgramArguments"])
    assert Path(plist["ProgramArguments"][0]).is_absolute() and Path(plist["StandardErrorPath"]).is_absolute()


def test_the_server_accepts_the_launchd_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    (written,) = re.findall(r"echo '(api-key: .*?)' > ~/.config/metal-engine/server.yaml", PAGE)
    config.write_text(written)
    plist = load("server")
    program, *arguments = plist["ProgramArguments"]
    assert Path(program).name == "metal-engine"
    arguments = [str(config) if one.endswith(".config/metal-engine/server.yaml") else one for one in arguments]
    seen: list[tuple[EngineArgs, ServerArgs]] = []

    def note(args: EngineArgs, server_args: ServerArgs) -> int:
        seen.append((args, server_args))
        return 0

    monkeypatch.setattr(main, "_serve_one", note)
    assert CliRunner().invoke(main.app, arguments).exit_code == 0
    ((args, server_args),) = seen
    transfer = kv_transfer_config(args)
    assert transfer is not None and transfer.kv_connector == "valkey" and transfer.loads and transfer.saves
    assert server_args.host == "0.0.0.0" and tuple(server_args.api_key) == ("KEY",)
    assert plist["ExitTimeOut"] > server_args.shutdown_timeout


def test_a_group_of_ranks_accepts_the_launchd_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mlx's own launcher passes the command to both Macs, and a rank parses it as the command of a group."""
    hosts, config = tmp_path / "hosts.json", tmp_path / "group.yaml"
    hosts.write_text(json.dumps([{"ssh": f"mac{i}.local", "ips": [f"10.0.0.{i}"]} for i in (1, 2)]))
    config.write_text("api-key: [KEY]")
    written = {"hosts.json": str(hosts), "group.yaml": str(config)}
    program, *arguments = [written.get(Path(one).name, one) for one in load("group")["ProgramArguments"]]
    assert Path(program).name == "mlx.launch"
    launched: list[tuple[list[str], list[str], list[str]]] = []

    def note_launch(parser: Any, hosts: Any, args: Any, command: list[str]) -> None:
        launched.append(([host.ssh_hostname for host in hosts], args.env, command))

    monkeypatch.setattr(launch, "launch_ring", note_launch)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(shutil, "which", lambda name: name)  # the path is valid only on a Mac
    launch.main()
    (((of, environment, command)),) = launched
    assert of == ["mac1.local", "mac2.local"] and "HF_HUB_OFFLINE=1" in environment  # among other variables
    assert Path(command[0]).name == "metal-engine"
    seen: list[tuple[EngineArgs, ServerArgs]] = []

    def note(args: EngineArgs, server_args: ServerArgs) -> int:
        seen.append((args, server_args))
        return 0

    monkeypatch.setattr(main, "_serve_one", note)
    assert CliRunner().invoke(main.app, command[1:]).exit_code == 0
    ((args, server_args),) = seen
    assert args.tensor_parallel_size == len(of) and kv_transfer_config(args) is None
    assert server_args.host == "0.0.0.0" and tuple(server_args.api_key) == ("KEY",)


def test_the_gateway_accepts_the_launchd_command() -> None:
    plist = load("gateway")
    program, command, *arguments = plist["ProgramArguments"]
    assert (Path(program).name, command) == ("smg", "launch")
    args = parse_router_args(arguments)
    assert args.worker_urls == ["http://mac1.local:8000", "http://mac2.local:8000"]
    assert (args.host, args.prometheus_host, args.api_key) == ("0.0.0.0", "127.0.0.1", "KEY")
    assert args.policy == "cache_aware"
    tried = parse_router_args(["--worker-urls", *args.worker_urls, *ROUTING_FLAGS])
    for name in (
        *("disable_circuit_breaker", "worker_overload_protection"),
        *("health_success_threshold", "load_monitor_interval"),
    ):
        assert getattr(args, name) == getattr(tried, name), f"the tests try other flags: {name}"
    assert args.disable_circuit_breaker is True and args.worker_overload_protection is False
    assert plist["ExitTimeOut"] > args.shutdown_grace_period_secs


def gateway_flags(text: str) -> set[str]:
    """Return the gateway's flags that a page names in commands and in code spans that begin with a command."""
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("smg launch")] + re.findall(r"`(smg launch [^`]+)`", text)
    return {flag for command in commands for flag in re.findall(r"--[a-z][a-z0-9-]*", command)}


def test_the_page_names_flags_that_the_gateway_has() -> None:
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    known = set(re.findall(r"--[a-z][a-z0-9-]*", parser.format_help()))
    named = gateway_flags(PAGE)
    assert len(named) > 12 and named - known == set()
    assert gateway_flags("`smg launch --polic x`\nsmg launch --hots \\\n --port 1") == {"--polic", "--hots", "--port"}


def test_the_first_command_is_the_launch_agents() -> None:
    """The commands are equal, except for addresses that the reader fills in."""
    (command,) = re.findall(r"^smg launch (--host .*?--worker-urls [^\n]*)$", PAGE.replace("\\\n", " "), re.MULTILINE)
    assert parse_router_args(shlex.split(command)) == parse_router_args(load("gateway")["ProgramArguments"][2:])

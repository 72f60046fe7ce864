"""The ``launch`` command: starts coding tools with a running server as their provider."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from metal_engine.cli.launch_tools import TOOLS, RunningServer, Tool
from metal_engine.cli.options import one_line_errors
from metal_engine.cli.server_address import ApiKey, Host, Port, Url, base_url, find_card, first_key
from metal_engine.errors import ConfigError, short
from metal_engine.settings.args import ServerArgs
from metal_engine.settings.model_names import problem_of_name

# Key for a server without keys, because clients refuse to start without one.
PLACEHOLDER_KEY = "metal-engine"
_SECONDS = 5
_MAX_ANSWER = 1 << 20


def launch(
    tool: Annotated[str, typer.Argument(help=f"{', '.join(TOOLS)}.", metavar="TOOL", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Arguments of the tool, as in `-- -p hello`. With arguments, the tool is run.",
            metavar="[-- ARGS]",
            show_default=False,
        ),
    ] = None,
    host: Host = ServerArgs.host,
    port: Port = ServerArgs.port,
    url: Url = None,
    api_key: ApiKey = None,
    exec_: Annotated[bool, typer.Option("--exec", help="Run the tool instead of printing its environment.")] = False,
) -> None:
    """Point a coding tool at a running server: print its environment, or run the tool.

    `eval "$(metal-engine launch claude)"` sets the variables in this shell.
    """
    with one_line_errors():
        if tool not in TOOLS:
            raise ConfigError(None, f"unknown tool {short(tool)}: choose one of {', '.join(TOOLS)}")
        wanted = TOOLS[tool]
        start = "metal-engine serve demo" + (f" --port {port}" if port != ServerArgs.port and url is None else "")
        server = find_server(base_url(host, port, url), first_key(api_key), start)
        path = shutil.which(wanted.program)
        missing = f"{wanted.program} is not installed: {wanted.install}"
        if server.max_model_len < wanted.prompt_tokens:
            _note(
                f"{tool}'s first prompt takes about {wanted.prompt_tokens:,} tokens; this server's limit is "
                f"{server.max_model_len:,}"
            )
        if exec_ or arguments:
            if path is None:
                raise ConfigError(None, missing)
            sys.stdout.flush()
            command = [wanted.program, *wanted.arguments(server), *(arguments or [])]
            os.execve(path, command, {**os.environ, **wanted.environment(server)})
        if path is None:
            _note(missing)
        print("\n".join(shell_lines(wanted, server)))
        if sys.stdout.isatty():
            _note(f'`eval "$(metal-engine launch {tool})"` sets them; `metal-engine launch {tool} --exec` runs {tool}')


def shell_lines(tool: Tool, server: RunningServer) -> list[str]:
    """Return shell commands that configure a tool: its variables, and an alias if it needs arguments."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in tool.environment(server).items()]
    arguments = tool.arguments(server)
    if arguments:
        lines.append(f"alias {tool.program}={shlex.quote(shlex.join([tool.program, *arguments]))}")
    return lines


def find_server(url: str, api_key: str, start: str) -> RunningServer:
    """Return the address, key and model of a running server.

    Args:
        start: command that starts a server, for the error message.

    Raises:
        ConfigError: no server responds, it requires another key, or it is not a metal-engine server.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = get_json(f"{url}/v1/models", headers)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError("--api-key", f"is not a key of the server at {url}") from error
        raise ConfigError("--url", f"{url} responds with status {error.code}: is it a metal-engine server?") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError):
            message = f"no server responds at {url}: start one with `{start}`, or another model"
            raise ConfigError(None, message) from error
        raise ConfigError("--url", f"{url} does not respond like a metal-engine server") from error
    try:
        card = find_card(answer["data"], "") or {}
        server = RunningServer(url, api_key or PLACEHOLDER_KEY, str(card["id"]), int(card["max_model_len"]))
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError("--url", f"{url} does not respond like a metal-engine server") from error
    if problem := problem_of_name(server.model):
        raise ConfigError("--url", f"{url} has a model with an invalid name: {problem}")
    return server


def get_json(url: str, headers: dict[str, str]) -> Any:
    """Return the JSON at a URL. Ignores proxies, because the server is nearby. Raises as ``urllib`` and ``json``."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as response:
        return json.loads(response.read(_MAX_ANSWER))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)

"""The ``launch`` command: coding tools pointed at a server that runs."""

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

# Clients refuse to start without a key.
PLACEHOLDER_KEY = "metal-engine"
_SECONDS = 5
_MAX_ANSWER = 1 << 20


def launch(
    tool: Annotated[str, typer.Argument(help=f"{', '.join(TOOLS)}.", metavar="TOOL", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Run the tool with these, as in `-- -p hello`.", metavar="[-- ARGS]", show_default=False),
    ] = None,
    host: Host = ServerArgs.host,
    port: Port = ServerArgs.port,
    url: Url = None,
    api_key: ApiKey = None,
    exec_: Annotated[bool, typer.Option("--exec", help="Run the tool, instead of printing its environment.")] = False,
) -> None:
    """Point a coding tool at a server that runs: print its environment, or run it.

    `eval "$(metal-engine launch claude)"` sets the variables in this shell.
    """
    with one_line_errors():
        if tool not in TOOLS:
            raise ConfigError(None, f"there is no tool {short(tool)}: choose {', '.join(TOOLS)}")
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
    """What a shell reads to use a tool with a server: variables, and an alias where it needs arguments."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in tool.environment(server).items()]
    arguments = tool.arguments(server)
    if arguments:
        lines.append(f"alias {tool.program}={shlex.quote(shlex.join([tool.program, *arguments]))}")
    return lines


def find_server(url: str, api_key: str, start: str) -> RunningServer:
    """Ask a server for its model.

    Args:
        start: the command that starts one, for the message where none answers.

    Raises:
        ConfigError: none answers, it wants another key, or it is no server of this kind.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = get_json(f"{url}/v1/models", headers)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError("--api-key", f"is not what the server at {url} wants") from error
        raise ConfigError("--url", f"{url} answers {error.code}: is it a metal-engine server?") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError):
            message = f"no server answers at {url}: start one with `{start}`, or another model"
            raise ConfigError(None, message) from error
        raise ConfigError("--url", f"{url} does not answer as a metal-engine server does") from error
    try:
        card = find_card(answer["data"], "") or {}
        server = RunningServer(url, api_key or PLACEHOLDER_KEY, str(card["id"]), int(card["max_model_len"]))
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError("--url", f"{url} does not answer as a metal-engine server does") from error
    if problem := problem_of_name(server.model):
        raise ConfigError("--url", f"{url} has a model whose name {problem}")
    return server


def get_json(url: str, headers: dict[str, str]) -> Any:
    """The JSON at a URL. Asks no proxy: the server is near. Raises what ``urllib`` and ``json`` raise."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as response:
        return json.loads(response.read(_MAX_ANSWER))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)

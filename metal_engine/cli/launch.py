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
from metal_engine.cli.server_address import OWNER, ApiKey, Host, Port, Url, base_url, find_card, first_key
from metal_engine.errors import ConfigError, short
from metal_engine.settings.served_names import problem_of_name
from metal_engine.settings.server_args import ServerArgs

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
        flag = None if url is None else "--url"
        server = find_server(base_url(host, port, url), first_key(api_key), start, flag)
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


def find_server(url: str, api_key: str, start: str, flag: str | None) -> RunningServer:
    """Return the address, key and model of a running server.

    Args:
        api_key: key to send; empty if the user gave no key.
        start: command that starts a server, for the error message.
        flag: flag with which the user gave the URL; None if there is none.

    Raises:
        ConfigError: no server responds, the server requires another key, it is not a metal-engine server, it serves no
            model or a model with an invalid name, or it has not loaded a model yet.
    """
    cards = _cards(url, api_key, start, flag)
    try:
        card = find_card(cards, "")
        if card is None:
            raise ConfigError(flag, f"{url} serves no model")
        server = RunningServer(url, api_key or PLACEHOLDER_KEY, str(card["id"]), int(card.get("max_model_len") or 0))
        is_own = card.get("owned_by") == OWNER
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise response_problem(error, url, api_key, flag) from error
    if problem := problem_of_name(server.model):
        raise ConfigError(flag, f"{url} has a model with an invalid name: {problem}")
    if not server.max_model_len:
        if not is_own:
            raise response_problem(ValueError(), url, api_key, flag)
        chat = shlex.join(["metal-engine", "chat", server.model, "--url", url])
        message = (
            f"the server at {url} has not loaded a model yet, so its context length is unknown: load a model, "
            f"for example with `echo hello | {chat}`, and repeat this command"
        )
        raise ConfigError(None, message)
    return server


def _cards(url: str, api_key: str, start: str, flag: str | None) -> list[dict[str, Any]]:
    """Return the entries of ``/v1/models``, unchecked. The arguments are those of :func:`find_server`.

    Raises:
        ConfigError: no server responds, or the server refuses the request.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        cards: list[dict[str, Any]] = get_json(f"{url}/v1/models", headers)["data"]
    except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError) as error:
        raise response_problem(error, url, api_key, flag, f": start one with `{start}`, or another model") from error
    return cards


def response_problem(error: Exception, url: str, api_key: str, flag: str | None, advice: str = "") -> ConfigError:
    """Return the ConfigError to raise for a failed request to a server, or for a response of an unexpected form.

    Args:
        error: exception that the request or the reading of its response has raised.
        api_key: key that was sent; empty if the user gave no key.
        flag: flag with which the user gave the URL; None if there is none.
        advice: text to append to the message if no server responds.
    """
    if isinstance(error, urllib.error.HTTPError):
        if error.code == 401 and api_key:
            return ConfigError("--api-key", f"is not a key of the server at {url}")
        if error.code == 401:
            return ConfigError(None, f"the server at {url} requires a key: add --api-key KEY")
        return ConfigError(flag, f"{url} responds with status {error.code}: is it a metal-engine server?")
    if isinstance(error, OSError):
        return ConfigError(None, f"no server responds at {url}{advice}")
    return ConfigError(flag, f"{url} does not respond like a metal-engine server")


def get_json(url: str, headers: dict[str, str]) -> Any:
    """Return the JSON at a URL. Ignores proxies, because the server is nearby.

    Raises:
        OSError: no server responds, or the status is an error (``urllib.error.HTTPError``).
        http.client.HTTPException: the response is not HTTP.
        ValueError: the response is not JSON.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as response:
        return json.loads(response.read(_MAX_ANSWER))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)

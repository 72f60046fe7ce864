"""The ``ps`` command: lists the models of a running server."""

from __future__ import annotations

import http.client
import json
from typing import Annotated, Any

import typer

from metal_engine.cli.launch import get_json, response_problem
from metal_engine.cli.models import print_columns
from metal_engine.cli.options import one_line_errors
from metal_engine.cli.server_address import ApiKey, Host, Port, Url, base_url, first_key
from metal_engine.settings.fields import format_size
from metal_engine.settings.server_args import ServerArgs


def ps(
    host: Host = ServerArgs.host,
    port: Port = ServerArgs.port,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models of a running server, with their state, memory and number of requests."""
    with one_line_errors():
        rows = running_models(base_url(host, port, url), first_key(api_key), None if url is None else "--url")
        if as_json:
            print(json.dumps(rows, indent=2))
            return
        heads = ("NAME", "STATE", "MEMORY", "CONTEXT", "REQUESTS", "IDLE", "PROBLEM")
        print_columns([heads, *(_cells(row) for row in rows)])


def running_models(url: str, api_key: str, flag: str | None) -> list[dict[str, Any]]:
    """Return a server's models: name, state, memory_bytes, max_model_len, requests, idle_seconds, error.

    Values that the server does not report are None.

    Args:
        api_key: key to send; empty if the user gave no key.
        flag: flag with which the user gave the URL; None if there is none.

    Raises:
        ConfigError: no server responds, the server requires another key, or it is not a metal-engine server.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        cards = get_json(f"{url}/v1/models", headers)["data"]
        health = get_json(f"{url}/health", headers)
        return [_row(card, health) for card in cards]
    except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError) as error:
        raise response_problem(error, url, api_key, flag) from error


def _row(card: dict[str, Any], health: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, from its entry in ``/v1/models`` and from ``/health``.

    The entry of a server's only model has no state and no requests. That model is always loaded and has all requests.
    """
    return {
        "name": card["id"],
        "state": card.get("state", "loaded"),
        "memory_bytes": card.get("memory_bytes"),
        "max_model_len": card["max_model_len"],
        "requests": card.get("requests", health["running"] + health["waiting"]),
        "idle_seconds": card.get("idle_seconds"),
        "error": card.get("error"),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    memory, context, idle = row["memory_bytes"], row["max_model_len"], row["idle_seconds"]
    return (
        row["name"],
        row["state"],
        format_size(memory) if memory else "",
        "" if context is None else f"{context:,}",
        str(row["requests"]),
        "" if idle is None or row["requests"] else f"{idle:.0f} s",
        row["error"] or "",
    )

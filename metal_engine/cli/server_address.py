"""Address, key and model of the running server to which `chat`, `ps` and `launch` connect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from metal_engine.settings.chat_args import API_KEY_HELP, HOST_HELP, PORT_HELP, URL_HELP, check_url
from metal_engine.settings.fields import ENV_PREFIX
from metal_engine.settings.server_args import ServerArgs

# `owned_by` of the entries in this server's list of models.
OWNER = "metal-engine"
# Maps the address of all interfaces, on which a server listens, to the address to connect to.
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def _option(name: str, help_: str, metavar: str, default: object = None) -> Any:
    shown = help_ if default is None else f"{help_} Default: {default}."
    return typer.Option(help=shown, metavar=metavar, envvar=ENV_PREFIX + name, show_envvar=False, show_default=False)


Host = Annotated[str, _option("HOST", HOST_HELP, "TEXT", ServerArgs.host)]
Port = Annotated[int, _option("PORT", PORT_HELP, "N", ServerArgs.port)]
Url = Annotated[str | None, _option("URL", URL_HELP, "URL")]
ApiKey = Annotated[str | None, _option("API_KEY", API_KEY_HELP, "TEXT")]


def base_url(host: str, port: int, url: str | None) -> str:
    """Return the server's URL without ``/v1``: ``url``, or the address of ``host`` and ``port`` if ``url`` is None.

    Raises:
        ConfigError: ``url`` is not the URL of a server.
    """
    if url is None:
        host = _ANYWHERE.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    check_url(url)
    return url.rstrip("/").removesuffix("/v1")


def first_key(api_key: str | None) -> str:
    """Return the key to send; an empty text if there is none.

    The environment variable may contain several keys for `serve`, separated by commas. The first one is used.
    """
    return (api_key or "").split(",")[0].strip()


def find_card(cards: Sequence[dict[str, Any]], model: str) -> dict[str, Any] | None:
    """Return the entry of ``/v1/models`` to use, or None if the server does not serve the model.

    Args:
        model: name of a model in the API, or the path or repository of a loaded model. Empty for any model: a loaded
            model if there is one.
    """
    if model:
        named = [card for card in cards if card["id"] == model]
        # Excludes LoRA adapters: the root of their entries is their own path, and they have a parent.
        loaded_as = [card for card in cards if card.get("root") == model and card.get("parent") is None]
        return next(iter(named or loaded_as), None)
    return next((card for card in cards if card.get("max_model_len") is not None), next(iter(cards), None))

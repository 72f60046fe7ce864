"""Settings of ``metal-engine chat`` in addition to the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from metal_engine.errors import ConfigError, short
from metal_engine.settings.fields import SettingsBase, setting
from metal_engine.settings.server_args import LOG_LEVELS, ServerArgs

# `ps` and `launch` have the same four options.
HOST_HELP = "Address on which the server listens."
PORT_HELP = "Port of the server."
URL_HELP = "URL of the server, instead of --host and --port."
API_KEY_HELP = "Key of the server. METAL_ENGINE_API_KEY is safer."


@dataclass(frozen=True, kw_only=True)
class ChatArgs(SettingsBase):
    """Settings of ``metal-engine chat`` in addition to the engine's."""

    host: str = setting(ServerArgs.host, HOST_HELP)
    port: int = setting(ServerArgs.port, PORT_HELP, ge=0, le=65535)
    url: str | None = setting(None, f"{URL_HELP} The chat then never loads MODEL itself.")
    api_key: str | None = setting(None, API_KEY_HELP, secret=True)
    system: str | None = setting(None, "System prompt.")
    temperature: float | None = setting(
        None,
        "Sampling temperature; 0 is greedy. Default: the server's. Without a server, the model's recommendation, "
        "or 0.7.",
    )
    top_p: float | None = setting(
        None,
        "Sample from the most likely tokens with this total probability. Default: the server's. Without a server, "
        "the model's recommendation, or 0.95.",
    )
    max_tokens: int | None = setting(None, "Maximum tokens of an answer. Default: as many as fit.", kind="count")
    log_level: str = setting(
        "warning", "Minimum severity in the log: debug, info, warning or error.", choices=LOG_LEVELS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is not None:
            check_url(self.url)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("--api-key", "must be printable ASCII")


def check_url(url: str) -> None:
    """Raise ConfigError if ``--url`` is not the URL of a server."""
    if not _is_address(url):
        raise ConfigError("--url", f"must be like http://127.0.0.1:8000 or https://example.org, got {short(url)}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port
        return False

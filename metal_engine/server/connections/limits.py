"""What one connection may take, and how many there may be."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.device.descriptors import open_file_limit
from metal_engine.errors import ConfigError
from metal_engine.settings.args import ServerArgs

DEFAULT_MAX_CONNECTIONS = 4096
# Descriptors for everything else: model files, the KV cache's, logs, the libraries'.
RESERVED_DESCRIPTORS = 128
# With fewer connections than this a server is of no use.
_FEWEST_CONNECTIONS = 16


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on what clients can make the server hold before any of their requests has been looked at.

    Attributes:
        max_connections: connections at once.
        num_spare: connections beyond those, for ``/health`` and ``/ready`` only.
        spare_seconds: what a spare connection may take to ask.
        max_head_bytes: of a request line and its headers, together.
        max_headers: how many headers a request may have.
        max_pipelined: requests that may wait behind the one that is being answered.
        read_seconds: what the request line and headers may take, and a pause within a body.
        write_seconds: how long an answer may wait for a client that does not read it.
        keep_alive_seconds: how long a connection may stay open between requests.
    """

    max_connections: int = DEFAULT_MAX_CONNECTIONS
    num_spare: int = 16
    spare_seconds: float = 1.0
    max_head_bytes: int = 64 << 10
    max_headers: int = 256
    max_pipelined: int = 8
    read_seconds: float = 15.0
    write_seconds: float = 60.0
    keep_alive_seconds: float = 5.0


def connection_limits(args: ServerArgs) -> ConnectionLimits:
    """The limits that ``args`` ask for. Raises the process's limit of open files as far as they need it.

    Raises:
        ConfigError: the process may not open as many files.
    """
    beside = RESERVED_DESCRIPTORS + ConnectionLimits.num_spare
    wanted = args.max_connections or DEFAULT_MAX_CONNECTIONS
    can_open = open_file_limit(wanted + beside)
    room = can_open - beside
    needed = args.max_connections or _FEWEST_CONNECTIONS
    if room < needed:
        lower = f" or lower max-connections to {room}" if room >= _FEWEST_CONNECTIONS else ""
        problem = f"needs {needed + beside} open files at once, and the process may have {can_open}"
        message = f"max-connections {needed} {problem}: raise the limit (ulimit -n 8192){lower}"
        raise ConfigError("max-connections", message)
    return ConnectionLimits(
        max_connections=min(wanted, room),
        read_seconds=args.timeout_read,
        write_seconds=args.timeout_write,
        keep_alive_seconds=args.timeout_keep_alive,
    )

"""Limits on each connection and on the number of connections."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.device.descriptors import open_file_limit
from metal_engine.errors import ConfigError
from metal_engine.settings.server_args import ServerArgs

DEFAULT_MAX_CONNECTIONS = 4096
# Descriptors for other purposes: model files, files of the KV cache, logs, and libraries.
RESERVED_DESCRIPTORS = 128
# Minimum number of connections for a useful server.
_FEWEST_CONNECTIONS = 16


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on connections and on the data that clients send over them. All times are in seconds.

    Attributes:
        max_connections: maximum number of connections.
        num_spare: number of additional connections, for ``/health`` and ``/ready`` only.
        spare_seconds: time limit for the request of a spare connection.
        max_head_bytes: maximum size of a request line and its headers together.
        max_headers: maximum number of headers of a request.
        max_pipelined: maximum number of requests that wait for the response to an earlier request on the connection.
        read_seconds: time limit for the request line and headers, and for a pause within a body.
        write_seconds: time after which a connection is aborted if its client does not read the response.
        keep_alive_seconds: time for which a connection may stay open between requests.
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
    """Return the limits from ``args``. Increases the process's limit of open files if necessary.

    Raises:
        ConfigError: the limit of open files is too low for ``max-connections``, or for 16 connections if that setting
            is 0.
    """
    beside = RESERVED_DESCRIPTORS + ConnectionLimits.num_spare
    wanted = args.max_connections or DEFAULT_MAX_CONNECTIONS
    can_open = open_file_limit(wanted + beside)
    available = can_open - beside
    needed = args.max_connections or _FEWEST_CONNECTIONS
    if available < needed:
        lower = f" or lower max-connections to {available}" if available >= _FEWEST_CONNECTIONS else ""
        problem = f"needs {needed + beside} open files at once, and the process may have {can_open}"
        message = f"max-connections {needed} {problem}: raise the limit (ulimit -n 8192){lower}"
        raise ConfigError("max-connections", message)
    return ConnectionLimits(
        max_connections=min(wanted, available),
        read_seconds=args.timeout_read,
        write_seconds=args.timeout_write,
        keep_alive_seconds=args.timeout_keep_alive,
    )

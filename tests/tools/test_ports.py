"""Ports of servers that tests start."""

from __future__ import annotations

from tools.fixtures.ports import free_port


def test_no_other_server_or_connection_gets_the_port() -> None:
    """Linux chooses ports from 32768 on for connections, and for servers with port 0."""
    ports = {free_port() for _ in range(100)}
    assert len(ports) == 100 and max(ports) < 32_768

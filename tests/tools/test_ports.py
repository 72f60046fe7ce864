"""Ports of servers that tests start."""

from __future__ import annotations

from tools.fixtures.ports import free_port


def test_no_other_server_or_connection_gets_the_port() -> None:
    """Ports from 32768 on are those that Linux chooses by itself, for any other test."""
    ports = {free_port() for _ in range(100)}
    assert len(ports) == 100 and max(ports) < 32_768

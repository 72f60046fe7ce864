"""The thread that ends a fork whose peer has gone."""

from __future__ import annotations

import os
import select
import socket

import pytest

from metal_engine.forks.limits import Growth, Monitor


class PollOfMacOS:
    """``select.poll`` of macOS, which reports nothing for a socket without requested events."""

    def __init__(self) -> None:
        self._poll = PollOfMacOS.real()

    real = staticmethod(select.poll)

    def register(self, channel: socket.socket, events: int) -> None:
        if events:
            self._poll.register(channel, events)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        return self._poll.poll(timeout)


@pytest.mark.parametrize("poll", [select.poll, PollOfMacOS])
@pytest.mark.parametrize("has_data", [False, True])
def test_the_monitor_ends_the_process_once_the_peer_has_gone(
    monkeypatch: pytest.MonkeyPatch, poll: type, has_data: bool
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(select, "poll", poll)
    monkeypatch.setattr(os, "_exit", ends.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monitor = Monitor(ours, Growth(), 1 << 40)
        if has_data:
            theirs.sendall(b"data")
        for expected in ([], [1]):
            checks = iter([False, True])
            monkeypatch.setattr(monitor.done, "wait", lambda seconds, checks=checks: next(checks))
            monitor.run()
            assert ends == expected
            theirs.close()

"""Limits on the memory of a fork."""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
import threading

# Interval between two checks. macOS enforces no limit on a process's memory.
_MONITOR_SECONDS = 0.005


class Growth:
    """Growth of this process since it was forked.

    On Linux, this is the growth of its resident private memory. Pages of libraries do not count, because the system may
    evict them from an idle process and load them again. On other systems, it is the growth of the peak memory.
    """

    def __init__(self) -> None:
        self._before = self._size()

    def _size(self) -> int:
        if sys.platform != "linux":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with open("/proc/self/statm", "rb") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
        return (resident - of_files) * resource.getpagesize()

    @property
    def num_bytes(self) -> int:
        return self._size() - self._before


class Monitor(threading.Thread):
    """Thread that ends the process if it grows too much, or if the peer has closed the socket.

    Args:
        channel: socket to the peer.
        growth: growth of this process.
        max_growth: maximum of ``growth.num_bytes``.

    Attributes:
        done: event that ends the thread when the caller sets it.
    """

    def __init__(self, channel: socket.socket, growth: Growth, max_growth: int) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        self._growth = growth
        self._max_growth = max_growth
        self.done = threading.Event()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLHUP)  # Linux always reports hang-ups, macOS only on request
        while not self.done.wait(_MONITOR_SECONDS):
            if self._growth.num_bytes > self._max_growth or poll.poll(0):
                os._exit(1)

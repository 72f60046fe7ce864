"""The priority of threads that must not take time from those that compute."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# With this niceness, four threads that load KV take a sixth of two busy cores.
_NICENESS = 10


def lower_thread_priority() -> None:
    """Make the calling thread give way to others; only Linux has a niceness for each thread."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    # A process that is nicer still stays so: raising a priority takes privileges. Where even lowering it is
    # forbidden, the thread works as it is: one that ended would leave requests waiting.
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)

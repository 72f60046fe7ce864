"""Priority of threads that must not take CPU time from computing threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# With this niceness, four threads that load KV take a sixth of the time of two busy cores.
_NICENESS = 10


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread. Only Linux has a niceness for each thread."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    # A higher niceness stays, because raising the priority needs privileges. If even lowering is forbidden, the thread
    # keeps its priority. An error would end the thread and leave requests waiting.
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)

"""Ends this process when its parent ends, even if no thread can read the parent's messages."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Arrange that this process ends when its parent ends. Returns at once.

    On Linux, the system sends SIGKILL when the thread that has started this process ends. Elsewhere, a thread checks
    once a second whether the parent has ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    parent = os.getppid()

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=poll, name="parent", daemon=True).start()

"""Process that answers over the socket that it has from its parent."""

from __future__ import annotations

import os
import sys

from metal_engine.python_process import channel_to_parent

if __name__ == "__main__":
    with channel_to_parent() as channel:
        channel.sendall(f"session {os.getsid(0)}, empty standard input: {sys.stdin.read()!r}".encode())

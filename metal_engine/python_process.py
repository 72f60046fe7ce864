"""Command and environment for starting other Python processes with the import path of this process."""

from __future__ import annotations

import os
import sys

# Without -P, the options -m and -c import from the current folder, which can have files of other users. With
# python_environment(), modules are imported from the current folder only if this process does so.
PYTHON = (sys.executable, "-P")


def python_environment() -> dict[str, str]:
    """Return this process's environment, with its import path as ``PYTHONPATH``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

"""The command and the environment of another Python process that imports what this process can import."""

from __future__ import annotations

import os
import sys

# The option -m would import from the current folder, whose files may be anybody's. If this process imports from there,
# too, the folder is in PYTHONPATH.
PYTHON = (sys.executable, "-P")


def python_environment() -> dict[str, str]:
    """Return this process's environment, with its import path as ``PYTHONPATH``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

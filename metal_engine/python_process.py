"""How other Python processes are started, with the import path of this process."""

from __future__ import annotations

import os
import sys

# Without -P, the option -m imports from the current folder, which can have files of other users. If this process also
# imports from the folder, it is in PYTHONPATH.
PYTHON = (sys.executable, "-P")


def python_environment() -> dict[str, str]:
    """Return this process's environment, with its import path as ``PYTHONPATH``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}

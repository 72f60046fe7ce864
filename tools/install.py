"""Runs pip install and shows its progress in one line. Used by `make`.

python tools/install.py -c constraints.txt -e .

Takes pip's arguments. On a terminal, the line is overwritten, and the last 40 lines of pip's output are printed if pip
fails. Elsewhere, as in CI, pip runs with ``--quiet``. The exit status is pip's, or 130 after Ctrl-C on a terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable


class Progress:
    """Derives pip's current action from its output."""

    def __init__(self) -> None:
        self._num_found = 0
        self._doing = "looking for packages"

    def after(self, line: str) -> str:
        """Take the next line of pip's output and return the text to show, e.g. ``3 packages; looking for numpy``."""
        if match := re.match(r"Collecting ([\w.-]+)", line):
            self._num_found += 1
            self._doing = f"looking for {match[1]}"
        elif match := re.match(r" *(?:Downloading|Using cached) (\S+?)-\d\S* \(([^)]+)\)", line):
            verb = "downloading" if "Downloading" in line else "found"
            self._doing = f"{verb} {match[1].rpartition('/')[2]} ({match[2]})"
        elif match := re.match(r"Building wheel for ([\w.-]+)", line.strip()):
            self._doing = f"building {match[1]}"
        elif line.startswith("Installing collected packages: "):
            self._doing = f"unpacking {_packages(line.count(',') + 1)}"
        return f"{_packages(self._num_found)}; {self._doing}" if self._num_found else self._doing


def _packages(count: int) -> str:
    return f"{count} package{'' if count == 1 else 's'}"


def show(lines: Iterable[str]) -> list[str]:
    """Overwrite one line of the terminal for each line of pip's output. Return the output."""
    progress, said = Progress(), []
    start = time.monotonic()
    for line in lines:
        said.append(line)
        text = f"  {time.monotonic() - start:3.0f} s  {progress.after(line)}"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", flush=True)
    print("\r\x1b[K", end="", flush=True)
    return said


def main() -> int:
    command = [sys.executable, "-m", "pip", "install", *sys.argv[1:]]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_PROGRESS_BAR": "off", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if not sys.stdout.isatty() or os.environ.get("CI"):
        return subprocess.run([*command, "--quiet"], env=env).returncode
    pip = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert pip.stdout is not None
    try:
        said = show(pip.stdout)
    except KeyboardInterrupt:
        print()
        pip.wait()
        return 130
    status = pip.wait()
    if status:
        print("".join(said[-40:]), end="")
    return status


if __name__ == "__main__":
    sys.exit(main())

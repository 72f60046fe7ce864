"""tools/install.py shows pip's progress in one line on a terminal, and nothing elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "install.py"
# pip's output.
LINES = """\
Obtaining file:///home/me/metal-engine
Collecting mlx>=0.32.4 (from metal-engine==0.1.0)
  Downloading mlx-0.32.4-cp311-cp311-manylinux_2_35_x86_64.whl.metadata (5.9 kB)
Collecting numpy>=2.0 (from metal-engine==0.1.0)
  Using cached numpy-2.4.0-cp311-cp311-manylinux_2_27_x86_64.whl (16.6 MB)
Installing collected packages: numpy, mlx, metal-engine
Successfully installed metal-engine-0.1.0 mlx-0.32.4 numpy-2.4.0
"""
PIP = """\
import sys
print(sys.argv[1:], end="\\n\\n")
print({lines!r}, end="", flush=True)
print("ERROR: no such package", file=sys.stderr)
sys.exit({status})
"""


@pytest.mark.parametrize("status", [0, 1])
def test_a_terminal_shows_pip_progress_in_one_line(status: int, tmp_path: Path) -> None:
    """The test uses a fake pip."""
    (tmp_path / "pip.py").write_text(PIP.format(lines=LINES, status=status))
    env = {name: value for name, value in os.environ.items() if name != "CI"} | {"PYTHONPATH": str(tmp_path)}
    ours, theirs = pty.openpty()
    tool = subprocess.Popen([sys.executable, str(TOOL), "-e", "."], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    assert tool.wait(60) == status
    lines = shown.decode().split("\r\x1b[K")
    assert any("unpacking 3 packages" in line for line in lines)
    assert all("\n" not in line for line in lines[:-1])  # one line that is overwritten
    assert ("no such package" in lines[-1]) == ("Collecting" in lines[-1]) == (status != 0)


def test_install_is_quiet_without_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text("import sys; assert '--quiet' in sys.argv; sys.exit(3)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(TOOL), "-e", "."], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")

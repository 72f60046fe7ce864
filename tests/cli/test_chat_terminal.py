"""`metal-engine chat` in a pseudo-terminal: editing, history, Ctrl-C, Ctrl-D and words at the edge."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.serving import MODEL, Served, wait_until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 60.0
PROMPT = "> "
CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")
CTRL_C, CTRL_D, ALT_ENTER, UP, ENTER = "\x03", "\x04", "\x1b\r", "\x1b[A", "\r"


class Terminal:
    """A chat in a terminal 40 cells wide; what it shows, without control sequences, is in ``shown``."""

    def __init__(self, url: str, folder: Path) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        self.history = folder / "metal-engine" / "chat_history"
        # Nobody here answers where the cursor is.
        env = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(folder), "PROMPT_TOOLKIT_NO_CPR": "1"}
        env.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "metal_engine", "chat", "--url", url],
            cwd=ROOT,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._ours = ours
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """Reads until the text is shown; returns what was shown up to its end, and goes on behind it."""
        deadline = time.monotonic() + DEADLINE
        while (at := self.shown.find(text)) < 0:
            ready, _, _ = select.select([self._ours], [], [], 0.5)
            if ready:
                try:
                    self.shown += CONTROL.sub("", os.read(self._ours, 1 << 16).decode(errors="replace"))
                except OSError:  # the other end is closed
                    raise AssertionError(f"the chat ended before {text!r}:\n{self.shown}") from None
            assert time.monotonic() < deadline, f"still waiting for {text!r}:\n{self.shown}"
        before, self.shown = self.shown[: at + len(text)], self.shown[at + len(text) :]
        return before

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def ask(self, keys: str) -> str:
        """Sends a message when the prompt is there; returns what is shown until the answer's end."""
        self.wait_for(PROMPT)
        self.send(keys)
        return self.wait_for("tokens/s]")

    def ends(self) -> int:
        """Reads to the end; the exit status."""
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:
                data = b""
            if not data:
                return self.process.wait(DEADLINE)
            self.shown += CONTROL.sub("", data.decode(errors="replace"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Callable[[str], Terminal]]:
    terminals: list[Terminal] = []

    def start(url: str) -> Terminal:
        terminals.append(Terminal(url, tmp_path))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def test_a_conversation(echoing: Served, open_terminal: Callable[[str], Terminal]) -> None:
    terminal = open_terminal(echoing.url)
    terminal.wait_for(f"Talking to {MODEL}")
    # Edited, sent, and wrapped between words: 40 cells are less than these.
    words = "extraordinarily long words are never broken at the edge of a terminal"
    shown = terminal.ask(words.replace("never", "nevxr") + "\x1b[D" * 39 + "\x7fe" + ENTER)
    answer = shown[shown.rindex("assistant") if "assistant" in shown else 0 :]
    assert "tokens, the first after" in shown
    lines = [line for line in shown.splitlines() if "broken" in line or "extraordinarily" in line]
    assert lines and "nevxr" not in answer.split(ENTER)[-1].splitlines()[-2]
    # Several lines: by Alt-Enter, by a backslash, and pasted.
    assert "one\ntwo\nthree" in terminal.ask(f"one{ALT_ENTER}two\\{ENTER}three{ENTER}").replace("  ", "")
    assert "four" in terminal.ask(f"\x1b[200~four\nfive\x1b[201~{ENTER}")
    # The last message again.
    assert "five" in terminal.ask(UP + ENTER)
    terminal.wait_for(PROMPT)
    terminal.send(CTRL_D)
    assert terminal.ends() == 0
    assert stat.S_IMODE(terminal.history.stat().st_mode) == 0o600
    kept = terminal.history.read_text()
    assert "+two\n+three" in kept and "+four\n+five" in kept
    # A new chat has the history of the last.
    again = open_terminal(echoing.url)
    assert "five" in again.ask(UP + ENTER)
    again.wait_for(PROMPT)
    again.send(CTRL_C)
    assert again.ends() == 0


def test_ctrl_c(served: Served, open_terminal: Callable[[str], Terminal]) -> None:
    """Ends the answer under way; empties a line; leaves at an empty one. The server is rid of the request."""
    terminal = open_terminal(served.url)
    terminal.wait_for(PROMPT)
    terminal.send(f"Talk without end.{ENTER}")
    wait_until(lambda: served.engine.num_open_requests == 1, "the request")
    terminal.wait_for("end.")
    wait_until(lambda: served.engine.stats.num_running == 1, "the answer")
    terminal.send(CTRL_C)
    wait_until(lambda: served.engine.num_open_requests == 0, "the request to end")
    terminal.wait_for(PROMPT)
    terminal.send("never sent")
    terminal.wait_for("never sent")
    terminal.send(CTRL_C)
    terminal.send(f"/exitnot{ENTER}")
    assert "never" not in terminal.wait_for("There is no command /exitnot").split("/exitnot")[-1]
    terminal.wait_for(PROMPT)
    terminal.send(CTRL_C)
    assert terminal.ends() == 0
    assert "Traceback" not in terminal.shown


def test_the_history_of_a_home_that_cannot_be_written(
    echoing: Served, open_terminal: Callable[[str], Terminal], tmp_path: Path
) -> None:
    (tmp_path / "metal-engine").write_text("in the way")
    terminal = open_terminal(echoing.url)
    terminal.wait_for("The history is not kept")
    assert "Hello" in terminal.ask(f"Hello{ENTER}")
    terminal.process.send_signal(signal.SIGTERM)
    terminal.process.wait(DEADLINE)

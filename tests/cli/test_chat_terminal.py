"""Tests `metal-engine chat` in a pseudo-terminal: editing, history, multiline input, Ctrl-C, Ctrl-D and wrapping."""

from __future__ import annotations

import fcntl
import json
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
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.http_server import QuietHandler, http_server

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0
COLUMNS = 40
PROMPT = ">"  # prompt_toolkit moves the cursor over the space behind it
CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")
CTRL_C, CTRL_D, ALT_ENTER, UP, LEFT, BACKSPACE, ENTER = "\x03", "\x04", "\x1b\r", "\x1b[A", "\x1b[D", "\x7f", "\r"


class Shouting(QuietHandler):
    """Server whose model repeats the last message in capitals, or writes HA endlessly on request."""

    aborted = threading.Event()

    def do_GET(self) -> None:
        self.send_body(b'{"data": [{"id": "shouter", "owned_by": "somebody"}]}')

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        self.send_response(200)
        self.end_headers()
        num_tokens = 0
        try:
            while num_tokens < len(text) or "without end" in text:
                piece = "HA " if "without end" in text else text[num_tokens].upper()
                num_tokens += 1
                delta = {"choices": [{"delta": {"content": piece}}], "usage": {"completion_tokens": num_tokens}}
                self.wfile.write(f"data: {json.dumps(delta)}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.002)
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            self.aborted.set()


def _be_a_terminals_own() -> None:
    """Runs in the child process: makes the terminal its controlling terminal, so that Ctrl-C reaches it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores the signal


class Terminal:
    """A chat in a narrow terminal. Control sequences are removed from its output."""

    def __init__(self, url: str, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.history = folder / "metal-engine" / "chat_history"
        # This terminal does not answer requests for the cursor's position.
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
            preexec_fn=_be_a_terminals_own,
        )
        os.close(theirs)
        self._raw = b""
        self._num_read = 0  # number of characters that earlier waits have consumed

    @property
    def shown(self) -> str:
        """Output after the text of the last wait."""
        return CONTROL.sub("", self._raw.decode(errors="replace"))[self._num_read :]

    def wait_for(self, text: str) -> str:
        """Read until the text is shown. Return the output up to its end."""
        deadline = time.monotonic() + DEADLINE
        while text not in self.shown:
            assert self._read(), f"the chat ended before {text!r}:\n{self.shown}"
            assert time.monotonic() < deadline, f"still waiting for {text!r}:\n{self.shown}"
        before = self.shown[: self.shown.index(text) + len(text)]
        self._num_read += len(before)
        return before

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def ask(self, keys: str) -> str:
        """Send a message when the prompt is shown. Return the lines of the answer."""
        self.wait_for(PROMPT)
        self.send(keys)
        return "\n".join(line for line in self.wait_for("tokens/s]").splitlines() if line.isupper())

    def ends(self) -> int:
        """Read to the end. Return the exit status."""
        while self._read():
            pass
        return self.process.wait(DEADLINE)

    def _read(self) -> bool:
        """Read more output. Return False at the end."""
        if select.select([self._ours], [], [], 0.5)[0]:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # the other end is closed
                return False
            self._raw += data
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


OpenTerminal = Callable[[], Terminal]


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[OpenTerminal]:
    """Opens terminals that talk to a shouting server."""
    terminals: list[Terminal] = []
    with http_server(Shouting) as url:

        def start() -> Terminal:
            terminals.append(Terminal(url, tmp_path))
            return terminals[-1]

        try:
            yield start
        finally:
            for terminal in terminals:
                terminal.close()


def test_a_conversation(open_terminal: OpenTerminal) -> None:
    terminal = open_terminal()
    assert "Talking to shouter" in terminal.wait_for("settings apply.")
    # Edited in the middle, and longer than a line: words are wrapped whole.
    words = "extraordinarily long words are nevxr broken at the edge of a terminal"
    back = len(words) - words.index("x", words.index("nev")) - 1
    answer = terminal.ask(words + LEFT * back + BACKSPACE + "e" + ENTER)
    assert answer.replace("\n", " ").split() == words.replace("nevxr", "never").upper().split()
    assert len(answer.splitlines()) == 2 and all(len(line) <= COLUMNS for line in answer.splitlines())
    # Several lines, entered with Alt-Enter, with a backslash, and pasted.
    assert terminal.ask(f"one{ALT_ENTER}two\\{ENTER}three{ENTER}") == "ONE\nTWO\nTHREE"
    assert terminal.ask(f"\x1b[200~four\nfive\x1b[201~{ENTER}") == "FOUR\nFIVE"
    assert terminal.ask(UP + ENTER) == "FOUR\nFIVE"
    terminal.wait_for(PROMPT)
    terminal.send(CTRL_D)
    assert terminal.ends() == 0
    assert stat.S_IMODE(terminal.history.stat().st_mode) == 0o600
    assert "+two\n+three\n" in terminal.history.read_text()
    # The next chat has the history of the previous one.
    terminal.history.chmod(0o644)
    again = open_terminal()
    assert again.ask(UP + ENTER) == "FOUR\nFIVE"
    assert stat.S_IMODE(again.history.stat().st_mode) == 0o600
    again.wait_for(PROMPT)
    again.send(CTRL_C)
    assert again.ends() == 0


def test_ctrl_c(open_terminal: OpenTerminal) -> None:
    """Ctrl-C stops the current answer and its request, clears a line, and ends the chat at an empty line."""
    Shouting.aborted.clear()
    terminal = open_terminal()
    terminal.wait_for(PROMPT)
    terminal.send(f"laugh without end{ENTER}")
    terminal.wait_for("HA HA HA HA")
    terminal.send(CTRL_C)
    terminal.wait_for("tokens/s]")  # the chat reports the speed
    assert Shouting.aborted.wait(DEADLINE)
    terminal.wait_for(PROMPT)
    terminal.send("never sent")
    terminal.wait_for("never sent")
    terminal.send(f"{CTRL_C}really{ENTER}")
    shown = terminal.wait_for("tokens/s]")
    assert "REALLY" in shown and "NEVER" not in shown
    terminal.wait_for(PROMPT)
    terminal.send(CTRL_C)
    assert terminal.ends() == 0
    assert "Traceback" not in terminal.shown


def test_a_history_that_cannot_be_kept(open_terminal: OpenTerminal, tmp_path: Path) -> None:
    (tmp_path / "metal-engine").write_text("in the way")
    terminal = open_terminal()
    terminal.wait_for("The history is not saved")
    assert terminal.ask(f"hello{ENTER}") == "HELLO"
    terminal.wait_for(PROMPT)
    terminal.send(f"/exit{ENTER}")
    assert terminal.ends() == 0

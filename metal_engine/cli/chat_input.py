"""Sources of a chat's messages: a terminal with line editing and a history, or a pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

# Maximum length of a message in the history, because a chat reads the complete history at its start.
_MAX_KEPT = 10_000


class Input(Protocol):
    def read(self) -> str | None:
        """Return the user's next message, of one or several lines; None at the end of the input."""
        ...


class PipeInput:
    """Messages from a pipe or a file, one per line. A backslash at the end of a line joins it with the next line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read(self) -> str | None:
        lines = []
        while line := self._stream.readline():
            line = line.rstrip("\r\n")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(lines) if lines else None


class TerminalInput:
    """Messages from a terminal.

    Enter sends the message. Alt-Enter, or Enter after a backslash, starts a new line. Pasted text may have several
    lines. Ctrl-C clears the input. On an empty line it ends the chat, as Ctrl-D does.

    If the history cannot be stored in a file, a note reports that, and the history exists for this chat only.
    """

    def __init__(self, history_file: Path) -> None:
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            history=_history(history_file),
            enable_open_in_editor=False,
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt()
        except EOFError:
            return None


def open_input(history_file: Path) -> Input:
    """Return the input for a terminal if stdin and stdout are terminals, else the input for a pipe."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalInput(history_file)
    return PipeInput(open(sys.stdin.fileno(), encoding="utf-8", errors="replace", closefd=False))


def history_path() -> Path:
    """Return the path of the history: ``metal-engine/chat_history`` below ``XDG_STATE_HOME``, or ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(base)) / "metal-engine" / "chat_history"


def _history(path: Path) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class BoundedHistory(FileHistory):
        def store_string(self, string: str) -> None:
            if len(string) <= _MAX_KEPT:
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # the history is private
        finally:
            os.close(descriptor)
    except OSError as error:
        print(f"The history is not saved: {error}", file=sys.stderr)
        return InMemoryHistory()
    return BoundedHistory(str(path))


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _empty_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=EOFError, style="class:aborting")

    return bindings

"""Shows answers while they arrive, with word wrapping on a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
_TAB = 8
# Number of columns for a terminal of unknown size.
_WIDTH = 80


class WordWrapper:
    """Writes text that arrives in pieces, and starts a new line before a word that would not fit.

    Incomplete words are held back. Characters that are two cells wide, such as Chinese, count as words,
    because there are no spaces between them. A word longer than a line is broken at the edge.

    Args:
        write: function that shows a text.
        width: function that returns the width of a line in cells. Called for each word, because windows change their
            size.
    """

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._spaces = ""
        self._word = ""

    def add(self, text: str) -> None:
        """Show text, except its last word, which may be incomplete. The text may end at any character."""
        for char in text:
            if char == "\n":
                self._end_word()
                self._new_line()
            elif char in " \t":
                self._end_word()
                self._spaces += " " * (_TAB - (self._column + len(self._spaces)) % _TAB) if char == "\t" else " "
            elif cell_len(char) == 2:
                self._end_word()
                self._word = char
                self._end_word()
            else:
                self._word += _shown(char)
                if cell_len(self._word) >= self._width():
                    self._end_word()

    def finish(self) -> None:
        """Show the text that was held back, and end the line if it is not empty."""
        self._end_word()
        if self._column:
            self._new_line()

    def _end_word(self) -> None:
        if not self._word:
            return
        size = cell_len(self._word)
        if self._column and self._column + len(self._spaces) + size > self._width():
            self._new_line()
        else:
            # a long word at the start of a line may leave no width for all spaces before it
            spaces = self._spaces[: max(0, self._width() - size)]
            self._write(spaces)
            self._column += len(spaces)
        self._write(self._word)
        self._column += size
        self._spaces = self._word = ""

    def _new_line(self) -> None:
        self._write("\n")
        self._column, self._spaces = 0, ""


def _shown(char: str) -> str:
    """Return a character, or U+FFFD in the place of a control character.

    Models may output control sequences for terminals.
    """
    return char if char.isprintable() or char in "\u200b\u200c\u200d" else "\N{REPLACEMENT CHARACTER}"


class AnswerView:
    """Shows a sequence of answers on a stream.

    A terminal also shows reasoning, dimmed. A pipe gets only the answers, unchanged.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._has_styles = self._is_terminal and "NO_COLOR" not in os.environ
        self._wrapper = WordWrapper(out.write, self._width)
        self._is_dim = False
        self._last = "\n"

    def add(self, text: str, *, is_reasoning: bool = False) -> None:
        """Show the next part of an answer. Without a terminal, reasoning is dropped."""
        if self._is_terminal:
            self._set_dim(is_reasoning)
            self._wrapper.add(text)
        elif not is_reasoning and text:
            self._out.write(text)
            self._last = text[-1]
        self._out.flush()

    def finish(self) -> None:
        """End the answer's last line."""
        if self._is_terminal:
            self._set_dim(False)
            self._wrapper.finish()
        elif self._last != "\n":
            self._out.write("\n")
            self._last = "\n"
        self._out.flush()

    def _set_dim(self, is_dim: bool) -> None:
        if is_dim == self._is_dim:
            return
        self._is_dim = is_dim
        self._wrapper.finish()  # reasoning and answer start on separate lines
        if self._has_styles:
            self._out.write(_DIM if is_dim else _PLAIN)

    def _width(self) -> int:
        try:
            # A terminal of unknown size reports 0 columns.
            return os.get_terminal_size(self._out.fileno()).columns or _WIDTH
        except OSError:
            return _WIDTH

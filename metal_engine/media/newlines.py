"""Joins newlines around images with newlines of the neighbouring text.

Some processors write newlines around an image into the prompt's text. A tokenizer may have one token for several
newlines. The tokens of an image and of the text beside it can therefore not be encoded separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

_MOST_NEWLINES = 32


class NewlineJoiner:
    """Joins two newline tokens into one token where a text and an image of a prompt meet.

    Args:
        encode: encodes a text within a prompt to token ids.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    @cached_property
    def _counts(self) -> dict[int, int]:
        """Number of newlines in each token that consists of newlines, by token id."""
        encoded = [(count, self._encode("\n" * count)) for count in range(1, _MOST_NEWLINES + 1)]
        return {ids[0]: count for count, ids in encoded if len(ids) == 1}

    def join(self, pieces: list[np.ndarray]) -> None:
        """Join newlines at the borders of pieces. Replaces items of ``pieces``.

        The joined token becomes part of the image's piece. Feature tokens keep their indices in the piece.

        Args:
            pieces: token ids of text and images in turn, beginning with text. A text may be empty.
        """
        counts = self._counts
        tokens = {count: token for token, count in counts.items()}
        last: int | None = None  # index of the last piece with tokens
        for i, piece in enumerate(pieces):
            if not len(piece):
                continue
            if last is not None:
                before = pieces[last]
                joined = tokens.get(counts.get(int(before[-1]), 0) + counts.get(int(piece[0]), 0))
                if joined is not None and int(before[-1]) in counts and int(piece[0]) in counts:
                    if i % 2:
                        pieces[i] = np.append(joined, piece[1:])
                        pieces[last] = before[:-1]
                    else:
                        pieces[i] = piece[1:]
                        pieces[last] = np.append(before[:-1], joined)
                    if not len(pieces[i]):
                        continue
            last = i

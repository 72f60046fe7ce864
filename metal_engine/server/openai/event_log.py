"""Events of one response, kept for clients that read them later or again."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator

from metal_engine.server.errors import invalid
from metal_engine.server.generation.streaming import named_sse

# Maximum number of characters that a log keeps.
MAX_CHARACTERS = 1 << 24
# Number of bytes from which on no further entry is added to a write.
_PIECE_BYTES = 1 << 16
# Number of characters to count for an entry, which is the argument of one append, in addition to its text.
_PER_ENTRY = 100
_END_OF_EVENT = b"\n\n"


class EventLog:
    """Encoded events with the sequence numbers 0, 1, 2 ..., for any number of readers. Used in the event loop only.

    A log that exceeds ``max_characters`` drops its oldest events.

    Attributes:
        num_readers: number of clients that read the log.
        num_characters: number of characters of the stored events, plus ``_PER_ENTRY`` for each :meth:`append`.
    """

    def __init__(self, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._entries: list[bytes] = []
        self._starts: list[int] = []  # for each entry, the sequence number of its first event
        self._first = self._end = 0  # sequence numbers of the first event that is kept, and of the next event
        self._is_closed = False
        self._readers: set[asyncio.Event] = set()
        self.num_characters = 0

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    def append(self, events: bytes) -> None:
        """Add one or several events, encoded by :func:`named_sse`."""
        if not events:
            return
        self._entries.append(events)
        self._starts.append(self._end)
        self._end += events.count(_END_OF_EVENT)
        self.num_characters += len(events) + _PER_ENTRY
        if self.num_characters > self._max_characters:
            self.shrink()
        self._wake()

    def close(self) -> None:
        """End the log. Readers end after the last event."""
        self._is_closed = True
        self._wake()

    def shrink(self) -> None:
        """Drop the oldest entries until at most half of the characters are left.

        An entry has the events of one :meth:`append`. The latest entry is dropped only if it is the only entry.
        """
        kept = self.num_characters
        num_dropped = 0
        while num_dropped < max(len(self._entries) - 1, 1) and kept > self.num_characters // 2:
            kept -= len(self._entries[num_dropped]) + _PER_ENTRY
            num_dropped += 1
        self.num_characters = kept
        del self._entries[:num_dropped], self._starts[:num_dropped]
        self._first = self._starts[0] if self._starts else self._end

    def check(self, after: int) -> None:
        """Raise APIError, a 400, if the log has dropped events after the sequence number ``after``."""
        if after + 1 < self._first:
            problem = f": events before {self._first} are no longer stored; retrieve the response without a stream"
            raise invalid(problem, where="starting_after")

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after the sequence number ``after``: the stored events, then new events as they arrive.

        Each item has one or several encoded events. If the log has dropped the reader's next event because the reader
        is too slow, the last event is an error.
        """
        position = after + 1
        changed = asyncio.Event()
        self._readers.add(changed)
        try:
            while True:
                changed.clear()
                if position < self._first:
                    yield _dropped(position)
                    return
                if position < self._end:
                    data, position = self._take(position)
                    yield data
                    await asyncio.sleep(0)  # a long log is sent in many pieces: other tasks may run between them
                elif self._is_closed:
                    return
                else:
                    await changed.wait()
        finally:
            self._readers.discard(changed)

    def _take(self, position: int) -> tuple[bytes, int]:
        """Return the encoded events from ``position`` on, for one write, and the sequence number of the next event."""
        index = bisect_right(self._starts, position) - 1
        events = self._entries[index].split(_END_OF_EVENT)[position - self._starts[index] :]
        data = _END_OF_EVENT.join(events)
        index += 1
        pieces, size = [data], len(data)
        while index < len(self._entries) and size < _PIECE_BYTES:
            pieces.append(self._entries[index])
            size += len(self._entries[index])
            index += 1
        return b"".join(pieces), self._starts[index] if index < len(self._starts) else self._end

    def _wake(self) -> None:
        for changed in self._readers:
            changed.set()


def _dropped(position: int) -> bytes:
    message = "the client reads too slowly: the next events are no longer stored; retrieve the response instead"
    fields = {"code": "events_dropped", "message": message, "param": None, "sequence_number": position}
    return named_sse({"type": "error", **fields})

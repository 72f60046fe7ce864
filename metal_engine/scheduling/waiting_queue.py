"""Queue of requests waiting for admission, ordered by priority and arrival.

Finding the next request does not scan the queue: it takes O(log n) with n requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from metal_engine.request import Request


@dataclass(order=True, slots=True)
class _Entry:
    key: tuple[int, int]
    request: Request | None = field(compare=False)  # None: the entry is void
    is_long: bool = field(compare=False)


class WaitingQueue:
    """Waiting requests in order of their sort keys.

    Long prompts are in a separate heap, so that short prompts after them in the order can be found.

    A request can also be parked until a running request, its *owner*, has computed a given number of tokens. If these
    tokens are the common prefix of both requests, the prefix is then computed only once.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        # Heaps of entries: short prompts, long prompts. An entry that is not in `_entries` is void. Its `request` is
        # None, because a reference to the request would keep the slot of the request's LoRA adapter in use.
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])
        # Owner's request id -> heap of (number of tokens the owner must have computed, parked entry).
        self._parked: dict[str, list[tuple[int, _Entry]]] = {}
        self._num_void = 0  # void entries in the heaps and among the parked entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests in order. O(n log n); for tests and debugging."""
        return iter([e.request for e in sorted(self._entries.values()) if e.request is not None])

    def push(self, request: Request, *, is_long: bool) -> None:
        """Insert a request at its position. A request that the queue contains already, even parked, is moved there."""
        self.remove(request.request_id)
        entry = self._entries[request.request_id] = _Entry(request.sort_key, request, is_long)
        heapq.heappush(self._heaps[is_long], entry)

    def remove(self, request_id: str) -> None:
        """Remove a request and all references to it. Unknown ids are ignored."""
        if (entry := self._entries.pop(request_id, None)) is None:
            return
        entry.request = None
        self._num_void += 1
        if self._num_void > len(self._entries) + 64:  # mostly requests that were aborted
            self._drop_void()

    def _drop_void(self) -> None:
        for heap in self._heaps:
            heap[:] = [entry for entry in heap if entry.request is not None]
            heapq.heapify(heap)
        for owner_id, parked in list(self._parked.items()):
            parked[:] = [one for one in parked if one[1].request is not None]
            heapq.heapify(parked)
            if not parked:
                del self._parked[owner_id]
        self._num_void = 0

    def head(self, *, include_long: bool) -> Request | None:
        """Return the first request that is not parked, and keep it in the queue. None if all are parked or skipped.

        Args:
            include_long: False to skip long prompts.
        """
        entries = [e for heap in self._heaps[: 1 + include_long] if (e := self._first(heap)) is not None]
        return min(entries).request if entries else None

    def _first(self, heap: list[_Entry]) -> _Entry | None:
        while heap and heap[0].request is None:
            heapq.heappop(heap)
            self._num_void -= 1
        return heap[0] if heap else None

    def park(self, request: Request, owner: Request, num_tokens: int) -> None:
        """Hide a queued request from :meth:`head` until ``owner`` has computed ``num_tokens`` tokens in total."""
        old = self._entries[request.request_id]
        self.remove(request.request_id)
        entry = self._entries[request.request_id] = _Entry(old.key, request, old.is_long)
        heapq.heappush(self._parked.setdefault(owner.request_id, []), (num_tokens, entry))

    @property
    def owners(self) -> list[str]:
        """Ids of the running requests whose progress parked requests wait for."""
        return list(self._parked)

    def unpark(self, owner_id: str, num_computed_tokens: int | None = None) -> None:
        """Requeue the parked requests that waited for at most ``num_computed_tokens`` tokens of the owner.

        None requeues all requests that waited for the owner. Does nothing for an id that owns no parked request.
        """
        parked = self._parked.get(owner_id)
        if parked is None:
            return
        while parked and (num_computed_tokens is None or parked[0][0] <= num_computed_tokens):
            entry = heapq.heappop(parked)[1]
            if entry.request is None:
                self._num_void -= 1
            else:
                heapq.heappush(self._heaps[entry.is_long], entry)
        if not parked:
            del self._parked[owner_id]

    def check_integrity(self, num_computed_tokens: Mapping[str, int]) -> None:
        """Assert that every request is in a heap, or is parked until a running request has computed more tokens.

        Args:
            num_computed_tokens: number of computed tokens, by the id of each running request.
        """
        assert self._parked.keys() <= num_computed_tokens.keys(), "parked with a request that is not running"
        for owner_id, parked in self._parked.items():
            assert parked[0][0] > num_computed_tokens[owner_id], f"still parked with {owner_id}"
        found = [e for heap in self._heaps for e in heap] + [p[1] for ps in self._parked.values() for p in ps]
        valid = [e for e in found if e.request is not None and self._entries.get(e.request.request_id) is e]
        assert len(valid) == len(self._entries), "a waiting request is lost, or found twice"
        assert len(found) - len(valid) == self._num_void <= len(self._entries) + 64, "void entries are miscounted"
        assert all(e.is_long == bool(i) for i, heap in enumerate(self._heaps) for e in heap)

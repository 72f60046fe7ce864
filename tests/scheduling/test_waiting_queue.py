"""Tests of the waiting queue: the data that it keeps after requests have left is bounded."""

from __future__ import annotations

import weakref

from metal_engine.lora_adapter import Adapter
from metal_engine.request import Request
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.waiting_queue import WaitingQueue


def made(request_id: str, adapter: Adapter | None = None) -> Request:
    return Request(request_id, [1, 2], SamplingParams(), max_tokens=1, adapter=adapter)


def num_kept(queue: WaitingQueue) -> int:
    """Return the number of entries in the heaps and among the parked entries."""
    return sum(map(len, queue._heaps)) + sum(map(len, queue._parked.values()))


def test_removing_a_waiting_request_releases_the_adapter() -> None:
    """The slot is free at once, even if no other request arrives, or if the request was parked or requeued."""
    queue = WaitingQueue()
    for i in range(4):
        adapter = Adapter("name", "path", 1, 8, "")
        gone = weakref.ref(adapter)
        request = made("a", adapter)
        queue.push(request, is_long=bool(i % 2))
        if i == 1:
            queue.push(request, is_long=False)
        elif i == 2:
            queue.park(request, made("owner"), 16)
        elif i == 3:
            queue.park(request, made("owner"), 16)
            queue.unpark("owner")
        queue.remove("a")
        del adapter, request
        assert gone() is None, i
        assert len(queue) == 0 and list(queue) == []
    queue.unpark("owner")
    assert queue.head(include_long=True) is None
    queue.check_integrity({})


def test_waiting_queue_entries_of_removed_requests_are_bounded() -> None:
    """The limit holds for both heaps, and for requests parked with a running request."""
    queue, owner = WaitingQueue(), made("owner")
    queue.push(stays := made("stays"), is_long=False)
    for is_long in (False, True):
        for is_parked in (False, True):
            for i in range(300):
                queue.push(request := made(str(i)), is_long=is_long)
                if is_parked:
                    queue.park(request, owner, 16)
            for i in range(300):
                queue.remove(str(i))
            assert num_kept(queue) <= 1 + 66
            queue.check_integrity({"owner": 0} if queue.owners else {})
    queue.unpark("owner")
    assert queue.head(include_long=True) is stays
    queue.check_integrity({})

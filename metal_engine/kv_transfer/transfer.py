"""Moves blocks between a store and host memory in its own threads, so that no other thread waits for a store.

Loads read a few blocks at a time, in rotation over the requests. Arrived blocks are in the request's
:class:`LoadTicket`. Saves go through a :class:`SaveQueue`. A failure starts a pause in which the store is not used. The
pause grows with each failure.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from metal_engine.kv_transfer.layout import BlockLayout, CorruptBlockError, state_key
from metal_engine.kv_transfer.save_queue import SaveQueue, lower_thread_priority
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import KVStore, StoreError, StorePause

logger = logging.getLogger(__name__)

# Approximate number of bytes that one call of the store reads or writes.
_BYTES_PER_CALL = 8 << 20
# Interval in seconds at which a load looks for a block that a producer is still computing. The interval grows with the
# number of such loads: together they take the GIL from the engine at most _POLLS_PER_SECOND times per second.
_POLL_SECONDS = 0.01
_POLLS_PER_SECOND = 400
_PAUSED = "the KV store failed recently and is not queried"


@dataclass(eq=False)
class LoadTicket:
    """Load of the KV of one request. Written by the load threads, read by the caller.

    Attributes:
        hashes: hashes of the wanted blocks, in the order of the prompt.
        follow: True if another engine, the producer, is still computing the blocks. The load then waits for missing
            blocks.
        blocks: blocks that have arrived: hash -> uint8 [block bytes].
        prefix: hashes of the blocks before ``hashes``, which are in the local cache already.
        state: last recurrent state that the store had for ``prefix`` and ``blocks``, as a pair: the hash of the block
            before the state, and the state, uint8 [state bytes]. None if no state has arrived.
        min_state_blocks: number of prompt blocks after which the producer saves a state. With ``follow``, the load
            waits for that state. 0 if the load ends before that state.
        has_answered: True if the store has responded at least once. Also True if the store is not queried, because it
            pauses or because the load waits for host memory.
        is_done: True if nothing more will arrive.
        is_cancelled: True if the caller has ended the load.
        error: reason why the load ended early, such as a failure of the store; otherwise None.
        started: time at which the load was queued for the load threads, by the transfer's clock; None while the load
            waits for host memory.
        last_arrival: time at which the last block or state arrived, or ``started``.
        num_reserved_bytes: host memory reserved for the load, in bytes.
    """

    request_id: str
    hashes: list[bytes]
    follow: bool
    blocks: dict[bytes, np.ndarray] = field(default_factory=dict)
    prefix: list[bytes] = field(default_factory=list)
    state: tuple[bytes, np.ndarray] | None = None
    min_state_blocks: int = 0
    has_answered: bool = False
    is_done: bool = False
    is_cancelled: bool = False
    error: str | None = None
    started: float | None = None
    last_arrival: float = 0.0
    num_reserved_bytes: int = 0

    def nbytes(self, layout: BlockLayout) -> int:
        """Return the bytes of host memory that the arrived blocks and state take."""
        state_bytes = 0 if self.state is None else self.state[1].nbytes
        return len(self.blocks) * layout.nbytes + state_bytes


class KVTransfer:
    """Threads that load KV from a store, and save KV to the store.

    Args:
        store: store of the blocks.
        layout: layout of a block.
        state_layout: layout of a recurrent state; None for models without recurrent states.
        config: limits on memory and time.
        stats: counters to update.
        clock: returns seconds, for deadlines.

    Attributes:
        num_reserved_bytes: host memory reserved for loads in bytes.
    """

    def __init__(
        self,
        store: KVStore,
        layout: BlockLayout,
        config: KVTransferConfig,
        stats: KVTransferStats,
        clock: Callable[[], float] = time.monotonic,
        state_layout: BlockLayout | None = None,
    ) -> None:
        self._store = store
        self.layout = layout
        self.state_layout = state_layout
        self.config = config
        self.stats = stats
        self.clock = clock
        self._pause = StorePause(clock)
        self._blocks_per_call = max(1, _BYTES_PER_CALL // layout.nbytes)
        self._save_queue = SaveQueue(store, config.max_save_bytes, _BYTES_PER_CALL, stats, clock)
        self._changed = threading.Event()
        # The condition guards all attributes below.
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, LoadTicket]] = []  # heap, ordered by the time at which a load continues
        self._sequence = itertools.count()
        self._deferred: deque[LoadTicket] = deque()
        self.num_reserved_bytes = 0
        self._closed = False
        self._load_threads = [
            threading.Thread(target=self._run_loads, name=f"kv-load-{i}", daemon=True) for i in range(config.io_threads)
        ]
        for thread in self._load_threads:
            thread.start()

    # --- for the engine thread: loads -----------------------------------------------------------------------

    def start_load(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        follow: bool,
        prefix: Sequence[bytes] = (),
        min_state_blocks: int = 0,
    ) -> LoadTicket:
        """Start to load blocks in order, up to the first missing block, and then a state. Does not block.

        The load is shortened to the blocks that fit into the host memory for loads. While other loads occupy that
        memory, the load waits in a queue. While the store pauses after a failure, no load starts: the returned ticket
        is done, and has an error. Earlier loads without arrived blocks end with the same error.

        Args:
            request_id: id of the request.
            hashes: hashes of the blocks to load.
            follow: True if a producer is still computing the blocks.
            prefix: hashes of the blocks before ``hashes``.
            min_state_blocks: see :class:`LoadTicket`.
        """
        nbytes = self.layout.nbytes
        state_bytes = 0 if self.state_layout is None else self.state_layout.nbytes
        max_blocks = (self.config.max_load_bytes - state_bytes) // nbytes
        wanted = list(hashes[: max(1, max_blocks)])
        ticket = LoadTicket(request_id, wanted, follow, num_reserved_bytes=len(wanted) * nbytes + state_bytes)
        ticket.prefix = list(prefix)
        if min_state_blocks <= len(ticket.prefix) + len(wanted):
            ticket.min_state_blocks = min_state_blocks
        if not self._pause.is_over:
            self.stats.add(loads_skipped=1)
            ticket.num_reserved_bytes = 0
            ticket.error = _PAUSED
            ticket.has_answered = ticket.is_done = True
            return ticket
        self.stats.add(loads_started=1)
        with self._condition:
            if self._deferred or not self._reserve(ticket):
                self.stats.add(loads_deferred=1)
                ticket.has_answered = True
                self._deferred.append(ticket)
        return ticket

    def end_load(self, ticket: LoadTicket) -> dict[bytes, np.ndarray]:
        """Stop a load and return its arrived blocks, which count as reserved host memory until :meth:`release`."""
        with self._condition:
            ticket.is_cancelled = ticket.is_done = True
            if ticket in self._deferred:
                self._deferred.remove(ticket)
                ticket.num_reserved_bytes = 0
            blocks = dict(ticket.blocks)
            self._unreserve(ticket, ticket.nbytes(self.layout))
        return blocks

    def release(self, ticket: LoadTicket) -> None:
        """Return the host memory of an ended load to the budget. The caller drops the blocks at the same time."""
        with self._condition:
            self._unreserve(ticket, 0)

    def load_timed_out(self, ticket: LoadTicket) -> None:
        """Record that a load's deadline has passed.

        Starts a pause of the store if it returned no block and no producer is still computing the blocks.
        """
        self.stats.add(loads_timed_out=1)
        if not ticket.blocks and not ticket.follow:
            self._pause.failed()

    def wait(self, timeout: float) -> None:
        """Wait until something has arrived or ended since the last call, for at most ``timeout`` seconds."""
        self._changed.wait(timeout)
        self._changed.clear()

    # --- for the engine thread: saves -----------------------------------------------------------------------

    def grant_saves(self, num_blocks: int) -> int:
        """Return how many of ``num_blocks`` blocks fit into the queue now. The remaining blocks count as dropped."""
        return self._save_queue.grant(num_blocks, self.layout)

    def grant_state_saves(self, num_states: int) -> int:
        """Return how many of ``num_states`` recurrent states fit into the queue now. The rest counts as dropped."""
        return 0 if self.state_layout is None else self._save_queue.grant(num_states, self.state_layout)

    def save(self, hashes: Sequence[bytes], data: np.ndarray) -> None:
        """Queue blocks to be written. ``data`` is uint8 [len(hashes), block bytes] and must not change."""
        self._save_queue.put(hashes, data, self.layout)

    def save_states(self, hashes: Sequence[bytes], data: np.ndarray) -> None:
        """Queue recurrent states to be written, like :meth:`save`. A state has the hash of the last block before it."""
        assert self.state_layout is not None
        self._save_queue.put([state_key(block_hash) for block_hash in hashes], data, self.state_layout)

    def flush(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for all saves. Return True if all were written or have failed."""
        return self._save_queue.flush(timeout)

    def close(self) -> None:
        """Write the queued blocks within ``save_on_close`` seconds, stop the threads, and close the store.

        The store stays open, with a warning, if a thread still waits for it.
        """
        has_saved = self._save_queue.close(self.config.save_on_close)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._load_threads:
            thread.join(1.0)
        if has_saved and not any(thread.is_alive() for thread in self._load_threads):
            self._store.close()
        else:
            logger.warning("KV store: a thread is still waiting for the store")

    # --- load threads ---------------------------------------------------------------------------------------

    def _reserve(self, ticket: LoadTicket) -> bool:
        """Reserve host memory for a load and queue it for the load threads. Return False if memory is short.

        The caller holds the lock.
        """
        wanted = ticket.num_reserved_bytes
        if self.num_reserved_bytes and self.num_reserved_bytes + wanted > self.config.max_load_bytes:
            return False
        self.num_reserved_bytes += wanted
        ticket.started = ticket.last_arrival = self.clock()
        self._queue_load(ticket, 0.0)
        return True

    def _unreserve(self, ticket: LoadTicket, still_needed: int) -> None:
        """Reduce the memory reserved for a load to ``still_needed`` bytes, and start deferred loads that fit now.

        The caller holds the lock.
        """
        self.num_reserved_bytes -= ticket.num_reserved_bytes - still_needed
        ticket.num_reserved_bytes = still_needed
        while self._deferred and self._reserve(self._deferred[0]):
            self._deferred.popleft()

    def _queue_load(self, ticket: LoadTicket, delay: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay, next(self._sequence), ticket))
        self._condition.notify_all()

    def _run_loads(self) -> None:
        lower_thread_priority()
        while (ticket := self._next_load()) is not None:
            error: str | None = None
            is_complete = True
            try:
                # A load that has received blocks continues: one failed read of another load must not end it.
                if ticket.blocks or self._pause.is_over:
                    is_complete = self._load_some(ticket)
                else:
                    error = _PAUSED
            except CorruptBlockError as failure:
                error = str(failure)  # the store itself works
            except StoreError as failure:
                error = self._load_failed(failure)
            except Exception as failure:  # if the thread ended, requests would wait forever
                logger.exception("loading KV for %s failed", ticket.request_id)
                error = self._load_failed(failure)
            with self._condition:
                ticket.has_answered = True
                if is_complete and not ticket.is_cancelled:
                    ticket.error = error
                    ticket.is_done = True
                    self._unreserve(ticket, ticket.nbytes(self.layout))
                    if error is not None:
                        self.stats.add(loads_failed=1)
            self._changed.set()

    def _next_load(self) -> LoadTicket | None:
        """Wait for the next due load and return it; None after :meth:`close`."""
        with self._condition:
            while not self._closed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)[2]
                self._condition.wait(wait)
        return None

    def _load_failed(self, failure: Exception) -> str:
        self.stats.add(store_errors=1)
        self._pause.failed()
        logger.warning("KV store: %s", failure)
        return str(failure)

    def _load_some(self, ticket: LoadTicket) -> bool:
        """Load a few more blocks of a ticket. Return True if the load is complete or cancelled.

        Otherwise, the load is queued again. Raises StoreError and CorruptBlockError.
        """
        if ticket.is_cancelled:
            return True
        wanted = ticket.hashes[len(ticket.blocks) :][: self._blocks_per_call]
        found: list[bytes] = []
        if wanted:
            found = self._store.get(wanted)
            self._pause.succeeded()
        for block_hash, stored in zip(wanted, found, strict=False):
            ticket.blocks[block_hash] = self._decoded(self.layout, block_hash, stored)
        if found:
            ticket.last_arrival = self.clock()
        missing = len(found) < len(wanted)
        if len(ticket.blocks) == len(ticket.hashes) or (missing and not ticket.follow):
            if self._load_state(ticket):
                return True
            missing = True
        return self._requeue(ticket, missing)

    def _requeue(self, ticket: LoadTicket, missing: bool) -> bool:
        with self._condition:
            delay = max(_POLL_SECONDS, (len(self._due) + 1) / _POLLS_PER_SECOND)
            self._queue_load(ticket, delay if missing else 0.0)
        return False

    def _load_state(self, ticket: LoadTicket) -> bool:
        """Load the last recurrent state that the store has for a ticket's blocks.

        Returns False if the producer has not saved its state yet, so that the caller tries again later. Returns
        True otherwise, even if the store has no state for the blocks.
        """
        if self.state_layout is None or ticket.state is not None:
            return True
        # Earlier states would not end the load of a follower.
        first = max(0, ticket.min_state_blocks - 1) if ticket.follow else 0
        hashes = [*ticket.prefix, *ticket.hashes[: len(ticket.blocks)]][first:]
        keys = [state_key(block_hash) for block_hash in hashes]
        present = self._store.contains(keys)
        self._pause.succeeded()
        last = max((i for i, is_present in enumerate(present) if is_present), default=-1)
        if last < 0 and ticket.follow and ticket.min_state_blocks:
            return False
        if last >= 0:
            for stored in self._store.get([keys[last]]):
                ticket.state = hashes[last], self._decoded(self.state_layout, keys[last], stored)
                ticket.last_arrival = self.clock()
        return True

    def _decoded(self, layout: BlockLayout, block_hash: bytes, stored: bytes) -> np.ndarray:
        """Decode stored bytes. Remove a corrupt block from the store and raise CorruptBlockError."""
        try:
            return layout.decode(block_hash, stored)
        except CorruptBlockError as error:
            self.stats.add(blocks_corrupt=1)
            logger.warning("KV store: block %s is corrupt: %s; removing it", block_hash.hex(), error)
            try:
                self._store.discard(block_hash)
            except StoreError as failure:  # a store without write access can still be read
                logger.warning("KV store: %s", failure)
            raise

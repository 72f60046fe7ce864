"""Moves blocks between a store and host memory, in threads of its own: nobody else waits for a store.

Loads go some blocks at a time, the requests in turn; what has arrived stands in the request's :class:`LoadTicket`.
Saves go through a :class:`SaveQueue`. A store that fails is let rest for a while, each time longer.
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

from metal_engine.device.thread_priority import lower_thread_priority
from metal_engine.kv_transfer.layout import BlockLayout, CorruptBlockError, state_key
from metal_engine.kv_transfer.save_queue import SaveQueue
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import KVStore, StoreError, StoreRest

logger = logging.getLogger(__name__)

# What one call of the store reads or writes, about.
_BYTES_PER_CALL = 8 << 20
# How often a block is looked for that a producer is still computing, in seconds; more rarely where many requests
# wait for such blocks, so that looking takes no more of Python's lock from the engine than this many times a second.
_POLL_SECONDS = 0.01
_POLLS_PER_SECOND = 400


@dataclass(eq=False)
class LoadTicket:
    """What is being loaded for one request. Written by the threads, read by whoever asked.

    Attributes:
        hashes: of the blocks wanted, in the order of the prompt.
        follow: a producer is still computing them: wait for blocks that are not there yet.
        blocks: what has arrived: hash -> uint8 [block bytes].
        prefix: hashes of the blocks before those, which are here already.
        state: hash of the block that it follows, and uint8 [state bytes]: a recurrent state that has arrived, the last
            that the store had for these blocks; None without.
        min_state_blocks: blocks of the prompt after which a producer leaves a state; who follows it waits for that.
        has_answered: the store has said whether the first block is there, or is not going to.
        is_done: nothing more will arrive.
        error: why it ended early, if the store is to blame.
        started: when the store was asked, by the transfer's clock; None while it waits for host memory.
        last_arrival: when the last block came, or ``started``.
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
        """Host memory that what has arrived takes."""
        state_bytes = 0 if self.state is None else self.state[1].nbytes
        return len(self.blocks) * layout.nbytes + state_bytes


class KVTransfer:
    """The threads between a store and the engine.

    Args:
        store: where blocks are.
        layout: what a block is.
        state_layout: what a recurrent state is; None for models without.
        config: limits on memory and time.
        stats: counted in here.
        clock: seconds, for deadlines.
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
        self._rest = StoreRest(clock)
        self._blocks_per_call = max(1, _BYTES_PER_CALL // layout.nbytes)
        self._save_queue = SaveQueue(store, config.max_save_bytes, _BYTES_PER_CALL, stats, clock)
        self._changed = threading.Event()
        # Everything below is guarded by this.
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, LoadTicket]] = []  # heap: when a load goes on
        self._sequence = itertools.count()
        self._deferred: deque[LoadTicket] = deque()
        self._num_reserved_bytes = 0
        self._closed = False
        self._load_threads = [
            threading.Thread(target=self._run_loads, name=f"kv-load-{i}", daemon=True) for i in range(config.io_threads)
        ]
        for thread in self._load_threads:
            thread.start()

    # --- for the engine's thread: loads ---------------------------------------------------------------------

    def start_load(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        follow: bool,
        prefix: Sequence[bytes] = (),
        min_state_blocks: int = 0,
    ) -> LoadTicket:
        """Begin to load blocks in this order, until one is not there, then a state; returns at once.

        More than fits into the host memory for loads is not asked for. While others hold that memory, the
        load waits for its turn.

        Args:
            follow: a producer is still computing them.
            prefix: hashes of the blocks before those.
            min_state_blocks: see :class:`LoadTicket`.
        """
        nbytes = self.layout.nbytes
        state_bytes = 0 if self.state_layout is None else self.state_layout.nbytes
        room = (self.config.max_load_bytes - state_bytes) // nbytes
        wanted = list(hashes[: max(1, room)])
        ticket = LoadTicket(request_id, wanted, follow, num_reserved_bytes=len(wanted) * nbytes + state_bytes)
        ticket.prefix, ticket.min_state_blocks = list(prefix), min_state_blocks
        if not self._rest.is_over:
            self.stats.add(loads_skipped=1)
            ticket.num_reserved_bytes = 0
            ticket.error = "the KV store failed lately and is not asked"
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
        """Stop loading for a ticket; returns what has arrived, whose host memory is taken until :meth:`release`."""
        with self._condition:
            ticket.is_cancelled = ticket.is_done = True
            if ticket in self._deferred:
                self._deferred.remove(ticket)
                ticket.num_reserved_bytes = 0
            blocks = dict(ticket.blocks)
            self._unreserve(ticket, ticket.nbytes(self.layout))
        return blocks

    def release(self, ticket: LoadTicket) -> None:
        """Give the host memory of a ticket that has ended to others: its blocks are not kept any more."""
        with self._condition:
            self._unreserve(ticket, 0)

    def load_timed_out(self, ticket: LoadTicket) -> None:
        """Tell that a ticket's deadline has passed: a store that gave nothing at all is let rest."""
        self.stats.add(loads_timed_out=1)
        if not ticket.blocks and not ticket.follow:
            self._rest.failed()

    def wait(self, timeout: float) -> None:
        """Wait until something has arrived or ended since the last call, or for ``timeout`` seconds."""
        self._changed.wait(timeout)
        self._changed.clear()

    # --- for the engine's thread: saves ---------------------------------------------------------------------

    def grant_saves(self, num_blocks: int) -> int:
        """Returns how many of these blocks the queue has room for now. The others count as dropped."""
        return self._save_queue.grant(num_blocks, self.layout)

    def grant_state_saves(self, num_states: int) -> int:
        """:meth:`grant_saves` for recurrent states."""
        return 0 if self.state_layout is None else self._save_queue.grant(num_states, self.state_layout)

    def save(self, hashes: Sequence[bytes], data: np.ndarray) -> None:
        """Queue blocks to be written; ``data`` is uint8 [len(hashes), block bytes] and must not change."""
        self._save_queue.put(hashes, data, self.layout)

    def save_states(self, hashes: Sequence[bytes], data: np.ndarray) -> None:
        """Queue recurrent states to be written, each by the hash of the block that it follows; as :meth:`save`."""
        assert self.state_layout is not None
        self._save_queue.put([state_key(block_hash) for block_hash in hashes], data, self.state_layout)

    def flush(self, timeout: float) -> bool:
        """Wait until every save has been written, or given up; whether that was within ``timeout`` seconds."""
        return self._save_queue.flush(timeout)

    def close(self) -> None:
        """Write what is queued, for as long as the configuration allows, then stop the threads."""
        has_saved = self._save_queue.close(self.config.save_on_close)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._load_threads:
            thread.join(1.0)
        if has_saved and not any(thread.is_alive() for thread in self._load_threads):
            self._store.close()
        else:
            logger.warning("KV store: a thread is still waiting for it")

    # --- load threads ---------------------------------------------------------------------------------------

    def _reserve(self, ticket: LoadTicket) -> bool:
        """Take host memory for a ticket and queue it for the load threads, if there is enough. Needs the lock."""
        wanted = ticket.num_reserved_bytes
        if self._num_reserved_bytes and self._num_reserved_bytes + wanted > self.config.max_load_bytes:
            return False
        self._num_reserved_bytes += wanted
        ticket.started = ticket.last_arrival = self.clock()
        self._queue_load(ticket, 0.0)
        return True

    def _unreserve(self, ticket: LoadTicket, still_needed: int) -> None:
        """Give back what a ticket does not need any more, and let others have it. Needs the lock."""
        self._num_reserved_bytes -= ticket.num_reserved_bytes - still_needed
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
                is_complete = self._load_some(ticket)
            except CorruptBlockError as failure:
                error = str(failure)  # the store itself is well
            except StoreError as failure:
                error = self._load_failed(failure)
            except Exception as failure:  # a thread that ended would leave requests waiting
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
        """The next ticket whose turn has come; None at the end."""
        with self._condition:
            while not self._closed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)[2]
                self._condition.wait(wait)
        return None

    def _load_failed(self, failure: Exception) -> str:
        self.stats.add(store_errors=1)
        self._rest.failed()
        logger.warning("KV store: %s", failure)
        return str(failure)

    def _load_some(self, ticket: LoadTicket) -> bool:
        """Load some more blocks; whether that was all."""
        if ticket.is_cancelled:
            return True
        wanted = ticket.hashes[len(ticket.blocks) :][: self._blocks_per_call]
        found = self._store.get(wanted) if wanted else []
        self._rest.succeeded()
        for block_hash, stored in zip(wanted, found, strict=False):
            ticket.blocks[block_hash] = self._decoded(self.layout, block_hash, stored)
        if found:
            ticket.last_arrival = self.clock()
        missing = len(found) < len(wanted)
        if len(ticket.blocks) == len(ticket.hashes) or (missing and not ticket.follow):
            if self._load_state(ticket):
                return True
            missing = True
        return self._go_on_later(ticket, missing)

    def _go_on_later(self, ticket: LoadTicket, missing: bool) -> bool:
        with self._condition:
            delay = max(_POLL_SECONDS, (len(self._due) + 1) / _POLLS_PER_SECOND)
            self._queue_load(ticket, delay if missing else 0.0)
        return False

    def _load_state(self, ticket: LoadTicket) -> bool:
        """Load the last recurrent state that the store has for a ticket's blocks; whether nothing is left to do."""
        if self.state_layout is None or ticket.state is not None:
            return True
        hashes = [*ticket.prefix, *ticket.hashes[: len(ticket.blocks)]]
        keys = [state_key(block_hash) for block_hash in hashes]
        present = self._store.contains(keys)
        last = max((i for i, is_present in enumerate(present) if is_present), default=-1)
        if ticket.follow and last + 1 < ticket.min_state_blocks:
            return False
        if last >= 0:
            for stored in self._store.get([keys[last]]):
                ticket.state = hashes[last], self._decoded(self.state_layout, keys[last], stored)
                ticket.last_arrival = self.clock()
        return True

    def _decoded(self, layout: BlockLayout, block_hash: bytes, stored: bytes) -> np.ndarray:
        """What a store gave; it is removed there if it is not what it should be, and CorruptBlockError raised."""
        try:
            return layout.decode(block_hash, stored)
        except CorruptBlockError as error:
            self.stats.add(blocks_corrupt=1)
            logger.warning("KV store: block %s is bad: %s; removing it", block_hash.hex(), error)
            try:
                self._store.discard(block_hash)
            except StoreError as failure:  # not ours to write to: no reason not to read from it
                logger.warning("KV store: %s", failure)
            raise

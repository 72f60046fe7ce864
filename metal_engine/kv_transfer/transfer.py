"""Moves blocks between a store and host memory, in threads of its own; nothing here waits for a store but they.

Loads go batch by batch, the requests in turn; what has arrived stands in the request's :class:`LoadTicket`. Saves wait
in a bounded queue and are dropped when it is full. A store that fails is let rest for a while, each time longer.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from metal_engine.kv_transfer.layout import BlockLayout, CorruptBlockError
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import KVStore, StoreError

logger = logging.getLogger(__name__)

# Read or written in one call of the store, about.
_BATCH_BYTES = 8 << 20
# The threads here give way to those that compute, where the system has a niceness for each thread: with this one, four
# that load take a sixth of two busy cores.
_NICENESS = 10
# The most that saving takes of one core, beside that: decoding goes on while half a gigabyte of KV is written.
# Loading is not held up so: somebody waits for it.
_SAVE_CPU_SHARE = 1 / 3
# How often a block is looked for that a producer is still computing, in seconds; more rarely where many requests
# wait for such blocks, so that looking takes no more of Python's lock from the engine than this many times a second.
_POLL_SECONDS = 0.01
_POLLS_PER_SECOND = 400
_FIRST_REST_SECONDS = 1.0
_LONGEST_REST_SECONDS = 30.0


@dataclass(eq=False)
class LoadTicket:
    """What is being loaded for one request. Written by the threads, read by whoever asked.

    Attributes:
        hashes: of the blocks wanted, in the order of the prompt.
        follow: a producer is still computing them: wait for blocks that are not there yet.
        blocks: what has arrived: hash -> uint8 [block bytes].
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
    has_answered: bool = False
    is_done: bool = False
    is_cancelled: bool = False
    error: str | None = None
    started: float | None = None
    last_arrival: float = 0.0
    num_reserved_bytes: int = 0


class StoreRest:
    """When a store that failed may be asked again. Thread-safe: a race costs one more attempt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = 0.0
        self._next_rest = _FIRST_REST_SECONDS

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    def succeeded(self) -> None:
        self._next_rest = _FIRST_REST_SECONDS

    def failed(self) -> None:
        self._until = self._clock() + self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST_SECONDS)


class KVTransfer:
    """The threads between a store and the engine.

    Args:
        store: where blocks are.
        layout: what a block is.
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
    ) -> None:
        self.store = store
        self.layout = layout
        self.config = config
        self.stats = stats
        self.clock = clock
        self._load_rest, self._save_rest = StoreRest(clock), StoreRest(clock)
        self._blocks_per_batch = max(1, _BATCH_BYTES // layout.nbytes)
        self._changed = threading.Event()
        # Everything below is guarded by this.
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, LoadTicket]] = []  # heap: next batch of a load, when it is due
        self._sequence = itertools.count()
        self._deferred: deque[LoadTicket] = deque()
        self._num_reserved_bytes = 0
        self._saves: deque[tuple[list[bytes], np.ndarray]] = deque()
        self._num_save_bytes = 0
        self._num_flushing = 0
        self._closing = self._closed = False
        self._save_thread = threading.Thread(target=self._run_saves, name="kv-save", daemon=True)
        self._load_threads = [
            threading.Thread(target=self._run_loads, name=f"kv-load-{i}", daemon=True)
            for i in range(config.io_threads)
        ]
        for thread in (self._save_thread, *self._load_threads):
            thread.start()

    # --- for the engine's thread: loads ---------------------------------------------------------------------

    def start_load(self, request_id: str, hashes: Sequence[bytes], *, follow: bool) -> LoadTicket:
        """Begin to load blocks in this order, until one is not there; returns at once.

        More than fits into the host memory for loads is not asked for. While others hold that memory, the
        load waits for its turn.
        """
        nbytes = self.layout.nbytes
        wanted = list(hashes[: max(1, self.config.max_load_bytes // nbytes)])
        ticket = LoadTicket(request_id, wanted, follow, num_reserved_bytes=len(wanted) * nbytes)
        if not self._load_rest.is_over:
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
            self._unreserve(ticket, len(blocks) * self.layout.nbytes)
        return blocks

    def release(self, ticket: LoadTicket) -> None:
        """Give the host memory of a ticket that has ended to others: its blocks are not kept any more."""
        with self._condition:
            self._unreserve(ticket, 0)

    def load_timed_out(self, ticket: LoadTicket) -> None:
        """Tell that a ticket's deadline has passed: a store that gave nothing at all is let rest."""
        self.stats.add(loads_timed_out=1)
        if not ticket.blocks and not ticket.follow:
            self._load_rest.failed()

    def wait(self, timeout: float) -> None:
        """Wait until something has arrived or ended since the last call, or for ``timeout`` seconds."""
        self._changed.wait(timeout)
        self._changed.clear()

    # --- for the engine's thread: saves ---------------------------------------------------------------------

    def grant_saves(self, num_blocks: int) -> int:
        """How many of so many blocks to be saved have room in the queue now; the others are counted as dropped."""
        room = 0
        if self._save_rest.is_over and not self._closing:
            room = max(0, self.config.max_save_bytes - self._num_save_bytes) // self.layout.nbytes
        granted = min(num_blocks, room)
        if granted < num_blocks:
            self.stats.add(blocks_dropped=num_blocks - granted)
        return granted

    def saves_failed(self, num_blocks: int) -> None:
        """Count blocks that were granted and could not be handed over."""
        self.stats.add(blocks_failed=num_blocks)

    def save(self, hashes: Sequence[bytes], data: np.ndarray) -> None:
        """Queue blocks to be written; ``data`` is uint8 [len(hashes), block bytes] and must not change."""
        assert data.dtype == np.uint8 and data.shape == (len(hashes), self.layout.nbytes)
        with self._condition:
            self._saves.append((list(hashes), data))
            self._num_save_bytes += data.nbytes
            self._condition.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued has been written, or given up; whether that was within ``timeout``."""
        with self._condition:
            if timeout <= 0:
                return self._num_save_bytes == 0
            self._num_flushing += 1
            self._condition.notify_all()
            try:
                return self._condition.wait_for(lambda: self._num_save_bytes == 0, timeout)
            finally:
                self._num_flushing -= 1

    def close(self) -> None:
        """Write what is queued, for as long as the configuration allows, then stop the threads."""
        self._closing = True
        is_flushed = self.flush(self.config.save_on_close)
        with self._condition:
            if not is_flushed:
                num_blocks = sum(len(hashes) for hashes, _ in self._saves)
                logger.warning("KV store: %d blocks were not written in time", num_blocks)
            self._closed = True
            self._condition.notify_all()
        for thread in (self._save_thread, *self._load_threads):
            thread.join(1.0)
        if any(thread.is_alive() for thread in (self._save_thread, *self._load_threads)):
            logger.warning("KV store: a thread is still waiting for it")
        else:
            self.store.close()

    # --- load threads ---------------------------------------------------------------------------------------

    def _reserve(self, ticket: LoadTicket) -> bool:
        """Take host memory for a ticket and queue its first batch, if there is enough. Needs the lock."""
        wanted = ticket.num_reserved_bytes
        if self._num_reserved_bytes and self._num_reserved_bytes + wanted > self.config.max_load_bytes:
            return False
        self._num_reserved_bytes += wanted
        ticket.started = ticket.last_arrival = self.clock()
        self._schedule(ticket, 0.0)
        return True

    def _unreserve(self, ticket: LoadTicket, still_needed: int) -> None:
        """Give back what a ticket does not need any more, and let others have it. Needs the lock."""
        self._num_reserved_bytes -= ticket.num_reserved_bytes - still_needed
        ticket.num_reserved_bytes = still_needed
        while self._deferred and self._reserve(self._deferred[0]):
            self._deferred.popleft()

    def _schedule(self, ticket: LoadTicket, delay: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay, next(self._sequence), ticket))
        self._condition.notify_all()

    def _run_loads(self) -> None:
        _give_way()
        while (ticket := self._next_load()) is not None:
            error: str | None = None
            is_complete = True
            try:
                is_complete = self._load_batch(ticket)
            except CorruptBlockError as failure:
                error = str(failure)  # the store itself is well
            except StoreError as failure:
                error = self._load_failed(ticket, failure)
            except Exception as failure:  # a thread that ended would leave requests waiting
                logger.exception("loading KV for %s failed", ticket.request_id)
                error = self._load_failed(ticket, failure)
            with self._condition:
                ticket.has_answered = True
                if is_complete and not ticket.is_cancelled:
                    ticket.error = error
                    ticket.is_done = True
                    self._unreserve(ticket, len(ticket.blocks) * self.layout.nbytes)
                    if error is not None:
                        self.stats.add(loads_failed=1)
            self._changed.set()

    def _next_load(self) -> LoadTicket | None:
        """The next ticket whose batch is due; None at the end."""
        with self._condition:
            while not self._closed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)[2]
                self._condition.wait(wait)
        return None

    def _load_failed(self, ticket: LoadTicket, failure: Exception) -> str:
        self.stats.add(store_errors=1)
        self._load_rest.failed()
        logger.warning("KV store: %s", failure)
        return str(failure)

    def _load_batch(self, ticket: LoadTicket) -> bool:
        """Load some more blocks; whether that was all."""
        if ticket.is_cancelled:
            return True
        wanted = ticket.hashes[len(ticket.blocks) :][: self._blocks_per_batch]
        found = self.store.get(wanted)
        self._load_rest.succeeded()
        for block_hash, stored in zip(wanted, found, strict=False):
            try:
                ticket.blocks[block_hash] = self.layout.decode(block_hash, stored)
            except CorruptBlockError as error:
                self.stats.add(blocks_corrupt=1)
                logger.warning("KV store: block %s is bad: %s; removing it", block_hash.hex(), error)
                try:
                    self.store.discard(block_hash)
                except StoreError as failure:  # not ours to write to: no reason not to read from it
                    logger.warning("KV store: %s", failure)
                raise
        if found:
            ticket.last_arrival = self.clock()
        if len(ticket.blocks) == len(ticket.hashes):
            return True
        missing = len(found) < len(wanted)
        if missing and not ticket.follow:
            return True
        with self._condition:
            delay = max(_POLL_SECONDS, (len(self._due) + 1) / _POLLS_PER_SECOND)
            self._schedule(ticket, delay if missing else 0.0)
        return False

    # --- save thread ----------------------------------------------------------------------------------------

    def _run_saves(self) -> None:
        _give_way()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._saves or self._closed)
                if self._closed:
                    return
                hashes, data = self._saves[0]
            for start in range(0, len(hashes), self._blocks_per_batch):
                batch = hashes[start : start + self._blocks_per_batch]
                used = time.thread_time()
                self._save_batch(batch, data[start : start + self._blocks_per_batch])
                used = time.thread_time() - used
                with self._condition:  # those who wait for the end of all saves have nothing else to do
                    pause = used * (1 / _SAVE_CPU_SHARE - 1)
                    self._condition.wait_for(lambda: self._num_flushing > 0 or self._closed, pause)
                if self._closed:
                    return
            with self._condition:
                self._saves.popleft()
                self._num_save_bytes -= data.nbytes
                self._condition.notify_all()
            del data

    def _save_batch(self, hashes: list[bytes], data: np.ndarray) -> None:
        if not self._save_rest.is_over:
            self.stats.add(blocks_dropped=len(hashes))
            return
        try:
            present = self.store.contains(hashes)
            new = [
                (block_hash, self.layout.encode(block_hash, row))
                for block_hash, row, is_present in zip(hashes, data, present, strict=True)
                if not is_present
            ]
            if new:
                self.store.put(new)
        except Exception as error:
            # What is not saved is computed again another day; the thread must live on.
            if isinstance(error, StoreError):
                logger.warning("KV store: %s", error)
            else:
                logger.exception("saving KV failed")
            self._save_rest.failed()
            self.stats.add(store_errors=1, blocks_failed=len(hashes))
            return
        self._save_rest.succeeded()
        self.stats.add(
            blocks_present=sum(present),
            blocks_saved=len(new),
            bytes_saved=sum(len(stored) for _, stored in new),
        )


def _give_way() -> None:
    """Lower the calling thread's priority; only Linux has one for each thread."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    # A process that is nicer still stays so: raising a priority takes privileges. Where even lowering it is
    # forbidden, the thread works as it is: one that ended would leave requests waiting.
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)

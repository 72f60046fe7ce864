"""Bounded queue of blocks to save to a store, and the thread that writes them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import KVStore, StoreError, StorePause

logger = logging.getLogger(__name__)

# Upper limit on the fraction of one core that saving takes, besides its low priority: decoding must continue while half
# a gigabyte of KV is written. Loading has no such limit, because requests wait for it.
_SAVE_CPU_FRACTION = 1 / 3
# With this niceness, four threads that load KV take a sixth of the time of two busy cores.
_NICENESS = 10


class SaveQueue:
    """First-in, first-out queue of blocks, with the thread that writes them.

    :meth:`grant` limits the number of queued blocks. Call it before :meth:`put`, which accepts any number.

    Args:
        store: store that receives the blocks.
        max_bytes: host memory in bytes for blocks that wait to be written.
        bytes_per_call: approximate number of bytes to write in one call of the store.
        stats: counters to update.
        clock: returns seconds, for the pause after a failure of the store.
    """

    def __init__(
        self, store: KVStore, max_bytes: int, bytes_per_call: int, stats: KVTransferStats, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._bytes_per_call = bytes_per_call
        self._stats = stats
        self._pause = StorePause(clock)
        # The condition guards all attributes below.
        self._condition = threading.Condition()
        self._waiting: deque[tuple[BlockLayout, list[bytes], np.ndarray]] = deque()
        self._num_bytes = 0
        self._num_flushing = 0
        self._closing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def grant(self, num_blocks: int, layout: BlockLayout) -> int:
        """Return how many of ``num_blocks`` blocks fit into the queue now. The remaining blocks count as dropped.

        0 while the store pauses after a failure, and after :meth:`close`. Reserves nothing.
        """
        capacity = 0
        if self._pause.is_over and not self._closing:
            capacity = max(0, self._max_bytes - self._num_bytes) // layout.nbytes
        granted = min(num_blocks, capacity)
        if granted < num_blocks:
            self._stats.add(blocks_dropped=num_blocks - granted)
        return granted

    def put(self, hashes: Sequence[bytes], data: np.ndarray, layout: BlockLayout) -> None:
        """Queue blocks to be written. ``data`` is uint8 [len(hashes), block bytes] and must not change."""
        assert data.dtype == np.uint8 and data.shape == (len(hashes), layout.nbytes)
        with self._condition:
            self._waiting.append((layout, list(hashes), data))
            self._num_bytes += data.nbytes
            self._condition.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for all queued blocks. Return True if all were written or have failed."""
        with self._condition:
            if timeout <= 0:
                return self._num_bytes == 0
            self._num_flushing += 1
            self._condition.notify_all()
            try:
                return self._condition.wait_for(lambda: self._num_bytes == 0, timeout)
            finally:
                self._num_flushing -= 1

    def close(self, timeout: float) -> bool:
        """Write the queued blocks for at most ``timeout`` seconds, then stop the thread. Return True if it ended."""
        self._closing = True
        is_flushed = self.flush(timeout)
        with self._condition:
            if not is_flushed:
                num_blocks = sum(len(hashes) for _, hashes, _ in self._waiting)
                logger.warning("KV store: %d blocks were not written in time", num_blocks)
            self._closed = True
            self._condition.notify_all()
        self._thread.join(1.0)
        return not self._thread.is_alive()

    # --- writer thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_thread_priority()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                layout, hashes, data = self._waiting[0]
            per_call = max(1, self._bytes_per_call // layout.nbytes)
            for start in range(0, len(hashes), per_call):
                stop = start + per_call
                used = time.thread_time()
                self._write(layout, hashes[start:stop], data[start:stop])
                used = time.thread_time() - used
                with self._condition:  # no pause while a caller of flush() waits
                    pause = used * (1 / _SAVE_CPU_FRACTION - 1)
                    self._condition.wait_for(lambda: self._num_flushing > 0 or self._closed, pause)
                if self._closed:
                    return
            with self._condition:
                self._waiting.popleft()
                self._num_bytes -= data.nbytes
                self._condition.notify_all()
            del data

    def _write(self, layout: BlockLayout, hashes: list[bytes], data: np.ndarray) -> None:
        """Write the blocks that the store does not have yet. Errors are logged and counted, and start a pause."""
        if not self._pause.is_over:
            self._stats.add(blocks_dropped=len(hashes))
            return
        try:
            present = self._store.contains(hashes)
            new = [
                (block_hash, layout.encode(block_hash, row))
                for block_hash, row, is_present in zip(hashes, data, present, strict=True)
                if not is_present
            ]
            if new:
                self._store.put(new)
        except Exception as error:
            # Unsaved blocks can be computed again. The thread must survive any error.
            if isinstance(error, StoreError):
                logger.warning("KV store: %s", error)
            else:
                logger.exception("saving KV failed")
            self._pause.failed()
            self._stats.add(store_errors=1, blocks_failed=len(hashes))
            return
        self._pause.succeeded()
        self._stats.add(
            blocks_present=sum(present), blocks_saved=len(new), bytes_saved=sum(len(stored) for _, stored in new)
        )


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread below the priority of computing threads.

    Has an effect only on Linux. On other systems, threads have no niceness of their own. Ignores errors.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    # A higher niceness stays, because raising the priority needs privileges. If even lowering is forbidden, the thread
    # keeps its priority. An error would end the thread and leave requests waiting.
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)

"""Blocks on their way to a store: a bounded queue, and the thread that writes what is in it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from metal_engine.device.thread_priority import lower_thread_priority
from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.base import KVStore, StoreError, StoreRest

logger = logging.getLogger(__name__)

# The most that saving takes of one core, beside its low priority: decoding goes on while half a gigabyte of KV is
# written. Loading is not held up so: somebody waits for it.
_SAVE_CPU_SHARE = 1 / 3


class SaveQueue:
    """Writes blocks in the order in which they are queued. What has no room is dropped, never waited for.

    Args:
        store: where blocks are written.
        max_bytes: host memory for blocks that wait to be written.
        bytes_per_call: about what is written in one call of the store.
        stats: counted in here.
        clock: seconds, for the rest of a store that failed.
    """

    def __init__(
        self, store: KVStore, max_bytes: int, bytes_per_call: int, stats: KVTransferStats, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._bytes_per_call = bytes_per_call
        self._stats = stats
        self._rest = StoreRest(clock)
        # Everything below is guarded by this.
        self._condition = threading.Condition()
        self._waiting: deque[tuple[BlockLayout, list[bytes], np.ndarray]] = deque()
        self._num_bytes = 0
        self._num_flushing = 0
        self._closing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def grant(self, num_blocks: int, layout: BlockLayout) -> int:
        """Returns how many of these blocks the queue has room for now. The others count as dropped."""
        room = 0
        if self._rest.is_over and not self._closing:
            room = max(0, self._max_bytes - self._num_bytes) // layout.nbytes
        granted = min(num_blocks, room)
        if granted < num_blocks:
            self._stats.add(blocks_dropped=num_blocks - granted)
        return granted

    def put(self, hashes: Sequence[bytes], data: np.ndarray, layout: BlockLayout) -> None:
        """Queue blocks to be written; ``data`` is uint8 [len(hashes), block bytes] and must not change."""
        assert data.dtype == np.uint8 and data.shape == (len(hashes), layout.nbytes)
        with self._condition:
            self._waiting.append((layout, list(hashes), data))
            self._num_bytes += data.nbytes
            self._condition.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued has been written, or given up; whether that was within ``timeout`` seconds."""
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
        """Write what is queued, for ``timeout`` seconds at most, then stop the thread; whether it has ended."""
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

    # --- the thread -----------------------------------------------------------------------------------------

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
                with self._condition:  # those who wait for the end of all saves have nothing else to do
                    pause = used * (1 / _SAVE_CPU_SHARE - 1)
                    self._condition.wait_for(lambda: self._num_flushing > 0 or self._closed, pause)
                if self._closed:
                    return
            with self._condition:
                self._waiting.popleft()
                self._num_bytes -= data.nbytes
                self._condition.notify_all()
            del data

    def _write(self, layout: BlockLayout, hashes: list[bytes], data: np.ndarray) -> None:
        """Write those of some blocks that the store does not have."""
        if not self._rest.is_over:
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
            # What is not saved is computed again another day; the thread must live on.
            if isinstance(error, StoreError):
                logger.warning("KV store: %s", error)
            else:
                logger.exception("saving KV failed")
            self._rest.failed()
            self._stats.add(store_errors=1, blocks_failed=len(hashes))
            return
        self._rest.succeeded()
        self._stats.add(
            blocks_present=sum(present), blocks_saved=len(new), bytes_saved=sum(len(stored) for _, stored in new)
        )

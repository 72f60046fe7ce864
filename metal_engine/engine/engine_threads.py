"""Pool of threads for engines that are loaded and unloaded."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class EngineThreads:
    """Lends a thread to each engine. When an engine has ended, its thread serves the next engine.

    MLX starts operating system threads for each thread that computes, and these end only with the process. Reusing
    threads limits their number to the largest number of engines that ran at the same time.

    Args:
        at_end: called in each thread before the thread ends.
    """

    def __init__(self, at_end: Callable[[], None] = lambda: None) -> None:
        self._at_end = at_end
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._is_closed = False

    def lend(self, work: Callable[[], None]) -> LentThread:
        """Return a thread that will run ``work``. If ``work`` raises, the thread is not used again."""
        return LentThread(self, work)

    def close(self, timeout: float) -> bool:
        """End all threads after their current work. Return True if all have ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.jobs.put(None)
        for worker in workers:
            worker.thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(worker.thread.is_alive() for worker in workers)

    def _give(self, lent: LentThread) -> None:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("cannot start an engine: the threads have been closed")
            worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = _Worker(self, f"engine-{self._num_started}")
                self._num_started += 1
                self._workers.append(worker)
                worker.thread.start()
        worker.jobs.put(lent)

    def _take_back(self, worker: _Worker, *, is_whole: bool) -> None:
        with self._lock:
            (self._idle.append if is_whole else self._workers.remove)(worker)

    def _end(self) -> None:
        try:
            self._at_end()
        except Exception:
            logger.exception("the cleanup of an engine thread failed")


class LentThread:
    """Borrowed thread for one call of ``work``, with the methods of :class:`threading.Thread` that the engine uses."""

    def __init__(self, threads: EngineThreads, work: Callable[[], None]) -> None:
        self._threads = threads
        self.work: Callable[[], None] | None = work
        self.has_begun = False
        self.has_ended = threading.Event()

    def start(self) -> None:
        """Start the work. Raises RuntimeError if the threads have been closed."""
        self._threads._give(self)
        self.has_begun = True

    def is_alive(self) -> bool:
        return self.has_begun and not self.has_ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.has_ended.wait(timeout)


class _Worker:
    def __init__(self, threads: EngineThreads, name: str) -> None:
        self._threads = threads
        self.jobs: queue.SimpleQueue[LentThread | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def _main(self) -> None:
        is_whole = True
        while is_whole:
            lent = self.jobs.get()
            if lent is None:
                break
            is_whole = self._run(lent)
            if not is_whole:
                self._threads._end()
            self._threads._take_back(self, is_whole=is_whole)
            lent.has_ended.set()
            del lent  # it references a whole engine
        else:
            return
        self._threads._end()

    @staticmethod
    def _run(lent: LentThread) -> bool:
        """Run the work, and drop the reference to it. Return True if the thread can be used again."""
        work, lent.work = lent.work, None
        assert work is not None
        try:
            work()
        except BaseException:
            logger.exception("an engine ended with an error: its thread is not used again")
            return False
        return True

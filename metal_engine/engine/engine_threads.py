"""Threads for engines that come and go."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class EngineThreads:
    """Lends a thread to each engine; what one has ended with is the next one's.

    For each thread that computes, MLX starts threads of the operating system's, which end with the process only. So
    there are no more of them than there ever were engines at once.

    Args:
        at_end: called in each thread that is about to end.
    """

    def __init__(self, at_end: Callable[[], None] = lambda: None) -> None:
        self._at_end = at_end
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._is_closed = False

    def lend(self, work: Callable[[], None]) -> LentThread:
        """A thread that is going to run ``work``. If that raises, no other work comes to the thread."""
        return LentThread(self, work)

    def close(self, timeout: float) -> bool:
        """End the threads, each after its work. Returns whether all have ended within ``timeout`` seconds."""
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
                raise RuntimeError("no engine is started any more")
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
            logger.exception("an engine's thread could not be ended properly")


class LentThread:
    """A thread for one piece of work, with the methods of :class:`threading.Thread` that its borrower needs."""

    def __init__(self, threads: EngineThreads, work: Callable[[], None]) -> None:
        self._threads = threads
        self.work: Callable[[], None] | None = work
        self.has_begun = False
        self.has_ended = threading.Event()

    def start(self) -> None:
        """Begin with the work. Raises RuntimeError when the threads have been closed."""
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
            del lent  # it keeps a whole engine
        else:
            return
        self._threads._end()

    @staticmethod
    def _run(lent: LentThread) -> bool:
        """Do a piece of work, and forget it. Returns whether the thread is good for another."""
        work, lent.work = lent.work, None
        assert work is not None
        try:
            work()
        except BaseException:
            logger.exception("an engine has ended badly: its thread is not used again")
            return False
        return True

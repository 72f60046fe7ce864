"""Ends all ranks of a group if one of them is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from metal_engine.distributed.channel import Link
from metal_engine.step import RunnerLostError

logger = logging.getLogger(__name__)

# Seconds for rank 0 to notify clients and probes before it ends.
LEADER_GRACE_SECONDS = 1.0
# Seconds before the other ranks end. They end after rank 0, because a step of rank 0 fails when other ranks end.
FOLLOWER_GRACE_SECONDS = LEADER_GRACE_SECONDS + 0.25
# Maximum seconds for writing the log line about the loss.
_LOG_SECONDS = 0.5
# Number of parts in which the time limit of a step is counted.
_PARTS = 20


class RankFailureMonitor:
    """Ends this process when a rank is lost. A step that waits for the lost rank would never end.

    Args:
        rank: rank of this process.
        grace: seconds from the loss to the end of this process.

    Attributes:
        error: first loss; None if no rank was lost.
    """

    def __init__(self, rank: int, grace: float) -> None:
        self.error: RunnerLostError | None = None
        self._rank = rank
        self._grace = grace
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._is_logged = threading.Event()
        self._callbacks: list[Callable[[RunnerLostError], None]] = []
        self._at_end: Callable[[], None] = lambda: None

    def add_callback(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Register a callback for a loss, called with the error in the thread that reports the loss.

        If a rank was lost already, the callback is called at once, in the calling thread.
        """
        with self._lock:
            self._callbacks.append(callback)
            error = self.error
        if error is not None:
            callback(error)

    def at_end(self, act: Callable[[], None]) -> None:
        """Set the function to call right before this process exits because a rank was lost."""
        self._at_end = act

    def lose(self, message: str) -> None:
        """Record and log a loss, and call the callbacks. Later losses are ignored.

        A thread ends this process with status 1 after the grace period.
        """
        with self._lock:
            if self.error is not None:
                return
            self.error = error = RunnerLostError(message)
            callbacks = list(self._callbacks)
        self._is_lost.set()
        # Started first, in a separate thread, so that this process ends even if something else hangs or fails.
        thread = threading.Thread(target=self._end, args=(time.monotonic() + self._grace,), daemon=True)
        with suppress(RuntimeError):  # no thread can start while the interpreter ends: see exit_if_rank_lost
            thread.start()
        logger.critical("%s: rank %d ends", message, self._rank)
        self._is_logged.set()
        for callback in callbacks:
            callback(error)

    def _end(self, deadline: float) -> None:
        self._is_logged.wait(_LOG_SECONDS)
        time.sleep(max(deadline - time.monotonic(), 0))
        try:
            self._at_end()
        finally:
            os._exit(1)

    def exit_if_rank_lost(self) -> None:
        """If a rank was lost, wait for the grace period and end this process with status 1.

        Called when the interpreter exits. MLX's threads may still wait for the lost rank. They would end the process
        with a signal.
        """
        if self.error is not None:
            self._end(time.monotonic() + self._grace)

    def wait(self, seconds: float) -> RunnerLostError | None:
        """Wait at most ``seconds`` for a loss. Return the error of the loss; None if no rank was lost."""
        self._is_lost.wait(seconds)
        return self.error

    def check(self) -> None:
        """Raise RunnerLostError if a rank was lost."""
        if self.error is not None:
            raise self.error


class StepTimeout:
    """Context manager around a wait of rank 0 for a step. Reports a loss if the wait exceeds the time limit of a step.

    Heartbeats do not detect a rank that has stopped computing. A separate thread counts the time in parts, so that the
    time does not advance while this process is stopped.

    Args:
        monitor: handler to which the loss is reported.
        links: links to the other ranks, which report the progress of these ranks.
        seconds: time limit of a step.

    Attributes:
        progress: progress of rank 0, counted as in :class:`metal_engine.distributed.channel.Link`.
    """

    def __init__(self, monitor: RankFailureMonitor, links: Sequence[Link], seconds: float) -> None:
        self.progress = 0
        self._monitor = monitor
        self._links = links
        self._seconds = seconds
        self._wait: object | None = None  # identity of the current wait; None if rank 0 is not waiting
        self._counted: object | None = None  # wait to which ``_num_parts`` belongs
        self._num_parts = 0
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Start the thread that counts the time of each wait."""
        threading.Thread(target=self._count, name="step timeout", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def __enter__(self) -> None:
        self._wait = object()

    def __exit__(self, *exc_info: object) -> None:
        self._wait = None

    def _count(self) -> None:
        while not self._is_closed.wait(self._seconds / _PARTS) and self._monitor.error is None:
            self.count()

    def count(self) -> None:
        """Add one part of the time limit to the current wait. Report a loss if the limit is reached."""
        wait = self._wait
        if wait is None or wait is not self._counted:
            self._counted, self._num_parts = wait, 0
            return
        self._num_parts += 1
        if self._num_parts >= _PARTS:
            self._monitor.lose(self._problem())

    def _problem(self) -> str:
        """Return a message that names the ranks with the least progress, because the other ranks wait for them."""
        progress = {"rank 0": self.progress, **{link.name: link.their_progress for link in self._links}}
        least = min(progress.values())
        waited = f"rank 0 has waited {self._seconds:.0f} s for a step"
        if least == max(progress.values()):
            return f"{waited} that all ranks are in: a rank has stopped computing, or a link between two ranks is cut"
        slowest = ", ".join(name for name, number in progress.items() if number == least)
        return f"{slowest} has made no progress, and {waited}"

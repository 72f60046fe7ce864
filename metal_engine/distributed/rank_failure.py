"""The end of a group: when one rank is lost, all of them end."""

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

# For rank 0 to tell clients, and probes, before it ends.
LEADER_GRACE_SECONDS = 1.0
# For the others: a step of rank 0, which waits for them, fails when they end.
FOLLOWER_GRACE_SECONDS = LEADER_GRACE_SECONDS + 0.25
# For the line that says what has happened.
_TELLING_SECONDS = 0.5
# In which the time of a step is counted.
_PARTS = 20


class RankFailureMonitor:
    """Ends this process when a rank is lost: a step that waits for that rank would never end.

    Args:
        rank: this process's.
        grace: seconds until then.

    Attributes:
        error: what has happened; None as long as nothing has.
    """

    def __init__(self, rank: int, grace: float) -> None:
        self.error: RunnerLostError | None = None
        self._rank = rank
        self._grace = grace
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._callbacks_done = threading.Event()
        self._tells: list[Callable[[RunnerLostError], None]] = []
        self._at_end: Callable[[], None] = lambda: None

    def tell(self, tell: Callable[[RunnerLostError], None]) -> None:
        """Call a function with the error, in another thread, when a rank is lost; at once if one has been."""
        with self._lock:
            self._tells.append(tell)
            error = self.error
        if error is not None:
            tell(error)

    def at_end(self, act: Callable[[], None]) -> None:
        """Call a function last, before a loss ends this process."""
        self._at_end = act

    def lose(self, message: str) -> None:
        """A rank is lost: tell everybody, and end. What comes after the first is not heard."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error = RunnerLostError(message)
            tells = list(self._tells)
        self._is_lost.set()
        # A thread of its own, first: whatever else hangs or fails, this process ends.
        thread = threading.Thread(target=self._end, args=(time.monotonic() + self._grace,), daemon=True)
        with suppress(RuntimeError):  # the interpreter is ending, and starts none: see exit_if_rank_lost
            thread.start()
        logger.critical("%s: rank %d ends", message, self._rank)
        self._callbacks_done.set()
        for tell in tells:
            tell(error)

    def _end(self, deadline: float) -> None:
        self._callbacks_done.wait(_TELLING_SECONDS)
        time.sleep(max(deadline - time.monotonic(), 0))
        try:
            self._at_end()
        finally:
            os._exit(1)

    def exit_if_rank_lost(self) -> None:
        """At the end of the interpreter: where a rank is lost, the process ends as :meth:`lose` has it end.

        Else MLX's threads, which may wait for that rank, end it with a signal.
        """
        if self.error is not None:
            self._end(time.monotonic() + self._grace)

    def wait(self, seconds: float) -> RunnerLostError | None:
        """Wait for a loss; None if there is none in that time."""
        self._is_lost.wait(seconds)
        return self.error

    def check(self) -> None:
        """Raises RunnerLostError if a rank has been lost."""
        if self.error is not None:
            raise self.error


class StepTimeout:
    """Loses the group where rank 0 waits for a step for longer than any can take, which heartbeats do not tell.

    Time is counted in parts by a thread of its own, so that it does not go on while this process is stopped.

    Args:
        watch: is told.
        links: to the other ranks, which tell how far those are.
        seconds: that a step may take.

    Attributes:
        progress: how far rank 0 is, counted as in :class:`metal_engine.distributed.channel.Link`.
    """

    def __init__(self, watch: RankFailureMonitor, links: Sequence[Link], seconds: float) -> None:
        self.progress = 0
        self._watch = watch
        self._links = links
        self._seconds = seconds
        self._wait: object | None = None  # under way
        self._counted: object | None = None  # of which so many parts have passed
        self._num_parts = 0
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Begin to count."""
        threading.Thread(target=self._count, name="step watch", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def __enter__(self) -> None:
        self._wait = object()

    def __exit__(self, *exc_info: object) -> None:
        self._wait = None

    def _count(self) -> None:
        while not self._is_closed.wait(self._seconds / _PARTS) and self._watch.error is None:
            self.count()

    def count(self) -> None:
        """A part of the time has passed."""
        wait = self._wait
        if wait is None or wait is not self._counted:
            self._counted, self._num_parts = wait, 0
            return
        self._num_parts += 1
        if self._num_parts >= _PARTS:
            self._watch.lose(self._problem())

    def _problem(self) -> str:
        """Names the ranks that are behind: the others have come to where they wait for these."""
        progress = {"rank 0": self.progress, **{link.name: link.their_progress for link in self._links}}
        least = min(progress.values())
        waited = f"rank 0 has waited {self._seconds:.0f} s for a step"
        if least == max(progress.values()):
            return f"{waited} that all ranks are in: one of them computes no more, or a link between two of them is cut"
        behind = ", ".join(name for name, number in progress.items() if number == least)
        return f"{behind} does not go on, and {waited}"

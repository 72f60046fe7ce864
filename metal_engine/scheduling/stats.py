"""What a scheduler has under way, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of the scheduler, for the log, ``/health`` and live views.

    ``num_loading`` counts those of the waiting requests whose KV is on its way from a store.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_blocks: int
    num_used_blocks: int
    peak_used_blocks: int
    num_loading: int = 0

"""What a scheduler has under way, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metal_engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot of the scheduler, for the log, ``/health`` and live views.

    ``num_loading`` counts those of the waiting requests whose KV is on its way from a store. ``num_state_slots`` counts
    slots of recurrent states, 0 for models without; ``num_checkpoints`` those that hold one, ``checkpoint_hits`` how
    often a request went on from one, ``checkpoint_evictions`` how often one gave way.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_blocks: int
    num_used_blocks: int
    peak_used_blocks: int
    num_loading: int = 0
    num_state_slots: int = 0
    num_checkpoints: int = 0
    checkpoint_hits: int = 0
    checkpoint_evictions: int = 0

    @staticmethod
    def of(scheduler: Scheduler) -> SchedulerStats:
        num_loading = len(scheduler.admissions.loading)
        return SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.admissions.waiting) + num_loading,
            num_preemptions=scheduler.num_preemptions,
            num_blocks=scheduler.blocks.num_blocks,
            num_used_blocks=scheduler.blocks.num_used_blocks,
            peak_used_blocks=scheduler.blocks.peak_used_blocks,
            num_loading=num_loading,
            **scheduler.states.slots.stats,
        )

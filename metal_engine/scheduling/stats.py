"""Snapshot of a scheduler's requests, blocks and state checkpoints as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metal_engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class SchedulerStats:
    """Snapshot of the scheduler for the log, ``/health`` and live views.

    Attributes:
        num_waiting: number of waiting requests, including requests that load KV from a store.
        num_preemptions: total number of preemptions since the start.
        peak_used_blocks: largest number of blocks that requests have used at the same time.
        num_loading: number of waiting requests whose KV is being loaded from a store.
        num_state_slots: number of slots for recurrent states; 0 for models without recurrent layers.
        num_checkpoints: number of slots that hold a state checkpoint.
        checkpoint_hits: number of times that a request resumed from a state checkpoint.
        checkpoint_evictions: number of evicted state checkpoints.
        images_encoded: number of images that steps have encoded.
        image_cache_hits: number of images whose features were kept when a request needed them.
        image_cache_tokens: number of image tokens whose features are kept.
        num_plans: number of plans so far, including empty plans. It grows as long as the engine works on requests.
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
    num_plans: int = 0
    images_encoded: int = 0
    image_cache_hits: int = 0
    image_cache_tokens: int = 0

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
            num_plans=scheduler.num_plans,
            images_encoded=scheduler.images.num_encoded,
            image_cache_hits=scheduler.images.num_hits,
            image_cache_tokens=scheduler.images.num_kept_tokens,
            **scheduler.states.slots.stats,
        )

"""Bookkeeping of state slots must not grow with the number of requests."""

from __future__ import annotations

from metal_engine.request import Request
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.recurrent_states import RecurrentStates
from metal_engine.scheduling.state_slots import StateSlots
from metal_engine.settings.config import CacheConfig


def test_dropped_state_checkpoints_leave_no_hit_records() -> None:
    slots = StateSlots(2)
    for i in range(4):
        slot = slots.take()
        assert slots.add_checkpoint(bytes([i]), slot) and slots.resume_from(bytes([i])) == slot
        slots.give_back(slot)
        slots.check_integrity([])
    slots.forget()
    assert not slots._was_hit


def test_a_checkpoint_requested_by_many_is_planned_once() -> None:
    config = CacheConfig(block_size=4, num_blocks=8, enable_prefix_caching=True, num_state_slots=2)
    states = RecurrentStates(StateSlots(2), config, 1)
    request = Request("r", list(range(20)), SamplingParams(), max_tokens=4)
    states.admit(request, 0, 0)
    for _ in range(3):
        states.request_checkpoint(request, 8)
    assert sorted(states._held["r"].stops) == [0, 8, 16]

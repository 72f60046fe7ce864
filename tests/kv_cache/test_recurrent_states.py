"""Recurrent states of one layer over arbitrary steps: each slot holds the last state that its request wrote."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.recurrent import RecurrentState
from metal_engine.kv_cache.segments import PADDING_SLOT
from metal_engine.kv_cache.spec import ArraySpec, RecurrentSpec

NUM_SLOTS = 6


def test_padding_rows_reuse_the_pending_state_array() -> None:
    """Padding rows reuse the pending array that they are in. If they did not, each step would gather all states."""
    pool = StatePool.of([RecurrentSpec((ArraySpec((2,), mx.float32),))])
    pool.allocate(1, 1, NUM_SLOTS)
    slots = (2, 5, 3, PADDING_SLOT, PADDING_SLOT)
    for step in range(3):
        pool.begin_step()
        pool.attach_arrays(pool.detach_arrays(slots, slots), slots)
        assert pool.has_moved_states == (step == 0)
    fewer = (2, 5, PADDING_SLOT, PADDING_SLOT)
    pool.attach_arrays(pool.detach_arrays(fewer, fewer), fewer)
    assert pool.has_moved_states


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_states_are_correct_after_any_mix_of_built_and_replayed_steps(data: st.DataObject) -> None:
    """A step adds one to its initial states. Some steps are discarded after they were built, and built again."""
    pool = StatePool.of([RecurrentSpec((ArraySpec((2,), mx.float32),))])
    (state,) = pool.states
    assert isinstance(state, RecurrentState)
    pool.allocate(1, 1, NUM_SLOTS)
    expected = {0: 0.0}  # slot -> value; slots that were never written are never read
    for step in range(data.draw(st.integers(1, 8), "steps")):
        reads = tuple(data.draw(st.lists(st.sampled_from(sorted(expected)), min_size=1, max_size=4), "reads"))
        slots = st.lists(st.integers(1, NUM_SLOTS), min_size=len(reads), max_size=len(reads), unique=True)
        is_same = data.draw(st.booleans(), "in place") and 0 not in reads and len(set(reads)) == len(reads)
        writes = reads if is_same else tuple(data.draw(slots, "writes"))
        num_padded = data.draw(st.integers(0, 2), "padded")
        padding = (PADDING_SLOT,) * num_padded
        if data.draw(st.booleans(), "is tried"):
            before = pool.pending_states()
            tried = pool.detach_arrays(reads + padding, writes + padding)
            pool.attach_arrays([values + 100 for values in tried], writes + padding)
            pool.restore_pending_states(before)
        if data.draw(st.booleans(), "is replayed"):
            (values,) = pool.detach_arrays(reads + padding, writes + padding)
            assert values.shape == (len(reads) + num_padded, 2)
            pool.attach_arrays([values + 1], writes + padding)
        else:
            (values,) = state.take(next(iter(state.arrays)), [reads], [writes])
            assert values is not None
            state.put(next(iter(state.arrays)), writes, values + 1)
        expected |= {write: expected[read] + 1 for read, write in zip(reads, writes, strict=True)}
        if data.draw(st.booleans(), "is evaluated"):
            pool.evaluate()
        asked = sorted(expected)
        (found,) = pool.read_states(tuple(asked))
        np.testing.assert_array_equal(np.array(found)[:, 0], [expected[slot] for slot in asked], f"after step {step}")

"""The pool with two kinds of state, and with a third kind that only this test defines."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.spec import ArraySpec, KVSpec, LatentSpec, StateSpec
from metal_engine.kv_cache.state import KVState, LatentState, StateSnapshot
from metal_engine.kv_cache.writes import BlockWrites, RunWrites, SlotWrites
from metal_engine.kv_transfer.runner_side import block_parts
from metal_engine.step import KVCacheLostError

KV = KVSpec(num_kv_heads=2, head_dim=4, v_head_dim=3, dtype=mx.float16)
LATENT = LatentSpec(latent_dim=6, rope_dim=2, dtype=mx.float32)
NUM_BLOCKS, BLOCK_SIZE = 5, 4


class SumSpec(StateSpec):
    """Spec of a running sum for each of three requests, like a recurrent layer's state."""

    dtype = mx.float32
    request_arrays = {"sum": ArraySpec((7,), mx.float32)}  # noqa: RUF012


class SumState:
    """Implements LayerState outside the package. It has no blocks, and adds values instead of overwriting them."""

    def __init__(self) -> None:
        self.spec = SumSpec()
        self.arrays: dict[str, mx.array] = {}

    def allocate(self, num_blocks: int, block_size: int, num_state_slots: int) -> None:
        self.arrays = {"sum": mx.zeros((3, 7))}

    def release(self) -> None:
        self.arrays = {}

    def snapshot(self) -> StateSnapshot:
        return StateSnapshot({"sum": self.arrays["sum"].reshape(3, 7)})

    def restore(self, snapshot: StateSnapshot) -> None:
        self.arrays = dict(snapshot.arrays)

    def writes_done_marker(self) -> list[mx.array]:
        return list(self.arrays.values())

    def block_arrays(self) -> dict[str, mx.array]:
        return {}

    def write(self, step: StepRows, rows: Mapping[str, mx.array]) -> None:
        self.arrays["sum"] = self.arrays["sum"].at[mx.array(step.request_of_row)].add(rows["sum"])


def pool() -> StatePool:
    made = StatePool([KVState(KV), LatentState(LATENT), SumState()])
    made.allocate(NUM_BLOCKS, BLOCK_SIZE)
    return made


def rows_of(make_writes: type = SlotWrites) -> StepRows:
    """Return rows of two requests: 6 rows that fill block 3 and half of block 1, and one row in block 4."""
    table = np.array([[3, 1], [4, 0]], np.int32)
    return step_rows(table, np.array([0, 2], np.int32), [6, 1], BLOCK_SIZE, make_writes=make_writes)


def write(pool: StatePool, step: StepRows, seed: int = 0) -> list[dict[str, mx.array]]:
    rng = np.random.default_rng(seed)
    shapes = [{"keys": (2, 4), "values": (2, 3)}, {"keys": (1, 8)}, {"sum": (7,)}]
    given = [
        {n: mx.array(rng.standard_normal((step.num_tokens, *shape)).astype(np.float32)) for n, shape in s.items()}
        for s in shapes
    ]
    for state, rows in zip(pool.states, given, strict=True):
        state.write(step, rows)
    return given


def test_sizes_come_from_the_declared_arrays() -> None:
    assert (KV.bytes_per_token, KV.bytes_per_request) == (2 * (4 + 3) * 2, 0)
    assert (LATENT.bytes_per_token, LATENT.bytes_per_request) == (8 * 4, 0)
    assert (pool().bytes_per_token, pool().bytes_per_request) == (28 + 32, 28)
    for state in pool().states[:2]:
        arrays = state.arrays.values()
        assert sum(a.nbytes for a in arrays) == NUM_BLOCKS * BLOCK_SIZE * state.spec.bytes_per_token


@pytest.mark.parametrize("make_writes", [SlotWrites, BlockWrites, RunWrites])
def test_rows_go_to_their_slots(make_writes: type) -> None:
    made, step = pool(), rows_of(make_writes)
    given = write(made, step)
    made.evaluate()
    assert step.slot_mapping.tolist() == [12, 13, 14, 15, 4, 5, 18]
    for state, rows in zip(made.states[:2], given, strict=False):
        for name, array in state.arrays.items():
            expected = np.zeros(array.shape, np.float32)
            expected[step.slot_mapping] = np.array(rows[name])
            np.testing.assert_allclose(np.array(array.astype(mx.float32)), expected, atol=2e-3)
            blocks = state.block_arrays()[name]
            assert blocks.shape == (NUM_BLOCKS, BLOCK_SIZE, *array.shape[1:])
            assert mx.array_equal(blocks.reshape(array.shape), array)


def test_attention_reads_stored_kv_by_head_and_by_token() -> None:
    made, step = pool(), rows_of()
    write(made, step)
    kv, latent, _ = made.states
    assert isinstance(kv, KVState) and isinstance(latent, LatentState)
    keys, values = kv.read_heads(mx.array([[12 * 2 + 1, 5 * 2]]))
    assert (keys.shape, values.shape, keys.dtype) == ((1, 2, 4), (1, 2, 3), mx.float32)
    assert mx.array_equal(keys[0, 0], kv.keys[12, 1]) and mx.array_equal(values[0, 1], kv.values[5, 0])
    for slots in (slice(12, 15), mx.array([12, 13, 14])):
        keys, values = kv.read_tokens(slots)
        assert mx.array_equal(keys, kv.keys[12:15].reshape(3, -1))
        assert mx.array_equal(values, kv.values[12:15].reshape(3, -1))
    keys, values = latent.read_heads(mx.array([4, 18]))
    assert keys is values and mx.array_equal(keys, latent.keys[mx.array([4, 18]), 0])
    assert latent.block_arrays().keys() == {"keys"}, "what is the same array is there once"


def test_restoring_a_snapshot_undoes_later_writes() -> None:
    made, step = pool(), rows_of()
    write(made, step)
    made.evaluate()
    before = [{n: np.array(a) for n, a in state.arrays.items()} for state in made.states]
    snapshot = made.snapshot()
    write(made, step, seed=1)
    made.restore(snapshot)
    for state, arrays in zip(made.states, before, strict=True):
        assert state.arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(np.array(state.arrays[name]), array)


def test_the_writes_done_marker_is_computed_after_every_write() -> None:
    made = pool()
    write(made, rows_of())
    mx.async_eval(made.writes_done_marker())
    made.evaluate()
    assert all(np.array(array).any() for state in made.states for array in state.arrays.values())


@pytest.mark.parametrize("num_failures", [1, 2], ids=["the old one fails", "the new one too, at first"])
def test_a_pool_that_cannot_be_evaluated_is_made_anew(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool()
    write(made, rows_of())
    made.recover(RuntimeError("a step failed"))  # executes the pending writes
    assert np.array(made.states[0].arrays["keys"]).any()
    evaluate, failures = made.evaluate, [RuntimeError("gone")] * num_failures
    monkeypatch.setattr(made, "evaluate", lambda: _raise(failures.pop()) if failures else evaluate())
    with pytest.raises(KVCacheLostError, match="RuntimeError: a step failed"):
        made.recover(RuntimeError("a step failed"))
    assert made.is_allocated
    assert not any(np.array(array).any() for state in made.states for array in state.arrays.values())
    made.release()
    assert not made.is_allocated


def _raise(error: Exception) -> None:
    raise error


def test_specs_give_the_states_of_a_pool_and_the_parts_of_a_block() -> None:
    made = StatePool.of([KV, LATENT])
    assert [type(state) for state in made.states] == [KVState, LatentState]
    assert not made.is_allocated
    parts = block_parts([state.spec for state in made.states], BLOCK_SIZE)
    assert [(p.name, p.dtype, p.shape, p.nbytes) for p in parts] == [
        ("layers.0000.keys", "float16", (4, 2, 4), 64),
        ("layers.0000.values", "float16", (4, 2, 3), 48),
        ("layers.0001.keys", "float32", (4, 1, 8), 128),
    ]
    with pytest.raises(TypeError, match="SumSpec"):
        StatePool.of([SumSpec()])

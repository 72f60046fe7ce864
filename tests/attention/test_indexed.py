"""Attention to the keys that an index selects, compared with NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.indexed import IndexQueries, SelectionSize, plan_selection
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable.groups import CPU_LIMITS, Dims, Limits, RowSegment
from metal_engine.attention.portable.indexed import largest, select_keys
from metal_engine.kv_cache.spec import IndexSpec
from metal_engine.kv_cache.state import IndexState, StateSnapshot
from tests.support.memory import settled_memory
from tools.fixtures.packed_step import PackedStep, make_step

TOP_K, SCALE = 8, 0.25
# (rows, context) of each request: dense decodes and chunks, decodes of similar and different lengths, drafts, chunks
# that cross the top-k, and a long chunk.
SEGMENTS = [(1, 3), (5, 0), (1, 40), (1, 43), (1, 200), (4, 30), (11, 4), (1, 7), (1, 8), (70, 25)]
LIMITS = {
    "device": None,
    # Tiles of a few rows, keys in several spans, one gathered row after another.
    "small": Limits(scores=640, span=256, tile_rows=7, small_area=50, min_keys=8),
}


@dataclass
class IndexedStep:
    """A packed step with an index of two heads, of which many scores are exactly 0."""

    packed: PackedStep
    index: IndexQueries
    index_state: IndexState

    @classmethod
    def random(
        cls, segments: list[tuple[int, int]], seed: int = 0, blocks: SelectionSize | None = None, **sizes: Any
    ) -> IndexedStep:
        packed = make_step(segments, block_size=8, seed=seed, **sizes)
        rows, rng = packed.rows, np.random.default_rng(seed)
        state = IndexState(IndexSpec(5, mx.float32))
        num_slots = len(packed.state.keys)
        keys = np.full((num_slots, 5), np.nan, np.float32)
        for request, seq_len in enumerate(rows.seq_lens.tolist()):
            keys[rows.slots(request, np.arange(seq_len))] = rng.standard_normal((seq_len, 5))
        state.allocate(num_slots // 8, 8)
        state.restore(StateSnapshot({"index_keys": mx.array(keys)}))
        queries, weights = rng.standard_normal((rows.num_tokens, 2, 5)), rng.standard_normal((rows.num_tokens, 2))
        index = IndexQueries(
            mx.array(queries.astype(np.float32)), mx.array(weights.astype(np.float32)), SelectionSize(TOP_K)
        )
        return cls(packed, index, state)

    def attend(self, backend: Any, limits: Limits | None = None) -> np.ndarray:
        rows = self.packed.rows
        plan = plan_selection(rows, self.index.size.num_keys, self.index.dims, limits)
        selection = None if plan is None else select_keys(plan, self.index, self.index_state)
        out = backend.for_step(rows).attend(self.packed.q, self.packed.state, scale=SCALE, selection=selection)
        return np.array(out)[..., : self.packed.latent_dim]

    def selected(self, row: int, head: int = 0) -> np.ndarray:
        """Return the positions that a row attends to, for one KV head."""
        rows, size = self.packed.rows, self.index.size
        num_keys = int(rows.positions[row]) + 1
        slots = rows.slots(int(rows.request_of_row[row]), np.arange(num_keys))
        keys, query = np.array(self.index_state.arrays["index_keys"])[slots], np.array(self.index.queries)[row]
        products = query.astype(np.float64) @ keys.T
        if self.index.weights is not None:
            scores = np.array(self.index.weights)[row] @ np.maximum(products, 0)
            return np.sort(np.lexsort((np.arange(num_keys), -scores))[:TOP_K])
        blocks = np.split(products[head], range(size.block_size, num_keys, size.block_size))
        scores = np.array([block.max() for block in blocks])
        scores[len(scores) - size.num_local :] = np.inf
        best = np.argsort(-scores, kind="stable")[: size.top_k]
        return np.flatnonzero(np.isin(np.arange(num_keys) // size.block_size, best))

    def reference(self) -> np.ndarray:
        rows, state = self.packed.rows, self.packed.state
        keys, values = (np.array(array).astype(np.float64) for array in (state.keys, state.values))
        outputs = []
        for row, q in enumerate(np.array(self.packed.q).astype(np.float64)):
            group, heads = len(q) // keys.shape[1], []
            for head in range(keys.shape[1]):
                slots = rows.slots(int(rows.request_of_row[row]), self.selected(row, head))
                k, v = keys[slots, head], values[slots, head, : self.packed.latent_dim]
                weights = np.exp(q[head * group : (head + 1) * group] @ k.T * SCALE)
                heads.append(weights / weights.sum(1, keepdims=True) @ v)
            outputs.append(np.concatenate(heads))
        return np.array(outputs)


def gap(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max())


LATENTS = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 12, "v_head_dim": 8, "is_latent": True}
SIZES = {"latents": LATENTS, "two KV heads": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_attend_to_the_keys_with_the_largest_scores(sizes: str, limits: str) -> None:
    for seed in range(3):
        step = IndexedStep.random(SEGMENTS, seed, **SIZES[sizes])
        assert gap(step.attend(PortableBackend(), LIMITS[limits]), step.reference()) < 2e-5


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("blocks", [SelectionSize(3, 4, 1), SelectionSize(2, 7, 2), SelectionSize(5, 3, 0)], ids=str)
def test_each_kv_head_attends_to_blocks_of_its_own(blocks: SelectionSize, limits: str) -> None:
    step = IndexedStep.random(SEGMENTS, blocks=blocks, **SIZES["two KV heads"])
    assert gap(step.attend(PortableBackend(), LIMITS[limits]), step.reference()) < 2e-5


def test_a_selection_that_fails_later_is_an_error() -> None:
    """Such an operation fails when it runs. A conversion to NumPy then gives zeros."""
    step = IndexedStep.random(SEGMENTS, **LATENTS)
    plan = plan_selection(step.packed.rows, TOP_K, step.index.dims)
    assert plan is not None
    selection = select_keys(plan, step.index, step.index_state)
    wrong = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0].astype(mx.int32)
    with pytest.raises(RuntimeError, match="LU factorization failed"):
        replace(selection, positions=[positions + wrong for positions in selection.positions]).by_row()


@pytest.mark.parametrize("top_k", [1, 5, 40])
def test_the_largest_scores_with_ties(top_k: int) -> None:
    """Few different scores, among them both zeros, for rows that see from one to all keys."""
    rng = np.random.default_rng(0)
    scores = rng.integers(-2, 3, (4, 30, 40)).astype(np.float32) * rng.choice([-1.0, 1.0], (4, 30, 40))
    positions = rng.integers(0, 40, (4, 30, 1)).astype(np.int32)
    found = np.sort(np.array(largest(mx.array(scores.astype(np.float32)), mx.array(positions), top_k)), axis=-1)
    for at in np.ndindex(4, 30):
        num_keys = int(positions[at][0]) + 1
        best = np.lexsort((np.arange(num_keys), -scores[at][:num_keys]))[:top_k]
        assert np.array_equal(found[at], np.sort(np.pad(best, (0, top_k - len(best)), constant_values=-1)))


def test_memory_does_not_grow_with_the_context() -> None:
    """All scores of this step would take 512 MiB."""
    index_heads, top_k = 32, 64
    peaks = []
    for context in (2_000, 16_000):
        packed = make_step([(256, context)], block_size=16, **LATENTS)
        rows = packed.rows
        state = IndexState(IndexSpec(8, mx.float32))
        state.allocate(len(packed.state.keys) // 16, 16)
        queries = mx.random.normal((256, index_heads, 8))
        index = IndexQueries(queries, mx.ones((256, index_heads)), SelectionSize(top_k))
        mx.eval(queries, packed.q, packed.k_cache)
        plan = plan_selection(rows, top_k, index.dims)
        assert plan is not None
        held = settled_memory()
        selection = select_keys(plan, index, state)
        step = PortableBackend().for_step(rows)
        mx.eval(step.attend(packed.q, packed.state, scale=1.0, selection=selection))
        peaks.append(mx.get_peak_memory() - held)
    assert max(peaks) < 4 * (6 * CPU_LIMITS.scores + 4 * CPU_LIMITS.span)


def test_planning_compares_no_pairs_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,024 decodes, comparisons of all pairs would take longer than the step."""
    monkeypatch.setattr(RowSegment, "__eq__", lambda *_: pytest.fail("two segments are compared"))
    rows = make_step([(1, 20 + i) for i in range(50)], **LATENTS).rows
    plan = plan_selection(rows, TOP_K, Dims(2, 1, 8), LIMITS["small"])
    assert plan is not None and sum(len(tile.requests) for tile in plan.tiles) == 50


def test_layers_share_one_plan_for_rows_that_attend_to_all_keys() -> None:
    step = IndexedStep.random(SEGMENTS, **LATENTS)
    plan = plan_selection(step.packed.rows, TOP_K, step.index.dims)
    assert plan is not None and plan.full_step is not None
    attention = PortableBackend().for_step(step.packed.rows)
    planned = []

    def for_step(rows: Any) -> Any:
        planned.append(rows)
        return attention

    for _ in range(3):
        assert plan.full_attention(attention, for_step) is attention
    assert planned == [plan.full_step]
    assert plan_selection(step.packed.rows, 1000, step.index.dims) is None
    alone = plan_selection(step.packed.alone(4).rows, TOP_K, step.index.dims)
    assert alone is not None and alone.full_step is None

"""Rows of a step: compared with a naive implementation, and refused if inconsistent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.writes import SlotWrites, consecutive_runs, whole_block_rows

BLOCK_SIZE = 4
NUM_BLOCKS = 10
# Query lengths 4, 1 and 3 over contexts 2, 5 and 0. The first and the second request sample.
ARRAYS = {
    "cu_seqlens_q": [0, 4, 5, 8],
    "seq_lens": [6, 6, 3],
    "block_table": [[3, 5], [9, 0], [2, 99]],  # 99 is padding
    "request_of_row": [0, 0, 0, 0, 1, 2, 2, 2],
    "positions": [2, 3, 4, 5, 5, 0, 1, 2],
    "slot_mapping": [14, 15, 20, 21, 1, 8, 9, 10],
    "logits_indices": [3, 4],
    "sample_requests": [0, 1],
    "state_reads": [2, 4, 0],
    "state_writes": [2, 3, 1],
}


def good() -> StepRows:
    arrays = {name: np.array(values, np.int32) for name, values in ARRAYS.items()}
    return StepRows(**arrays, block_size=BLOCK_SIZE, make_writes=SlotWrites)


def changed(name: str, values: object, dtype: type = np.int32) -> StepRows:
    return replace(good(), **{name: np.array(values, dtype)})


def made(num_samples: list[int]) -> StepRows:
    rows = good()
    slots = rows.state_reads, rows.state_writes
    lengths = [4, 1, 3]
    return step_rows(
        rows.block_table, rows.context_lens, lengths, BLOCK_SIZE, num_samples=num_samples, state_slots=slots
    )


def test_step_rows() -> None:
    for name, values in ARRAYS.items():
        array = getattr(made([1, 1, 0]), name)
        assert array.dtype == np.int32
        assert array.tolist() == values, name


@pytest.mark.parametrize("num_samples", [[4, 1, 3], [2, 0, 1], [0, 0, 3], [0, 0, 0]])
def test_several_samples_of_a_request_are_its_last_rows(num_samples: list[int]) -> None:
    rows = made(num_samples)
    rows.validate(NUM_BLOCKS)
    expected = [(r, row) for r, n in enumerate(num_samples) for row in range((4, 5, 8)[r] - n, (4, 5, 8)[r])]
    assert list(zip(rows.sample_requests.tolist(), rows.logits_indices.tolist(), strict=True)) == expected


@pytest.mark.parametrize("num_samples", [[4, 1, 3], [2, 0, 1], [0, 0, 3]])
def test_sampling_rows_are_a_step_of_their_own(num_samples: list[int]) -> None:
    rows = made(num_samples)
    of_step = rows.sampling_rows()
    of_step.validate(NUM_BLOCKS)
    assert of_step.logits_indices.tolist() == list(range(of_step.num_tokens))
    for name in ("positions", "slot_mapping"):
        assert getattr(of_step, name).tolist() == getattr(rows, name)[rows.logits_indices].tolist()
    sampling = np.flatnonzero(num_samples)
    for name in ("seq_lens", "state_reads", "state_writes"):
        assert getattr(of_step, name).tolist() == getattr(rows, name)[sampling].tolist()


@given(st.data())
def test_any_step_against_one_row_at_a_time(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    segment = st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 6))
    segments = [(c, q, min(n, q)) for c, q, n in data.draw(st.lists(segment, min_size=1, max_size=5))]
    num_blocks = len(segments) * 20
    table = np.random.default_rng(0).permutation(num_blocks).reshape(len(segments), 20).astype(np.int32)
    context, query, samples = (list(column) for column in zip(*segments, strict=True))
    rows = step_rows(table, np.array(context, np.int32), query, block_size, num_samples=samples)
    rows.validate(num_blocks)
    naive = [
        (request, position, table[request, position // block_size] * block_size + position % block_size)
        for request, (c, q, _) in enumerate(segments)
        for position in range(c, c + q)
    ]
    columns = (rows.request_of_row.tolist(), rows.positions.tolist(), rows.slot_mapping.tolist())
    assert list(zip(*columns, strict=True)) == naive
    sampled = [(r, p) for r, p, _ in naive if p >= context[r] + query[r] - samples[r]]
    at = rows.logits_indices
    assert list(zip(rows.sample_requests.tolist(), rows.positions[at].tolist(), strict=True)) == sampled
    assert (rows.context_lens.tolist(), rows.query_lens.tolist()) == (context, query)


def test_arguments_that_differ_in_length_are_refused() -> None:
    rows = good()
    with pytest.raises(ValueError, match="differ in length"):
        step_rows(rows.block_table, rows.context_lens[:2], [4, 1, 3], BLOCK_SIZE)
    with pytest.raises(ValueError, match="too small"):
        step_rows(rows.block_table[:, :1], rows.context_lens, [4, 1, 3], BLOCK_SIZE)


def test_good_rows_pass_and_their_padding_is_not_looked_at() -> None:
    good().validate(NUM_BLOCKS)
    changed("block_table", [[3, 5], [9, 0], [2, -7]]).validate(NUM_BLOCKS)
    none = np.array([], np.int32)
    replace(good(), logits_indices=none, sample_requests=none).validate(NUM_BLOCKS)


@pytest.mark.parametrize("name", ARRAYS)
def test_validate_rejects_another_dtype_another_rank_and_a_missing_element(name: str) -> None:
    values = ARRAYS[name]
    for bad, message in (
        (changed(name, values, np.int64), f"{name} is int64"),
        (changed(name, [values]), f"{name} has shape"),
        (changed(name, values[:-1]), "bad step"),
    ):
        with pytest.raises(ValueError, match=message):
            bad.validate(NUM_BLOCKS)


@pytest.mark.parametrize("name", sorted(ARRAYS.keys() - {"block_table", "state_reads", "state_writes"}))
@pytest.mark.parametrize("by", [-1, 1])
def test_validate_rejects_any_element_off_by_one(name: str, by: int) -> None:
    """The other arrays determine each of these arrays, so any other element is an inconsistency."""
    for index in range(len(ARRAYS[name])):
        bad = np.array(ARRAYS[name], np.int32)
        bad[index] += by
        with pytest.raises(ValueError, match="bad step"):
            changed(name, bad).validate(NUM_BLOCKS)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("state_writes", [2, 2, 1]),  # two requests in one slot
        ("state_writes", [2, 3, 0]),  # the reserved slot of the zero state
        ("state_writes", [2, 3, 5]),  # beyond the pool
        ("state_reads", [2, 5, 0]),
        ("state_reads", [2, 0, 0]),  # a continuing request without a state
        ("state_reads", [2, 4, 1]),  # a new request with a state
    ],
)
def test_validate_rejects_slots_of_states(name: str, slots: list[int]) -> None:
    good().validate(NUM_BLOCKS, num_state_slots=4)
    changed(name, slots).validate(NUM_BLOCKS)  # without recurrent layers, state slots are not checked
    with pytest.raises(ValueError, match="bad step"):
        changed(name, slots).validate(NUM_BLOCKS, num_state_slots=4)


def with_table(block_table: list[list[int]]) -> StepRows:
    """Return the valid rows with another block table and matching slots."""
    rows = changed("block_table", block_table)
    return replace(rows, slot_mapping=rows.slots(rows.request_of_row, rows.positions))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed("cu_seqlens_q", [1, 4, 5, 8]), "cu_seqlens_q"),
        (changed("cu_seqlens_q", [0, 4, 5, 7]), "cu_seqlens_q"),
        (changed("cu_seqlens_q", [0, 4, 4, 8]), "cu_seqlens_q"),
        (changed("cu_seqlens_q", [0, 5, 4, 8]), "cu_seqlens_q"),
        (changed("cu_seqlens_q", [0, 4, 5, 6, 8]), "cu_seqlens_q"),
        (changed("request_of_row", [0, 0, 0, 1, 1, 2, 2, 2]), "request_of_row"),
        (changed("seq_lens", [3, 6, 3]), "shorter than its query"),
        (changed("positions", [2, 3, 3, 5, 5, 0, 1, 2]), "positions"),
        (changed("positions", [3, 2, 4, 5, 5, 0, 1, 2]), "positions"),
        (changed("block_table", [[3], [9], [2]]), "too small"),
        (changed("block_table", [[3, 5], [9, 0]]), "too small"),
        (with_table([[3, 5], [9, 10], [2, 99]]), "exceeds the pool"),
        (with_table([[3, 5], [9, -1], [2, 99]]), "exceeds the pool"),
        # Block 9 of the second request is read but not written, so only the block table shows it.
        (changed("block_table", [[3, 5], [10, 0], [2, 99]]), "exceeds the pool"),
        (changed("block_table", [[3, 5], [9, 1], [2, 99]]), "disagrees with block_table"),
        (changed("slot_mapping", [14, 15, 20, 21, 1, 8, 10, 9]), "disagrees with block_table"),
        (with_table([[3, 5], [9, 5], [2, 99]]), "share a slot"),
        (changed("logits_indices", [4, 3]), "logits_indices"),
        (changed("logits_indices", [3, 3]), "logits_indices"),
        (changed("logits_indices", [3, 6]), "logits_indices"),
        (changed("logits_indices", [3, 8]), "logits_indices"),
        (changed("sample_requests", [1, 0]), "packing order"),
        (changed("sample_requests", [0, 3]), "packing order"),
        (changed("sample_requests", [-1, 0]), "packing order"),
        (changed("sample_requests", [1, 1]), "more rows than it has"),
    ],
)
def test_validate_names_the_contradiction(rows: StepRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows.validate(NUM_BLOCKS)


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([7], []),
        ([4, 5, 6], [[0, 3, 4]]),
        ([9, 4, 5, 6, 8, 7, 20, 21, 22, 23], [[1, 3, 4], [6, 4, 20]]),
        ([0, 1, 2, 2, 3, 4, 3], [[0, 3, 0], [3, 3, 2]]),
    ],
)
def test_consecutive_runs(slots: list[int], runs: list[list[int]]) -> None:
    assert consecutive_runs(np.array(slots, np.int32), min_length=3).tolist() == runs


def test_whole_blocks() -> None:
    slots = np.array([5, 6, 7, 8, 9, 10, 11, 4, 0, 1, 2, 3, 12, 13, 14], np.int32)
    assert whole_block_rows(slots, 4).tolist() == [[3, 4, 5, 6], [8, 9, 10, 11]]
    assert whole_block_rows(slots[:3], 4).shape == (0, 4)

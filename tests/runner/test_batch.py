"""Tests of packing a step, against a naive reimplementation for single tokens, and of validation errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.kv_cache.rows import step_rows
from metal_engine.runner.batch import PackedBatch, RequestTable
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import ModelOutput, NewRequestData, SchedulerOutput

MAX_ROWS = 4
MAX_MODEL_LEN = 40
NUM_BLOCKS = 200


def pack(table: RequestTable, plan: SchedulerOutput) -> PackedBatch:
    table.update(plan)
    return table.pack(plan)


@dataclass
class NaiveRequest:
    """Expected data of the table for a request, in plain lists."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]


def naive_pack(plan: SchedulerOutput, held: dict[str, NaiveRequest], block_size: int) -> dict[str, list]:
    """Compute the arrays of a step token by token, and update ``held``."""
    out: dict[str, list] = {name: [] for name in ("input_ids", "positions", "slot_mapping")}
    out |= {"cu_seqlens_q": [0], "seq_lens": [], "tables": [], "logits_indices": []}
    for request_id, share in plan.num_scheduled_tokens.items():
        request = held[request_id]
        for _ in range(share):
            position = request.num_computed_tokens
            out["input_ids"].append(request.token_ids[position])
            out["positions"].append(position)
            block_id = request.block_ids[position // block_size]
            out["slot_mapping"].append(block_id * block_size + position % block_size)
            request.num_computed_tokens += 1
        out["cu_seqlens_q"].append(len(out["input_ids"]))
        out["seq_lens"].append(request.num_computed_tokens)
        out["tables"].append(request.block_ids[: -(-request.num_computed_tokens // block_size)])
        if request_id in plan.sampled_req_ids:
            out["logits_indices"].append(len(out["input_ids"]) - 1)
    return out


class Traffic:
    """Draws random plans that a scheduler could make, without any policy."""

    def __init__(self, data: st.DataObject, block_size: int) -> None:
        self.data = data
        self.block_size = block_size
        self.held: dict[str, NaiveRequest] = {}
        self.free_blocks: list[int] = data.draw(st.permutations(range(NUM_BLOCKS)), label="free blocks")
        self.num_requests = 0

    def blocks_up_to(self, block_ids: list[int], num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self.block_size) - len(block_ids)
        taken, self.free_blocks = self.free_blocks[: max(0, missing)], self.free_blocks[max(0, missing) :]
        return taken

    def draw_plan(self, step_id: int) -> SchedulerOutput:
        draw = self.data.draw
        plan = SchedulerOutput(step_id)
        for request_id in list(self.held):
            full = len(self.held[request_id].token_ids) == MAX_MODEL_LEN
            if full or draw(st.integers(0, 5)) == 0:
                self.free_blocks += self.held.pop(request_id).block_ids
                plan.dropped_req_ids.append(request_id)
        if draw(st.booleans()):
            plan.dropped_req_ids.append("never held")  # its step failed before it was packed
        for request_id, request in self.held.items():
            if draw(st.integers(0, 4)):
                share = draw(st.integers(1, len(request.token_ids) - request.num_computed_tokens))
                new_ids = self.blocks_up_to(request.block_ids, request.num_computed_tokens + share)
                if new_ids:
                    plan.new_block_ids[request_id] = new_ids
                    request.block_ids += new_ids
                plan.num_scheduled_tokens[request_id] = share
        while len(self.held) < MAX_ROWS and (draw(st.booleans()) or not plan.num_scheduled_tokens):
            request_id = f"r{self.num_requests}"
            self.num_requests += 1
            token_ids = draw(st.lists(st.integers(0, 999), min_size=1, max_size=MAX_MODEL_LEN - 1))
            computed = draw(st.integers(0, len(token_ids) - 1))
            num_prompt = draw(st.integers(1, len(token_ids)))
            block_ids = self.blocks_up_to([], len(token_ids))
            self.held[request_id] = NaiveRequest(token_ids, num_prompt, computed, block_ids)
            plan.new_requests.append(
                NewRequestData(request_id, list(token_ids), num_prompt, computed, list(block_ids), SamplingParams())
            )
            plan.num_scheduled_tokens[request_id] = draw(st.integers(1, len(token_ids) - computed))
        for request_id, share in plan.num_scheduled_tokens.items():
            request = self.held[request_id]
            if request.num_computed_tokens + share == len(request.token_ids):
                plan.sampled_req_ids.append(request_id)
        return plan


@settings(max_examples=150, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 3, 4, 16]), ahead=st.booleans())
def test_pack_against_one_token_at_a_time(data: st.DataObject, block_size: int, ahead: bool) -> None:
    """With ``ahead``, the tokens of a step arrive after the next step has been packed."""
    table = RequestTable(MAX_ROWS, MAX_MODEL_LEN, block_size)
    traffic = Traffic(data, block_size)
    last_samples: list[int] = []
    in_flight: list[tuple[list[str], np.ndarray]] = []
    for step_id in range(data.draw(st.integers(1, 8), label="steps")):
        plan = traffic.draw_plan(step_id)
        if not plan.num_scheduled_tokens:
            for request_id in plan.dropped_req_ids:
                table.remove(request_id)
            continue
        batch = pack(table, plan)
        expected = naive_pack(plan, traffic.held, block_size)
        batch.validate(NUM_BLOCKS)
        if not ahead:
            assert not len(batch.pending_rows)
        assert not batch.input_ids[batch.pending_rows].any()
        batch.input_ids[batch.pending_rows] = [last_samples[i] for i in batch.pending_samples]  # as the device does
        for name in ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens", "logits_indices"):
            array = batch.input_ids if name == "input_ids" else getattr(batch.rows, name)
            assert array.dtype == np.int32
            assert array.tolist() == expected[name], name
        block_table = batch.rows.block_table
        assert block_table.shape[1] == max(map(len, expected["tables"])), "no wider than the step needs"
        for row, block_ids in zip(block_table.tolist(), expected["tables"], strict=True):
            assert row[: len(block_ids)] == block_ids
        assert len(table._index_of) == len(traffic.held)

        # Compare the positions of the samples, by which the sampler draws random numbers.
        sampled = [traffic.held[request_id] for request_id in plan.sampled_req_ids]
        num_outputs = [len(request.token_ids) - request.num_prompt_tokens for request in sampled]
        assert table.output_positions(batch).tolist() == num_outputs
        tokens = data.draw(st.lists(st.integers(0, 999), min_size=len(sampled), max_size=len(sampled)))
        last_samples = tokens
        in_flight.append(([*plan.sampled_req_ids, "gone"], ModelOutput([*tokens, 7])))
        while len(in_flight) > ahead:
            table.append_tokens(*in_flight.pop(0))
        for request, token_id in zip(sampled, tokens, strict=True):
            request.token_ids.append(token_id)


# --- bad plans ----------------------------------------------------------------------------------------------


def new_request(request_id: str, num_tokens: int, block_ids: list[int]) -> NewRequestData:
    return NewRequestData(request_id, list(range(num_tokens)), num_tokens, 0, block_ids, SamplingParams())


def test_plans_that_contradict_the_table_are_refused() -> None:
    table = RequestTable(2, 32, 4)
    pack(table, SchedulerOutput(0, {"a": 4}, [new_request("a", 6, [0, 1])]))
    with pytest.raises(ValueError, match="held already"):
        pack(table, SchedulerOutput(1, {"a": 4}, [new_request("a", 6, [2, 3])]))
    with pytest.raises(KeyError):
        pack(table, SchedulerOutput(2, {"unknown": 1}))
    with pytest.raises(ValueError, match="fewer blocks than tokens"):
        pack(table, SchedulerOutput(3, {"a": 5}))
    with pytest.raises(ValueError, match="table is full"):
        pack(table, SchedulerOutput(4, {"b": 1, "c": 1}, [new_request(r, 1, [5]) for r in "bc"]))


@pytest.mark.parametrize("sampled", [["b", "a"], ["a", "gone"], ["a", "a"]])
def test_sampled_requests_must_be_in_packing_order(sampled: list[str]) -> None:
    table = RequestTable(2, 32, 4)
    new = [new_request("a", 2, [0]), new_request("b", 2, [1])]
    with pytest.raises(ValueError, match="packing order"):
        pack(table, SchedulerOutput(0, {"a": 2, "b": 2}, new, sampled_req_ids=sampled))


def test_an_empty_plan_makes_a_batch_that_is_refused() -> None:
    batch = pack(RequestTable(2, 32, 4), SchedulerOutput(0))
    with pytest.raises(ValueError, match="no tokens"):
        batch.validate(8)


def test_tokens_of_a_dropped_request_never_enter_a_reused_table_row() -> None:
    table = RequestTable(1, 32, 4)
    pack(table, SchedulerOutput(0, {"a": 2}, [new_request("a", 2, [0])], sampled_req_ids=["a"]))
    new = NewRequestData("b", [7, 8, 9], 3, 0, [1], SamplingParams())
    pack(table, SchedulerOutput(1, {"b": 2}, [new], dropped_req_ids=["a"]))
    table.append_tokens(["a"], ModelOutput([5]))
    batch = pack(table, SchedulerOutput(2, {"b": 1}, sampled_req_ids=["b"]))
    assert batch.input_ids.tolist() == [9]
    assert table.output_positions(batch).tolist() == [0]


def decode(step_id: int, request_id: str) -> SchedulerOutput:
    return SchedulerOutput(step_id, {request_id: 1}, sampled_req_ids=[request_id])


def test_packing_a_token_neither_known_nor_pending_raises_value_error() -> None:
    """Table rows are reused, so the position of the unknown token may hold a token of an earlier request."""
    table = RequestTable(1, 32, 4)
    pack(table, SchedulerOutput(0, {"old": 8}, [new_request("old", 8, [0, 1])]))
    new = [new_request("a", 2, [2, 3])]
    first = SchedulerOutput(1, {"a": 2}, new, sampled_req_ids=["a"], dropped_req_ids=["old"])
    pack(table, first)
    table.forget_samples()  # the step failed
    with pytest.raises(ValueError, match="neither known nor being sampled"):
        pack(table, decode(2, "a"))

    table = RequestTable(1, 32, 4)
    pack(table, SchedulerOutput(0, {"a": 2}, [new_request("a", 2, [2, 3])]))  # samples nothing
    with pytest.raises(ValueError, match="neither known nor being sampled"):
        pack(table, decode(1, "a"))

    for share in (2, 3):  # more tokens than the single pending token
        table = RequestTable(1, 32, 4)
        pack(table, first)
        with pytest.raises(ValueError, match="neither known nor being sampled"):
            pack(table, SchedulerOutput(2, {"a": share}, sampled_req_ids=["a"]))


def test_pending_samples_come_only_from_the_immediately_preceding_step() -> None:
    table = RequestTable(2, 32, 4)
    new = [new_request("a", 2, [2]), new_request("b", 8, [4, 5])]
    pack(table, SchedulerOutput(0, {"a": 2, "b": 2}, new, sampled_req_ids=["a"]))
    batch = pack(table, SchedulerOutput(1, {"b": 2, "a": 1}, sampled_req_ids=["a"]))
    assert (batch.pending_rows.tolist(), batch.pending_samples.tolist()) == ([2], [0])
    assert batch.input_ids.tolist() == [2, 3, 0]
    table.append_tokens(["a"], ModelOutput([9]))
    pack(table, SchedulerOutput(2, {"b": 2}))
    with pytest.raises(ValueError, match="neither known nor being sampled"):
        pack(table, decode(3, "a"))  # sampled in step 1, but step 2 is in between


# --- bad batches --------------------------------------------------------------------------------------------

TWICE = np.array([2, 2], np.int32)
TOKENS = {
    "input_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    "sample_indices": [7, 0],
    "pending_rows": [4],
    "pending_samples": [2],
    "adapter_slots": [0, 2, 1],
}


def good_batch() -> PackedBatch:
    """Query lengths 4, 1 and 3 over contexts 2, 5 and 0; the first and the second request sample.

    The token of the second request is the third sample of the previous step.
    """
    block_table = np.array([[3, 5], [9, 0], [2, 99]], np.int32)  # 99 is padding
    rows = step_rows(block_table, np.array([2, 5, 0], np.int32), [4, 1, 3], 4, num_samples=[1, 1, 0])
    return PackedBatch(rows=rows, **{name: np.array(values, np.int32) for name, values in TOKENS.items()})


def changed(name: str, values: object, dtype: type = np.int32) -> PackedBatch:
    return replace(good_batch(), **{name: np.array(values, dtype)})


def validate(batch: PackedBatch, num_blocks: int = 10) -> None:
    batch.validate(num_blocks, num_adapter_slots=2)


def test_a_good_batch_passes() -> None:
    validate(good_batch())
    none = np.array([], np.int32)
    nothing_pending = replace(good_batch(), pending_rows=none, pending_samples=none)
    validate(nothing_pending)
    nothing = replace(nothing_pending.rows, logits_indices=none, sample_requests=none)
    validate(replace(nothing_pending, rows=nothing, sample_indices=none))


def test_validate_looks_at_the_rows_too() -> None:
    with pytest.raises(ValueError, match="bad step"):
        validate(good_batch(), num_blocks=9)


@pytest.mark.parametrize("name", TOKENS)
def test_validate_rejects_a_wrong_dtype_wrong_ndim_or_missing_element(name: str) -> None:
    values = TOKENS[name]
    for bad, message in (
        (changed(name, values, np.int64), f"{name} is int64"),
        (changed(name, [values]), f"{name} is int32 of shape"),
        (changed(name, values[:-1]), "bad batch"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed("sample_indices", [7, -1]), "sample_indices"),
        (lambda: changed("sample_indices", [7, 7]), "sample_indices"),
        (lambda: changed("pending_rows", [5]), "pending_rows"),
        (lambda: changed("pending_rows", [-1]), "pending_rows"),
        (lambda: changed("pending_samples", [-1]), "pending_rows"),
        (lambda: changed("adapter_slots", [0, 3, 1]), "adapter_slots"),
        (lambda: changed("adapter_slots", [0, -1, 1]), "adapter_slots"),
        (lambda: replace(changed("pending_rows", [3, 4]), pending_samples=TWICE), "pending_rows"),
    ],
)
def test_validate_names_the_contradiction(make: Callable[[], PackedBatch], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(make())

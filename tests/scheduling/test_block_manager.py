"""Tests of the block pool: allocation, release, order of reuse, and a check that detects corruption."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.scheduling.block_manager import BlockManager


@settings(max_examples=200, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    actions=st.lists(
        st.tuples(st.sampled_from("abcd"), st.none() | st.integers(0, 40), st.integers(0, 3)), max_size=40
    ),
)
def test_against_a_naive_pool(num_blocks: int, block_size: int, actions: list[tuple[str, int | None, int]]) -> None:
    """A plain list and a plain dict give the same results, the same ids and the same order."""
    blocks = BlockManager(num_blocks, block_size)
    free, tables = list(range(num_blocks)), dict[str, list[int]]()
    for request_id, num_tokens, reserve in actions:
        if num_tokens is None:
            blocks.free(request_id)
            free += reversed(tables.pop(request_id, []))
        else:
            table = tables.get(request_id, [])
            needed = max(0, (num_tokens + block_size - 1) // block_size - len(table))
            fits = needed == 0 or needed + reserve <= len(free)
            new_ids = sorted(free[:needed]) if fits else None
            assert blocks.allocate(request_id, num_tokens, reserve=reserve) == new_ids
            if new_ids:
                tables[request_id] = table + new_ids
                del free[:needed]
        assert {r: blocks.block_ids(r) for r in "abcd"} == {r: tables.get(r, []) for r in "abcd"}
        assert blocks.num_free_blocks == len(free)
        blocks.check_integrity()


CORRUPTIONS: dict[str, Callable[[BlockManager], object]] = {
    "one reference too many": lambda blocks: setattr(blocks._blocks[0], "ref_cnt", 2),
    "a used block is free": lambda blocks: blocks._free.update({blocks._blocks[0]: None}),
    "a free block is lost": lambda blocks: blocks._free.popitem(),
    "a block in two tables": lambda blocks: blocks._tables["b"].append(blocks._blocks[0]),
    "a block in a table twice": lambda blocks: (
        blocks._tables["a"].append(blocks._blocks[0]),
        setattr(blocks._blocks[0], "ref_cnt", 2),
    ),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_check_integrity_notices(corruption: str) -> None:
    blocks = BlockManager(6, 2)
    blocks.allocate("a", 4)
    blocks.allocate("b", 3)
    blocks.check_integrity()
    CORRUPTIONS[corruption](blocks)
    with pytest.raises(AssertionError):
        blocks.check_integrity()


def test_a_block_is_never_freed_twice() -> None:
    blocks = BlockManager(2, 1)
    blocks.allocate("a", 2)
    blocks._free[blocks._blocks[0]] = None
    with pytest.raises(AssertionError):
        blocks.free("a")

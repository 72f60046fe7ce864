"""Tests of shared prefixes: hits and their timing, and detection of wrong hits."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from metal_engine.request import Request
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling import prefix_cache
from metal_engine.scheduling.block_manager import BlockManager
from metal_engine.scheduling.prefix_cache import extend_block_hashes, prompt_block_hashes
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness


def make_harness(budget: int = 64, *, num_blocks: int = 64, depth: int = 1, partial: int = 1) -> SchedulerHarness:
    return SchedulerHarness(
        SchedulerConfig(
            max_num_batched_tokens=budget, max_num_seqs=8, max_model_len=400, max_num_partial_prefills=partial
        ),
        CacheConfig(block_size=4, num_blocks=num_blocks, enable_prefix_caching=True, model_fingerprint="m"),
        depth=depth,
    )


def cached_tokens(harness: SchedulerHarness, *request_ids: str) -> list[int]:
    return [harness.tracked[r].request.num_cached_tokens for r in request_ids]


def hashes(prompt: list[int], *, salt: str = "", model: str = "m") -> list[bytes]:
    request = Request("r", prompt, SamplingParams(), max_tokens=1, cache_salt=salt)
    return extend_block_hashes(request, 4, model)


def test_a_salt_is_hashed_once_for_all_prompts_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(data: bytes = b"") -> Any:
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr(prefix_cache, "sha256", counted)
    salt = "a salt that no other test has" * 100
    config = CacheConfig(block_size=4, num_blocks=8, enable_prefix_caching=True, model_fingerprint="m")
    for i in range(50):
        prompt_block_hashes([i] * (i % 9), config, salt)
    assert sum(length > 1000 for length in hashed) == 1


def test_block_hashes_cover_full_blocks_and_all_preceding_tokens() -> None:
    prompt = make_prompt(0, 11)
    assert len(hashes(prompt)) == 2
    assert hashes(prompt) == hashes(prompt[:8])
    first_differs = [prompt[0] + 1, *prompt[1:]]
    assert not set(hashes(first_differs)) & set(hashes(prompt)), "a block's hash depends on those before it"
    assert hashes([*prompt[:7], 1])[:1] == hashes(prompt)[:1]


def test_hashes_depend_on_salt_and_model() -> None:
    prompt = make_prompt(0, 8)
    variants = [hashes(prompt), hashes(prompt, salt="a"), hashes(prompt, salt="b"), hashes(prompt, model="n")]
    assert len({h for chain in variants for h in chain}) == 8
    assert hashes(prompt, salt="\ud800"), "JSON may hold lone surrogates"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_request_computes_only_uncached_tokens(depth: int) -> None:
    harness = make_harness(depth=depth)
    harness.submit("a", make_prompt(0, 20), 2)
    harness.run()
    harness.submit("b", make_prompt(0, 20) + make_prompt(1, 6), 2)
    assert harness.step().num_scheduled_tokens == {"b": 6}
    assert cached_tokens(harness, "a", "b") == [0, 20]
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_answers_are_cached_too(depth: int) -> None:
    harness = make_harness(depth=depth)
    a = harness.submit("a", make_prompt(0, 10), 10)
    harness.run()
    # The KV of the last token was never computed, so the block that it would fill is not cached.
    assert len(a.token_ids) == 20
    harness.submit("b", [*a.token_ids, 1, 2, 3], 1)
    harness.run()
    assert cached_tokens(harness, "b") == [16]


def test_salts_keep_requests_apart() -> None:
    harness = make_harness()
    for name, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x")):
        harness.submit(name, make_prompt(0, 20), 1, cache_salt=salt)
        harness.run()
    assert cached_tokens(harness, *"abcd") == [0, 0, 0, 16]


@pytest.mark.parametrize("depth", [1, 2])
def test_concurrent_requests_compute_a_shared_prefix_once(depth: int) -> None:
    """Partial prefills run concurrently, but prefills with the same prefix wait for the first of them."""
    harness = make_harness(budget=16, depth=depth, partial=4)
    for i in range(6):
        harness.submit(f"r{i}", make_prompt(0, 40) + make_prompt(i + 1, 3), 1)
    harness.run()
    assert sum(sum(plan.num_scheduled_tokens.values()) for plan in harness.plans) == 40 + 6 * 3
    assert cached_tokens(harness, *(f"r{i}" for i in range(6))) == [0] + [40] * 5


def test_a_request_does_not_wait_for_a_short_shared_prefix() -> None:
    harness = make_harness(budget=64, partial=4)
    harness.submit("a", make_prompt(0, 4) + make_prompt(1, 20), 1)
    harness.submit("b", make_prompt(0, 4) + make_prompt(2, 20), 1)
    assert harness.step().num_scheduled_tokens == {"a": 24, "b": 24}
    harness.drain()


def test_a_request_that_needs_every_prompt_row_does_not_wait_for_a_prefix() -> None:
    harness = make_harness(budget=16, partial=4)
    harness.submit("a", make_prompt(0, 60), 1)
    harness.step()
    request = harness.submit("b", make_prompt(0, 60), 1, needs_prompt_rows=True)
    extend_block_hashes(request, 4, "m")  # as in a prepared request
    assert harness.step().num_scheduled_tokens == {"a": 8, "b": 8}
    harness.drain()


@pytest.mark.parametrize("how", ["abort", "finish"])
def test_a_request_waiting_for_a_prefix_resumes_when_the_owner_ends(how: str) -> None:
    harness = make_harness(budget=8, partial=2)
    harness.submit("a", make_prompt(0, 32), 1)
    harness.submit("b", make_prompt(0, 40), 1)
    assert list(harness.step().num_scheduled_tokens) == ["a"]
    if how == "abort":
        harness.abort("a")
        assert harness.step().num_scheduled_tokens == {"b": 8}
        assert cached_tokens(harness, "b") == [8]
    harness.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_waiter_hits_if_the_last_prefix_token_runs_as_a_decode(depth: int) -> None:
    """The owner's first chunk leaves one token of its prompt, which is scheduled as a decode."""
    harness = make_harness(budget=31, partial=4, depth=depth)
    harness.submit("owner", make_prompt(0, 32), 50)
    b = harness.submit("b", make_prompt(0, 42), 1)
    for _ in range(3 + depth):
        harness.step()
    assert cached_tokens(harness, "b") == [32] and b.status.finish_reason
    harness.drain()


def test_a_preempted_request_resumes_from_cached_blocks() -> None:
    harness = make_harness(num_blocks=14)
    harness.submit("a", make_prompt(0, 20), 20)
    b = harness.submit("b", make_prompt(1, 24), 12)
    harness.run(until=lambda: b.num_preemptions > 0)
    harness.run(until=lambda: b.num_computed_tokens > 0)
    resumed = [new for plan in harness.plans for new in plan.new_requests if new.request_id == "b"][-1]
    assert resumed.num_computed_tokens > 0
    assert b.num_cached_tokens == 0, "what it had computed itself does not count"
    harness.drain()


def fill(blocks: BlockManager, request_id: str, chain: list[bytes]) -> None:
    cached = blocks.find_cached(chain, len(chain))
    assert blocks.allocate(request_id, len(chain) * blocks.block_size, cached=cached) is not None
    blocks.register(request_id, chain, len(cached), len(chain))
    blocks.check_integrity()


def test_eviction_is_least_recently_used_with_last_blocks_first() -> None:
    blocks = BlockManager(6, 4)
    a, b = [b"a0", b"a1", b"a2"], [b"b0", b"b1"]
    fill(blocks, "a", a)
    fill(blocks, "b", b)
    blocks.free("a")
    blocks.free("b")
    fill(blocks, "again", a)  # now b is the least recently used
    blocks.free("again")
    assert blocks.allocate("new", 8) is not None  # takes the unused block and b's last block
    assert len(blocks.find_cached(a, 3)) == 3 and len(blocks.find_cached(b, 2)) == 1
    blocks.check_integrity()


def test_blocks_without_a_cached_prefix_are_reused_first() -> None:
    blocks = BlockManager(4, 4)
    fill(blocks, "a", [b"a0", b"a1"])
    blocks.allocate("b", 8)
    blocks.free("a")
    blocks.free("b")
    assert blocks.allocate("c", 8) is not None
    assert len(blocks.find_cached([b"a0", b"a1"], 2)) == 2


def test_cached_blocks_count_as_free_but_not_twice() -> None:
    blocks = BlockManager(4, 4)
    fill(blocks, "a", [b"a0", b"a1", b"a2"])
    blocks.free("a")
    assert blocks.num_free_blocks == 4
    cached = blocks.find_cached([b"a0", b"a1", b"a2"], 3)
    assert blocks.allocate("b", 20, cached=cached) is None
    assert blocks.allocate("b", 16, cached=cached, reserve=1) is None
    assert len(blocks.allocate("b", 16, cached=cached) or ()) == 4
    blocks.check_integrity()

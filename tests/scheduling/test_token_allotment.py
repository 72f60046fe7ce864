"""Tests of partial prefills, alignment, priorities and the cap on attention work, one guarantee each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_engine.errors import ConfigError
from metal_engine.request import Request, RequestOptions
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.token_allotment import (
    MAX_PROMPT_ROWS,
    PrefillAllocator,
    StepBudget,
    attention_work,
    rows_for_work,
)
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import MARGIN_BYTES, CacheConfig, DeviceInfo, ModelInfo, SchedulerConfig
from metal_engine.settings.resolve import resolve_config
from tests.support.fake_kv_runner import make_prompt
from tests.support.scheduler_harness import SchedulerHarness


def make_harness(
    budget: int = 64, *, block_size: int = 4, num_blocks: int = 400, caching: bool = False, **knobs: Any
) -> SchedulerHarness:
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=knobs.pop("seqs", 64), max_model_len=10**6,
        max_num_partial_prefills=knobs.pop("partial", 4), long_prefill_token_threshold=knobs.pop("threshold", budget),
        **knobs,
    )  # fmt: skip
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=caching)
    return SchedulerHarness(config, cache)


def shares(harness: SchedulerHarness) -> dict[str, int]:
    return dict(harness.step().num_scheduled_tokens)


# --- concurrent partial prefills ----------------------------------------------------------------------------


def test_a_short_prompt_beside_long_prompts_samples_in_the_first_step() -> None:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=2048, max_num_seqs=16, max_model_len=200_000, max_num_partial_prefills=4,
            max_long_partial_prefills=1, long_prefill_token_threshold=2048,
        ),
        CacheConfig(block_size=16, num_blocks=40_000),
    )  # fmt: skip

    def add(request_id: str, length: int) -> None:
        scheduler.add_request(Request(request_id, [1] * length, SamplingParams(), max_tokens=4))

    for i in range(4):
        add(f"long{i}", 100_000)
    assert scheduler.schedule().num_scheduled_tokens == {"long0": 2048}
    add("short", 5)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"long0": 2043, "short": 5}
    assert plan.sampled_req_ids == ["short"]
    scheduler.check_integrity()


def test_prefills_share_the_budget_evenly_and_use_leftover_tokens() -> None:
    harness = make_harness(budget=60)
    for i, length in enumerate((40, 6, 50, 30, 9)):
        harness.submit(f"r{i}", make_prompt(i, length), 1)
    assert shares(harness) == {"r0": 18, "r1": 6, "r2": 18, "r3": 18}
    assert shares(harness) == {"r0": 19, "r2": 20, "r3": 12, "r4": 9}
    harness.drain()


def test_budget_left_by_prefill_slots_admits_further_requests() -> None:
    harness = make_harness(budget=60, partial=2)
    for i in range(8):
        harness.submit(f"r{i}", make_prompt(i, 10), 1)
    assert shares(harness) == {f"r{i}": 10 for i in range(6)}


def test_prefill_slots_rotate_if_the_budget_cannot_serve_all_slots() -> None:
    harness = make_harness(budget=8, partial=4, max_long_partial_prefills=4)
    for i in range(4):
        harness.submit(f"r{i}", make_prompt(i, 40), 1)
    while len(harness.scheduler.running) < 4:
        harness.step()
    assert len(harness.plans) <= 6, "free slots have their turns, too"
    served: list[str] = []
    for _ in range(8):
        step = shares(harness)
        assert all(n >= 4 for n in step.values()), "a share is never below a block"
        served += step
    assert [served.count(f"r{i}") for i in range(4)] == [4] * 4
    harness.drain()


@pytest.mark.parametrize("aligned", [False, True])
def test_new_and_running_prefills_alternate_if_the_budget_serves_one(aligned: bool) -> None:
    """Decodes leave one block of the budget, and a long prompt would take it in every step without rotation."""
    harness = make_harness(budget=12, page_aligned_scheduling=aligned)
    for i in range(8):
        harness.submit(f"d{i}", [i + 1], 40)
    harness.run(until=lambda: len(harness.scheduler.running) == 8)
    harness.submit("long", make_prompt(0, 400), 1)
    assert shares(harness)["long"] == shares(harness)["long"] == 4
    for i in range(6):
        harness.submit(f"short{i}", make_prompt(i + 1, 4), 1)
        steps = [shares(harness).keys() - {f"d{j}" for j in range(8)} for _ in range(2)]
        assert steps == [{f"short{i}"}, {"long"}]
    harness.drain()


def test_a_stream_of_new_prompts_does_not_starve_a_running_prefill() -> None:
    harness = make_harness(budget=12, num_blocks=1000)
    for i in range(8):
        harness.submit(f"d{i}", [i + 1], 40)
    harness.run(until=lambda: len(harness.scheduler.running) == 8)
    harness.submit("long", make_prompt(0, 400), 1)
    harness.step()
    served = []
    for i in range(12):
        for j in range(2):
            harness.submit(f"short{i}-{j}", make_prompt(i + 1, 4), 1)
        served.append("long" in shares(harness))
    assert served == [True, False] * 6
    harness.drain()


def test_long_is_more_than_the_threshold() -> None:
    for length, is_long in ((32, False), (33, True)):
        harness = make_harness(budget=32)
        harness.submit("a", make_prompt(0, 100), 1)
        harness.submit("b", make_prompt(1, length), 1)
        assert ("b" not in shares(harness)) == is_long
        harness.drain()


def test_a_stream_of_short_prompts_does_not_starve_a_waiting_long_prompt() -> None:
    """Short prompts pass it only until the first long prompt is done, which gets its even part of each step."""
    harness = make_harness(budget=32, num_blocks=4000, seqs=256)
    harness.submit("long0", make_prompt(0, 320), 1)
    second = harness.submit("long1", make_prompt(1, 320), 1)
    steps = 0
    while second.num_output_tokens == 0:
        for i in range(12):  # more than fit into a step
            harness.submit(f"s{steps}-{i}", make_prompt(2 + i, 6), 1)
        harness.step()
        steps += 1
        assert steps <= 2 * 320 // (32 // 4) + 4
    assert all(len(plan.num_scheduled_tokens) > 1 for plan in harness.plans), "short ones went ahead all the time"
    harness.drain()


def test_a_long_prompt_with_a_cached_prefix_counts_as_short() -> None:
    harness = make_harness(budget=32, caching=True, num_blocks=1000)
    first = harness.submit("a", make_prompt(0, 100), 1)
    harness.run()
    harness.submit("long", make_prompt(1, 300), 1)
    harness.step()
    harness.submit("turn2", [*first.token_ids, 5, 6], 1)
    assert "turn2" in shares(harness)
    harness.drain()


@given(
    st.lists(st.integers(2, 300), min_size=1, max_size=12),
    st.integers(1, 600),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
)
def test_prefill_allotments_are_even_and_use_the_whole_budget(
    remaining: list[int], budget: int, block_size: int, aligned: bool
) -> None:
    config = SchedulerConfig(
        max_num_batched_tokens=budget, max_num_seqs=99, max_model_len=10**6, page_aligned_scheduling=aligned
    )
    requests = [Request(str(i), [1] * n, SamplingParams(), max_tokens=1) for i, n in enumerate(remaining)]
    prefills = PrefillAllocator(StepBudget(budget, 1 << 62), requests, config, block_size)
    prefills.add_running()
    prefills.spread()
    unit = block_size if aligned else 1
    charged = sum(-(-share // unit) * unit for share in prefills.allotments.values())
    assert charged + prefills.step.tokens == budget and prefills.step.tokens >= 0
    unsatisfied = [share for request, share in prefills.allotments.items() if share < request.num_tokens]
    assert all(share % unit == 0 for share in unsatisfied)
    assert prefills.num_partial == len(unsatisfied) + len(requests) - len(prefills.allotments)
    if unsatisfied:
        assert prefills.step.tokens < unit, "something is left, and somebody wants it"
        assert max(unsatisfied) - min(unsatisfied) <= unit, "uneven"
        satisfied = [share for request, share in prefills.allotments.items() if share == request.num_tokens]
        assert max(satisfied, default=0) <= max(unsatisfied) + unit, "one got its prompt at the cost of others"


def test_prompts_with_prompt_logprobs_share_a_limit_of_rows() -> None:
    """The limit applies only to rows with logits.

    Another prompt uses the remaining budget at no cost to these prompts.
    """
    harness = make_harness(2048, num_blocks=4000, partial=3, max_long_partial_prefills=3)
    asking = {"a": 1000, "b": 300}
    for request_id, length in asking.items():
        harness.submit(request_id, make_prompt(len(asking), length), 2, needs_prompt_rows=True)
    harness.submit("other", make_prompt(0, 3000), 2)
    num_steps = 0
    while asking:
        given = shares(harness)
        rows = {request_id: given.get(request_id, 0) for request_id in asking}
        assert sum(rows.values()) <= MAX_PROMPT_ROWS
        assert sum(rows.values()) >= min(MAX_PROMPT_ROWS - len(rows), sum(asking.values()))
        if num_steps == 0:
            assert given["other"] == 2048 - sum(rows.values())
        asking = {i: left for i, length in asking.items() if (left := length - rows[i])}
        num_steps += 1
    assert num_steps == 6
    harness.drain()


# --- page alignment -----------------------------------------------------------------------------------------


def test_alignment_that_could_starve_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--page-aligned-scheduling needs .*60 \+ 16"):
        resolve(page_aligned_scheduling=True, max_num_seqs=60, max_num_batched_tokens=64)
    resolve(page_aligned_scheduling=True, max_num_seqs=48, max_num_batched_tokens=64)


def test_a_budget_that_decodes_could_use_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 32 is less than --max-num-seqs 33"):
        resolve(max_num_seqs=33, max_num_batched_tokens=32)
    assert resolve(max_num_batched_tokens=32).max_num_seqs == 32
    assert resolve(max_num_seqs=2000).max_num_batched_tokens == 2000


def test_decodes_always_leave_an_aligned_prefill_a_block() -> None:
    harness = make_harness(budget=68, block_size=8, page_aligned_scheduling=True, seqs=60, num_blocks=1000)
    for i in range(59):
        harness.submit(f"d{i}", [i + 1], 80)
    harness.run(until=lambda: len(harness.scheduler.running) == 59)
    harness.submit("long", make_prompt(0, 40), 1)
    assert [shares(harness)["long"] for _ in range(5)] == [8] * 5


# --- priorities ---------------------------------------------------------------------------------------------


def submit_priorities(harness: SchedulerHarness, priorities: dict[str, int], length: int = 8) -> None:
    for i, (name, priority) in enumerate(priorities.items()):
        harness.submit(name, make_prompt(i, length), 6, options=RequestOptions(priority=priority))


@pytest.mark.parametrize(("policy", "first"), [("priority", ["high", "mid"]), ("fcfs", ["low", "mid"])])
def test_lower_priority_values_go_first_unless_requests_go_in_order_of_arrival(policy: str, first: list[str]) -> None:
    harness = make_harness(budget=16, scheduling_policy=policy, partial=1, seqs=2)
    submit_priorities(harness, {"low": 5, "mid": 0, "high": -3, "mid2": 0})
    assert list(shares(harness)) == first
    harness.drain()


def test_preemption_takes_the_lowest_priority_and_the_latest_arrival() -> None:
    harness = make_harness(budget=64, scheduling_policy="priority", num_blocks=8, block_size=4)
    submit_priorities(harness, {"low": 1, "high": -1, "mid": 0, "low2": 1}, length=7)
    harness.run(until=lambda: harness.scheduler.num_preemptions >= 2)
    requests = {name: tracked.request for name, tracked in harness.tracked.items()}
    order = [name for plan in harness.plans for name in plan.dropped_req_ids if requests[name].num_preemptions]
    assert order[0] == "low2"
    assert requests["high"].num_preemptions == 0
    harness.drain()


# --- attention work -----------------------------------------------------------------------------------------


@given(st.integers(0, 200_000), st.integers(0, 10**10))
def test_rows_for_work_is_the_most_that_fits(context_len: int, work: int) -> None:
    rows = rows_for_work(context_len, work)
    assert attention_work(context_len, rows) <= work < attention_work(context_len, rows + 1)


@given(st.integers(0, 50), st.integers(0, 50))
def test_attention_work_counts_visible_keys(context_len: int, rows: int) -> None:
    assert attention_work(context_len, rows) == sum(context_len + i + 1 for i in range(rows))


def test_chunks_shrink_as_the_context_grows_but_not_below_a_block() -> None:
    harness = make_harness(budget=64, max_attention_work=1000)
    harness.submit("a", make_prompt(0, 600), 1)
    chunks = []
    while harness.live:
        chunks.append(shares(harness)["a"])
    assert chunks[0] == 44  # 44 * 45 / 2 = 990
    assert chunks == sorted(chunks, reverse=True) or sorted(chunks[:-1], reverse=True) == chunks[:-1]
    assert min(chunks[:-1]) == 4


def test_a_long_context_does_not_take_the_whole_cap() -> None:
    harness = make_harness(budget=64, max_attention_work=2000, threshold=64)
    harness.submit("a", make_prompt(0, 600), 1)
    for _ in range(10):
        harness.step()
    harness.submit("b", make_prompt(1, 20), 1)
    step = shares(harness)
    assert step["b"] == 20 and step["a"] >= 4
    harness.drain()


def test_attention_work_is_shared_evenly() -> None:
    harness = make_harness(budget=640, max_attention_work=1000, threshold=640)
    for name in "ab":
        harness.submit(name, make_prompt(ord(name), 600), 1)
    step = shares(harness)
    assert step == {"a": 31, "b": 31}  # 31 * 32 / 2 = 496
    harness.drain()


def test_a_context_above_the_attention_cap_does_not_block_short_prompts() -> None:
    """After 100 tokens, one block exceeds the cap: the long prompt runs alone, in every second step."""
    harness = make_harness(budget=64, max_attention_work=300, threshold=64)
    long = harness.submit("long", make_prompt(0, 1000), 1)
    harness.run(until=lambda: long.num_computed_tokens >= 100)
    for i in range(6):
        harness.submit(f"short{i}", make_prompt(i + 1, 5), 1)
        assert [shares(harness) for _ in range(2)] == [{f"short{i}": 5}, {"long": 4}]
    harness.drain()


@pytest.mark.parametrize("length", range(3, 12))
def test_a_prompt_admitted_without_a_slot_is_prefilled_in_one_step(length: int) -> None:
    """The prompt fits into the remaining budget, and must not share the budget with the prompt in the slot."""
    harness = make_harness(
        54, block_size=2, seqs=4, partial=1, threshold=7, page_aligned_scheduling=True, max_attention_work=49
    )
    harness.submit("long", make_prompt(0, 80), 1)
    num_whole = 0
    for i in range(60):
        if not harness.live:
            break
        if "long" in harness.scheduler.running and len(harness.live) < 3:
            harness.submit(f"short {i}", make_prompt(i % 5, length), 1)
        step = harness.step()  # checks the limit on prompts in progress
        num_whole += sum(step.num_scheduled_tokens.get(r.request_id, 0) == length for r in step.new_requests)
    assert num_whole or length > 6


def test_prefills_progress_while_decodes_use_the_whole_attention_cap() -> None:
    harness = make_harness(budget=64, max_attention_work=300, num_blocks=1000)
    for i in range(8):
        harness.submit(f"d{i}", make_prompt(i, 60), 60)
    harness.run(until=lambda: all(t.token_ids for t in harness.live))
    harness.submit("long", make_prompt(9, 200), 1)
    harness.step()
    short = harness.submit("short", make_prompt(10, 4), 1)
    harness.step()
    harness.step()
    assert short.status.finish_reason
    harness.drain()


# --- configuration ------------------------------------------------------------------------------------------


MODEL = ModelInfo(
    name="m", model_type="t", dtype="float32", vocab_size=10, num_layers=30, num_params=134_000_000, weight_bytes=1,
    kv_bytes_per_token=100, max_position_embeddings=8192, num_heads=9, head_dim=64,
)  # fmt: skip
CPU = DeviceInfo(kind="cpu", name="c", compute="b", memory_bytes=1 << 33)


def resolve(**args: Any) -> SchedulerConfig:
    return resolve_config(EngineArgs(model="m", **args), MODEL, CPU, "mlx").scheduler


def test_auto_settings() -> None:
    config = resolve()
    assert config.long_prefill_token_threshold == config.max_num_batched_tokens
    assert 100_000 < config.max_attention_work < 10_000_000
    assert resolve(max_num_partial_prefills=1).long_prefill_token_threshold > 10**9, "one slot: strictly in order"
    huge = resolve_config(EngineArgs(model="m"), replace(MODEL, num_params=10**11), CPU, "mlx").scheduler
    assert huge.max_num_batched_tokens == 64, "a token takes more than a second"
    gpu = resolve_config(EngineArgs(model="m"), MODEL, replace(CPU, kind="metal"), "mlx").scheduler
    assert gpu.max_attention_work > config.max_attention_work
    assert resolve(max_attention_work=5, long_prefill_token_threshold=9).max_attention_work == 5


def test_gpu_kv_cache_uses_memory_left_by_weights_and_measured_step() -> None:
    gpu, model = replace(CPU, kind="metal"), replace(MODEL, weight_bytes=1 << 32)
    asked = []

    def measure(num_tokens: int, num_seqs: int) -> int:
        asked.append((num_tokens, num_seqs))
        return 1 << 30

    config = resolve_config(EngineArgs(model="m", max_num_seqs=9), model, gpu, "metal", measure)
    assert asked == [(2048, 9)] and config.step_bytes == 1 << 30
    total = config.peak_bytes + MARGIN_BYTES
    assert total <= 0.9 * gpu.memory_bytes < total + config.cache.block_size * model.kv_bytes_per_token
    with pytest.raises(ConfigError, match="raise --gpu-memory-utilization, or lower --max-num-batched-tokens"):
        resolve_config(EngineArgs(model="m"), model, gpu, "metal", lambda *_: 1 << 32)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_partial_prefills": 0}, "--max-num-partial-prefills must be at least 1"),
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 3}, "--max-long-partial-prefills 3 exceeds"),
        ({"long_prefill_token_threshold": -1}, "--long-prefill-token-threshold"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority"),
        ({"max_attention_work": 0}, "^max-attention-work must be at least 1"),
    ],
)
def test_settings_that_cannot_be_meant(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model="m", **args)

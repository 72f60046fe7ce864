"""Writes to the KV cache are in place. A step must not copy the pool, which would cost the pool's size in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable.groups import CPU_LIMITS, Limits
from metal_engine.kv_cache import pool
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import KVState
from metal_engine.kv_cache.writes import BlockWrites, RunWrites, SlotWrites
from metal_engine.models.draft_head import PagedDraftHead
from metal_engine.models.paged_model import PagedModel
from metal_engine.request import Request
from metal_engine.runner.draft_model import DraftModel
from metal_engine.runner.drafting import Drafter
from metal_engine.runner.head_drafter import HeadDrafter
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.speculation.ngram import NgramProposer
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.settings.config import IN_FLIGHT_STATES, IN_FLIGHT_STATES_OF_DRAFTS, CacheConfig, SchedulerConfig
from metal_engine.step import SchedulerOutput
from metal_engine.token_rules import NO_RULES, TokenRules
from tests.support.draft_heads import random_head
from tests.support.memory import settled_memory
from tests.support.speculation import FreeDrafts, KnownAheadTimes, draft_model_config, speculate, speculative_config
from tests.support.sweeps import sweep
from tools.fixtures.architectures import configuration
from tools.fixtures.tiny_models import random_model, tiny_model

NUM_STEPS = 64


# One array for latents and positions, with 2 * 16 numbers per token, like K or V of the other models.
LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 1, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16,
}  # fmt: skip
# Latents and keys of an index, 32 numbers per token each.
INDEXED = {
    **LATENT, "model_type": "deepseek_v32", "index_head_dim": 32, "index_n_heads": 4, "index_topk": 64,
    "n_routed_experts": None,
}  # fmt: skip


MODELS = [
    pytest.param({"num_hidden_layers": 1}, id="1 layer", marks=pytest.mark.full),
    pytest.param({"num_hidden_layers": 6}, id="6 layers"),
    pytest.param({"num_hidden_layers": 30}, id="30 layers", marks=pytest.mark.full),
    pytest.param(LATENT, id="latent"),
]


class Loop:
    """Runs steps. The next step is built while ``num_ahead`` steps are in flight."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, num_ahead: int) -> None:
        self.runner, self.scheduler, self.num_ahead = runner, scheduler, num_ahead
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()

    def run(self) -> int:
        """Run until no work is left. Return the number of steps."""
        num_steps = 0
        while self.scheduler.has_requests:
            plan = self.scheduler.schedule()
            if plan.num_scheduled_tokens:
                num_steps += 1
                self._in_flight.append((plan, self.runner.execute(plan)))
            if len(self._in_flight) > self.num_ahead or not plan.num_scheduled_tokens:
                done, handle = self._in_flight.popleft()
                self.scheduler.update(done, handle.result())
        while self._in_flight:
            self._in_flight.popleft()[1].result()
        return num_steps


def measure_in_place(
    paged: PagedModel,
    num_ahead: int,
    limits: Limits | None = None,
    draft: PagedModel | PagedDraftHead | None = None,
    *,
    num_blocks: int = 2048,
    num_drafts: int = 3,
    replay: bool = False,
) -> int:
    """Check that writes are in place. Return the number of steps."""
    # The smallest array of a layer, such as K, takes 4 MB: much more than everything else in a step of these models.
    cache = CacheConfig(block_size=16, num_blocks=num_blocks, num_padding_blocks=int(replay))
    array_bytes = min(a.nbytes for s in paged.pool.states for a in s.spec.token_arrays.values()) * cache.num_tokens
    assert array_bytes == 4 << 20
    config = SchedulerConfig(
        max_num_batched_tokens=24,
        max_num_seqs=4,
        max_model_len=512,
        async_scheduling=num_ahead > 0,
        speculative=None if draft is None else draft_model_config(num_drafts or 1),
    )
    backend = PortableBackend(limits)
    drafter: Drafter | None = None
    if isinstance(draft, PagedModel):
        drafter = DraftModel(draft, backend, config, cache, vocab_size=draft.vocab_size)
    elif draft is not None:
        drafter = HeadDrafter(draft, paged.pool, backend, cache)
    proposer = make_proposer(config.speculative) if config.speculative is not None and num_drafts else None
    runner = ModelRunner(paged, backend, config, cache, drafter=drafter)
    scheduler = Scheduler(config, cache, proposer=proposer)
    if proposer is not None:
        speculate(scheduler, proposer, costs=FreeDrafts())
    _add(scheduler, [20, 27, 80], NUM_STEPS)
    before = settled_memory()  # before the first step, so that memory kept by that step counts as well
    num_steps = Loop(runner, scheduler, num_ahead).run()
    assert not replay or (runner.replay is not None and runner.replay.num_traces > 2)
    assert mx.get_active_memory() - before < array_bytes / 4
    assert mx.get_peak_memory() - before < array_bytes / 2, "a step held a second copy of a cache array"
    return num_steps


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("config", [*MODELS, pytest.param(INDEXED, id="index")])
def test_writes_stay_in_place_over_many_steps(config: dict[str, Any], num_ahead: int) -> None:
    """Chunks without sampling, mixed steps, and decodes."""
    assert measure_in_place(PagedModel(tiny_model(**config)), num_ahead) > NUM_STEPS


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
def test_replayed_writes_stay_in_place(num_ahead: int) -> None:
    measure_in_place(PagedModel(tiny_model()), num_ahead, replay=True)


@pytest.mark.parametrize(
    ("replay", "num_drafts", "num_ahead"),
    sweep(
        product([False, True], [3, 0], [0, 1]), [(False, 3, 1), (True, 3, 0), (True, 3, 1), (False, 0, 0), (True, 0, 1)]
    ),
)
def test_a_draft_head_s_writes_stay_in_place(replay: bool, num_drafts: int, num_ahead: int) -> None:
    """The head follows each step, and its chains write between the steps."""
    paged = PagedModel(tiny_model())
    head = PagedDraftHead(random_head(paged.model), paged)
    assert measure_in_place(paged, num_ahead, draft=head, num_drafts=num_drafts, replay=replay)


@pytest.mark.parametrize("seed", [0, 7], ids=["accepted", "rejected"])
@pytest.mark.parametrize("config", MODELS)
def test_a_draft_model_s_writes_stay_in_place(config: dict[str, Any], seed: int) -> None:
    """The draft model's consecutive forward passes, with the target model's passes in between."""
    models = [PagedModel(tiny_model(seed, **config)) for seed in (0, seed)]
    assert (measure_in_place(models[0], 0, draft=models[1]) < NUM_STEPS / 2) == (seed == 0)


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("config", MODELS)
def test_writes_stay_in_place_with_two_streams(config: dict[str, Any], num_ahead: int) -> None:
    """Arrays that the second stream reads are released before the next step writes."""
    measure_in_place(PagedModel(tiny_model(**config)), num_ahead, replace(CPU_LIMITS, lane_elements=0))


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "config"),
    [
        pytest.param("int8", {"num_hidden_layers": 1, "head_dim": 32}, id="int8"),
        pytest.param("int4", {"num_hidden_layers": 1, "head_dim": 32}, id="int4", marks=pytest.mark.full),
        pytest.param("int4", LATENT, id="int4 latent"),
    ],
)
def test_quantized_writes_stay_in_place(config: dict[str, Any], kv_cache_dtype: str, num_ahead: int) -> None:
    """A copy of one layer's scales would add 4 MB. K of that layer in float32 would add 128 MB."""
    paged = PagedModel(tiny_model(**config), kv_cache_dtype=kv_cache_dtype)
    num_kv_heads = paged.pool.states[0].spec.token_arrays["keys"].shape[0]
    measure_in_place(paged, num_ahead, num_blocks=(4 << 20) // (16 * 4 * num_kv_heads))


@pytest.mark.metal
@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("config", MODELS)
def test_writes_stay_in_place_on_metal(config: dict[str, Any], num_ahead: int) -> None:
    """The same test on the GPU, where arrays are released when a command buffer has completed."""
    assert mx.default_device() == mx.Device(mx.gpu)
    measure_in_place(PagedModel(tiny_model(**config)), num_ahead)


class KeepsTheOldArray(KVState):
    """A mutant: a reference is kept to the array that the next write should reuse."""

    def write(self, step: StepRows, rows: Mapping[str, mx.array]) -> None:
        self._old = self.keys.reshape(-1)
        super().write(step, rows)


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
def test_the_measurement_sees_an_array_that_is_kept(num_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KVState", KeepsTheOldArray)
    with pytest.raises(AssertionError):
        measure_in_place(PagedModel(tiny_model(num_hidden_layers=1)), num_ahead)


def test_a_step_is_dispatched_when_the_one_before_has_ended() -> None:
    """If a step were dispatched while the previous step still reads the cache, it would write to a copy."""
    _, runner, scheduler = _aligned_runner(num_blocks=64, ahead=True)
    _add(scheduler, [5, 100], 3)
    plans = [scheduler.schedule() for _ in range(3)]
    first, second, third = [runner.execute(plan) for plan in plans]
    assert first.root and first.before is None
    assert not second.root and not third.root
    with pytest.raises(RuntimeError, match="in the order"):
        second.result()
    scheduler.update(plans[0], first.result())
    assert second.root and second.before is None
    assert not third.root
    scheduler.update(plans[1], second.result())
    assert third.root and third.before is None
    scheduler.update(plans[2], third.result())
    with pytest.raises(RuntimeError, match="once, in the order"):
        third.result()

    _, runner, scheduler = _aligned_runner(num_blocks=64)
    _add(scheduler, [5, 100], 3)
    runner.execute(scheduler.schedule())
    with pytest.raises(RuntimeError, match="without async scheduling"):
        runner.execute(scheduler.schedule())


def _aligned_runner(
    num_blocks: int, *, ahead: bool = False, **model_config: Any
) -> tuple[PagedModel, ModelRunner, Scheduler]:
    paged = PagedModel(tiny_model(**{"num_hidden_layers": 2, **model_config}))
    cache = CacheConfig(block_size=16, num_blocks=num_blocks)
    config = SchedulerConfig(
        max_num_batched_tokens=90, max_num_seqs=8, max_model_len=512, max_num_partial_prefills=3,
        page_aligned_scheduling=True, async_scheduling=ahead,
    )  # fmt: skip
    return paged, ModelRunner(paged, PortableBackend(), config, cache), Scheduler(config, cache)


def _add(scheduler: Scheduler, lengths: list[int], max_tokens: int, *, repeats: bool = False) -> None:
    """Queue requests. With ``repeats``, their outputs consist of only two token ids."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logit_bias={5: 50.0, 6: 50.0} if repeats else {})
    biases = {"bias_ids": np.array([5, 6], np.int32), "biases": np.array([50, 50], np.float32)}
    rules = TokenRules(**biases) if repeats else NO_RULES
    for i, length in enumerate(lengths):
        prompt = np.random.default_rng(i).integers(0, 256, length).tolist()
        scheduler.add_request(Request(str(i), prompt, params, max_tokens=max_tokens, rules=rules))


@pytest.mark.parametrize("config", [{}, LATENT], ids=["plain", "latent"])
def test_slot_block_and_run_writes_store_the_same_cache(config: dict[str, Any]) -> None:
    caches: dict[str, list[np.ndarray]] = {}
    ways = {"slot": SlotWrites, "block": BlockWrites, "run": RunWrites}
    num_faster = dict.fromkeys(ways, 0)
    for way, make_writes in ways.items():
        mx.random.seed(0)  # for equal weights
        paged, runner, scheduler = _aligned_runner(num_blocks=64, **config)
        runner._table._make_writes = make_writes
        _add(scheduler, [5, 100, 64, 33], 4)
        while scheduler.has_requests:
            plan = scheduler.schedule()
            num_faster[way] += way != "slot" and any(n >= 16 for n in plan.num_scheduled_tokens.values())
            scheduler.update(plan, runner.execute(plan).result())
        caches[way] = [np.array(a) for s in paged.pool.states for a in s.block_arrays().values()]
    assert num_faster["run"] >= 3 and num_faster["block"] >= 3
    for way, arrays in caches.items():
        for slot, other in zip(caches["slot"], arrays, strict=True):
            assert np.abs(slot).max() > 0
            np.testing.assert_array_equal(slot, other, err_msg=way)


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("by_run", [False, True], ids=["by block", "by run"])
def test_faster_writes_stay_in_place(by_run: bool, num_ahead: int) -> None:
    _, runner, scheduler = _aligned_runner(num_blocks=16_384, ahead=num_ahead > 0)
    runner._table._make_writes = RunWrites if by_run else BlockWrites
    array_bytes = 16_384 * 16 * 2 * 16 * 4
    _add(scheduler, [500, 400, 480], 2)
    before = settled_memory()
    Loop(runner, scheduler, num_ahead).run()
    assert mx.get_peak_memory() - before < array_bytes / 2, "a step held a second copy of a cache array"


# --- recurrent states ---------------------------------------------------------------------------------------


# 16 value heads of 96 x 96: the states of a request take 1.2 MB.
HYBRID = {
    **configuration("qwen3_next"),
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 96,
    "vocab_size": 256,
}
NUM_SLOTS = 40


def measure_states(num_ahead: int, *, has_drafts: bool = False, replay: bool = False) -> None:
    """Check the peak memory of many steps. Requests arrive, continue in order, and finish one by one.

    With partially rejected drafts, states move to other slots and back.
    """
    paged = PagedModel(random_model(HYBRID))
    cache = CacheConfig(
        block_size=16, num_blocks=128, num_state_slots=NUM_SLOTS, enable_prefix_caching=True,
        num_padding_blocks=int(replay),
    )  # fmt: skip
    speculative = speculative_config(3, longest=2, shortest=1)
    config = SchedulerConfig(
        max_num_batched_tokens=24,
        max_num_seqs=4,
        max_model_len=512,
        async_scheduling=num_ahead > 0,
        speculative=speculative if has_drafts else None,
    )
    runner = ModelRunner(paged, PortableBackend(), config, cache)
    if runner.replay is not None:
        runner.replay._trace_at = 1
    scheduler = Scheduler(config, cache)
    num_tokens = 2 * NUM_STEPS if has_drafts else NUM_STEPS
    are_accepted: set[bool] = set()  # True for a request and step if all drafts were accepted
    if has_drafts:
        proposer = NgramProposer(speculative)
        speculate(scheduler, proposer, async_planning=KnownAheadTimes(0.7))
        proposer.record_result = lambda request, n, right: are_accepted.add(n == right)  # type: ignore[method-assign]
    _add(scheduler, [20, 27, 80], num_tokens, repeats=has_drafts)
    before = settled_memory()
    assert Loop(runner, scheduler, num_ahead).run() > (num_tokens // 4 if has_drafts else num_tokens)
    assert are_accepted == ({True, False} if has_drafts else set())
    assert runner.replay is None or runner.replay.num_traces > 1
    running = 3 * paged.pool.bytes_per_request
    pool = NUM_SLOTS * paged.pool.bytes_per_request
    pending_states = (IN_FLIGHT_STATES + (IN_FLIGHT_STATES_OF_DRAFTS if has_drafts else 0) + 0.5) * running
    assert 0.5 * running > ACTIVATIONS and pending_states < 0.6 * pool  # makes a copy of a layer's pool visible
    assert mx.get_peak_memory() - before < pending_states + ACTIVATIONS


# Upper limit of the memory of a step with 24 rows apart from states. The states of the running requests are larger, so
# that an additional copy of these states is visible.
ACTIVATIONS = 1 << 20


@pytest.mark.parametrize("num_ahead", [0, 1], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("replay", [False, True], ids=["built", "replayed"])
def test_states_stay_in_place_over_many_steps(num_ahead: int, replay: bool) -> None:
    measure_states(num_ahead, replay=replay)


@pytest.mark.parametrize("num_ahead", [0, pytest.param(1, marks=pytest.mark.full)], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("replay", [False, True], ids=["built", "replayed"])
def test_states_stay_in_place_with_drafts(num_ahead: int, replay: bool) -> None:
    measure_states(num_ahead, has_drafts=True, replay=replay)

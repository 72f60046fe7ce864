"""The engine on recurrent models: outputs do not depend on other requests in the batch, and prefix caching works."""

from __future__ import annotations

from functools import cache
from itertools import cycle, product

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.sampling_params import SamplingParams
from tests.support.sweeps import sweep
from tests.support.tiny_engine import greedy_tokens, run_all, tiny_engine, tiny_reference, token_ids
from tools.fixtures.fake_engine import VOCAB_SIZE
from tools.fixtures.stepped_engine import SteppedEngine

# Models of all kinds: with a recurrence as function or module, with and without attention, several caches in a layer.
ARCHITECTURES = ["qwen3_5", "lfm2", "granitemoehybrid", "mamba", "rwkv7", "falcon_h1"]
NUM_OUTPUTS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, n).tolist() for n in lengths]


PROMPTS = prompts(0, [5, 23, 1, 40, 17, 64])


def own_answer(architecture: str, prompt: list[int], num_tokens: int = NUM_OUTPUTS) -> list[int]:
    """Return the greedy output of mlx-lm's forward pass with its own caches."""
    return _own_answer(architecture, tuple(prompt), num_tokens)


@cache
def _own_answer(architecture: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return greedy_tokens(tiny_reference(architecture=architecture), list(prompt), num_tokens)


def own_answers(architecture: str) -> list[list[int]]:
    """Return mlx-lm's outputs for PROMPTS."""
    return [own_answer(architecture, prompt) for prompt in PROMPTS]


WAYS = {
    "one by one": {},
    "chunks of any size": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "preempted": {"num_blocks": 24, "max_num_seqs": 4},
    "one ahead": {"ahead": True},
    "one ahead, preempted": {"ahead": True, "num_blocks": 24, "max_num_batched_tokens": 16},
    "few slots": {"num_state_slots": 6, "max_num_seqs": 6},
    "replayed": {"replay": True},
    "replayed, one ahead, preempted": {"replay": True, "ahead": True, "num_blocks": 24, "max_num_batched_tokens": 16},
    "behind": {"behind": True},
    "replayed, behind, preempted": {"replay": True, "behind": True, "num_blocks": 24, "max_num_batched_tokens": 16},
    "replayed, few slots": {"replay": True, "num_state_slots": 6, "max_num_seqs": 6},
}
# `make test` runs WAYS_OF_ONE of qwen3_5: together, each setting of WAYS. Every other model runs one of COMMON_WAYS.
COMMON_WAYS = ("chunks of any size", "replayed, behind, preempted")
WAYS_OF_ONE = (*COMMON_WAYS, "preempted", "one ahead, preempted", "few slots", "replayed, few slots")


@pytest.mark.parametrize(
    ("architecture", "way"),
    sweep(
        product(ARCHITECTURES, WAYS),
        [*product(ARCHITECTURES[:1], WAYS_OF_ONE), *zip(ARCHITECTURES[1:], cycle(COMMON_WAYS), strict=False)],
    ),
)
def test_answers_are_mlx_lms(architecture: str, way: str) -> None:
    engine = hybrid_engine(architecture, **WAYS[way])
    for _ in range(2):  # the second time, the prompts' prefixes are cached
        answers = [token_ids(outputs) for outputs in run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])]
        assert answers == own_answers(architecture)
    if "replayed" in way:
        assert engine.metrics.num_decode_forwards["replayed"] > 15
    if "preempted" in way:
        assert engine.scheduler.num_preemptions
    assert engine.scheduler.states.slots.num_hits or "few slots" in way
    assert engine.scheduler.blocks.num_used_blocks == 0


def hybrid_engine(architecture: str, **config: object) -> SteppedEngine:
    defaults = {"num_state_slots": 32, "max_num_seqs": 8, "block_size": 4, "num_blocks": 256, "max_model_len": 512}
    return tiny_engine(architecture=architecture, **{**defaults, **config})


@pytest.mark.parametrize("replay", [False, True], ids=["built", "replayed"])
def test_steps_that_copy_states_have_the_device_alone(replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another step in flight would write to the states that a step reads. There is no memory for a second copy."""
    engine = hybrid_engine("qwen3_5", behind=True, replay=replay, block_size=16)
    dispatch = ModelRunner._dispatch
    seen = []

    def noted(self: ModelRunner, step: PendingStep, *logits: mx.array) -> None:
        others = [other for other in self._steps if other is not step and other.is_dispatched]
        seen.append((bool(others), any(one.moves_states for one in (step, *others))))
        dispatch(self, step, *logits)

    monkeypatch.setattr(ModelRunner, "_dispatch", noted)
    for _ in range(2):
        outputs = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
        assert [token_ids(o) for o in outputs] == own_answers("qwen3_5")
    # An error within a step would be caught, and the step retried.
    assert (True, True) not in seen
    assert seen.count((True, False)) > 5 and seen.count((False, True)) > 5


def computed_tokens(engine: SteppedEngine, prompt: list[int], num_outputs: int = NUM_OUTPUTS) -> tuple[list[int], int]:
    """Return the output for a prompt, and the number of prompt tokens that were computed."""
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    (outputs,) = run_all(engine, [(prompt, params)])
    return token_ids(outputs), len(prompt) - outputs[-1].num_cached_tokens


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.full), True], ids=["one by one", "one ahead"])
def test_each_chat_turn_recomputes_only_a_small_part_of_the_history(ahead: bool) -> None:
    """Each turn adds the output and a question to the history. At most a block of the history is computed again."""
    engine = hybrid_engine("qwen3_5", ahead=ahead, max_model_len=2048, num_blocks=512)
    block_size = engine.config.cache.block_size
    history: list[int] = []
    for turn, question in enumerate(prompts(1, [30, 9, 14, 8, 11, 25, 7, 16, 10, 12])):
        num_new = len(question) + (turn > 0)  # the output's last token is not computed in its own turn
        history += question
        answer, num_computed = computed_tokens(engine, history)
        assert num_computed < num_new + 2 * block_size, turn
        assert turn or num_computed == len(question)
        history += answer


def test_a_repeated_prompt_hits_the_prefix_cache() -> None:
    engine = hybrid_engine("qwen3_5")
    (prompt,) = prompts(2, [37])
    assert computed_tokens(engine, prompt)[1] == 37
    first, again = computed_tokens(engine, prompt), computed_tokens(engine, prompt)
    assert first == again and again[1] == 1


def test_the_third_prompt_with_a_shared_prefix_hits_the_prefix_cache() -> None:
    """The place where two prompts diverge is known only when the second arrives."""
    engine = hybrid_engine("lfm2")
    system, *tails = prompts(3, [40, 9, 13, 11])
    assert [computed_tokens(engine, system + tail)[1] for tail in tails] == [49, 53, 11]


def test_concurrent_prompts_compute_a_shared_prefix_at_most_twice() -> None:
    """The first prompt has passed the shared prefix when the second is admitted. The second stores a state there."""
    engine = hybrid_engine("qwen3_5", max_num_batched_tokens=32)
    system, *tails = prompts(5, [80, 9, 13, 11, 6])
    requests = [system + tail for tail in tails]
    outputs = run_all(engine, [(prompt, GREEDY) for prompt in requests])
    assert [token_ids(o) for o in outputs] == [own_answer("qwen3_5", prompt) for prompt in requests]
    assert [o[-1].num_cached_tokens for o in outputs] == [0, 0, 80, 80]


def test_a_long_prompt_stores_state_checkpoints_at_intervals() -> None:
    engine = hybrid_engine("qwen3_5")
    engine.scheduler.states.interval = 32
    base, *tails = prompts(4, [100, 5])
    computed_tokens(engine, base)
    answer, num_computed = computed_tokens(engine, base[:70] + tails[0])
    assert num_computed == 75 - 64
    assert answer == own_answer("qwen3_5", base[:70] + tails[0])


def test_a_long_prompt_does_not_evict_state_checkpoints_of_other_prompts() -> None:
    engine = hybrid_engine("qwen3_5", num_state_slots=8 + 8)
    engine.scheduler.states.interval = 16
    first, long, *tails = prompts(6, [40, 400, 5, 7])
    computed_tokens(engine, first)
    computed_tokens(engine, long)
    slots = engine.scheduler.states.slots
    assert slots.stats["num_checkpoints"] < 8 and not slots.num_evictions
    answer, num_computed = computed_tokens(engine, first + tails[0])
    assert num_computed == 45 - 36
    answer, num_computed = computed_tokens(engine, long[:300] + tails[1])
    assert num_computed == 307 - 256  # an interval of 256 tokens, after every second checkpoint was evicted four times
    assert answer == own_answer("qwen3_5", long[:300] + tails[1])


@pytest.mark.parametrize("max_num_partial_prefills", [1, 4])
def test_chats_at_once_all_go_on_from_their_last_prompts(max_num_partial_prefills: int) -> None:
    """Outputs do not recur. The number of slots is a server's: state, prompt and output of each request."""
    limits = {"max_num_partial_prefills": max_num_partial_prefills, "max_num_batched_tokens": 512, "num_blocks": 512}
    engine = hybrid_engine("qwen3_5", num_state_slots=24, **limits)
    chats = prompts(7, [40 + i for i in range(8)])
    for turn in range(3):
        for chat, own in zip(chats, run_all(engine, [(chat, GREEDY) for chat in chats]), strict=True):
            assert token_ids(own) == own_answer("qwen3_5", chat)
            assert turn == 0 or len(chat) - own[-1].num_cached_tokens <= 20 + 2 * 4
        chats = [chat + more for chat, more in zip(chats, prompts(turn, [20] * 8), strict=True)]


def test_state_checkpoints_are_evicted_for_running_requests() -> None:
    engine = hybrid_engine("qwen3_5", num_state_slots=9)
    for lengths in ([20] * 8, [21] * 8, [22] * 8):
        batch = prompts(sum(lengths), lengths)
        answers = [token_ids(outputs) for outputs in run_all(engine, [(prompt, GREEDY) for prompt in batch])]
        assert answers[:2] == [own_answer("qwen3_5", prompt) for prompt in batch[:2]]
    assert engine.scheduler.states.slots.num_evictions

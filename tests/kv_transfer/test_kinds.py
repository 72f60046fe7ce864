"""Stored KV and states of every kind of model: outputs equal the outputs without a store.

A recurrent state is loaded only together with the blocks before it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from tests.kv_transfer.test_engines import BLOCK_SIZE, PROMPTS, files, make_prompt
from tests.support.kv_engines import KVEngine, MakeEngine, hand_over, kv_engine
from tests.support.running import DISPATCHES
from tests.support.sweeps import sweep
from tests.support.tiny_engine import with_vocabulary
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.architectures import configuration
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.tiny_models import TINY_LLAMA, random_model
from tools.fixtures.wide_heads import wide_configuration

LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16}
# Configuration of the model, and the type of its stored K and V.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (TINY_LLAMA, "auto"),
    "latent": (TINY_LLAMA | {"model_type": "deepseek_v3", **LATENT}, "auto"),
    "int8": (TINY_LLAMA | {"head_dim": 64}, "int8"),
    "hybrid": (with_vocabulary(configuration("qwen3_next"), 256), "auto"),
    "int8 hybrid": (with_vocabulary(wide_configuration("qwen3_next"), 256), "int8"),
}
# Tokens of each prompt outside full blocks, and the last block if all blocks are full.
NUM_COMPUTED = sum((len(prompt) - 1) % BLOCK_SIZE + 1 for prompt in PROMPTS)


def model_of(kind: str, seed: int = 0) -> nn.Module:
    return random_model(KINDS[kind][0], seed)


def engine_of(make: MakeEngine, kind: str, seed: int = 0, **settings: Any) -> KVEngine:
    return make(model=model_of(kind, seed), kv_cache_dtype=KINDS[kind][1], **settings)


@functools.cache
def plain_outputs(kind: str, max_tokens: int = 6) -> list[list[int]]:
    """Return the outputs without a store."""
    model, kv_cache_dtype = model_of(kind), KINDS[kind][1]
    return kv_engine(tiny_tokenizer(), None, model=model, kv_cache_dtype=kv_cache_dtype).run(PROMPTS, max_tokens)


def check(kind: str, outputs: list[list[int]], max_tokens: int = 6) -> None:
    reference, expected = model_of(kind), plain_outputs(kind, max_tokens)
    if KINDS[kind][1] != "auto":  # mlx-lm's model has K and V as computed
        assert outputs == expected
    for prompt, a, b in zip(PROMPTS, expected, outputs, strict=True):
        assert compare_outputs(reference, prompt, a, b).equal


def fill(engine: KVEngine, kind: str, prompts: Sequence[list[int]] = PROMPTS, max_tokens: int = 6) -> list[list[int]]:
    """Fill the store and return the outputs. One request at a time leaves a state at the end of each prompt."""
    if "hybrid" in kind:
        return [engine.run([prompt], max_tokens)[0] for prompt in prompts]
    return engine.run(prompts, max_tokens)


@pytest.mark.parametrize(
    ("kind", "dispatch"),
    sweep(
        product(KINDS, DISPATCHES),
        [
            *(("plain", "one ahead"), ("plain", "replayed"), ("latent", "one by one"), ("int8", "one ahead")),
            *(("hybrid", "one ahead"), ("hybrid", "replayed"), ("int8 hybrid", "one by one")),
        ],
    ),
)
def test_cold_then_after_a_restart(make: MakeEngine, kind: str, dispatch: str) -> None:
    first = engine_of(make, kind, **DISPATCHES[dispatch])
    # Long enough for steps of one size to be traced, at whatever times the store's answers arrive.
    max_tokens = 16 if dispatch == "replayed" else 6
    check(kind, fill(first, kind, max_tokens=max_tokens), max_tokens)
    assert first.stats.blocks_loaded == first.stats.states_loaded == 0 < first.stats.blocks_saved
    assert (first.core.metrics.num_decode_forwards["replayed"] > 0) == (dispatch == "replayed")
    second = engine_of(make, kind, **DISPATCHES[dispatch])
    check(kind, second.run(PROMPTS))
    stats, num_tokens = second.stats, sum(map(len, PROMPTS))
    # A prefix that two prompts share is loaded for both, or found in the cache by the second prompt.
    assert stats.prompt_tokens_computed == NUM_COMPUTED
    assert stats.prompt_tokens_local + stats.prompt_tokens_store == num_tokens - NUM_COMPUTED
    assert stats.blocks_loaded * BLOCK_SIZE >= stats.prompt_tokens_store > 0
    assert (stats.states_loaded >= 6) == ("hybrid" in kind)


@pytest.mark.parametrize(
    ("kind", "dispatch"),
    sweep(product(KINDS, DISPATCHES), [("plain", "replayed"), ("int8", "one by one"), ("hybrid", "one ahead")]),
)
def test_requests_with_loaded_kv_are_preempted_with_the_same_outputs(
    make: MakeEngine, kind: str, dispatch: str
) -> None:
    """The outputs are so long that requests outgrow the pool, in whatever order the loads finish."""
    fill(engine_of(make, kind, **DISPATCHES[dispatch]), kind)
    engine = engine_of(make, kind, num_blocks=24, **DISPATCHES[dispatch])
    check(kind, engine.run(PROMPTS, 32), 32)
    assert engine.stats.blocks_loaded > 0 and engine.core.scheduler.num_preemptions > 0
    assert (engine.stats.states_loaded > 0) == ("hybrid" in kind)


@pytest.mark.parametrize(
    ("kind", "budgets"),
    sweep(product(KINDS, [(24, 40), (16, 200), (200, 16)]), [("plain", (24, 40)), ("hybrid", (16, 200))]),
)
def test_a_hand_over_between_engines_that_cut_differently(
    make: MakeEngine, kind: str, budgets: tuple[int, int]
) -> None:
    """The consumer's requests arrive while the producer computes chunks, and wait for blocks, and then for a state."""
    producer = engine_of(make, kind, budget=budgets[0], kv_role="kv_producer")
    consumer = engine_of(make, kind, budget=budgets[1], kv_role="kv_consumer")
    loaded_beside: list[bool] = []

    def observe() -> None:
        stats = consumer.core.stats
        loaded_beside.append(stats.num_loading > 0 and stats.num_running > 0)

    check(kind, hand_over(producer, consumer, PROMPTS, observe))
    assert any(loaded_beside)
    assert consumer.stats.prompt_tokens_computed == NUM_COMPUTED, "only what no block holds"
    assert consumer.stats.blocks_saved == consumer.stats.loads_timed_out == producer.stats.loads_started == 0


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_second_turn_loads_the_first_answer_too(make: MakeEngine, kind: str) -> None:
    first = engine_of(make, kind)
    (answer,) = first.run([PROMPTS[0]], 30)
    first.run([make_prompt(9, 3)], 1)  # states of an ended request are saved with the next step
    turn = PROMPTS[0] + answer + make_prompt(7, 9)
    engine = engine_of(make, kind)
    (second,) = engine.run([turn])
    assert engine.stats.prompt_tokens_store >= (len(PROMPTS[0]) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert [second] == kv_engine(tiny_tokenizer(), None, model=model_of(kind)).run([turn])


@pytest.mark.parametrize(
    ("kind", "lost"), sweep(product(["plain", "hybrid"], (0.05, 0.15, 0.3, 0.5)), [("plain", 0.05), ("hybrid", 0.3)])
)
def test_a_store_with_holes(make: MakeEngine, tmp_path: Path, kind: str, lost: float) -> None:
    fill(engine_of(make, kind), kind)
    rng = random.Random(0)
    for path in files(tmp_path):
        if rng.random() < lost:
            path.unlink()
    engine = engine_of(make, kind, budget=int(16 + 300 * lost))
    check(kind, engine.run(PROMPTS))
    assert engine.stats.blocks_loaded > 0 and engine.stats.blocks_saved > 0
    if kind == "plain":
        again = engine_of(make, kind)
        check(kind, again.run(PROMPTS))
        assert again.stats.blocks_saved == 0, "the holes were filled"


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_kv_of_another_model_is_not_found(make: MakeEngine, kind: str) -> None:
    fill(engine_of(make, kind), kind)
    other = engine_of(make, kind, seed=1)
    outputs = other.run(PROMPTS)
    assert other.stats.blocks_loaded == other.stats.states_loaded == other.stats.blocks_corrupt == 0
    assert outputs == kv_engine(tiny_tokenizer(), None, model=model_of(kind, seed=1)).run(PROMPTS)


def test_kv_of_another_kv_cache_dtype_is_not_found(make: MakeEngine) -> None:
    sizes, fingerprints = {}, set()
    for kv_cache_dtype in ("int8", "int4", "auto"):
        engine = make(model=model_of("int8"), kv_cache_dtype=kv_cache_dtype)
        engine.run(PROMPTS[:2])
        assert engine.stats.blocks_loaded == engine.stats.blocks_corrupt == 0 < engine.stats.blocks_saved
        sizes[kv_cache_dtype] = engine.layout.nbytes
        fingerprints.add(engine.layout.fingerprint)
    # 64 numbers take 256 bytes in float32, 64 and 32 bytes in 8 and 4 bits, and 8 bytes for a scale and a bias.
    assert sizes["int8"] * 256 == sizes["auto"] * 72 and sizes["int4"] * 256 == sizes["auto"] * 40
    assert len(fingerprints) == 3


def test_a_loaded_state_becomes_a_local_state_checkpoint(make: MakeEngine) -> None:
    fill(engine_of(make, "hybrid"), "hybrid", PROMPTS[:1])
    engine = engine_of(make, "hybrid")
    for _ in range(3):
        engine.run(PROMPTS[:1])
    assert engine.stats.states_loaded == 1 and engine.core.scheduler.states.slots.num_hits == 2


@pytest.mark.parametrize("fault", ["spoilt", "lost"])
def test_states_that_cannot_be_loaded_are_computed_again(make: MakeEngine, tmp_path: Path, fault: str) -> None:
    """The engine then loads no block, because a block is usable only together with a state."""
    first = engine_of(make, "hybrid")
    fill(first, "hybrid")
    assert first.paged.pool.bytes_per_request > first.layout.nbytes  # files of states are larger than files of blocks
    largest = max(path.stat().st_size for path in files(tmp_path))
    for path in files(tmp_path):
        if path.stat().st_size == largest:
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1])) if fault == "spoilt" else path.unlink()
    engine = engine_of(make, "hybrid")
    check("hybrid", engine.run(PROMPTS))
    assert engine.stats.states_loaded == 0
    assert (engine.stats.blocks_corrupt > 0) == (fault == "spoilt")
    assert fault == "spoilt" or (engine.stats.blocks_loaded == 0 and engine.stats.blocks_unused > 0)

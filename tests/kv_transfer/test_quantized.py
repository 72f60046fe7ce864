"""Quantized KV in a store and in a handover: blocks are smaller, bitwise preserved, and specific to their type."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from metal_engine.models.paged_model import PagedModel
from metal_engine.text.tokenizer import Tokenizer
from tests.support.kv_engines import KVEngine, MakeEngine, hand_over, kv_engine
from tests.support.tiny_engine import with_vocabulary
from tools.fixtures.tiny_models import random_model, tiny_model
from tools.fixtures.wide_heads import wide_configuration

BLOCK_SIZE = 8


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in (50, 65, 17, 8, 40)]
    return [*prompts, prompts[0][:40] + prompts[2], prompts[1] + prompts[3]]


PROMPTS = _prompts()
# Tokens of each prompt outside full blocks, and the last block if all blocks are full.
NUM_COMPUTED = sum((len(p) - 1) % BLOCK_SIZE + 1 for p in PROMPTS)


@pytest.fixture(name="make")
def make_quantized(make: MakeEngine) -> MakeEngine:
    """Create engines that share one directory, with a model of heads that can be quantized."""

    def make_quantized(kv_cache_dtype: str = "int8", model: Any = None, **settings: Any) -> KVEngine:
        return make(model=model or tiny_model(head_dim=64), kv_cache_dtype=kv_cache_dtype, **settings)

    return make_quantized


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> list[list[int]]:
    """Outputs without a store."""
    return kv_engine(tokenizer, None, model=tiny_model(head_dim=64), kv_cache_dtype="int8").run(PROMPTS)


@pytest.mark.parametrize("ahead", [False, True])
def test_after_a_restart(make: MakeEngine, plain: list[list[int]], ahead: bool) -> None:
    assert make(ahead=ahead).run(PROMPTS) == plain
    second = make(ahead=ahead)
    assert second.run(PROMPTS) == plain
    assert second.stats.prompt_tokens_computed == NUM_COMPUTED and second.stats.blocks_loaded > 0


def test_a_tight_pool_preempts_what_was_loaded(make: MakeEngine) -> None:
    """The outputs are so long that requests outgrow the pool, in whatever order the loads finish."""
    expected = make().run(PROMPTS, 32)
    engine = make(num_blocks=20)
    assert engine.run(PROMPTS, 32) == expected
    assert engine.stats.blocks_loaded > 0 and engine.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_states_beside_quantized_blocks(make: MakeEngine, tokenizer: Tokenizer, ahead: bool) -> None:
    """A model with recurrent layers: its states are stored as computed, K and V in 8 bits."""

    def hybrid() -> nn.Module:
        return random_model(with_vocabulary(wide_configuration("qwen3_next"), 256))

    expected = kv_engine(tokenizer, None, model=hybrid(), kv_cache_dtype="int8").run(PROMPTS)
    first = make(model=hybrid(), ahead=ahead)
    assert [first.run([prompt])[0] for prompt in PROMPTS] == expected
    second = make(model=hybrid(), ahead=ahead)
    assert second.run(PROMPTS) == expected
    assert second.stats.states_loaded >= 4 and second.stats.prompt_tokens_computed == NUM_COMPUTED
    other = make("int4", model=hybrid())
    other.run(PROMPTS[:2])
    assert other.stats.blocks_loaded == other.stats.states_loaded == 0


def test_a_draft_model_beside_a_store(make: MakeEngine) -> None:
    """Only the target model's KV is loaded. The draft model computes its own KV, also in 8 bits."""
    expected = make().run(PROMPTS, 20)
    draft = PagedModel(tiny_model(head_dim=64), kv_cache_dtype="int8")
    engine = make(draft=draft)
    assert engine.run(PROMPTS, 20) == expected
    metrics = engine.core.metrics
    assert engine.stats.blocks_loaded > 0
    assert sum(metrics.num_accepted_tokens) == metrics.num_draft_tokens > 40


def test_hand_over_between_engines_that_cut_differently(make: MakeEngine, plain: list[list[int]]) -> None:
    producer, consumer = make(budget=16, kv_role="kv_producer"), make(budget=200, kv_role="kv_consumer")
    outputs = hand_over(producer, consumer, PROMPTS)
    assert outputs == plain
    assert consumer.stats.prompt_tokens_computed == NUM_COMPUTED, "only what no block holds"


def test_other_types_do_not_find_it(make: MakeEngine) -> None:
    sizes = {}
    for kv_cache_dtype in ("int8", "int4", "auto"):
        engine = make(kv_cache_dtype)
        engine.run(PROMPTS[:2])
        assert engine.stats.blocks_loaded == engine.stats.blocks_corrupt == 0 < engine.stats.blocks_saved
        sizes[kv_cache_dtype] = engine.layout.nbytes
    # 64 numbers take 256 bytes in float32, 64 and 32 bytes in 8 and 4 bits, and 8 bytes for a scale and a bias.
    assert sizes["int8"] * 256 == sizes["auto"] * 72 and sizes["int4"] * 256 == sizes["auto"] * 40
    assert len({make(kv_cache_dtype).layout.fingerprint for kv_cache_dtype in sizes}) == 3

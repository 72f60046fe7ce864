"""The engine with quantized KV, compared with mlx-lm with K and V rounded in the same way.

A token attends only to stored, quantized values. The same tokens therefore result in any batch, for any chunking, for a
prefix that is cached, loaded or computed, and after preemption.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from metal_engine.kv_cache.spec import StateSpec
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.models.lora_targets import adapter_targets
from metal_engine.models.paged_model import PagedModel
from metal_engine.sampling_params import SamplingParams
from tests.support import adapters
from tests.support.demo import engine_for
from tests.support.rounded_cache import own_caches
from tests.support.running import drain, run
from tests.support.speculation import KnownOutputs, draft_for_free, propose_from, speculative_config
from tests.support.tiny_engine import greedy_tokens, token_ids
from tools.compare.equal_outputs import compare_outputs
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import random_model, tiny_model
from tools.fixtures.wide_heads import wide_configuration

NUM_OUTPUTS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
# Models with plain attention, sliding windows, latents, and a recurrent layer beside attention.
MODELS = ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"]
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of any size": {"budget": 7, "max_num_seqs": 4},
    "preempted": {"num_blocks": 10, "max_num_seqs": 4},
    "one ahead": {"ahead": True},
    "one ahead, preempted": {"ahead": True, "num_blocks": 10, "budget": 16},
}


def model_of(name: str) -> nn.Module:
    if name == "llama":
        return tiny_model(vocab_size=97, head_dim=64)
    return random_model(wide_configuration(name))


def make_engine(name: str, kv_cache_dtype: str = "int8", **sizes: Any) -> SteppedEngine:
    return engine_of(PagedModel(model_of(name), kv_cache_dtype=kv_cache_dtype), **sizes)


def engine_of(paged: PagedModel, **sizes: Any) -> SteppedEngine:
    defaults = {"budget": 64, "block_size": 8, "num_blocks": 64, "max_num_seqs": 8, "caching": True, "vocab_size": 97}
    return engine_for(paged, tiny_tokenizer(), **{**defaults, **sizes})


def _prompts() -> list[list[int]]:
    """Return prompts, some with common prefixes that end inside a block or extend over several blocks."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, n).tolist() for n in (5, 23, 1, 40)]
    return [*prompts, prompts[3][:35] + prompts[0], prompts[1] + prompts[2]]


PROMPTS = _prompts()


class RoundedModel:
    """mlx-lm's forward pass over K and V as stored, teacher-forced or greedy."""

    def __init__(self, name: str, kv_cache_dtype: str, adapter: Path | None = None) -> None:
        self._model = adapters.mlx_lms(model_of(name), adapter)
        self._specs: list[StateSpec] = [
            state.spec for state in PagedModel(model_of(name), kv_cache_dtype=kv_cache_dtype).pool.states
        ]

    def __call__(self, token_ids: mx.array) -> mx.array:
        return self._model(token_ids, cache=own_caches(self._model, self._specs))

    def answer(self, prompt: list[int]) -> list[int]:
        return greedy_tokens(self._model, prompt, NUM_OUTPUTS, own_caches(self._model, self._specs))


@cache
def rounded(name: str, kv_cache_dtype: str) -> tuple[RoundedModel, list[list[int]]]:
    model = RoundedModel(name, kv_cache_dtype)
    return model, [model.answer(prompt) for prompt in PROMPTS]


def assert_equal(name: str, outputs: list[list[int]], kv_cache_dtype: str = "int8") -> None:
    model, expected = rounded(name, kv_cache_dtype)
    found = [compare_outputs(model, p, a, b) for p, a, b in zip(PROMPTS, expected, outputs, strict=True)]
    assert all(one.equal for one in found), found
    assert sum(not one.same for one in found) <= 1


def _pairs() -> list[Any]:
    """Return all pairs of models and ways. Only a few pairs of the later models run by default."""
    few = {("gemma3_text", "one ahead, preempted"), ("deepseek_v3", "chunks of any size"), ("qwen3_next", "preempted")}
    return [
        pytest.param(name, way, marks=() if name == "llama" or (name, way) in few else pytest.mark.full)
        for name in MODELS
        for way in WAYS
    ]


@pytest.mark.parametrize(("name", "way"), _pairs())
def test_quantized_kv_outputs_equal_mlx_lm_for_any_batching(name: str, way: str) -> None:
    engine = make_engine(name, **WAYS[way])
    for _ in range(2):  # the second time, the prompts' prefixes are cached
        assert_equal(name, run(engine, PROMPTS, GREEDY))
    assert bool(engine.scheduler.num_preemptions) == ("preempted" in way)
    assert engine.scheduler.blocks.num_used_blocks == 0


@pytest.mark.parametrize("way", ["together", "chunks of any size", "one ahead, preempted"])
def test_four_bits(way: str) -> None:
    assert_equal("llama", run(make_engine("llama", "int4", **WAYS[way]), PROMPTS, GREEDY), "int4")


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_next", *(pytest.param(n, marks=pytest.mark.full) for n in MODELS[1:3])]
)
def test_speculation(name: str) -> None:
    """Drafts that are sometimes right: KV after a wrong draft is overwritten, and states are reset."""
    _, expected = rounded(name, "int8")
    engine = make_engine(name, speculative=speculative_config(3), num_blocks=16)
    known = KnownOutputs({tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)})
    propose_from(engine, known)
    assert_equal(name, run(engine, PROMPTS, GREEDY))
    assert known.num_right and known.num_wrong


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("way", ["together", "preempted", "one ahead"])
def test_drafts_of_the_model_itself_are_all_accepted(way: str, kv_cache_dtype: str) -> None:
    """The draft model's KV is quantized as the target's. With other bits, its drafts would sometimes differ."""
    draft = PagedModel(model_of("llama"), kv_cache_dtype=kv_cache_dtype)
    engine = make_engine("llama", kv_cache_dtype, draft=draft, **WAYS[way])
    draft_for_free(engine)
    assert_equal("llama", run(engine, PROMPTS, GREEDY), kv_cache_dtype)
    assert sum(engine.metrics.num_accepted_tokens) == engine.metrics.num_draft_tokens > 30
    assert bool(engine.scheduler.num_preemptions) == ("preempted" in way)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_quantized_draft_model_does_not_change_outputs(name: str) -> None:
    """The draft model has one layer, and another group size."""
    other = tiny_model(7, vocab_size=97, head_dim=32, num_hidden_layers=1)
    engine = make_engine(name, draft=PagedModel(other, kv_cache_dtype="int8"))
    draft_for_free(engine)
    assert_equal(name, run(engine, PROMPTS, GREEDY))
    assert sum(engine.metrics.num_accepted_tokens) < engine.metrics.num_draft_tokens / 2


@pytest.mark.parametrize("way", ["together", "preempted", "one ahead"])
def test_adapters(way: str, tmp_path: Path) -> None:
    """Requests with and without adapters share steps. Each equals mlx-lm's output with its adapter and rounded KV."""
    weights = adapters.products(model_of("llama"), adapters.ALL, rank=3, seed=1)
    folder = adapters.write_mlx_lm(tmp_path / "a", weights)
    paged = PagedModel(model_of("llama"), kv_cache_dtype="int8")
    targets = adapter_targets(paged)
    registry = AdapterRegistry(targets, 1, 3, paged.enable_lora(targets.shapes, 1, 3).set_weights)
    engine = engine_of(paged, adapters=registry, **WAYS[way])
    adapters.load(engine, "a", folder)
    for i, prompt in enumerate(PROMPTS):
        for name in ("a", None):
            (prepared,) = engine.prepare_all([prompt], GREEDY, adapter=registry.find(name))
            engine.add_request(f"{i} {name}", prepared)
    answers = {request_id: token_ids(outputs) for request_id, outputs in drain(engine).items()}
    assert bool(engine.scheduler.num_preemptions) == ("preempted" in way)
    assert_equal("llama", [answers[f"{i} None"] for i in range(len(PROMPTS))])
    adapted = RoundedModel("llama", "int8", folder)
    for i, prompt in enumerate(PROMPTS):
        found = compare_outputs(adapted, prompt, adapted.answer(prompt), answers[f"{i} a"])
        assert found.equal, found
    assert sum(answers[f"{i} a"] != answers[f"{i} None"] for i in range(len(PROMPTS))) > len(PROMPTS) / 2

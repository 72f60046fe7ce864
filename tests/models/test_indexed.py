"""Models whose layers attend to the keys that an index selects: tokens equal to mlx-lm's, and the check at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_engine.attention.indexed import KeySelection, SelectionSize
from metal_engine.attention.portable import backend as portable
from metal_engine.attention.portable import indexed
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.rows import TracedRows, step_rows
from metal_engine.kv_cache.spec import IndexSpec, LatentSpec, QuantizedKVSpec
from metal_engine.kv_cache.state import IndexState
from metal_engine.kv_cache.writes import TracedWrites
from metal_engine.models import indexer
from metal_engine.models.check import check_paged_model
from metal_engine.models.indexer import IndexCache
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.step_memory import measure_step_bytes
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import NO_REPLAY_WITH_INDEX
from tests.support.kv_engines import kv_engine
from tests.support.running import run
from tests.support.speculation import draft_for_free, speculative_config
from tests.support.sweeps import sweep
from tests.support.tiny_engine import greedy_tokens, tiny_engine, tiny_reference
from tools.fixtures.architectures import VOCAB_SIZE, configuration
from tools.fixtures.fake_engine import VOCAB_SIZE as ENGINE_VOCAB_SIZE
from tools.fixtures.fake_engine import tiny_tokenizer
from tools.fixtures.tiny_models import random_model

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Up to forty times the smaller top-k, and four times 64.
PROMPTS = [np.random.default_rng(n).integers(0, ENGINE_VOCAB_SIZE, n).tolist() for n in (5, 23, 300, 70)]


def config_of(top_k: int = 8, **fields: Any) -> dict[str, Any]:
    return {**configuration("deepseek_v32"), "index_topk": top_k, **fields}


def config_of_blocks(top_k: int, block_size: int, **fields: Any) -> dict[str, Any]:
    config = configuration("minimax_m3_vl")
    sizes = {"index_topk_blocks": top_k, "index_block_size": block_size}
    return {**config, "text_config": {**config["text_config"], **sizes, **fields}}


CONFIGS = {
    "1": config_of(1),
    "8": config_of(8),
    "64": config_of(64),
    "more than all keys": config_of(1000),
    "2 blocks": config_of_blocks(2, 5),
    "16 blocks": config_of_blocks(16, 4),
}


def mlx_lms_tokens(config: dict[str, Any]) -> list[list[int]]:
    model = tiny_reference(architecture=config)
    return [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def engine_of(config: dict[str, Any], **options: Any) -> Any:
    defaults = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 256, "max_model_len": 512}
    return tiny_engine(architecture=config, **{**defaults, **options})


@pytest.mark.parametrize("name", sweep(zip(CONFIGS), [("8",), ("2 blocks",)]))
def test_tokens_with_contexts_far_beyond_the_selection(name: str) -> None:
    config = CONFIGS[name]
    expected = mlx_lms_tokens(config)
    engine = engine_of(config, max_num_batched_tokens=61)
    assert run(engine, PROMPTS, GREEDY) == expected
    assert run(engine, PROMPTS, GREEDY) == expected  # from the prefix cache
    preempted = engine_of(config, ahead=True, num_blocks=104, max_num_batched_tokens=256)
    assert run(preempted, PROMPTS, GREEDY) == expected
    assert preempted.scheduler.num_preemptions


def test_drafts_are_verified_with_a_selection_for_each_row() -> None:
    config = config_of()
    plain = engine_of(config)
    drafting = engine_of(config, speculative=speculative_config(longest=1, shortest=1))
    draft_for_free(drafting)
    assert run(drafting, PROMPTS, GREEDY) == run(plain, PROMPTS, GREEDY) == mlx_lms_tokens(config)
    assert drafting.metrics.num_draft_tokens > 0


def test_decodes_are_not_replayed_for_that_reason() -> None:
    config = config_of()
    engine = engine_of(config, replay=True)
    assert run(engine, PROMPTS, GREEDY) == mlx_lms_tokens(config)
    assert engine.metrics.replay_refusal == NO_REPLAY_WITH_INDEX
    assert not engine.metrics.num_decode_forwards["replayed"]


def test_a_traced_step_is_an_error() -> None:
    """It would attend to all keys."""
    paged = PagedModel(random_model(config_of()))
    paged.pool.allocate(2, 4, 0)
    token, rows = mx.zeros(1, mx.int32), TracedRows(TracedWrites(mx.zeros(1, mx.int32)), None)
    attention = PortableBackend().for_step(step_rows(np.zeros((1, 1), np.int32), np.zeros(1, np.int32), [1], 4))
    with pytest.raises(RuntimeError, match="cannot be traced"):
        paged.forward_of_arrays(token, token, rows, attention)


def test_index_keys_are_stored_and_counted_and_never_quantized() -> None:
    wide = config_of(kv_lora_rank=60, qk_rope_head_dim=4, index_head_dim=32)
    plain = PagedModel(random_model(wide, dtype=mx.float16), is_sketch=True)
    specs = [state.spec for state in plain.pool.states]
    assert specs == [LatentSpec(60, 4, mx.float16), IndexSpec(32, mx.float16)] * 4
    assert plain.pool.bytes_per_token == 4 * 2 * (64 + 32)
    quantized = PagedModel(random_model(wide), kv_cache_dtype="int8")
    assert {type(state.spec) for state in quantized.pool.states} == {QuantizedKVSpec, IndexSpec}
    check_paged_model(quantized, PortableBackend(), VOCAB_SIZE)
    # The engine's tokens do not depend on chunks, although attention reads quantized latents.
    whole, chunked = (
        run(engine_of(wide, kv_cache_dtype="int8", max_num_batched_tokens=size), PROMPTS, GREEDY) for size in (512, 7)
    )
    assert whole == chunked


def test_the_measured_step_selects_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows select keys only if requests have a context: the step itself has 64 tokens."""
    taken = [
        measure_step_bytes(PagedModel(random_model(config_of(top_k=64))), PortableBackend(), 16, longest, 64, 4)
        for longest in (None, 64)
    ]
    assert taken[0] > taken[1] + 64 * 64 * 4


def test_all_ranks_use_the_selection_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedModel(random_model(config_of()))
    index, *_ = indexer.indexers(paged.model)
    own = mx.array([[3, 1, -1]])
    assert index.common(own) is own
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, group: array)
    summands: list[list[int]] = []
    for rank in range(2):
        index.ranks = SimpleNamespace(rank=lambda rank=rank: rank)
        summands += index.common(own).tolist()
    assert summands == [[3, 1, -1], [0, 0, 0]]


def test_a_store_of_kv_contains_the_index_keys(tmp_path: Path) -> None:
    prompts = [[token % 97 for token in prompt] for prompt in PROMPTS[1::2]]
    saving, loading, alone = (
        kv_engine(tiny_tokenizer(), store, model=tiny_reference(vocab_size=256, architecture=config_of()))
        for store in (tmp_path, tmp_path, None)
    )
    assert sum("index_keys" in part.name for part in saving.layout.parts) == 4
    assert saving.layout.nbytes == 8 * saving.paged.pool.bytes_per_token
    assert saving.run(prompts) == loading.run(prompts) == alone.run(prompts)
    assert loading.stats.blocks_loaded > 8


# --- the check at load ---------------------------------------------------------------------------------------------


def check(paged: PagedModel) -> float:
    return check_paged_model(paged, PortableBackend(), VOCAB_SIZE)


def half_precision(seed: int, dtype: mx.Dtype = mx.bfloat16, num_heads: int = 16) -> PagedModel:
    """Return a model without experts, which MLX computes on a CPU in float32 only."""
    return PagedModel(random_model(config_of(2048, n_routed_experts=None, index_n_heads=num_heads), seed, dtype))


def half_precision_of_blocks(seed: int, dtype: mx.Dtype) -> PagedModel:
    return PagedModel(random_model(config_of_blocks(16, 128, moe_layer_freq=[0] * 4), seed, dtype))


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("num_heads", "num_models"), [(16, 5), *(pytest.param(heads, 30, marks=FULL) for heads in (2, 16, 64))]
)
def test_no_random_model_in_half_precision_is_refused(num_heads: int, num_models: int) -> None:
    """Many keys have nearly equal scores. A comparison of logits alone refused 6 of 30 such models."""
    for seed in range(num_models):
        paged = half_precision(seed, num_heads=num_heads)
        check(paged)
        assert {index.size.num_keys for index in indexer.indexers(paged.model)} == {2048}


@pytest.mark.parametrize("num_models", [5, pytest.param(30, marks=FULL)])
def test_no_random_model_with_blocks_is_refused_in_half_precision(num_models: int) -> None:
    for seed in range(num_models):
        paged = half_precision_of_blocks(seed, mx.bfloat16)
        check(paged)
        assert {index.size for index in indexer.indexers(paged.model)} == {SelectionSize(16, 128, 1)}


def _one_less(found: KeySelection) -> KeySelection:
    return replace(found, positions=[mx.where(mx.arange(8) == 0, -1, one) for one in found.positions])


# Mistakes: owners and name of a function, and the wrong function in its place.
MISTAKES: dict[str, tuple[list[Any], str, Callable[..., Any]]] = {
    "no selection": ([indexer], "plan_selection", lambda own: lambda *_: None),
    "a selection that is not used": ([IndexCache], "take", lambda own: lambda self: None),
    "keys of the other request": (
        [IndexState], "read", lambda own: lambda self, slots: own(self, mx.roll(slots, 1, axis=0)),
    ),
    "one key less": ([portable], "select_keys", lambda own: lambda *args: _one_less(own(*args))),
    "the smallest scores": ([indexed], "largest", lambda own: lambda scores, *rest: own(-scores, *rest)),
    "the first keys": ([indexed], "largest", lambda own: lambda scores, *rest: own(mx.zeros_like(scores), *rest)),
    "weights without signs": (
        [portable], "select_keys",
        lambda own: lambda plan, index, *rest: own(plan, replace(index, weights=mx.abs(index.weights)), *rest),
    ),
    "queries at wrong positions": (
        [indexer.PagedIndexer, indexer.PagedBlockAttention], "project",
        lambda own: lambda self, x, qr, at: own(self, x, qr, at)._replace(queries=own(self, x, qr, at + 3).queries),
    ),
    "latents of other keys": (
        [indexed], "_attend_tile", lambda own: lambda tile, at, *rest: own(tile, mx.where(at > 0, at - 1, at), *rest),
    ),
}  # fmt: skip


def check_is_refused(models: list[PagedModel], mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owners, name, wrong = MISTAKES[mistake]
    for owner in owners:
        monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    for paged in models:
        with pytest.raises(UnsupportedModelError, match=r"index selects other keys|logits .* are off"):
            check(paged)


@pytest.mark.parametrize(
    ("dtype", "num_models"),
    [(mx.float32, 1), (mx.bfloat16, 1), *(pytest.param(d, 30, marks=FULL) for d in (mx.float16, mx.bfloat16))],
)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_selection_is_refused(
    mistake: str, dtype: mx.Dtype, num_models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_is_refused([half_precision(seed, dtype) for seed in range(num_models)], mistake, monkeypatch)


# A layer selects blocks by the signs of its products, and two blocks of four keys.
MISTAKES_OF_BLOCKS = [name for name in MISTAKES if name not in ("weights without signs", "latents of other keys")]


@pytest.mark.parametrize(("dtype", "num_models"), [(mx.float32, 1), pytest.param(mx.bfloat16, 30, marks=FULL)])
@pytest.mark.parametrize("mistake", MISTAKES_OF_BLOCKS)
def test_a_wrong_selection_of_blocks_is_refused(
    mistake: str, dtype: mx.Dtype, num_models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_is_refused([half_precision_of_blocks(seed, dtype) for seed in range(num_models)], mistake, monkeypatch)


def test_attention_to_quantized_latents_is_compared_for_selected_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedModel(random_model(config_of(kv_lora_rank=60, qk_rope_head_dim=4)), kv_cache_dtype="int8")
    attend_tile = indexed._attend_tile

    def attend_wrongly(tile: Any, positions: mx.array, queries: mx.array, state: Any, *rest: Any) -> Any:
        for out in attend_tile(tile, positions, queries, state, *rest):
            yield out * (1.1 if isinstance(state.spec, QuantizedKVSpec) else 1)

    monkeypatch.setattr(indexed, "_attend_tile", attend_wrongly)
    with pytest.raises(UnsupportedModelError, match="attention over keys and values in int8 is off"):
        check(paged)

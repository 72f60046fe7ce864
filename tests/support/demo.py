"""The demo model for tests: a plain copy run by mlx-lm, and a copy behind the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_engine.attention.backend import AttentionBackend
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids, load_gguf_tokenizer
from metal_engine.kv_transfer.runner_side import KVConnectorRunner
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.models.draft_head import PagedDraftHead
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.draft_model import DraftModel
from metal_engine.runner.drafting import Drafter
from metal_engine.runner.head_drafter import HeadDrafter
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.replay import DecodeReplay
from metal_engine.settings.config import (
    TEXT_ONLY,
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    ModelInfo,
    SchedulerConfig,
    SpeculativeConfig,
)
from metal_engine.text.tokenizer import Tokenizer
from tests.support.speculation import draft_model_config, head_config
from tools.fixtures.stepped_engine import SteppedEngine

MakeEngine = Callable[..., SteppedEngine]


@pytest.fixture(scope="session")
def demo_tokenizer(demo_path: Path) -> Tokenizer:
    header = read_gguf_header(demo_path)
    return Tokenizer(load_gguf_tokenizer(demo_path), gguf_eos_token_ids(header))


@pytest.fixture(scope="session")
def reference_model(demo_path: Path) -> Any:
    """Return a copy of the demo model that the engine never uses."""
    return load_gguf_model(demo_path, dtype=mx.float32, dequantize=True)[0]


@pytest.fixture(scope="session")
def paged_demo(reference_model: Any) -> PagedModel:
    """Return the demo model behind the paged cache. It has the arrays of the reference model, and its own layers."""
    model = type(reference_model)(reference_model.args)
    model.update(reference_model.parameters())
    return PagedModel(model)


@pytest.fixture
def make_engine(paged_demo: PagedModel, demo_tokenizer: Tokenizer) -> MakeEngine:
    """Return a function that makes engines on the demo model.

    Each call takes over the KV cache of the previous engine.
    """

    def make(**options: Any) -> SteppedEngine:
        defaults = {"budget": 512, "block_size": 16, "num_blocks": 512, "max_num_seqs": 64}
        return engine_for(paged_demo, demo_tokenizer, vocab_size=49152, **{**defaults, **options})

    return make


def engine_for(
    paged: PagedModel,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    budget: int,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    ahead: bool = False,
    behind: bool = False,
    replay: bool = False,
    trace_at: int = 1,
    caching: bool = False,
    connector: tuple[KVConnectorScheduler, KVConnectorRunner] | None = None,
    fingerprint: str = "",
    attention: AttentionBackend | None = None,
    speculative: SpeculativeConfig | None = None,
    draft: PagedModel | PagedDraftHead | None = None,
    adapters: AdapterRegistry | None = None,
    encoder_tokens: int = 4096,
    image_cache_tokens: int = 1 << 16,
    num_partial_prefills: int | None = None,
) -> SteppedEngine:
    """Return an engine on a model.

    Args:
        budget: maximum number of tokens in a step.
        ahead: plan and build each step while the previous step runs.
        behind: dispatch each step in two parts while the previous step runs, as on a GPU.
        replay: replay decode steps whose sizes have occurred ``trace_at`` times.
        caching: cache prefixes. Always on with a ``connector``.
        connector: scheduler half and runner half of a KV connector.
        fingerprint: root of the hashes of cached prefixes.
        attention: attention backend. Default: the portable backend.
        draft: draft model, or draft head of ``paged``. Default of ``speculative`` with either: four drafts per step.
        adapters: LoRA adapters that are installed in the model.
        encoder_tokens: limit on the tokens of an image, and on the image tokens that a step encodes.
        image_cache_tokens: number of image tokens whose features are kept.
        num_partial_prefills: maximum number of prompts in progress. Default: 1, or 4 with a connector.
    """
    attention = attention or PortableBackend()
    if draft is not None and speculative is None:
        speculative = draft_model_config(4) if isinstance(draft, PagedModel) else head_config(4)
    cache = CacheConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=caching or connector is not None,
        model_fingerprint=fingerprint,
        num_state_slots=3 * max_num_seqs if paged.pool.is_recurrent else 0,
        num_padding_blocks=int(replay),
    )
    config = EngineConfig(
        model=ModelInfo(
            name="test",
            model_type="test",
            dtype="float32",
            vocab_size=vocab_size,
            num_layers=len(paged.pool.states),
            num_params=1,
            weight_bytes=0,
            kv_bytes_per_token=paged.pool.bytes_per_token,
            max_position_embeddings=8192,
            image_refusal=TEXT_ONLY if paged.images is None else None,
        ),
        device=DeviceInfo(kind="cpu", name="test", compute="test", memory_bytes=1 << 30),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=min(8192, cache.num_tokens),
            async_scheduling=ahead,
            max_num_partial_prefills=num_partial_prefills or (1 if connector is None else 4),
            speculative=speculative,
            max_num_encoder_tokens=encoder_tokens,
            image_cache_tokens=image_cache_tokens,
        ),
        cache=cache,
        attention_backend=attention.name,
        seed=0,
    )
    options = {"connector": connector, "adapters": adapters, "behind": behind, "replay": replay, "trace_at": trace_at}
    return stepped_engine(config, paged, attention, tokenizer, draft, **options)


def stepped_engine(
    config: EngineConfig,
    paged: PagedModel,
    attention: AttentionBackend,
    tokenizer: Tokenizer,
    draft: PagedModel | PagedDraftHead | None,
    *,
    connector: tuple[KVConnectorScheduler, KVConnectorRunner] | None,
    adapters: AdapterRegistry | None,
    behind: bool,
    replay: bool,
    trace_at: int = 1,
) -> SteppedEngine:
    """Return an engine with a configuration. Arguments as for :func:`engine_for`."""
    scheduler_side, runner_side = connector or (None, None)
    drafter: Drafter | None = None
    if isinstance(draft, PagedModel):
        drafter = DraftModel(draft, attention, config.scheduler, config.cache, vocab_size=config.model.vocab_size)
    elif draft is not None:
        drafter = HeadDrafter(draft, paged.pool, attention, config.cache)
    gpu_like = {"allow_queued_dispatch": True, "in_parts": True} if behind else {}
    runner = ModelRunner(paged, attention, config.scheduler, config.cache, runner_side, drafter, **gpu_like)
    if replay:
        padding_block = config.cache.num_blocks
        sizes = {"padding_block": padding_block, "max_num_seqs": config.scheduler.max_num_seqs}
        needs_hidden = drafter is not None and drafter.needs_hidden
        runner.replay = DecodeReplay(paged, attention, **sizes, needs_hidden=needs_hidden, trace_at=trace_at)
        if isinstance(drafter, HeadDrafter):
            drafter.replay = DecodeReplay(drafter.head, attention, padding_block=padding_block, trace_at=trace_at)
    return SteppedEngine(config, runner, tokenizer, scheduler_side, adapters)

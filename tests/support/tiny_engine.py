"""Engine on a tiny model with random weights and the tiny tokenizer: real logits in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.kv_transfer.runner_side import KVConnectorRunner
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.models.draft_head import DraftHead, PagedDraftHead
from metal_engine.models.own_caches_model import open_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import CacheConfig
from metal_engine.text.tokenizer import Tokenizer
from tests.support.demo import stepped_engine
from tests.support.running import add_all, drain
from tools.fixtures.architecture_parts import Config
from tools.fixtures.architectures import configuration
from tools.fixtures.fake_engine import VOCAB_SIZE, fake_config, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
from tools.fixtures.tiny_models import random_model, tiny_model


def tiny_reference(
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    architecture: str | Config | None = None,
    dtype: mx.Dtype = mx.float32,
    **config: Any,
) -> nn.Module:
    """Return a model with the weights of :func:`tiny_engine`'s model, for reference outputs.

    Args:
        architecture: see :func:`tiny_engine`.
        config: changes to the configuration of the tiny Llama.
    """
    if architecture is None:
        return tiny_model(seed, dtype, vocab_size=vocab_size, **config)
    own = configuration(architecture) if isinstance(architecture, str) else architecture
    model = random_model(with_vocabulary(own, vocab_size), seed, dtype)
    if dtype != mx.float32:  # a CPU needs quantized experts
        nn.quantize(model, 32, 8, class_predicate=lambda _, module: isinstance(module, SwitchLinear))
    return model


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """Return an architecture's configuration with this vocabulary size."""
    inner = {"text_config": {**config["text_config"], "vocab_size": vocab_size}} if "text_config" in config else {}
    return {**config, "vocab_size": vocab_size, **inner}


def tiny_engine(
    *,
    ahead: bool = False,
    behind: bool = False,
    replay: bool = False,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    architecture: str | Config | None = None,
    dtype: mx.Dtype = mx.float32,
    kv_cache_dtype: str = "auto",
    num_state_slots: int = 0,
    enable_prefix_caching: bool = True,
    make_adapters: Callable[[PagedModel], AdapterRegistry] | None = None,
    draft: nn.Module | None = None,
    make_head: Callable[[nn.Module], DraftHead] | None = None,
    connector: tuple[KVConnectorScheduler, KVConnectorRunner] | None = None,
    **config: Any,
) -> SteppedEngine:
    """Return an engine. ``config`` goes to :func:`tools.fixtures.fake_engine.fake_config`.

    Args:
        behind: dispatch steps in two parts while the previous step runs, as on a GPU. Implies ``ahead``.
        replay: replay decode steps as soon as their sizes are known.
        architecture: name in tools/fixtures/architectures.py, or a configuration. Default: a tiny Llama.
        dtype: type of the weights.
        kv_cache_dtype: type of stored K and V. The Llama's heads are wide enough for quantization if it is not "auto".
        num_state_slots: number of slots for recurrent states.
        make_adapters: installs adapters in the model.
        draft: draft model, for a ``speculative`` configuration with a draft model.
        make_head: makes the draft head of the model, for a ``speculative`` configuration with a head.
        connector: scheduler half and runner half of a connector to a KV store.
    """
    settings = fake_config(**config)
    settings = replace(
        settings,
        scheduler=replace(settings.scheduler, async_scheduling=ahead or behind),
        cache=CacheConfig(
            block_size=settings.cache.block_size,
            num_blocks=settings.cache.num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            num_state_slots=num_state_slots,
            num_padding_blocks=int(replay),
        ),
    )
    wide = {} if kv_cache_dtype == "auto" else {"head_dim": 64}
    reference = tiny_reference(seed, settings.model.vocab_size, architecture, dtype, **wide)
    model = open_paged_model(reference, kv_cache_dtype=kv_cache_dtype)
    settings = replace(settings, model=replace(settings.model, own_caches_reason=model.own_caches_reason))
    adapters = None if make_adapters is None else make_adapters(model)
    drafter: PagedModel | PagedDraftHead | None = None if draft is None else PagedModel(draft)
    if make_head is not None:
        drafter = PagedDraftHead(make_head(model.model), model)
    options = {"connector": connector, "adapters": adapters, "behind": behind, "replay": replay}
    return stepped_engine(settings, model, PortableBackend(), tokenizer or tiny_tokenizer(), drafter, **options)


def run_all(engine: SteppedEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[RequestOutput]]:
    """Return all outputs of requests that run together."""
    add_all(engine, requests)
    outputs = drain(engine)
    return [outputs[str(i)] for i in range(len(requests))]


def run_pooling(
    engine: BuiltEngine | SteppedEngine, requests: list[tuple[list[int], PoolingParams | SamplingParams]]
) -> list[Any]:
    """Return the pooling result or the token ids of each request. All requests run together."""
    core, preparer = engine.core, engine.preparer
    found: list[Any] = []
    for i, (prompt, params) in enumerate(requests):
        is_pooling = isinstance(params, PoolingParams)
        found.append(None if is_pooling else [])
        prepared = preparer.prepare_pooling([prompt], params)[0] if is_pooling else preparer.prepare(prompt, params)
        core.add_request(str(i), prepared)
    while core.has_requests:
        for output in core.step():
            assert output.error is None, output.error
            if output.pooled is None:
                found[int(output.request_id)] += output.token_ids
            else:
                assert output.finish_reason == "stop" and not output.token_ids
                found[int(output.request_id)] = output.pooled
        core.scheduler.check_integrity()
    assert core.scheduler.blocks.num_used_blocks == 0
    return found


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int, caches: Any = None) -> list[int]:
    """Return the greedy output of mlx-lm's own forward pass. Default caches: the caches that mlx-lm makes."""
    caches, tokens, output = caches or make_prompt_cache(model), prompt, []
    for _ in range(num_tokens):
        tokens = [int(mx.argmax(model(mx.array([tokens]), cache=caches)[0, -1]).item())]
        output += tokens
    return output


def reference_logits(model: nn.Module, tokens: list[int]) -> np.ndarray:
    """Return mlx-lm's own logits after each token, [T, V] float64."""
    return np.array(model(mx.array(tokens)[None])[0].astype(mx.float32)).astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

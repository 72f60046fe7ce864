"""Engines whose model runs on the fake GPU: whole ones, with weights that nobody reads.

Imports MLX: :func:`tools.fake_gpu.install` comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes

from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.engine.core import EngineCore
from metal_engine.models.paged_model import PagedModel
from metal_engine.request import PreparedRequest
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import CacheConfig
from tools.fixtures.fake_engine import fake_config, tiny_tokenizer
from tools.fixtures.tiny_models import TINY_LLAMA

# SmolLM2-135M, the demo model.
SMOLLM2: dict[str, Any] = TINY_LLAMA | {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """Answers under way.

    Attributes:
        num_requests: that decode.
        num_layers: of the model.
        num_blocks: of the KV cache, of 16 tokens.
        prompt_len: tokens of a prompt.
        max_tokens: of an answer.
    """

    num_requests: int = 32
    num_layers: int = 30
    num_blocks: int = 8192
    prompt_len: int = 60
    max_tokens: int = 2000
    config: dict[str, Any] | None = None

    @property
    def model(self) -> dict[str, Any]:
        return (self.config or SMOLLM2) | {"num_hidden_layers": self.num_layers}


def make_model(config: dict[str, Any], *, quantized: bool = True) -> nn.Module:
    """The mlx-lm model that ``config`` describes, in 4 bits."""
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if quantized:
        nn.quantize(model, group_size=64, bits=4)
    return model


def make_engine(workload: Workload, *, ahead: bool, replay: bool = False, **runner: Any) -> EngineCore:
    """An engine, with answers under way as ``workload`` says.

    Args:
        ahead: as ``--async-scheduling``.
        replay: whether decode steps are replayed.
        runner: to :class:`ModelRunner`.
    """
    max_model_len = min(workload.prompt_len + workload.max_tokens + BLOCK_SIZE, 8192)
    settings = fake_config(
        num_blocks=workload.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=512,
        max_num_seqs=max(64, workload.num_requests),
        max_model_len=max_model_len,
        vocab_size=workload.model["vocab_size"],
    )
    settings = replace(
        settings,
        scheduler=replace(settings.scheduler, async_scheduling=ahead),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=workload.num_blocks, num_trash_blocks=int(replay)),
    )
    model = PagedModel(make_model(workload.model))
    made = ModelRunner(model, MetalBackend(), settings.scheduler, settings.cache, **runner)
    engine = EngineCore(settings, made, tiny_tokenizer())
    for i in range(workload.num_requests):
        engine.add_request(str(i), prepare(engine, workload, i))
    while any(request.num_output_tokens < 3 for request in engine.scheduler.requests.values()):
        engine.step()
    return engine


def prepare(engine: EngineCore, workload: Workload, number: int) -> PreparedRequest:
    """A request of the workload, prepared; prompts differ in length."""
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True)
    return engine.prepare([1] * (workload.prompt_len + number % 17), params)

"""Whole engines whose model runs on the fake GPU, with arbitrary weights.

Imports MLX, so :func:`tools.fake_gpu.install` must be called first.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.models.draft_head import PagedDraftHead, new_head
from metal_engine.models.paged_model import PagedModel
from metal_engine.recurrence.metal import MetalRecurrence
from metal_engine.request import PreparedRequest
from metal_engine.runner.head_drafter import HeadDrafter
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import CacheConfig
from tools.fixtures.architecture_parts import BASE
from tools.fixtures.fake_engine import fake_config, tiny_tokenizer
from tools.fixtures.stepped_engine import SteppedEngine
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
# Layers of Qwen3.5-0.8B: gated delta nets, and attention in every fourth layer.
HYBRID: dict[str, Any] = {
    **BASE,
    "model_type": "qwen3_next",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "head_dim": 256,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
    "norm_topk_prob": True,
}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """Requests in decode.

    Attributes:
        num_requests: number of requests.
        num_layers: number of layers of the model.
        num_blocks: number of blocks of 16 tokens in the KV cache.
        prompt_len: number of tokens of a prompt.
        max_tokens: number of output tokens of a request.
        config: configuration of the model. Default: the demo model's.
        prefix_caching: True to cache the KV blocks, and the recurrent states at the ends of blocks, for later prompts.
    """

    num_requests: int = 32
    num_layers: int = 30
    num_blocks: int = 8192
    prompt_len: int = 60
    max_tokens: int = 2000
    config: dict[str, Any] | None = None
    prefix_caching: bool = False

    @property
    def model(self) -> dict[str, Any]:
        return (self.config or SMOLLM2) | {"num_hidden_layers": self.num_layers}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, help="number of layers of the model (default: 30, or 24 with --hybrid)")
    parser.add_argument("--hybrid", action="store_true", help="use a model in which most layers are recurrent")
    parser.add_argument("--enable-prefix-caching", action="store_true", help="cache prefixes for later prompts")


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the workload for ``--requests`` and the arguments of the model."""
    config = HYBRID if args.hybrid else SMOLLM2
    layers = args.layers or config["num_hidden_layers"]
    return Workload(
        num_requests=args.requests, num_layers=layers, config=config, prefix_caching=args.enable_prefix_caching
    )


def make_model(config: dict[str, Any], *, quantized: bool = True) -> nn.Module:
    """Return the mlx-lm model of a configuration, quantized to 4 bits unless ``quantized`` is False."""
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if quantized:
        nn.quantize(model, group_size=64, bits=4)
    return model


def paged_model(model: nn.Module) -> PagedModel:
    """Return a model behind the paged cache, with a Mac's kernels.

    PagedModel compares numbers to find the arrays that a recurrent layer's convolutions store. The fake GPU computes no
    numbers, so arrays of the same shape are treated as equal.
    """
    array_equal = mx.array_equal
    mx.array_equal = lambda a, b: mx.array(a.shape == b.shape)  # type: ignore[assignment, misc]
    try:
        return PagedModel(model, recurrence=MetalRecurrence())
    finally:
        mx.array_equal = array_equal


def make_engine(
    workload: Workload, *, ahead: bool, replay: bool = False, has_head: bool = False, **runner: Any
) -> SteppedEngine:
    """Return an engine with the workload's requests in decode.

    Args:
        ahead: value of ``--async-scheduling``.
        replay: True to replay decode steps.
        has_head: True to give the model a draft head. The head processes the tokens of every step. It makes no drafts.
        runner: arguments of :class:`ModelRunner`.
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
    model = paged_model(make_model(workload.model))
    settings = replace(
        settings,
        scheduler=replace(settings.scheduler, async_scheduling=ahead),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=workload.num_blocks,
            num_padding_blocks=int(replay),
            enable_prefix_caching=workload.prefix_caching,
            num_state_slots=3 * settings.scheduler.max_num_seqs if model.pool.is_recurrent else 0,
        ),
    )
    backend = MetalBackend()
    if has_head:
        model.hidden_problem = None  # found by comparing numbers, which the fake GPU does not compute
        quantized_head = new_head(model.model)
        nn.quantize(quantized_head, group_size=64, bits=4)
        head = PagedDraftHead(quantized_head, model)
        runner["drafter"] = HeadDrafter(head, model.pool, backend, settings.cache)
    made = ModelRunner(model, backend, settings.scheduler, settings.cache, **runner)
    engine = SteppedEngine(settings, made, tiny_tokenizer())
    for i in range(workload.num_requests):
        engine.add_request(str(i), prepare(engine, workload, i))
    while any(request.num_output_tokens < 3 for request in engine.scheduler.requests.values()):
        engine.step()
    return engine


def prepare(engine: SteppedEngine, workload: Workload, number: int) -> PreparedRequest:
    """Prepare a request of the workload. Prompts differ in length."""
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True)
    return engine.prepare([1] * (workload.prompt_len + number % 17), params)

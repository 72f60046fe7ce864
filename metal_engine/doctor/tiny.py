"""Runs a model of a few kilobytes with random weights from end to end, which takes no download and no time."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from metal_engine.attention.portable.backend import MlxOpsBackend
from metal_engine.device.info import device_info
from metal_engine.engine.core import EngineCore
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.models.check import check_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.sampling_params import SamplingParams
from metal_engine.settings.config import CacheConfig, EngineConfig, ModelInfo, SchedulerConfig

_VOCAB_SIZE = 256
_PROMPTS = ("one packed step", "metal", "a longer prompt that is computed in several chunks beside the others")
_MAX_TOKENS = 8


def check_tiny_model() -> str:
    """Generate for several prompts at once, in chunks, and compare with mlx-lm's own forward; returns what was done.

    Raises:
        RuntimeError: an output differs, or a step failed.
    """
    model = _tiny_llama()
    tokenizer = _byte_tokenizer()
    prompts = [tokenizer.encode(prompt) for prompt in _PROMPTS]
    expected = [_greedy(model, prompt) for prompt in prompts]  # before the model is changed for paging
    backend = MlxOpsBackend()
    paged = PagedModel(model)
    check_paged_model(paged, backend, _VOCAB_SIZE)
    config = _config(paged)
    engine = EngineCore(config, ModelRunner(paged, backend, config.scheduler, config.cache), tokenizer)
    try:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, ignore_eos=True)
            engine.add_request(str(i), engine.prepare(prompt, params))
        outputs: list[list[int]] = [[] for _ in prompts]
        while engine.has_requests:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                outputs[int(output.request_id)] += output.token_ids
    finally:
        engine.close()
    if outputs != expected:
        raise RuntimeError(f"generated {outputs}, but mlx-lm {expected}")
    return f"{len(prompts)} requests in {engine.num_steps} packed steps equal mlx-lm's own output"


def _tiny_llama() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": _VOCAB_SIZE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **sizes, **heads)
    mx.random.seed(0)
    model = llama.Model(args)
    # Initial weights make the logits nearly flat. Scaled, their order does not depend on rounding.
    model.update(tree_map(lambda a: a * 3 if a.ndim > 1 else a, model.parameters()))
    mx.eval(model.parameters())
    return model


def _byte_tokenizer() -> Tokenizer:
    vocabulary = {ch: i for i, ch in enumerate(sorted(ByteLevel.alphabet()))}
    backend = BackendTokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def _greedy(model: nn.Module, prompt: list[int]) -> list[int]:
    cache = make_prompt_cache(model)
    tokens = mx.array([prompt])
    output: list[int] = []
    for _ in range(_MAX_TOKENS):
        token = mx.argmax(model(tokens, cache=cache)[0, -1])
        output += np.array(token).reshape(1).tolist()
        tokens = token.reshape(1, 1)
    return output


def _config(paged: PagedModel) -> EngineConfig:
    cache = CacheConfig(block_size=8, num_blocks=64)
    return EngineConfig(
        model=ModelInfo(
            name="tiny",
            model_type="llama",
            dtype="float32",
            vocab_size=_VOCAB_SIZE,
            num_layers=len(paged.pool.states),
            num_params=0,
            weight_bytes=0,
            kv_bytes_per_token=paged.pool.bytes_per_token,
            max_position_embeddings=256,
        ),
        device=device_info(),
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=4, max_model_len=256),
        cache=cache,
        attention_backend="mlx",
        seed=0,
    )

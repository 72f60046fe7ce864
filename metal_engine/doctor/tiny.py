"""Tests the whole engine with a model of half a megabyte with random weights. Needs no download, and little time."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from metal_engine.bench.offline import run_requests
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.loading.build import build_engine
from metal_engine.settings.args import EngineArgs

_VOCAB_SIZE = 256
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # a multiple of the group size of quantized KV
    "rms_norm_eps": 1e-5,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 256,
}
_PROMPTS = ("one packed step", "metal", "a longer prompt that is computed in several chunks beside the others")
_MAX_TOKENS = 8


def check_tiny_model() -> str:
    """Generate for a batch of prompts, in chunks, and compare the outputs with the outputs of mlx-lm's forward pass.

    Returns:
        Description of the test.

    Raises:
        RuntimeError: an output differs, or a request failed.
    """
    model = _tiny_llama()
    engine = _tiny_engine(model)
    prompts = [engine.preparer.tokenizer.encode(prompt) for prompt in _PROMPTS]
    expected = [_greedy(model, prompt) for prompt in prompts]
    outputs = _generate(engine, prompts)
    if outputs != expected:
        raise RuntimeError(f"generated {outputs}, but mlx-lm generates {expected}")
    return f"{len(prompts)} requests in {engine.core.num_steps} packed steps equal mlx-lm's own output"


def check_quantized_kv(kv_cache_dtype: str) -> str:
    """Load the tiny model with quantized KV, and generate. The load compares the model's logits with mlx-lm's.

    Returns:
        Description of the test.

    Raises:
        UnsupportedModelError: logits differ.
        RuntimeError: a request failed.
    """
    engine = _tiny_engine(_tiny_llama(), kv_cache_dtype)
    _generate(engine, [engine.preparer.tokenizer.encode(prompt) for prompt in _PROMPTS])
    config = engine.core.config
    model = config.model
    share = model.kv_bytes_per_token / (model.unquantized_kv_bytes_per_token or 1)
    return f"{model.kv_dtype} at {share:.0%} of float32's size, attention by {config.attention}"


def _tiny_engine(model: nn.Module, kv_cache_dtype: str = "auto") -> BuiltEngine:
    with tempfile.TemporaryDirectory() as folder:
        _write_checkpoint(Path(folder), model)
        return build_engine(
            EngineArgs(
                model=folder,
                dtype="float32",
                kv_cache_dtype=kv_cache_dtype,
                attention_tuning="never",
                attention_backend="mlx" if kv_cache_dtype == "auto" else "auto",
                block_size=8,
                num_gpu_blocks_override=64,
                max_num_batched_tokens=24,  # splits prompts into chunks
                max_num_seqs=4,
            )
        )


def _generate(engine: BuiltEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the output tokens of all prompts, and close the engine."""
    try:
        return run_requests(engine, prompts, [_MAX_TOKENS] * len(prompts)).token_ids
    finally:
        engine.close()


def _tiny_llama() -> nn.Module:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(_CONFIG))
    # The initial weights make the logits nearly flat. Scaled weights make their order independent of rounding.
    model.update(tree_map(lambda a: a * 3 if a.ndim > 1 else a, model.parameters()))
    mx.eval(model.parameters())
    return model


def _write_checkpoint(folder: Path, model: nn.Module) -> None:
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    vocabulary = {ch: i for i, ch in enumerate(sorted(ByteLevel.alphabet()))}
    backend = BackendTokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def _greedy(model: nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(_MAX_TOKENS):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    return tokens[len(prompt) :]

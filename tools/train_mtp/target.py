"""The target model: loading it, and its hidden states over packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from transformers import PreTrainedTokenizerFast

from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids, load_gguf_tokenizer
from tools.train_mtp.documents import PackedRows


@dataclass(frozen=True)
class Target:
    """A Llama-like model in float32.

    Attributes:
        model: mlx-lm model with dense weights.
        path: its GGUF file.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    path: Path


def load_target(path: Path) -> Target:
    """Load a GGUF file. Raises SystemExit if it does not exist or is not a Llama; ModelLoadError if it is damaged."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: name a GGUF file with --model, or fetch the demo model")
    model, config = load_gguf_model(path, mx.float32, dequantize=True)
    if config["model_type"] != "llama":
        raise SystemExit(f"{path} has the architecture {config['model_type']}; only llama is supported")
    eos_token_ids = frozenset(gguf_eos_token_ids(read_gguf_header(path)))
    return Target(model, load_gguf_tokenizer(path), eos_token_ids, path)


def head_weight(model: nn.Module) -> mx.array:
    """Return the weight of the model's LM head, [V, H]."""
    return (model.model.embed_tokens if model.args.tie_word_embeddings else model.lm_head).weight


def hidden_rows(model: nn.Module, token_ids: mx.array, segments: mx.array) -> mx.array:
    """Return the hidden states after the final norm, [B, L, H]. Documents of a row do not attend to each other."""
    slots = mx.arange(token_ids.shape[1])
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) & (slots[:, None] >= slots)
    hidden = model.model.embed_tokens(token_ids)
    for layer in model.model.layers:
        hidden = layer(hidden, mask, None)
    return model.model.norm(hidden)


def hidden_of_all(model: nn.Module, rows: PackedRows, rows_per_batch: int, dtype: mx.Dtype) -> mx.array:
    """Return the hidden states of all rows, [R, L, H], computed in batches of ``rows_per_batch`` rows."""
    parts = []
    for start in range(0, len(rows), rows_per_batch):
        batch = slice(start, start + rows_per_batch)
        parts.append(hidden_rows(model, mx.array(rows.token_ids[batch]), mx.array(rows.segments[batch])).astype(dtype))
        mx.eval(parts[-1])
    return mx.concatenate(parts)

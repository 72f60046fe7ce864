"""Tiny GGUF files written with PyPI's ``gguf``, and the mlx-lm models that loading them must give."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from mlx.utils import tree_flatten

F32 = GGMLQuantizationType.F32
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def tiny_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """Return a Hugging Face configuration with two layers, in which the length of every row is a multiple of 32."""
    config = {
        "model_type": architecture,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # qwen3 has its own head size. Other models derive the head size from hidden_size.
        "head_dim": 32 if architecture == "qwen3" else 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 160,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
    }
    return {**config, **changes}


def build(config: dict[str, Any]) -> nn.Module:
    """Return mlx-lm's own model with random weights."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 parameters in Hugging Face's names and layout. Norms and biases are random too."""
    generator = np.random.default_rng(seed)
    shapes = {name: array.shape for name, array in tree_flatten(build(config).parameters())}
    weights = {}
    for name, shape in shapes.items():
        array = generator.standard_normal(shape).astype(np.float32)
        # Matrices keep activations of order 1, so that attention is neither flat nor one-hot.
        weights[name] = array / np.float32(np.sqrt(shape[1])) if len(shape) == 2 else 1 + array / 4
    return weights


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute q and k of llama as llama.cpp's converter does: rows i and head_dim / 2 + i become adjacent."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@dataclass
class GgufFile:
    """Contents of a GGUF file to be written.

    Attributes:
        config: Hugging Face configuration.
        weights: float32 weights in Hugging Face's names and layout.
        type_of: returns the storage type of a matrix for its GGUF name.
        prepare: adds metadata or tensors to the writer, or removes them.
    """

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    type_of: Callable[[str], GGMLQuantizationType] = lambda name: F32
    prepare: Callable[[GGUFWriter], None] = lambda writer: None
    stored: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write the file. Sets ``stored`` to the weights after quantization, in Hugging Face's layout."""
        architecture = self.config["model_type"]
        writer = GGUFWriter(path, architecture)
        self._add_metadata(writer)
        enum = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(enum, self.config["num_hidden_layers"])
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        for name, array in self.weights.items():
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            kind = self.type_of(target) if array.ndim == 2 else F32
            self.stored[name] = quants.dequantize(quants.quantize(array, kind), kind)
            module = name.split(".")[-2]
            rows = array
            if architecture == "llama" and module in heads:
                rows = interleave(array, heads[module])
            writer.add_tensor(target, quants.quantize(rows, kind), raw_dtype=kind)
        self.prepare(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add_metadata(self, writer: GGUFWriter) -> None:
        config = self.config
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])

    def reference(self) -> nn.Module:
        """Return mlx-lm's model with the weights stored in the file, in Hugging Face's layout."""
        model = build(self.config)
        model.load_weights([(name, mx.array(array)) for name, array in self.stored.items()])
        return model


def logits(model: nn.Module, length: int = 24) -> np.ndarray:
    """Return float32 logits [length, vocab] for a fixed prompt."""
    ids = np.random.default_rng(7).integers(0, 160, length)
    return np.array(model(mx.array(ids)[None])[0].astype(mx.float32))

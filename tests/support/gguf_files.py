"""GGUF files of tests, and the mlx-lm models that loading them must give."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGUFWriter
from mlx_lm.utils import dequantize_model, load_model


def finish(writer: GGUFWriter, path: Path) -> Path:
    """Write and close a file. Return its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mlx_lm_model(folder: Path) -> nn.Module:
    """Load a Hugging Face folder with mlx-lm, in float32."""
    model, config = load_model(folder)
    if config.get("quantization"):
        model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


def last_logits(model: nn.Module, token_ids: list[int]) -> np.ndarray:
    """Return the logits after the last token, float32 [V]."""
    return np.array(model(mx.array([token_ids]))[0, -1].astype(mx.float32))

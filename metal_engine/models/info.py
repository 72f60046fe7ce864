"""The facts about a loaded model that the control plane needs."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from metal_engine.checkpoints.loader import LoadedModel
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.config import ModelInfo

# Where configurations state the longest sequence.
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


def model_info(loaded: LoadedModel, paged: PagedModel) -> ModelInfo:
    """The facts about a loaded model that the control plane needs."""
    config = loaded.config
    text_config = config.get("text_config", config)
    flat = cast(list[tuple[str, mx.array]], tree_flatten(loaded.model.parameters()))
    parameters = [array for _, array in flat]
    dtypes = {array.dtype for array in parameters if mx.issubdtype(array.dtype, mx.floating)}
    num_heads = text_config.get("num_attention_heads") or 1
    return ModelInfo(
        name=loaded.name,
        model_type=config["model_type"],
        dtype=", ".join(sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)),
        vocab_size=paged.vocab_size,
        num_layers=len(paged.pool.states),
        num_params=get_total_parameters(loaded.model),
        weight_bytes=sum(array.nbytes for array in parameters),
        kv_bytes_per_token=paged.pool.bytes_per_token,
        max_position_embeddings=_context_length(text_config, loaded.model),
        num_heads=num_heads,
        head_dim=text_config.get("head_dim") or text_config.get("hidden_size", 0) // num_heads or 1,
        default_sampling=loaded.default_sampling,
        hidden_size=text_config.get("hidden_size") or 0,
        pooler=loaded.pooler,
        reranker=loaded.reranker,
        can_generate=loaded.can_generate,
    )


def _context_length(text_config: dict[str, Any], model: nn.Module) -> int | None:
    """As the configuration says, or as the architecture assumes where it does not."""
    args = getattr(model, "args", None)
    for source in (text_config, getattr(args, "text_config", None), args):
        values = source if isinstance(source, dict) else vars(source) if source is not None else {}
        for key in _CONTEXT:
            if values.get(key):
                return int(values[key])
    return None

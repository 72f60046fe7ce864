"""Collects the facts about a model that the control plane needs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters

from metal_engine.checkpoints.loader import Divide, LoadedModel
from metal_engine.checkpoints.metadata import context_length
from metal_engine.checkpoints.model_classes import model_classes
from metal_engine.checkpoints.requirements import CheckpointRequirements
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.state import IndexState
from metal_engine.models.own_caches_model import open_paged_model
from metal_engine.models.paged_model import PagedModel
from metal_engine.settings.config import ModelInfo

logger = logging.getLogger(__name__)

# Architectures whose recurrent layers, in mlx-lm, compute an array of the states after every token of a step.
_STATES_OF_ALL_TOKENS = {"jamba"}


def model_info(loaded: LoadedModel, paged: PagedModel) -> ModelInfo:
    """Return the facts about a loaded model that the control plane needs."""
    flat = cast(list[tuple[str, mx.array]], tree_flatten(loaded.model.parameters()))
    parameters = [array for _, array in flat]
    dtypes = {array.dtype for array in parameters if mx.issubdtype(array.dtype, mx.floating)}
    return _info(
        loaded.name,
        loaded.config,
        paged,
        dtype=", ".join(sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)),
        num_params=get_total_parameters(loaded.model),
        weight_bytes=sum(array.nbytes for array in parameters),
        default_sampling=loaded.default_sampling,
        pooler=replace(loaded.pooler, problem=loaded.pooler.problem or paged.hidden_problem),
        reranker=loaded.reranker,
        can_generate=loaded.can_generate,
    )


def expected_model_info(
    name: str, requirements: CheckpointRequirements, kv_cache_dtype: str = "auto", divide: Divide | None = None
) -> ModelInfo | None:
    """Return the facts about a model before its weights are loaded, such as the size of its KV per token.

    The model is created with weights that are never computed, and is inspected like a loaded model.

    Args:
        name: name of the model.
        requirements: requirements of the checkpoint.
        kv_cache_dtype: type of stored keys and values, as in ``--kv-cache-dtype``.
        divide: reduces a model to this rank's shard; None if there is only one rank.

    Returns:
        The facts. None if the checkpoint has its own code, or if creating or running the model without its weights
        fails. A load of the model will report the failure.

    Raises:
        UnsupportedModelError: a layer has an unsupported kind of state, mlx-lm's functions cannot be replaced, or
            ``divide`` raises it.
        ConfigError: the keys and values cannot be stored in ``kv_cache_dtype``.
    """
    config = requirements.config
    if config.get("model_file") is not None:  # the checkpoint's code is not present yet, or must not run
        return None
    try:
        model_class, args_class = model_classes(config)
        model = model_class(args_class.from_dict(config))
        model.set_dtype(getattr(mx, requirements.dtype))
    except Exception as error:  # loading the model will report the problem in better words
        logger.debug("no sketch of %s", name, exc_info=error)
        return None
    num_whole = get_total_parameters(model)
    if divide is not None:
        divide(model)
    weight_bytes = requirements.weight_bytes * get_total_parameters(model) // num_whole
    try:
        paged = open_paged_model(model, kv_cache_dtype=kv_cache_dtype, is_sketch=True)
    except UnsupportedModelError as error:
        if error.__cause__ is None:
            raise
        # Loading the model will report the problem: the files may not match each other.
        logger.debug("no sketch of %s", name, exc_info=error)
        return None
    return _info(
        name, config, paged, dtype=requirements.dtype, num_params=requirements.num_params, weight_bytes=weight_bytes
    )


def _info(name: str, config: dict[str, Any], paged: PagedModel, **more: Any) -> ModelInfo:
    text_config = config.get("text_config") or config
    num_heads = text_config.get("num_attention_heads") or 1
    return ModelInfo(
        name=name,
        model_type=config["model_type"],
        vocab_size=paged.vocab_size,
        num_layers=_num_layers(paged),
        kv_dtype=paged.pool.kv_dtype,
        kv_bytes_per_token=paged.pool.bytes_per_token,
        unquantized_kv_bytes_per_token=paged.pool.unquantized_bytes_per_token,
        state_bytes_per_request=paged.pool.bytes_per_request,
        has_index=paged.pool.has_index,
        own_caches_reason=paged.own_caches_reason,
        max_position_embeddings=_context_length(text_config, paged.model),
        num_heads=num_heads,
        head_dim=text_config.get("head_dim") or text_config.get("hidden_size", 0) // num_heads or 1,
        hidden_size=text_config.get("hidden_size") or 0,
        layer_width=_layer_width(config["model_type"], text_config, paged),
        **more,
    )


def _num_layers(paged: PagedModel) -> int:
    """Return the number of layers with a state. A layer's index does not count as a layer."""
    if paged.own_caches_reason:
        return len(make_prompt_cache(paged.model))
    return sum(not isinstance(state, IndexState) for state in paged.pool.states)


def _layer_width(model_type: str, text_config: dict[str, Any], paged: PagedModel) -> int:
    """Return the largest number of values per token that a layer computes at once, to estimate a step's memory.

    This is the number of outputs of the widest matrix, without convolutions and matrices with one output per vocabulary
    token. The outputs of stacked experts are multiplied by the number of active experts, or by the number of all
    experts if the active ones are unknown. If layers compute an array of the recurrent states of all tokens (Jamba),
    the result is at least the size of a state.
    """
    num_experts = text_config.get("num_experts_per_tok") or text_config.get("top_k_experts") or 1 << 30
    convolutions = {name for name, module in paged.model.named_modules() if isinstance(module, nn.Conv1d)}
    widths = [0]
    for name, array in cast(list[tuple[str, mx.array]], tree_flatten(paged.model.parameters())):
        if model_type in _STATES_OF_ALL_TOKENS and name.endswith(".A_log"):
            widths.append(array.size)
        elif array.ndim > 1 and array.shape[0] != paged.vocab_size and name.rpartition(".")[0] not in convolutions:
            widths.append(array.shape[-2] * (min(array.shape[0], num_experts) if array.ndim == 3 else 1))
    return max(widths)


def _context_length(text_config: dict[str, Any], model: nn.Module) -> int | None:
    """Return the context length in the configuration, or the architecture's default. None if both are missing."""
    args = getattr(model, "args", None)
    for source in (text_config, getattr(args, "text_config", None), args):
        values = source if isinstance(source, dict) else vars(source) if source is not None else {}
        if (length := context_length(values)) is not None:
            return length
    return None

"""Wires an engine: model, backend, runner, configuration. What the command line and :class:`LLM` share."""

from __future__ import annotations

import logging

from metal_engine.config import EngineArgs, resolve_config
from metal_engine.engine.core import EngineCore
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.platform.blas import load_optimized_blas

logger = logging.getLogger(__name__)


def build_engine(args: EngineArgs) -> EngineCore:
    """Load a model and make an engine for it, in the thread that will step it.

    Raises:
        ModelLoadError: the model cannot be loaded or run.
        ConfigError: the settings cannot work.
    """
    blas = load_optimized_blas()
    # MLX is imported below this line only: the BLAS has no effect once it is loaded.
    import mlx.core as mx

    from metal_engine.attention.choice import choose_backend
    from metal_engine.attention.metal import UnsupportedAttentionError
    from metal_engine.models import loader
    from metal_engine.models.check import check_paged_model
    from metal_engine.models.errors import UnsupportedModelError
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.platform.device import device_info
    from metal_engine.runner.model_runner import ModelRunner

    backend = choose_backend(args.attention_backend, args.block_size)
    mx.random.seed(args.seed)
    loaded = loader.load(args, device_info(blas))
    try:
        paged = PagedModel(loaded.model)
        info = loader.model_info(loaded, paged)
        check_paged_model(paged, backend, info.vocab_size)
    except (UnsupportedModelError, UnsupportedAttentionError) as error:
        model_type = loaded.config.get("model_type")
        raise UnsupportedModelError(
            f"{args.model} (architecture {model_type}) cannot run here: {error}"
        ) from error
    config = resolve_config(args, info, device_info(blas), backend.name)
    runner = ModelRunner(paged, backend, config.scheduler, config.cache)
    logger.info(
        "%s: %s, %s, %.0f MB of weights; KV cache %d blocks of %d tokens (%.0f MB); %d tokens a step; %s",
        info.name,
        info.model_type,
        info.dtype,
        info.weight_bytes / 1e6,
        config.cache.num_blocks,
        config.cache.block_size,
        config.cache.num_tokens * info.kv_bytes_per_token / 1e6,
        config.scheduler.max_num_batched_tokens,
        config.device.compute,
    )
    return EngineCore(config, runner, Tokenizer(loaded.tokenizer, loaded.eos_token_ids))

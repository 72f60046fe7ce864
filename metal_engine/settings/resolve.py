"""Converts the user's settings to the engine's configuration: replaces every "auto" by a value.

The facts about the loaded model and the device are plain data, so this module imports no code of models or devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from metal_engine.errors import ConfigError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import (
    NO_REPLAY_WITH_INDEX,
    NO_REPLAY_WITHOUT_KERNEL,
    OWN_CACHES,
    REPLAYS,
    AttentionLayers,
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    ModelInfo,
    SchedulerConfig,
    SpeculativeConfig,
    VisionConfig,
)
from metal_engine.settings.lora_args import MODULES as LORA_MODULES
from metal_engine.settings.pool_size import affordable_states, pool_flag, pool_size, requested_context_length
from metal_engine.settings.speculative import speculative_config

# A step on a CPU should take at most about a second. Two laptop-class cores reach about this rate.
_CPU_FLOPS = 1.5e11
_CPU_STEP_SECONDS = 1.0
# Maximum time of attention in a step, and the rates that convert it to pairs of a query row and a key:
# seconds for one pair in one head of one layer on such a CPU, and FLOP/s that even a small GPU reaches.
_ATTENTION_SECONDS = 1.0
_CPU_SECONDS_PER_SCORE = 10e-9
_GPU_ATTENTION_FLOPS = 2e12
_NO_LAYERS = AttentionLayers()
# Smallest default of --max-num-encoder-tokens. Number of image tokens whose features are kept, as a multiple of
# --max-num-encoder-tokens.
_MIN_ENCODER_TOKENS, _KEPT_IMAGES = 2048, 4


def resolve_config(
    args: EngineArgs,
    model: ModelInfo,
    device: DeviceInfo,
    attention_backend: str,
    measure_step: Callable[[int, int], int] = lambda num_tokens, num_seqs: 0,
    attention_layers: AttentionLayers = _NO_LAYERS,
    draft: ModelInfo | None = None,
    measure_image: Callable[[int], int] = lambda num_tokens: 0,
) -> EngineConfig:
    """Replace every "auto" by a value for this model and device.

    Args:
        attention_backend: name of the attention backend.
        measure_step: function that runs a step with given numbers of tokens and of rows that sample. Returns the memory
            that the step takes in addition to weights and KV cache, in bytes.
        attention_layers: numbers of layers by the code that computes their attention.
        draft: draft model or draft head of ``--speculative-config``; None without one.
        measure_image: function that encodes an image with the given number of tokens, and returns the memory for the
            encoding in bytes. Called only if the model takes images.

    Raises:
        ConfigError: the settings conflict. The message names the flag to change.
    """
    args = _for_model(args, model)
    scheduler = _scheduler(args, model, device, draft)
    max_num_seqs = scheduler.max_num_seqs
    began = time.monotonic()
    step_bytes = measure_step(scheduler.max_num_batched_tokens, scheduler.max_sample_rows)
    step_seconds = time.monotonic() - began
    image_bytes = scheduler.image_cache_tokens * model.feature_bytes
    if scheduler.max_num_encoder_tokens:
        image_bytes += measure_image(scheduler.max_num_encoder_tokens)
    replay = _replay(args, attention_backend, attention_layers, model)
    num_padding_blocks = int(replay == REPLAYS)
    pool = pool_size(
        args, _with_draft(model, draft), device, max_num_seqs, step_bytes + image_bytes, num_padding_blocks
    )
    cache = CacheConfig(
        block_size=args.block_size,
        num_blocks=pool.num_blocks,
        enable_prefix_caching=args.enable_prefix_caching,
        model_fingerprint=_fingerprint(args, model),
        num_state_slots=pool.num_state_slots,
        kv_available_bytes=pool.kv_available_bytes,
        num_padding_blocks=num_padding_blocks,
    )
    return EngineConfig(
        model=model,
        device=device,
        scheduler=replace(scheduler, max_model_len=_max_model_len(args, model, cache)),
        cache=cache,
        attention_backend=attention_backend,
        attention_layers=attention_layers,
        seed=args.seed,
        step_bytes=step_bytes,
        image_bytes=image_bytes,
        step_seconds=step_seconds,
        draft=draft,
        replay=replay,
        wire_memory=args.wire_memory,
    )


@dataclass(frozen=True)
class ExpectedSizes:
    """Sizes that are known before the weights are read.

    Attributes:
        kv_bytes: size of the KV cache in bytes, including padding blocks and the slots of recurrent states.
        kept_image_bytes: size of the kept features of images in bytes.
        num_tokens: number of tokens in the largest step.
        num_rows: number of rows of the largest step that sample.
        encoder_tokens: number of tokens of the largest image; 0 if images are refused.
    """

    kv_bytes: int
    kept_image_bytes: int
    num_tokens: int
    num_rows: int
    encoder_tokens: int


def expected_sizes(args: EngineArgs, model: ModelInfo, device: DeviceInfo) -> ExpectedSizes:
    """Return sizes that are known before the weights are read, for a model without a draft model.

    The memory of a step is not subtracted from ``kv_bytes``. On a GPU, the final KV cache is therefore smaller.

    Raises:
        ConfigError: as :func:`resolve_config`.
    """
    args = _for_model(args, model)
    scheduler = _scheduler(args, model, device, None)
    attention_backend = "mlx" if device.kind == "cpu" else "metal"  # the backend that needs more memory
    num_padding_blocks = int(_replay(args, attention_backend, _NO_LAYERS, model) == REPLAYS)
    pool = pool_size(args, model, device, scheduler.max_num_seqs, 0, num_padding_blocks)
    kv_bytes = (pool.num_blocks + num_padding_blocks) * args.block_size * model.kv_bytes_per_token
    kv_bytes += pool.num_state_slots * model.state_bytes_per_request
    return ExpectedSizes(
        kv_bytes,
        scheduler.image_cache_tokens * model.feature_bytes,
        scheduler.max_num_batched_tokens,
        scheduler.max_sample_rows,
        scheduler.max_num_encoder_tokens,
    )


def _for_model(args: EngineArgs, model: ModelInfo) -> EngineArgs:
    """Return the settings for a model. They disable the prefix cache if the model runs over mlx-lm's own caches.

    Raises:
        ConfigError: the model runs over mlx-lm's own caches, and a setting needs packed steps.
    """
    if not model.own_caches_reason:
        return args
    needs_packed_steps = {
        "--speculative-config": args.speculative_config is not None,
        "--kv-cache-dir": args.kv_cache_dir is not None,
        "--kv-transfer-config": args.kv_transfer_config is not None,
        "--kv-cache-dtype": args.kv_cache_dtype != "auto",
        args.ranks_flag: args.num_ranks > 1,
        LORA_MODULES if args.adapters else "--enable-lora": args.has_adapters,
    }
    for flag, is_used in needs_packed_steps.items():
        if is_used:
            runs = f"run {OWN_CACHES} ({model.own_caches_reason})"
            raise ConfigError(flag, f"does not work with {model.name}, whose requests {runs}; remove it")
    return replace(args, enable_prefix_caching=False)


def too_small_for_images(
    args: EngineArgs, vision: VisionConfig, model: ModelInfo | None, device: DeviceInfo
) -> str | None:
    """Return the reason why the settings leave no room for any image; None if there is room.

    Args:
        model: facts about the model. None: the room in a step is not checked.

    Raises:
        ConfigError: ``--max-num-encoder-tokens`` is less than the tokens of the smallest image, or a setting is refused
            as in :func:`resolve_config`.
    """
    least = vision.least_image_tokens
    most = args.max_num_encoder_tokens
    if most is not None and most < least:
        raise ConfigError("--max-num-encoder-tokens", f"{most} is less than the {least} tokens of the smallest image")
    needs = f"an image has at least {least} tokens"
    if args.max_model_len is not None and least >= args.max_model_len:
        return f"{needs}, but --max-model-len is {args.max_model_len}; raise it"
    if not vision.bidirectional_layers or model is None:
        return None
    scheduler = _scheduler(args, replace(model, image_refusal=None, vision=vision), device, None)
    room = scheduler.room_for_image(args.block_size)
    if least <= room:
        return None
    return (
        f"{needs}, which one step must compute, but a step has only {max(room, 0)} tokens for it beside the decodes of "
        f"{scheduler.max_num_seqs - 1} requests; raise --max-num-batched-tokens or lower --max-num-seqs"
    )


def _scheduler(args: EngineArgs, model: ModelInfo, device: DeviceInfo, draft: ModelInfo | None) -> SchedulerConfig:
    budget = args.max_num_batched_tokens or max(args.max_num_seqs or 0, _step_budget(model, device))
    most = min(budget, 64 if device.kind == "cpu" else 256)
    max_num_seqs = args.max_num_seqs or min(most, affordable_states(args, model, device))
    uncut_tokens = _uncut_tokens(args, model)
    if args.max_num_batched_tokens is None:
        budget = max(budget, max_num_seqs + uncut_tokens)
    elif args.max_num_seqs is None and budget > uncut_tokens:
        max_num_seqs = min(max_num_seqs, budget - uncut_tokens)
    if budget < max_num_seqs:
        raise ConfigError(
            "--max-num-batched-tokens",
            f"{budget} is less than --max-num-seqs {max_num_seqs}: decodes could take all "
            f"tokens of every step, so that prompts would wait until requests end",
        )
    if args.page_aligned_scheduling and budget < max_num_seqs + args.block_size:
        raise ConfigError(
            "--page-aligned-scheduling",
            f"needs --max-num-batched-tokens of at least --max-num-seqs + --block-size "
            f"({max_num_seqs} + {args.block_size}), got {budget}: decodes could always leave less than a "
            "block, so that prompts would starve",
        )
    encoder_tokens = 0
    if model.image_refusal is None:
        encoder_tokens = args.max_num_encoder_tokens or max(budget, _MIN_ENCODER_TOKENS)
    return SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=0,  # set by resolve_config(), which knows the size of the pool
        max_num_partial_prefills=args.max_num_partial_prefills,
        max_long_partial_prefills=args.max_long_partial_prefills,
        long_prefill_token_threshold=args.long_prefill_token_threshold or _long_threshold(args, budget),
        page_aligned_scheduling=args.page_aligned_scheduling,
        scheduling_policy=args.scheduling_policy,
        max_attention_work=args.max_attention_work or _attention_work(model, device),
        async_scheduling=plans_ahead(args, device.kind),
        speculative=_speculative(args, draft),
        max_num_encoder_tokens=encoder_tokens,
        image_cache_tokens=_KEPT_IMAGES * encoder_tokens,
    )


def plans_ahead(args: EngineArgs, device_kind: str) -> bool:
    """Return True if each step is planned while the previous one runs.

    This is the default on a GPU. On a CPU, host and model share the cores. A draft model cannot run in a step that is
    planned ahead, and several ranks have not been measured on Macs.
    """
    if args.async_scheduling is not None:
        return args.async_scheduling
    speculative = speculative_config(args)
    has_draft_model = speculative is not None and speculative.method == "draft_model"
    return device_kind != "cpu" and args.num_ranks == 1 and not has_draft_model


def _replay(args: EngineArgs, attention_backend: str, attention_layers: AttentionLayers, model: ModelInfo) -> str:
    """Return the value of :attr:`EngineConfig.replay`: whether decode steps are replayed."""
    # On a CPU, building a graph takes little of a step's time. MLX's attention operations differ with every length.
    if args.replay_decodes == "never" or (args.replay_decodes == "auto" and attention_backend != "metal"):
        return "off"
    if args.num_ranks > 1:
        return "off: several ranks share the model"
    if attention_layers.not_covered:
        return f"off: {NO_REPLAY_WITHOUT_KERNEL}"
    if model.own_caches_reason:
        return f"off: requests run {OWN_CACHES}"
    if model.has_index:
        return f"off: {NO_REPLAY_WITH_INDEX}"
    return REPLAYS


def _speculative(args: EngineArgs, draft: ModelInfo | None) -> SpeculativeConfig | None:
    config = speculative_config(args)
    if config is not None and config.method == "auto":
        config = replace(config, method="ngram" if draft is None else "mtp")
    if config is None or draft is None:
        return config
    return replace(config, max_draft_len=draft.max_position_embeddings)


def _with_draft(model: ModelInfo, draft: ModelInfo | None) -> ModelInfo:
    """Return the model with its draft model's memory added. Both store the KV of every token in the same blocks."""
    if draft is None:
        return model
    return replace(
        model,
        weight_bytes=model.weight_bytes + draft.weight_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token + draft.kv_bytes_per_token,
    )


def check_kv_cache(args: EngineArgs, model: ModelInfo, device: DeviceInfo) -> int:
    """Check the settings of the KV cache before a model's weights are read.

    Args:
        model: facts from the model's configuration and the headers of its weights.
        device: facts about the device before the weights are in its memory.

    Returns:
        Maximum capacity of the KV cache in tokens. The memory for a step is still unknown and not subtracted.

    Raises:
        ConfigError: the settings conflict, or there is not enough memory. The message names the flag to change.
    """
    args = _for_model(args, model)
    if device.kind == "cpu":  # memory that remains after loading the weights
        device = replace(device, memory_bytes=max(0, device.memory_bytes - model.weight_bytes))
    pool = pool_size(args, model, device, args.max_num_seqs or 1, 0)
    cache = CacheConfig(block_size=args.block_size, num_blocks=pool.num_blocks)
    _max_model_len(args, model, cache)
    return cache.num_tokens


def _step_budget(model: ModelInfo, device: DeviceInfo) -> int:
    """Return the maximum number of tokens of a step: 2,048 on a GPU.

    On a CPU, it is the power of two that takes about a second, from 64 to 2,048.
    """
    if device.kind != "cpu":
        return 2048
    tokens = max(64, int(_CPU_FLOPS * _CPU_STEP_SECONDS / (2 * model.num_params)))
    return min(2048, 1 << tokens.bit_length() - 1)


def _uncut_tokens(args: EngineArgs, model: ModelInfo) -> int:
    """Return the tokens of the largest image plus one block at each end, if one chunk must contain a whole image.

    Return 0 if a chunk may end within an image, or if images are refused.
    """
    vision = model.vision
    if vision is None or not vision.bidirectional_layers or model.image_refusal is not None:
        return 0
    return (vision.num_features or vision.max_image_tokens or 0) + 2 * args.block_size


def _long_threshold(args: EngineArgs, budget: int) -> int:
    """Return the number of tokens above which a prompt is long.

    It is the token budget of a step, or no limit if prompts are prefilled one at a time.
    """
    return budget if args.max_num_partial_prefills > 1 else 1 << 62


def _attention_work(model: ModelInfo, device: DeviceInfo) -> int:
    """Return the number of (query row, visible key) pairs whose attention takes about a second to compute."""
    if device.kind == "cpu":
        seconds_per_pair = _CPU_SECONDS_PER_SCORE * model.num_layers * model.num_heads
    else:
        seconds_per_pair = 4 * model.num_layers * model.num_heads * model.head_dim / _GPU_ATTENTION_FLOPS
    return int(_ATTENTION_SECONDS / seconds_per_pair)


def _fingerprint(args: EngineArgs, model: ModelInfo) -> str:
    """Return an identifier of everything besides tokens that K and V depend on, except the weights' values."""
    return repr((args.model, args.revision, model.model_type, model.dtype, model.num_params, args.block_size))


def _max_model_len(args: EngineArgs, model: ModelInfo, cache: CacheConfig) -> int:
    """Return the requested context length, or the checkpoint's, but at most the number of tokens in the pool.

    Raises:
        ConfigError: the user requested more than the model was trained for, or more than the pool has.
    """
    limit = model.max_position_embeddings
    wanted = requested_context_length(args, model)
    if limit is not None and wanted > limit:
        raise ConfigError(
            "--max-model-len", f"{wanted} exceeds the {limit} tokens of context that {model.name} was trained for"
        )
    if wanted <= cache.num_tokens:
        return wanted
    if args.max_model_len is not None:
        raise ConfigError(
            "--max-model-len",
            f"{wanted} does not fit into the KV cache of {cache.num_tokens} tokens; lower it or "
            f"raise {pool_flag(args)}",
        )
    return cache.num_tokens

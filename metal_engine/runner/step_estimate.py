"""What the largest step of a model that has not been loaded may take, for whoever has to make room for it."""

from __future__ import annotations

from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS
from metal_engine.settings.config import DeviceInfo, ModelInfo

# What a step takes at most at one time, in arrays of 4 bytes a number: of all logits (11 measured, with the costly kind
# of sampling), of the widest part of a layer, of a tile of scores or a span of keys and values, and of states.
_LOGITS_ARRAYS = 12
_LAYER_ARRAYS = 8
_ATTENTION_ARRAYS = 4
_STATE_ARRAYS = 3
_NUMBER_BYTES = 4
# What is estimated is taken a quarter higher.
_MARGIN = 1.25


def estimate_step_bytes(
    info: ModelInfo, device: DeviceInfo, block_size: int, kv_bytes: int, num_tokens: int, num_rows: int
) -> int:
    """What measuring a step takes at most: that step, and the cache it runs in as far as it exceeds the model's own.

    Args:
        info: of a model that has not been loaded.
        kv_bytes: of its own cache, which is made later.
        num_tokens: of the step.
        num_rows: that sample.
    """
    limits = CPU_LIMITS if device.kind == "cpu" else GPU_LIMITS
    longest = min(num_tokens, info.max_position_embeddings or num_tokens)
    width = max(info.layer_width, info.hidden_size, info.num_heads * info.head_dim)
    scores = min(limits.scores, info.num_heads * num_tokens * longest)
    span = min(limits.span, num_tokens * info.num_heads * info.head_dim)
    numbers = (
        _LOGITS_ARRAYS * num_rows * info.vocab_size
        + _LAYER_ARRAYS * num_tokens * width
        + _ATTENTION_ARRAYS * (scores + 2 * span)
    )
    states = (num_rows + 1) * info.state_bytes_per_request
    cache = (num_tokens + num_rows * block_size) * info.kv_bytes_per_token + states
    return int(_MARGIN * (_NUMBER_BYTES * numbers + _STATE_ARRAYS * states)) + max(0, cache - kv_bytes)

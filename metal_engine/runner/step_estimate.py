"""What the largest step of a model that has not been loaded may take, for whoever has to make room for it."""

from __future__ import annotations

from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS
from metal_engine.settings.config import DeviceInfo, ModelInfo

# What a step takes at most at one time, in arrays of 4 bytes a number: of the widest part of a layer, of a tile of
# scores or a span of keys and values, and of states; that a quarter higher. No two architectures take the same.
_LAYER_ARRAYS = 8
_ATTENTION_ARRAYS = 4
_STATE_ARRAYS = 3
_MARGIN = 1.25
# And of all logits, with the costly kind of sampling: 11 measured, 12.8 where the head computes with them.
_LOGITS_ARRAYS = 14
# Of these, what there may be while the last layer is.
_EARLY_LOGITS_ARRAYS = 2
_NUMBER_BYTES = 4


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
    numbers = _LAYER_ARRAYS * num_tokens * width + _ATTENTION_ARRAYS * (scores + 2 * span)
    states = (num_rows + 1) * info.state_bytes_per_request
    layers = int(_MARGIN * (_NUMBER_BYTES * numbers + _STATE_ARRAYS * states))
    logits = _NUMBER_BYTES * num_rows * info.vocab_size
    if device.kind == "cpu":  # which has given back what layers took when it samples
        step = max(_LOGITS_ARRAYS * logits, layers + _EARLY_LOGITS_ARRAYS * logits)
    else:  # what is submitted to a GPU together is held until all of it is done
        step = layers + _LOGITS_ARRAYS * logits
    cache = (num_tokens + num_rows * block_size) * info.kv_bytes_per_token + states
    return step + max(0, cache - kv_bytes)

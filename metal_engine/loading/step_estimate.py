"""Estimates the memory of a model's largest step before the model is loaded, to make room for the model."""

from __future__ import annotations

from metal_engine.attention.portable.groups import CPU_LIMITS, GPU_LIMITS
from metal_engine.settings.config import DeviceInfo, ModelInfo

# The peak memory of a step's layers is the sum of these float32 arrays, plus a margin, because architectures differ:
# - _LAYER_ARRAYS arrays of the size of the widest part of a layer
# - _ATTENTION_ARRAYS arrays of the size of the scores, keys and values that attention processes at a time
# - _STATE_ARRAYS arrays of the size of all recurrent states
_LAYER_ARRAYS = 8
_ATTENTION_ARRAYS = 4
_STATE_ARRAYS = 3
_MARGIN = 1.25
# Memory of the most expensive sampling, in float32 arrays of the size of all logits. Measured: 11, or 12.8 if the LM
# head computes with the logits.
_LOGITS_ARRAYS = 14
# Number of arrays of the size of all logits that can exist while the last layer is computed.
_EARLY_LOGITS_ARRAYS = 2
_NUMBER_BYTES = 4
# Memory of small arrays, such as positions, masks and block tables. It matters for tiny models only.
_SMALL_BYTES = 1 << 16


def estimate_step_bytes(
    info: ModelInfo, device: DeviceInfo, block_size: int, kv_bytes: int, num_tokens: int, num_rows: int
) -> int:
    """Return a generous estimate of the memory for measuring a step, in bytes.

    The estimate excludes weights and ``kv_bytes``. The step will be measured with a temporary KV cache. If that cache
    is larger than ``kv_bytes``, the estimate includes the difference.

    Args:
        info: metadata of a model that has not been loaded.
        block_size: number of tokens in a block of the KV cache.
        kv_bytes: size of the KV cache that the model will allocate later, in bytes.
        num_tokens: number of tokens in the step.
        num_rows: number of rows that sample.
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
    if device.kind == "cpu":  # the CPU has freed the layers' buffers before sampling
        step = max(_LOGITS_ARRAYS * logits, layers + _EARLY_LOGITS_ARRAYS * logits)
    else:  # a GPU holds the buffers of work submitted together until all of it is done
        step = layers + _LOGITS_ARRAYS * logits
    cache = (num_tokens + num_rows * block_size) * info.kv_bytes_per_token + states
    return step + max(0, cache - kv_bytes) + _SMALL_BYTES

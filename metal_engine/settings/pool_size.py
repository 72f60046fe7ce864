"""Computes the sizes of the pools: blocks of the KV cache, and slots of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.errors import ConfigError
from metal_engine.settings.args import GIB, EngineArgs
from metal_engine.settings.config import (
    IN_FLIGHT_STATES,
    IN_FLIGHT_STATES_OF_DRAFTS,
    MARGIN_BYTES,
    DeviceInfo,
    ModelInfo,
)
from metal_engine.settings.fields import format_size

# Maximum on a CPU, where the pool is ordinary memory that other programs need too.
_CPU_POOL_BYTES = 2 * GIB
# Context length in tokens if neither the model's files nor the user specify one.
_UNKNOWN_CONTEXT = 4096
# Slots of a request: its state, and with prefix caching the state checkpoints after its prompt and its output.
_SLOTS_PER_REQUEST, _SLOTS_WITHOUT_CACHING = 3, 1
# Additional slot with speculation: the state before the drafts, which may be rejected.
_SLOTS_FOR_DRAFTS = 1
# Maximum fractions of the memory for KV cache and states: for the states of requests, if --max-num-seqs is not given;
# and for additional state checkpoints.
_REQUESTS_SHARE, _CHECKPOINTS_SHARE = 1 / 3, 1 / 6
_MAX_CHECKPOINTS = 256
# Maximum number of blocks for models without KV. Their blocks are counted and hashed, but take no device memory.
_MAX_EMPTY_BLOCKS = 1 << 16


@dataclass(frozen=True)
class PoolSize:
    """Number of KV cache blocks and recurrent state slots. Models without recurrent state have no slots.

    Attributes:
        kv_available_bytes: memory available for the blocks in bytes; 0 if the number of blocks was given.
    """

    num_blocks: int
    num_state_slots: int
    kv_available_bytes: int


def requested_context_length(args: EngineArgs, model: ModelInfo) -> int:
    """Return the requested context length in tokens, or else the checkpoint's context length."""
    return args.max_model_len or model.max_position_embeddings or _UNKNOWN_CONTEXT


def affordable_states(args: EngineArgs, model: ModelInfo, device: DeviceInfo) -> int:
    """Return the number of requests, at least 1, whose recurrent states fit into a third of the pool's memory.

    The result is ``1 << 62`` if the model has no recurrent states.
    """
    if not model.state_bytes_per_request:
        return 1 << 62
    share = int(_pool_bytes(args, model, device, 0) * _REQUESTS_SHARE)
    return max(1, share // (_states_per_request(args) * model.state_bytes_per_request))


def _slots_per_request(args: EngineArgs) -> int:
    num_slots = _SLOTS_PER_REQUEST if args.enable_prefix_caching else _SLOTS_WITHOUT_CACHING
    return num_slots + (_SLOTS_FOR_DRAFTS if args.speculative_config is not None else 0)


def _states_per_request(args: EngineArgs) -> int:
    """Return the number of a request's recurrent states, in its slots and during a step."""
    num_drafted = IN_FLIGHT_STATES_OF_DRAFTS if args.speculative_config is not None else 0
    return _slots_per_request(args) + IN_FLIGHT_STATES + num_drafted


def pool_size(
    args: EngineArgs,
    model: ModelInfo,
    device: DeviceInfo,
    max_num_seqs: int,
    step_bytes: int,
    num_padding_blocks: int = 0,
) -> PoolSize:
    """Divide the memory of the pools between recurrent states and the KV cache.

    The pools get the memory that the weights and a step leave, unless ``args`` give their size.

    Args:
        step_bytes: memory of the largest step in bytes, with the memory for images; 0 if unknown.
        num_padding_blocks: number of padding blocks in addition to the blocks for requests, also if
            ``--num-gpu-blocks-override`` gives the number of blocks.

    Raises:
        ConfigError: there is not enough memory. The message names the flag to change.
    """
    pool_bytes = _pool_bytes(args, model, device, step_bytes)
    num_slots = 0
    if model.state_bytes_per_request:
        num_states = max_num_seqs * _states_per_request(args) + 1
        state_bytes = num_states * model.state_bytes_per_request
        if state_bytes >= pool_bytes:
            available, more = _available(args, pool_bytes, model, step_bytes), _raise_flag(args, device)
            raise ConfigError(
                "--max-num-seqs",
                f"the recurrent states of {max_num_seqs} concurrent requests take {format_size(state_bytes)} "
                f"({format_size(model.state_bytes_per_request)} each, and copies during a step), and {available}; "
                f"lower --max-num-seqs, or raise {more}",
            )
        num_checkpoints = 0
        if args.enable_prefix_caching:
            spare = min(int(pool_bytes * _CHECKPOINTS_SHARE), pool_bytes - state_bytes)
            num_checkpoints = min(_MAX_CHECKPOINTS, spare // model.state_bytes_per_request)
        num_slots = _slots_per_request(args) * max_num_seqs + num_checkpoints
        state_bytes += num_checkpoints * model.state_bytes_per_request
        pool_bytes -= state_bytes
    else:
        state_bytes = 0
    num_blocks = _num_blocks(args, model, device, pool_bytes, step_bytes, max_num_seqs, num_padding_blocks)
    kv_bytes = (num_blocks + num_padding_blocks) * args.block_size * model.kv_bytes_per_token
    _check_pool_fits(args, kv_bytes + state_bytes, device)
    return PoolSize(num_blocks, num_slots, 0 if args.num_gpu_blocks_override is not None else pool_bytes)


def _num_blocks(
    args: EngineArgs,
    model: ModelInfo,
    device: DeviceInfo,
    pool_bytes: int,
    step_bytes: int,
    max_num_seqs: int,
    num_padding_blocks: int,
) -> int:
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    block_bytes = args.block_size * model.kv_bytes_per_token
    if not block_bytes:
        each = -(-requested_context_length(args, model) // args.block_size)
        return max(each, min(each * max_num_seqs, _MAX_EMPTY_BLOCKS))
    num_blocks = pool_bytes // block_bytes - num_padding_blocks
    if num_blocks < 1:
        padding = " (and one is for padding)" if num_padding_blocks else ""
        raise ConfigError(
            None,
            f"no memory for the KV cache: one block of {args.block_size} tokens takes {format_size(block_bytes)}"
            f"{padding}, and {_available(args, pool_bytes, model, step_bytes)}; raise {_raise_flag(args, device)}",
        )
    return num_blocks


def _pool_bytes(args: EngineArgs, model: ModelInfo, device: DeviceInfo, step_bytes: int) -> int:
    """Return the memory for the KV cache and recurrent states in bytes.

    The result is negative if the weights and a step exceed the memory budget.
    """
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    if device.kind == "cpu":
        # The weights are loaded already, so memory_bytes does not include their memory.
        return min(_CPU_POOL_BYTES, device.memory_bytes // 4)
    budget = int(device.memory_bytes * args.gpu_memory_utilization)
    return budget - model.weight_bytes - model.adapter_bytes - step_bytes - MARGIN_BYTES


def _raise_flag(args: EngineArgs, device: DeviceInfo) -> str:
    """Return the text about the flags to change for a larger pool, which follows "raise" in messages."""
    if args.kv_cache_memory_bytes is not None or device.kind == "cpu":
        return "--kv-cache-memory-bytes"
    return "--gpu-memory-utilization, or lower --max-num-batched-tokens"


def _available(args: EngineArgs, pool_bytes: int, model: ModelInfo, step_bytes: int) -> str:
    """Return a part of error messages: the memory that is available for the KV cache, and the reason."""
    available = format_size(max(pool_bytes, 0))
    if args.kv_cache_memory_bytes is not None:
        return f"{available} are given"
    step = f" and a step ({format_size(step_bytes)})" if step_bytes else ""
    adapters = f", adapters ({format_size(model.adapter_bytes)})" if model.adapter_bytes else ""
    return f"{available} remain beside the weights ({format_size(model.weight_bytes)}){adapters}{step}"


def _check_pool_fits(args: EngineArgs, pool_bytes: int, device: DeviceInfo) -> None:
    if pool_bytes > device.memory_bytes:
        named = pool_flag(args)
        raise ConfigError(
            named,
            f"a KV cache of {format_size(pool_bytes)} exceeds the {format_size(device.memory_bytes)} of memory; "
            f"lower {named}",
        )


def pool_flag(args: EngineArgs) -> str:
    """Return the flag to name in messages about the size of the KV cache.

    It is ``--num-gpu-blocks-override`` if the user set that flag, otherwise ``--kv-cache-memory-bytes``.
    """
    return "--kv-cache-memory-bytes" if args.num_gpu_blocks_override is None else "--num-gpu-blocks-override"

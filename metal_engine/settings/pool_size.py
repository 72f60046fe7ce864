"""How large the pools are: blocks of the KV cache, and slots of recurrent states beside them."""

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

# On a CPU the pool is made of ordinary memory that other programs want too.
_CPU_POOL_BYTES = 2 * GIB
# Tokens of context for a model that does not say what it was trained for, if the user does not either.
_UNKNOWN_CONTEXT = 4096
# Slots of a request: its state, and where prefixes are cached the checkpoints that follow its prompt and its answer.
_SLOTS_PER_REQUEST, _SLOTS_WITHOUT_CACHING = 3, 1
# And the state from before drafts, which may be rejected.
_SLOTS_FOR_DRAFTS = 1
# Of the memory for KV cache and states: most that the states of requests take where their number is not given, and most
# that checkpoints beside them take.
_REQUESTS_SHARE, _CHECKPOINTS_SHARE = 1 / 3, 1 / 6
_MAX_CHECKPOINTS = 256
# Blocks of models that keep nothing of a token: they are counted and hashed, and take no memory on the device.
_MAX_EMPTY_BLOCKS = 1 << 16


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the KV cache, and slots of recurrent states; no slots for models without such.

    Attributes:
        kv_room_bytes: memory that there was for the blocks; 0 where their number is given.
    """

    num_blocks: int
    num_state_slots: int
    kv_room_bytes: int


def requested_context_length(args: EngineArgs, model: ModelInfo) -> int:
    """Returns the length asked for, in tokens, or the checkpoint's context length."""
    return args.max_model_len or model.max_position_embeddings or _UNKNOWN_CONTEXT


def affordable_states(args: EngineArgs, model: ModelInfo, device: DeviceInfo) -> int:
    """Returns how many requests may run at once for the memory that their recurrent states take."""
    if not model.state_bytes_per_request:
        return 1 << 62
    share = int(_pool_bytes(args, model, device, 0) * _REQUESTS_SHARE)
    return max(1, share // (_states_per_request(args) * model.state_bytes_per_request))


def _slots_per_request(args: EngineArgs) -> int:
    num_slots = _SLOTS_PER_REQUEST if args.enable_prefix_caching else _SLOTS_WITHOUT_CACHING
    return num_slots + (_SLOTS_FOR_DRAFTS if args.speculative_config is not None else 0)


def _states_per_request(args: EngineArgs) -> int:
    """Of a request in its slots, and at hand in a step."""
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
    """Divide the memory that weights and a step leave between states and KV.

    Args:
        num_padding_blocks: blocks beside those of requests; a number of blocks that is given does not have them.

    Raises:
        ConfigError: there is not enough; the message names the flag to change.
    """
    pool_bytes = _pool_bytes(args, model, device, step_bytes)
    num_slots = 0
    if model.state_bytes_per_request:
        num_states = max_num_seqs * _states_per_request(args) + 1
        state_bytes = num_states * model.state_bytes_per_request
        if state_bytes >= pool_bytes:
            room, more = _room(args, pool_bytes, model, step_bytes), _raise_flag(args, device)
            raise ConfigError(
                "--max-num-seqs",
                f"{max_num_seqs} requests at once take {format_size(state_bytes)} for their recurrent states "
                f"({format_size(model.state_bytes_per_request)} each, and copies under way), and {room}; "
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
            f"{padding}, and {_room(args, pool_bytes, model, step_bytes)}; raise {_raise_flag(args, device)}",
        )
    return num_blocks


def _pool_bytes(args: EngineArgs, model: ModelInfo, device: DeviceInfo, step_bytes: int) -> int:
    """Bytes for the KV cache and recurrent states."""
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    if device.kind == "cpu":
        # The weights are loaded already, so what is left of the memory is what is available.
        return min(_CPU_POOL_BYTES, device.memory_bytes // 4)
    budget = int(device.memory_bytes * args.gpu_memory_utilization)
    return budget - model.weight_bytes - model.adapter_bytes - step_bytes - MARGIN_BYTES


def _raise_flag(args: EngineArgs, device: DeviceInfo) -> str:
    """What to change for more of them."""
    if args.kv_cache_memory_bytes is not None or device.kind == "cpu":
        return "--kv-cache-memory-bytes"
    return "--gpu-memory-utilization, or lower --max-num-batched-tokens"


def _room(args: EngineArgs, pool_bytes: int, model: ModelInfo, step_bytes: int) -> str:
    """Says how much memory there is for the KV cache, and why."""
    room = format_size(max(pool_bytes, 0))
    if args.kv_cache_memory_bytes is not None:
        return f"{room} are given"
    step = f" and a step ({format_size(step_bytes)})" if step_bytes else ""
    adapters = f", adapters ({format_size(model.adapter_bytes)})" if model.adapter_bytes else ""
    return f"{room} are left beside the weights ({format_size(model.weight_bytes)}){adapters}{step}"


def _check_pool_fits(args: EngineArgs, pool_bytes: int, device: DeviceInfo) -> None:
    if pool_bytes > device.memory_bytes:
        named = pool_flag(args)
        raise ConfigError(
            named,
            f"a KV cache of {format_size(pool_bytes)} is more than the {format_size(device.memory_bytes)} of memory "
            f"there are; lower {named}",
        )


def pool_flag(args: EngineArgs) -> str:
    """The flag that sets the size of the KV cache."""
    return "--kv-cache-memory-bytes" if args.num_gpu_blocks_override is None else "--num-gpu-blocks-override"

"""Serializes rank 0's plans for the other ranks, as JSON with request ids and integers.

Only rank 0 samples, so sampling parameters are not serialized.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from metal_engine.distributed.channel import MAX_FRAME
from metal_engine.pooling_params import PoolingParams
from metal_engine.sampling_params import SamplingParams
from metal_engine.step import NewRequestData, SchedulerOutput

_PLAIN = SamplingParams(temperature=0.0)
# Makes a rank compute the same logits as rank 0. Only rank 0 uses them.
_WITH_PROMPT_ROWS = SamplingParams(temperature=0.0, prompt_logprobs=0)


def encode(content: Any) -> bytes:
    """Return ``content`` as compact JSON."""
    return json.dumps(content, separators=(",", ":")).encode()


def encode_plan(plan: SchedulerOutput) -> bytes:
    """Serialize a plan as the content of a frame.

    Raises:
        ValueError: the plan is too large for a frame, or has features that other ranks do not support.
    """
    if plan.scheduled_spec_decode_tokens or plan.draft_model_req_ids or plan.kv_connector_metadata is not None:
        raise ValueError("drafts and KV stores are supported on a single rank only")
    if plan.images_to_encode or any(one.images is not None for one in plan.new_requests):
        raise ValueError("images are supported on a single rank only")
    scheduled = plan.num_scheduled_tokens
    content = encode(
        [
            plan.step_id,
            scheduled,
            [_new(one) for one in plan.new_requests],
            plan.new_block_ids,
            plan.new_state_slots,
            None if plan.sampled_req_ids == list(scheduled) else plan.sampled_req_ids,
            plan.dropped_req_ids,
            plan.pooled_req_ids,
        ]
    )
    if len(content) > MAX_FRAME:
        raise ValueError(f"a plan of {len(content)} bytes is too large for the other ranks")
    return content


def _new(one: NewRequestData) -> list[Any]:
    has_prompt_rows = one.sampling_params.prompt_logprobs is not None
    counts = [one.num_prompt_tokens, one.num_computed_tokens]
    pooling = None if one.pooling_params is None else [one.pooling_params.pooling_type, one.pooling_params.token_ids]
    return [one.request_id, one.token_ids, *counts, one.block_ids, one.state_slots, int(has_prompt_rows), pooling]


def decode_plan(content: bytes) -> SchedulerOutput:
    """Return the plan of :func:`encode_plan`, with placeholders for the sampling parameters."""
    step_id, scheduled, new, new_blocks, new_state_slots, sampled, dropped, pooled = json.loads(content)
    return SchedulerOutput(
        step_id=step_id,
        num_scheduled_tokens=scheduled,
        new_requests=[_request(*one) for one in new],
        new_block_ids=new_blocks,
        new_state_slots=new_state_slots,
        sampled_req_ids=list(scheduled) if sampled is None else sampled,
        pooled_req_ids=pooled,
        dropped_req_ids=dropped,
    )


def _request(
    request_id: str,
    token_ids: list[int],
    num_prompt_tokens: int,
    num_computed_tokens: int,
    block_ids: list[int],
    state_slots: list[int],
    has_prompt_rows: int,
    pooling: list[Any] | None,
) -> NewRequestData:
    params = _WITH_PROMPT_ROWS if has_prompt_rows else _PLAIN
    read, write = state_slots
    return NewRequestData(
        request_id,
        token_ids,
        num_prompt_tokens,
        num_computed_tokens,
        block_ids,
        params,
        # All ranks compute the same rows of hidden states and logits, because the LM head may be sharded, too.
        pooling_params=None if pooling is None else PoolingParams(pooling_type=pooling[0], token_ids=tuple(pooling[1])),
        state_slots=(read, write),
    )


def encode_ids(request_ids: Iterable[str]) -> bytes:
    return encode(list(request_ids))


def decode_ids(content: bytes) -> list[str]:
    return list(json.loads(content))

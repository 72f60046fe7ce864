"""JSON of the events that ``/watch`` sends: snapshots and frames. docs/api.md describes the fields."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from metal_engine import __version__
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.step_observer import Frame, SeenRequest, StepRow, StepSegment
from metal_engine.request import client_id
from metal_engine.server.page.pool_mirror import BlockRun, runs_of

# Bits in the flags of a segment, which describes one request's tokens in a step. ``FRESH``: the request is new in this
# step. ``SAMPLES``: the step samples or pools for the request.
FRESH = 1
SAMPLES = 2
# Number of characters of a request's id in events. Clients can recognize their own ids, but cannot learn other ids.
_SHOWN_ID_CHARACTERS = 12


def event(name: str, data: dict[str, Any]) -> bytes:
    """Encode one server-sent event with this name and ``data`` as JSON."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


def snapshot(engine: AsyncEngine, names: Sequence[str], requests: Sequence[SeenRequest]) -> dict[str, Any]:
    """Return the fields of a stream's first event.

    These are the model, the device, sizes of memory in bytes, the limits, the KV pool, the current requests and the
    statistics.
    """
    config = engine.config
    model, cache, limits = config.model, config.cache, config.scheduler
    return {
        "version": __version__,
        "models": list(names),
        "model": {
            "name": model.name,
            "type": model.model_type,
            "dtype": model.dtype,
            "num_layers": model.num_layers,
            "num_params": model.num_params,
            "can_generate": model.can_generate,
            "image_refusal": model.image_refusal,
            "sampling": dict(model.default_sampling),
        },
        "device": {"name": config.device.name, "compute": config.device.compute, "attention": config.attention_backend},
        "memory": {
            "weights": config.weight_bytes,
            "adapters": model.adapter_bytes,
            "kv_cache": config.kv_bytes,
            "states": config.state_bytes,
            "step": config.step_bytes + config.image_bytes,
            "device": config.device.memory_bytes,
        },
        "limits": {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
        },
        "pool": {
            "num_blocks": cache.num_blocks,
            "block_size": cache.block_size,
            "num_state_slots": cache.num_state_slots,
            "prefix_caching": cache.enable_prefix_caching,
        },
        "requests": [_request(seen) for seen in requests],
        "stats": stats(engine),
    }


def stats(engine: AsyncEngine) -> dict[str, Any]:
    """Return current counts, and totals since the start.

    ``first_token`` and ``inter_token`` are latencies: their sum in seconds, and the number of values. ``drafts`` has
    the numbers of proposed and of accepted tokens. ``time`` is Unix time in seconds.
    """
    now, m = engine.stats, engine.metrics
    return {
        "time": round(time.time(), 3),
        "running": now.num_running,
        "waiting": now.num_waiting,
        "restarting": engine.is_restarting,
        "used_blocks": now.num_used_blocks,
        "checkpoints": now.num_checkpoints,
        "preemptions": now.num_preemptions,
        "failed_steps": m.num_failed_steps,
        "prompt_tokens": m.num_prompt_tokens,
        "generation_tokens": m.num_generation_tokens,
        "cache_queries": m.num_cache_queries,
        "cache_hits": m.num_cache_hits,
        "drafts": [m.num_draft_tokens, sum(m.num_accepted_tokens)],
        "first_token": [round(m.first_token.sum, 6), sum(m.first_token.counts)],
        "inter_token": [round(m.inter_token.sum, 6), sum(m.inter_token.counts)],
    }


def frame_data(frame: Frame, stats_now: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a frame event. Empty fields are left out, except ``whole`` and ``stats``."""
    parts = {
        "rows": [_row(row) for row in frame.rows],
        "requests": [_request(seen) for seen in frame.requests],
        "tables": [[key, int(one.cleared), runs_of(one.added)] for key, one in frame.tables.items()],
        "cached": runs_of(frame.cached),
        "uncached": runs_of(frame.uncached),
        "preempted": frame.preempted,
        "finished": frame.finished,
        "drafts": [[key, proposed, accepted] for key, (proposed, accepted) in frame.drafts.items()],
    }
    return {name: part for name, part in parts.items() if part} | {"whole": frame.is_whole, "stats": stats_now}


def piece_data(tables: dict[int, list[BlockRun]], cached: list[BlockRun], is_whole: bool) -> dict[str, Any]:
    """Return a part of a snapshot in the format of a frame.

    Args:
        tables: block tables by request key.
        cached: runs of cached blocks.
        is_whole: True if this is the last part, and all parts together describe the complete pool.
    """
    return {"tables": [[key, 1, runs] for key, runs in tables.items()], "cached": cached, "whole": is_whole}


def _row(row: StepRow) -> dict[str, Any]:
    return {
        "step": row.step_id,
        "steps": row.num_steps,
        "seconds": round(row.seconds, 6),
        "idle": round(row.idle, 6),
        "segments": [_segment(one) for one in row.segments],
    }


def _segment(one: StepSegment) -> list[int]:
    segment = [one.key, one.num_tokens, one.context_len, FRESH * one.is_fresh + SAMPLES * one.samples]
    if one.num_image_tokens:
        return [*segment, one.num_drafts, one.num_image_tokens]
    return [*segment, one.num_drafts] if one.num_drafts else segment


def _request(seen: SeenRequest) -> dict[str, Any]:
    return {
        "key": seen.key,
        "id": client_id(seen.request_id)[-_SHOWN_ID_CHARACTERS:],
        "prompt_tokens": seen.num_prompt_tokens,
        "cached_tokens": seen.num_cached_tokens,
    }

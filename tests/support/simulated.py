"""Runs steps through the simulated kernel and compares them with the float64 reference."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.backend import MetalBackend
from tools.fixtures.packed_step import PackedStep, make_step
from tools.metal_sim import LaunchCounts, metal_kernel, record_launches

TOLERANCE = {mx.float32: 1e-5, mx.float16: 7e-4, mx.bfloat16: 4e-3}


@cache
def backend(target_threadgroups: int = 96) -> MetalBackend:
    return MetalBackend(metal_kernel, target_threadgroups=target_threadgroups)


def attend(step: PackedStep, target_threadgroups: int = 96, **options: object) -> tuple[np.ndarray, list[LaunchCounts]]:
    """Return the output in float32 and the counts of each launch."""
    with record_launches() as launches:
        out = backend(target_threadgroups).for_step(step.rows).attend(step.q, step.state, **options)
    assert out.dtype == step.q.dtype
    return np.array(out.astype(mx.float32)), launches


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(out).all()
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def check(
    segments: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    is_latent: bool = False,
    block_size: int = 16,
    dtype: mx.Dtype = mx.float32,
    shared_blocks: int = 0,
    target_threadgroups: int = 96,
    quantized: tuple[int, int] | None = None,
    seed: int = 0,
    **options: object,
) -> list[LaunchCounts]:
    """Compare with the reference. ``segments`` are (query_len, kv_len). Slots that must not be read contain NaN."""
    step = make_step(
        [(n, kv - n) for n, kv in segments],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        is_latent=is_latent,
        block_size=block_size,
        dtype=dtype,
        window=options.get("window"),  # type: ignore[arg-type]
        shared_blocks=shared_blocks,
        quantized=quantized,
        seed=seed,
    )
    options.setdefault("scale", head_dim**-0.5)
    out, launches = attend(step, target_threadgroups, **options)
    reference_options = dict(options)
    if options.get("sinks") is not None:
        reference_options["sinks"] = np.array(options["sinks"].astype(mx.float32))  # type: ignore[attr-defined]
    assert relative_error(out, step.reference(**reference_options)) <= TOLERANCE[dtype]
    return launches


def every_row_by_itself(out: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the relative error of each (row, head), so that one bad row is not hidden among many good rows."""
    return np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)

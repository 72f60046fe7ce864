"""The ``metal`` backend: one kernel launch per layer for any mix of segments.

The kernel factory is an argument: ``mx.fast.metal_kernel`` on a Mac, ``tools.metal_sim.metal_kernel`` anywhere. The
host code is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.planning import ITEM_FIELDS, WorkItems, plan_work_items
from metal_engine.device.metal_kernels import DEVICE_ELEMENTS, DTYPES, kernel_text
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import KVState

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (8, 16, 32)
MAX_GROUP = 16
THREADS = 256  # of a threadgroup: 8 SIMD groups, GROUPS in the kernel
STAGE_BYTES = 26 << 10  # most threadgroup memory for staged keys, of Metal's 32 KiB
# Threadgroups for each core of a GPU, to keep it busy: their memory lets two run at a time, the others follow.
THREADGROUPS_PER_CORE = 8
UNKNOWN_GPU_CORES = 12


class UnsupportedAttentionError(ValueError):
    """An attention shape that the kernel cannot compute; the message names it."""


def stage_keys(dtype: mx.Dtype, head_dim: int) -> int:
    """Keys that are staged at a time: as many as fit, at most 64."""
    row_bytes = head_dim * dtype.size + 16
    return next(keys for keys in (64, 32, 16, 8) if keys * row_bytes <= STAGE_BYTES)


def check_supported(
    *, dtype: mx.Dtype, head_dim: int, v_head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    """Raise UnsupportedAttentionError, naming the shape, unless the kernel covers it."""
    shape = (
        f"{num_heads} query heads, {num_kv_heads} KV heads, head_dim {head_dim}, V head_dim {v_head_dim}, "
        f"block size {block_size}, {dtype}"
    )

    def refuse(why: str) -> None:
        raise UnsupportedAttentionError(
            f"the metal attention backend does not support {shape}: {why}. Choose --attention-backend mlx."
        )

    if head_dim != v_head_dim:
        refuse("K and V head dims differ")
    if head_dim not in HEAD_DIMS:
        refuse(f"head_dim must be one of {HEAD_DIMS}")
    if block_size not in BLOCK_SIZES:
        refuse(f"block size must be one of {BLOCK_SIZES}")
    if dtype not in DTYPES:
        refuse("dtype must be float32, float16 or bfloat16")
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= MAX_GROUP:
        refuse(f"query heads must be 1 to {MAX_GROUP} times the KV heads")


def _on_device(table: np.ndarray) -> mx.array:
    """``table`` on the device, with zero rows at its end until it has DEVICE_ELEMENTS. No kernel reads these."""
    missing = max(0, DEVICE_ELEMENTS - table.size)
    rows = -(-missing // table.shape[1])
    return mx.array(np.pad(table, ((0, rows), (0, 0))) if rows else table)


@dataclass
class _Uploaded:
    """Work items on the device."""

    items: WorkItems
    table: mx.array
    rows: mx.array


@dataclass
class MetalStep:
    """One step's work; every layer of a kind shares its tables."""

    rows: StepRows
    backend: MetalBackend
    _uploaded: dict[tuple[object, ...], _Uploaded] = field(default_factory=dict)
    _block_table: mx.array | None = None

    def _items(self, group: int, num_kv_heads: int, window: int | None, key_step: int) -> _Uploaded:
        key = (group, num_kv_heads, window, key_step)
        if key not in self._uploaded:
            items = plan_work_items(
                self.rows,
                group=group,
                num_kv_heads=num_kv_heads,
                window=window,
                target_threadgroups=self.backend.target_threadgroups,
                key_step=key_step,
            )
            self._uploaded[key] = _Uploaded(items, _on_device(items.table), _on_device(items.rows))
        return self._uploaded[key]

    def attend(
        self,
        q: mx.array,  # [N, Hq, D]
        state: KVState,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,  # [Hq]
    ) -> mx.array:  # [N, Hq, D], dtype of q
        """See :meth:`metal_engine.attention.backend.StepAttention.attend`."""
        keys, values = state.key_blocks, state.value_blocks
        self._check(q, keys, values, window)
        num_tokens, num_heads, head_dim = q.shape
        _, block_size, num_kv_heads, _ = keys.shape
        group = num_heads // num_kv_heads
        staged_keys = stage_keys(q.dtype, head_dim)
        uploaded = self._items(group, num_kv_heads, window, staged_keys)
        if self._block_table is None:
            self._block_table = _on_device(self.rows.block_table)
        sink_values = sinks if sinks is not None else self.backend.no_sinks
        shared = [("T", q.dtype), ("D", head_dim), ("G", group), ("HAS_SINKS", sinks is not None)]
        # MLX has no outputs without elements, and the merge takes these as inputs.
        partial_rows = max(DEVICE_ELEMENTS, uploaded.items.num_partial_rows)
        numbers = self.backend.constant([scale, softcap or 0.0], mx.float32)
        window_size = self.backend.constant([window or 0], mx.int32)
        out, partial_out, partial_lse = self.backend.attention(
            inputs=[q, keys, values, self._block_table, uploaded.table, numbers, window_size, sink_values],
            template=[
                *shared,
                ("BLOCK_SIZE", block_size),
                ("BK", staged_keys),
                ("ITEM_FIELDS", ITEM_FIELDS),
                ("HAS_WINDOW", window is not None),
                ("HAS_SOFTCAP", bool(softcap)),
            ],
            grid=(len(uploaded.items.table) * THREADS, num_kv_heads, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[q.shape, (partial_rows, num_kv_heads, head_dim), (partial_rows, num_kv_heads)],
            output_dtypes=[q.dtype, mx.float32, mx.float32],
        )
        if not uploaded.items.is_split:
            return out
        (merged,) = self.backend.merge(
            inputs=[out, partial_out, partial_lse, uploaded.rows, sink_values],
            template=shared,
            grid=(head_dim, num_heads, num_tokens),
            threadgroup=(min(head_dim, THREADS), 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[q.dtype],
        )
        return merged

    def _check(self, q: mx.array, keys: mx.array, values: mx.array, window: int | None) -> None:
        _, block_size, num_kv_heads, _ = keys.shape
        check_supported(
            dtype=q.dtype,
            head_dim=q.shape[2],
            v_head_dim=values.shape[3],
            num_heads=q.shape[1],
            num_kv_heads=num_kv_heads,
            block_size=block_size,
        )
        if q.shape[0] != self.rows.num_tokens or block_size != self.rows.block_size:
            raise ValueError(f"q {q.shape} and keys {keys.shape} do not belong to this step")
        if keys.dtype != q.dtype or values.dtype != q.dtype or values.shape != keys.shape:
            raise ValueError(f"q is {q.dtype}; keys {keys.dtype} {keys.shape}, values {values.dtype}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")


class MetalBackend:
    """Makes each step's attention. Holds the two kernels; MLX compiles each variant at its first use.

    Args:
        kernel_factory: ``mx.fast.metal_kernel`` or the simulator's.
        target_threadgroups: contexts are split until a step has about so many; None: as unknown GPUs get.
    """

    name = "metal"

    def __init__(
        self, kernel_factory: Callable[..., Any] = mx.fast.metal_kernel, target_threadgroups: int | None = None
    ):
        self._constants: dict[tuple[object, ...], mx.array] = {}
        # Made of data, once: mx.zeros would be one more kernel for the GPU in every layer.
        self.no_sinks = mx.array([0.0], mx.float32)
        self.target_threadgroups = target_threadgroups or THREADGROUPS_PER_CORE * UNKNOWN_GPU_CORES
        self.attention = kernel_factory(
            name="paged_attention",
            input_names=["q", "k_cache", "v_cache", "block_table", "items", "numbers", "window_size", "sinks"],
            output_names=["out", "partial_out", "partial_lse"],
            source=kernel_text("paged_attention.metal"),
        )
        self.merge = kernel_factory(
            name="merge_splits",
            input_names=["whole", "partial_out", "partial_lse", "rows", "sinks"],
            output_names=["out"],
            source=kernel_text("merge_splits.metal"),
        )

    def constant(self, values: list[float] | list[int], dtype: mx.Dtype) -> mx.array:
        """A small array that layers and steps share."""
        key = (*values, dtype)
        if key not in self._constants:
            self._constants[key] = mx.array(values, dtype)
        return self._constants[key]

    def splitting(self) -> MetalBackend:
        """A backend with the same kernels that splits every context that may be split."""
        other = copy(self)
        other.target_threadgroups = 1 << 30
        return other

    def for_step(self, rows: StepRows) -> MetalStep:
        """A step's attention; work items are planned when the first layer of a kind attends."""
        return MetalStep(rows, self)

"""Recurrences on Metal: one kernel launch per layer for any mix of segments.

A segment consists of a request's rows in a step: a fresh prompt, a chunk, or a decode. It starts from a row of
``states`` or from a zero state. The new states are written to a new array, in the order of the segments::

    cu_seqlens   [B+1] int32   first packed row of each segment, and the end of the last one
    reads        [B] int32     row of `states` with a segment's initial state; -1: a zero state

Several segments may start from the same row. ``states`` is not modified.

The kernel factory is an argument: ``mx.fast.metal_kernel`` on a Mac, ``tools.metal_sim.metal_kernel`` elsewhere. Both
use the same host code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.device.metal_kernels import DEVICE_ELEMENTS, DTYPES, kernel_text

MAX_STATE_COLUMNS = 256  # columns of a recurrent state
MAX_STATE_PER_LANE = 32  # elements of one row of a recurrent state that a lane holds in registers
MAX_GATES = 1 << 32  # gates of a step: the kernel indexes them with 32 bits
SIMD_GROUPS = 4  # SIMD groups of a threadgroup
KERNEL_SIZES = range(2, 9)  # supported kernel sizes of a convolution
ROWS_OF_TILE = 8  # consecutive rows that a thread convolves: at least a kernel size minus one
MAX_THREADS = 256  # threads of a threadgroup


def lanes_of_state_row(columns: int) -> int:
    """Return the number of lanes of a SIMD group that share a row of a state. Fewer lanes exchange fewer sums."""
    return 4 if columns <= 4 * MAX_STATE_PER_LANE else 8


def _grid(num_segments: int, shape_of_state: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the kernel's grid in threads. The second axis counts SIMD groups.

    Args:
        shape_of_state: (heads, rows, columns).
    """
    num_heads, rows, columns = shape_of_state
    return 32, -(-rows * lanes_of_state_row(columns) // 32), num_segments * num_heads


def _are_columns(columns: int) -> bool:
    """Return True if lanes can share a row of a state with this many columns."""
    return columns % 32 == 0 and columns <= MAX_STATE_COLUMNS


@dataclass(frozen=True)
class _Segments:
    """Segments of a step, for all its layers: validated once, and padded to arrays that kernels read on the device."""

    given: tuple[mx.array, mx.array]  # the caller's cu_seqlens and reads
    cu_seqlens: mx.array  # [B+1], at least DEVICE_ELEMENTS long, padded with the last element
    reads: mx.array  # [B], at least DEVICE_ELEMENTS long, padded with -1
    count: int
    num_rows: int
    last_read: int  # maximum of reads

    @classmethod
    def of(cls, cu_seqlens: mx.array, reads: mx.array) -> _Segments:
        """Create the segments. Raises ValueError if the arrays are inconsistent."""
        ends, rows = np.array(cu_seqlens), np.array(reads)
        if ends.dtype != np.int32 or rows.dtype != np.int32 or ends.shape != (len(rows) + 1,) or not len(rows):
            raise ValueError(f"cu_seqlens {ends.shape} {ends.dtype} and reads {rows.shape} {rows.dtype} do not match")
        if ends[0] != 0 or (ends[1:] < ends[:-1]).any() or rows.min() < -1:
            raise ValueError(f"segments must follow each other and start from a row or -1: {ends}, {rows}")
        missing = [max(0, DEVICE_ELEMENTS - table.size) for table in (ends, rows)]
        return cls(
            given=(cu_seqlens, reads),
            cu_seqlens=mx.array(np.pad(ends, (0, missing[0]), mode="edge")) if missing[0] else cu_seqlens,
            reads=mx.array(np.pad(rows, (0, missing[1]), constant_values=-1)) if missing[1] else reads,
            count=len(rows),
            num_rows=int(ends[-1]),
            last_read=int(rows.max()),
        )

    def check(self, rows: mx.array, states: mx.array, shape_of_state: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Raise ValueError unless ``rows``, [N, ...], and ``states`` match the segments.

        Args:
            rows: packed rows of the step.
            states: states that the segments read, [M, *shape_of_state].
            dtype: required type of ``states``.
        """
        if rows.shape[0] != self.num_rows:
            raise ValueError(f"{rows.shape[0]} rows do not belong to segments of {self.num_rows}")
        if states.shape[1:] != shape_of_state or states.dtype != dtype:
            raise ValueError(f"states are {states.shape} {states.dtype}, and one should be {shape_of_state} {dtype}")
        # A kernel does not accept an empty array, even if no segment reads it.
        if max(self.last_read, 0) >= states.shape[0]:
            raise ValueError(f"row {self.last_read} is read, but there are {states.shape[0]} states")


class MetalRecurrence:
    """Launcher of the kernels of recurrent layers. MLX compiles each variant at its first use.

    Each call takes ``cu_seqlens`` and ``reads`` (see the module's docstring). Both arrays must be created from host
    data and must not change. The host validates them once if consecutive calls pass the same objects.

    Args:
        kernel_factory: ``mx.fast.metal_kernel`` or the simulator's function.
    """

    def __init__(self, kernel_factory: Callable[..., Any] = mx.fast.metal_kernel):
        self._segments: _Segments | None = None
        # Created from host data once: mx.zeros would launch one more kernel in every layer.
        self._no_bias = mx.array([0.0], mx.float32)
        self._gated_delta = kernel_factory(
            name="gated_delta",
            input_names=["q", "k", "v", "g", "beta", "states", "cu_seqlens", "reads"],
            output_names=["y", "new_states"],
            source=kernel_text("gated_delta.metal"),
        )
        self._ssm_update = kernel_factory(
            name="ssm_update",
            input_names=["x", "A_log", "B", "C", "D", "dt", "states", "cu_seqlens", "reads"],
            output_names=["y", "new_states"],
            source=kernel_text("ssm_update.metal"),
        )
        self._convolution = kernel_factory(
            name="short_convolution",
            input_names=["x", "weight", "bias", "states", "cu_seqlens", "reads"],
            output_names=["out", "new_states"],
            source=kernel_text("short_convolution.metal"),
        )

    def supports_gated_delta(self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, states_dtype: mx.Dtype) -> bool:
        """Return True if :meth:`gated_delta` supports these arrays. Otherwise mlx-lm's functions compute them."""
        if q.ndim != 3 or q.shape != k.shape or v.ndim != 3 or v.shape[0] != q.shape[0]:
            return False
        if any(array.dtype not in DTYPES for array in (q, k, v)) or g.dtype != mx.float32 or states_dtype != mx.float32:
            return False
        num_tokens, num_k_heads, key_dim = q.shape
        num_v_heads = v.shape[1]
        gates = ((num_tokens, num_v_heads), (num_tokens, num_v_heads, key_dim))
        is_whole = num_v_heads % num_k_heads == 0 and _are_columns(key_dim)
        return g.shape in gates and g.size < MAX_GATES and is_whole

    def gated_delta(
        self,
        q: mx.array,  # [N, Hk, Dk] float32, float16 or bfloat16, as are k, v and beta
        k: mx.array,  # [N, Hk, Dk]
        v: mx.array,  # [N, Hv, Dv]; value head h has key head h // (Hv / Hk)
        g: mx.array,  # [N, Hv] or [N, Hv, Dk] float32: factors, not logarithms
        beta: mx.array,  # [N, Hv]
        states: mx.array,  # [M, Hv, Dv, Dk] float32, M >= 1
        cu_seqlens: mx.array,  # [B+1] int32
        reads: mx.array,  # [B] int32
    ) -> tuple[mx.array, mx.array]:
        """Compute the gated delta rule, mlx-lm's ``gated_delta_ops``, for all segments in one launch.

        Returns:
            y [N, Hv, Dv] in q's dtype, and the segments' new states, [B, Hv, Dv, Dk] float32.

        Raises:
            ValueError: the arrays do not match, or :meth:`supports_gated_delta` is False for them.
        """
        if (
            not self.supports_gated_delta(q, k, v, g, states.dtype)
            or beta.shape != v.shape[:2]
            or beta.dtype not in DTYPES
        ):
            shapes = ", ".join(f"{array.shape} {array.dtype}" for array in (q, k, v, g, beta, states))
            raise ValueError(f"the gated delta kernel does not support q, k, v, g, beta and states of {shapes}")
        _, num_k_heads, key_dim = q.shape
        _, num_v_heads, value_dim = v.shape
        segments = self._segments_of(cu_seqlens, reads)
        shape_of_state = (num_v_heads, value_dim, key_dim)
        segments.check(q, states, shape_of_state, mx.float32)
        y, new_states = self._gated_delta(
            inputs=[q, k, v, g, beta, states, segments.cu_seqlens, segments.reads],
            template=[
                ("T", q.dtype),
                ("Hk", num_k_heads),
                ("Hv", num_v_heads),
                ("Dk", key_dim),
                ("Dv", value_dim),
                ("LANES", lanes_of_state_row(key_dim)),
                ("VECTOR_GATE", g.ndim == 3),
            ],
            grid=_grid(segments.count, shape_of_state),
            threadgroup=(32, SIMD_GROUPS, 1),
            output_shapes=[v.shape, (segments.count, *shape_of_state)],
            output_dtypes=[q.dtype, mx.float32],
        )
        return y, new_states

    def supports_ssm_update(self, x: mx.array, B: mx.array, C: mx.array, states_dtype: mx.Dtype) -> bool:
        """Return True if :meth:`ssm_update` supports these arrays. Otherwise mlx-lm's functions compute them."""
        if x.ndim != 3 or B.ndim != 3 or B.shape != C.shape or B.shape[0] != x.shape[0]:
            return False
        if any(array.dtype not in DTYPES for array in (x, B, C)) or states_dtype != mx.float32:
            return False
        _, num_groups, columns = B.shape
        return x.shape[1] % num_groups == 0 and _are_columns(columns)

    def ssm_update(
        self,
        x: mx.array,  # [N, H, Dh] float32, float16 or bfloat16; A_log, B, C and D each have one of these types
        A_log: mx.array,  # [H]
        B: mx.array,  # [N, G, Ds]; head h has group h // (H / G)
        C: mx.array,  # [N, G, Ds]
        D: mx.array,  # [H]
        dt: mx.array,  # [N, H] float32, with bias, softplus and limits applied
        states: mx.array,  # [M, H, Dh, Ds] float32, M >= 1
        cu_seqlens: mx.array,  # [B+1] int32
        reads: mx.array,  # [B] int32
    ) -> tuple[mx.array, mx.array]:
        """Compute Mamba2's recurrence, mlx-lm's ``ssm_update``, for all segments in one launch.

        Returns:
            y [N, H, Dh] in x's dtype, and the segments' new states, [B, H, Dh, Ds] float32.

        Raises:
            ValueError: the arrays do not match, or :meth:`supports_ssm_update` is False for them.
        """
        of_heads = A_log.shape == D.shape == x.shape[1:2] and dt.shape == x.shape[:2] and dt.dtype == mx.float32
        if not (of_heads and self.supports_ssm_update(x, B, C, states.dtype)):
            shapes = ", ".join(f"{array.shape} {array.dtype}" for array in (x, A_log, B, C, D, dt, states))
            raise ValueError(f"the Mamba2 kernel does not support x, A_log, B, C, D, dt and states of {shapes}")
        _, num_heads, head_dim = x.shape
        _, num_groups, columns = B.shape
        segments = self._segments_of(cu_seqlens, reads)
        shape_of_state = (num_heads, head_dim, columns)
        segments.check(x, states, shape_of_state, mx.float32)
        y, new_states = self._ssm_update(
            inputs=[x, A_log, B, C, D, dt, states, segments.cu_seqlens, segments.reads],
            template=[
                ("T", x.dtype),
                ("H", num_heads),
                ("G", num_groups),
                ("Dh", head_dim),
                ("Ds", columns),
                ("LANES", lanes_of_state_row(columns)),
            ],
            grid=_grid(segments.count, shape_of_state),
            threadgroup=(32, SIMD_GROUPS, 1),
            output_shapes=[x.shape, (segments.count, *shape_of_state)],
            output_dtypes=[x.dtype, mx.float32],
        )
        return y, new_states

    def supports_convolution(self, x: mx.array, weight: mx.array) -> bool:
        """Return True if :meth:`convolve` supports these arrays. Otherwise ``nn.Conv1d`` computes them."""
        if x.ndim != 2 or weight.ndim != 2 or x.dtype not in DTYPES or weight.dtype != x.dtype:
            return False
        return weight.shape[0] == x.shape[1] and weight.shape[1] in KERNEL_SIZES

    def convolve(
        self,
        x: mx.array,  # [N, C] float32, float16 or bfloat16; weight, bias and states have the same type
        weight: mx.array,  # [C, K], the last weight for the row itself; K is 2 to 8
        bias: mx.array | None,  # [C]
        states: mx.array,  # [M, K-1, C], oldest input first; M >= 1
        cu_seqlens: mx.array,  # [B+1] int32
        reads: mx.array,  # [B] int32
        *,
        silu: bool,
    ) -> tuple[mx.array, mx.array]:
        """Convolve each channel of each segment causally, and apply SiLU if ``silu`` is True, in one launch.

        Sums, bias and SiLU are computed in float32. An output is rounded once. A segment with a zero state is preceded
        by zeros.

        Returns:
            out [N, C], and the segments' new states [B, K-1, C]: the last K-1 inputs of each segment. A segment of
            fewer rows also keeps the last inputs of its initial state.

        Raises:
            ValueError: the arrays do not match, or :meth:`supports_convolution` is False for them.
        """
        if not self.supports_convolution(x, weight) or (bias is not None and bias.shape != x.shape[1:]):
            given = ", ".join(f"{a.shape} {a.dtype}" for a in (x, weight, bias) if a is not None)
            raise ValueError(f"the convolution kernel does not support x, weight and bias of {given}")
        num_tokens, num_channels = x.shape
        kernel_size = weight.shape[1]
        segments = self._segments_of(cu_seqlens, reads)
        segments.check(x, states, (kernel_size - 1, num_channels), x.dtype)
        out, new_states = self._convolution(
            inputs=[x, weight, self._no_bias if bias is None else bias, states, segments.cu_seqlens, segments.reads],
            template=[
                ("T", x.dtype),
                ("K", kernel_size),
                ("TILE", ROWS_OF_TILE),
                ("HAS_BIAS", bias is not None),
                ("SILU", silu),
            ],
            grid=(num_channels, num_tokens // ROWS_OF_TILE + segments.count, 1),
            threadgroup=(min(num_channels, MAX_THREADS), 1, 1),
            output_shapes=[x.shape, (segments.count, kernel_size - 1, num_channels)],
            output_dtypes=[x.dtype, x.dtype],
        )
        return out, new_states

    def _segments_of(self, cu_seqlens: mx.array, reads: mx.array) -> _Segments:
        known = self._segments
        if known is None or known.given[0] is not cu_seqlens or known.given[1] is not reads:
            known = self._segments = _Segments.of(cu_seqlens, reads)
        return known

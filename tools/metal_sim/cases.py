"""Steps that run every kernel of the engine and compare the results with float64. Any kernel factory can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.device.info import has_tensor_ops
from metal_engine.doctor.references.attention import TOLERANCE as ATTENTION_TOLERANCE
from metal_engine.doctor.references.recurrence import TOLERANCE as RECURRENT_TOLERANCE
from metal_engine.doctor.references.recurrence import relative_errors
from metal_engine.recurrence.metal import MetalRecurrence
from tools.fixtures.packed_step import make_step
from tools.fixtures.recurrent_step import GatedDeltaStep

from .recurrence_mutants import CASES as RECURRENT_STEPS
from .recurrence_mutants import Step


@dataclass(frozen=True)
class AttentionCase:
    """Attention step. ``segments`` has (query_len, kv_len) of each request."""

    name: str
    segments: tuple[tuple[int, int], ...]
    heads: tuple[int, int]  # Hq, Hkv
    head_dim: int
    dtype: mx.Dtype
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    quantized: tuple[int, int] | None = None  # bits and group size of K and V
    latent_dim: int | None = None  # number of columns of K that are V; None for ordinary keys
    spans: tuple[tuple[int, int], ...] = ()  # first row and end of each image; its rows attend to each other

    @property
    def allowed(self) -> float:
        return ATTENTION_TOLERANCE[self.dtype]

    def error(self, factory: Callable[..., Any]) -> float:
        """Run the step with kernels from ``factory``. Return the largest relative error of a row."""
        step = make_step(
            [(n, kv - n) for n, kv in self.segments],
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            v_head_dim=self.latent_dim,
            is_latent=self.latent_dim is not None,
            dtype=self.dtype,
            window=self.window,
            quantized=self.quantized,
            spans=self.spans,
        )
        sinks = mx.array(np.linspace(-2, 4, self.heads[0], dtype=np.float32)).astype(self.dtype)
        options = {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}
        attention = MetalBackend(factory, tensor_ops=has_tensor_ops()).for_step(step.rows)
        out = attention.attend(step.q, step.state, sinks=sinks if self.has_sinks else None, **options)
        out = out[..., : self.latent_dim]
        expected = step.reference(sinks=np.array(sinks.astype(mx.float32)) if self.has_sinks else None, **options)
        return _largest(relative_errors(out, expected))


@dataclass(frozen=True)
class RecurrentCase:
    """Step of a recurrent kernel."""

    step: Step

    @property
    def _dtype(self) -> mx.Dtype:
        rows = self.step.q if isinstance(self.step, GatedDeltaStep) else self.step.x
        return rows.dtype

    @property
    def name(self) -> str:
        return f"{type(self.step).__name__}, {self._dtype}"

    @property
    def allowed(self) -> float:
        return RECURRENT_TOLERANCE[self._dtype]

    def error(self, factory: Callable[..., Any]) -> float:
        """Run the step with kernels from ``factory``. Return the largest relative error of a row or a new state."""
        got = self.step.run(MetalRecurrence(factory))
        return max(_largest(relative_errors(a, b)) for a, b in zip(got, self.step.reference(), strict=True))


def _largest(errors: np.ndarray) -> float:
    """Return the maximum. NaN counts as infinite."""
    return float(np.nan_to_num(errors, nan=np.inf).max())


Case = AttentionCase | RecurrentCase

MIX = ((1, 1), (5, 18), (33, 33), (1, 130), (1, 2100))
IMAGES = ((2, 5), (6, 38))  # rows of MIX
SERVING = (*((1, 20 + 37 * i) for i in range(32)), (129, 463), (512, 2048), (1, 9000))
SMALL_CASES: tuple[Case, ...] = (
    AttentionCase("mixed step with a split context", MIX, (8, 2), 64, mx.float16),
    AttentionCase("window, softcap and sinks", MIX, (4, 2), 128, mx.bfloat16, window=20, softcap=9.0, has_sinks=True),
    AttentionCase("int8", MIX, (8, 2), 128, mx.float16, quantized=(8, 64)),
    AttentionCase("int4 in groups of 32, window", MIX, (4, 2), 96, mx.bfloat16, window=20, quantized=(4, 32)),
    AttentionCase("latent", MIX, (16, 1), 576, mx.bfloat16, latent_dim=512),
    AttentionCase("latent, int8", MIX, (16, 1), 576, mx.bfloat16, quantized=(8, 64), latent_dim=512),
    AttentionCase("images", MIX, (8, 2), 64, mx.float16, window=20, spans=IMAGES),
    AttentionCase("images, int8", MIX, (8, 2), 128, mx.bfloat16, quantized=(8, 64), spans=IMAGES),
    *map(RecurrentCase, RECURRENT_STEPS),
)
CASES: tuple[Case, ...] = (
    *SMALL_CASES,
    *(
        AttentionCase(f"serving step, head_dim {head_dim}, {dtype}", SERVING, (8, 2), head_dim, dtype)
        for head_dim in (64, 128, 256)
        for dtype in ATTENTION_TOLERANCE
    ),
)

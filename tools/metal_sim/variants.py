"""Finds every kernel variant that the engine launches for the shapes of shapes.py.

The engine's own host code runs with kernels that record their calls and compute nothing. Names and values of template
arguments are therefore known only to the host code.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.indexed import IndexQueries, plan_selection
from metal_engine.attention.metal.backend import MetalBackend, MetalStep
from metal_engine.attention.metal.cuts import DEFAULT_CUT, Cut, tried_cuts
from metal_engine.attention.metal.layer_kinds import shape_of
from metal_engine.attention.metal.variants import (
    UnsupportedAttentionError,
    check_supported,
    fits_tensor_ops,
    variant_of,
)
from metal_engine.attention.portable.groups import GPU_LIMITS
from metal_engine.errors import ConfigError
from metal_engine.kv_cache.pool import make_state
from metal_engine.kv_cache.rows import ImageSpans, StepRows, step_rows
from metal_engine.kv_cache.spec import IndexSpec, KVSpec, LatentSpec, kv_cache_spec
from metal_engine.kv_cache.state import IndexState, KVState
from metal_engine.prompt_images import BidirectionalLayers
from metal_engine.recurrence.metal import MetalRecurrence
from metal_engine.settings.args import EngineArgs

from .kernel import SimulatedKernel
from .shapes import INDEXES, Attention, Convolution, GatedDelta, Layer, Mamba2

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
# Values of --kv-cache-dtype, and the types of checkpoints that are compiled with them. float32 only compares results.
QUANTIZED = ("int8", "int4")
QUANTIZED_DTYPES = (mx.float16, mx.bfloat16)
# Steps as (rows, context) of each request, in all kinds that plans can distinguish. Some contexts are split.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 4),),
    ((1, 700),),
    ((1, 40_000),),
    ((1, 200),) * 16,
    ((2, 10), (5, 100)),
    ((16, 3_000),),
    ((64, 0),),
    ((300, 20_000), (1, 9_000), (17, 0)),
)
# Users can set --block-size. The most common layer is compiled for each block size of the kernels. Other layers are
# compiled only for the default block size.
COMMON_LAYER = Attention(32, 8, 128, 128)
BLOCK_SIZES = (8, 16, 32)
WINDOW, SOFTCAP = 1024, 50.0
# Architectures with images whose tokens attend to each other, and the rows of a step of one such image.
SELF_SEEING: dict[str, BidirectionalLayers] = {"gemma3": "every layer", "gemma4": "layers with windows"}
IMAGE_ROWS = 64
_NUM_CHANNELS = 2048
_NUM_BLOCKS = 8  # blocks of a cache that is never read


@dataclass
class Variant:
    """Variant of a kernel: a function that MLX would compile."""

    kernel: str  # "paged_attention"
    function: str  # MLX's name of the function, which contains template arguments and input types
    text: str  # text after MLX's preamble
    template: dict[str, str]
    threadgroup: tuple[int, int, int]  # largest threadgroup that it is launched with
    needed_by: set[str] = field(default_factory=set)  # architectures
    cut: str = ""  # description of a cut that tuning tries; an empty string stands for the default

    @property
    def threads(self) -> int:
        """Number of threads in a threadgroup."""
        return math.prod(self.threadgroup)

    @property
    def name(self) -> str:
        """Name for files."""
        return self.function.removeprefix("custom_kernel_")


class _NotingKernel(SimulatedKernel):
    """Kernel that records the function needed for a call, and returns zeros."""

    recorder: Recorder

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        **options: Any,
    ) -> list[mx.array]:
        text, function, arguments = self.metal_source(inputs, output_dtypes, template or ())
        names = [name for name, _ in template or ()]
        new = Variant(self.name, function, text, {}, (0, 0, 0), cut=self.recorder.cut)
        found = self.recorder.variants.setdefault(function, new)
        if found.text != text:
            raise ValueError(f"MLX gives two kernels the name {function}")
        found.template = dict(zip(names, arguments, strict=True))
        found.threadgroup = max(found.threadgroup, threadgroup, key=math.prod)
        found.needed_by |= self.recorder.models
        found.cut = found.cut and self.recorder.cut
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]


class Recorder:
    """Kernel factory like ``mx.fast.metal_kernel`` that records the calls of its kernels.

    Attributes:
        kernels: names of the kernels that were made.
        variants: variants by MLX's name of the function.
        models: architectures that need the next calls.
        cut: description of the next calls' cut (:mod:`metal_engine.attention.metal.cuts`). Empty for the default cut.
        refused: (architectures, layer and dtype, reason) for layers that the host code rejects.
    """

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self.variants: dict[str, Variant] = {}
        self.models: set[str] = set()
        self.cut = ""
        self._backends: dict[bool, MetalBackend] = {}  # by use of tensor operations
        self._work: set[Hashable] = set()  # recorded work of attention, whatever the number of query heads
        self.refused: list[tuple[list[str], str, str]] = []

    def __call__(self, *arguments: Any, **options: Any) -> _NotingKernel:
        kernel = _NotingKernel(*arguments, **options)
        kernel.recorder = self
        self.kernels.add(kernel.name)
        return kernel

    def record(self, layer: Layer, models: set[str], dtype: mx.Dtype) -> None:
        """Record all variants for a layer on a GPU without tensor operations."""
        self.models = models
        if isinstance(layer, Attention):
            for block_size in _block_sizes(layer):
                try:
                    self._record_attention(layer, dtype, block_size)
                except UnsupportedAttentionError as error:
                    self.refused.append((sorted(models), f"{layer} {dtype} in blocks of {block_size}", str(error)))
        else:
            _call_recurrence(MetalRecurrence(self), layer, dtype)

    def record_tensor_ops(self, layer: Attention, models: set[str], dtype: mx.Dtype) -> None:
        """Record the additional variants on a GPU with tensor operations."""
        self.models = models
        for block_size in _block_sizes(layer):
            self._record_attention(layer, dtype, block_size, tensor_ops=True)

    def record_quantized(self, layer: Attention, models: set[str], dtype: mx.Dtype, kv_cache_dtype: str) -> None:
        """Record the variants for quantized K and V on both kinds of GPU.

        Records nothing if the server rejects quantization.
        """
        self.models = models
        block_size = EngineArgs(model="").block_size
        try:
            for tensor_ops in (False, True):
                self._record_attention(layer, dtype, block_size, tensor_ops, kv_cache_dtype)
        except ConfigError:
            return
        except UnsupportedAttentionError as error:
            self.refused.append((sorted(models), f"{layer} {dtype} {kv_cache_dtype}", str(error)))

    def record_tried_cuts(self, layer: Attention, models: set[str], dtype: mx.Dtype, kv_cache_dtype: str) -> None:
        """Record the variants for all cuts that tuning tries on a layer, unless a recorded layer has the same work.

        Layers with the same work may differ in the number of heads, and in window, softcap and sinks. These change
        little of the code.
        """
        self.models = models
        block_size = EngineArgs(model="").block_size
        for cut in tried_cuts():
            for tensor_ops in (False, True):
                try:
                    self._record_attention(layer, dtype, block_size, tensor_ops, kv_cache_dtype, cut)
                except (ConfigError, UnsupportedAttentionError):
                    return  # recorded when the default cut was refused

    def _record_attention(
        self,
        layer: Attention,
        dtype: mx.Dtype,
        block_size: int,
        tensor_ops: bool = False,
        kv_cache_dtype: str = "auto",
        cut: Cut = DEFAULT_CUT,
    ) -> None:
        spec = (
            LatentSpec(layer.head_dim, layer.rope_dim, dtype)
            if layer.is_latent
            else KVSpec(layer.num_kv_heads, layer.head_dim, layer.v_head_dim, dtype)
        )
        kept = kv_cache_spec(spec, kv_cache_dtype)
        sinks = dtype if layer.sinks else None
        kind = AttentionKind(kept, layer.num_heads, dtype, layer.window, layer.softcap, sinks)
        state = make_state(kept)
        assert isinstance(state, KVState)
        state.allocate(_NUM_BLOCKS, block_size)
        shape = shape_of(mx.zeros((1, layer.num_heads, layer.head_dim + layer.rope_dim), dtype), state)
        if tensor_ops and not fits_tensor_ops(shape, cut):
            return
        check_supported(shape)
        work = (replace(shape, num_heads=1, num_kv_heads=1), variant_of(shape, cut), tensor_ops)
        if cut != DEFAULT_CUT and work in self._work:
            return
        self._work.add(work)
        self.cut = str(cut) if cut != DEFAULT_CUT else ""
        if tensor_ops not in self._backends:
            self._backends[tensor_ops] = MetalBackend(self, tensor_ops=tensor_ops)
        backend = self._backends[tensor_ops].with_cuts({kind: cut})
        steps = [_rows(segments, block_size) for segments in STEPS]
        for model in self.models & SELF_SEEING.keys():
            spans = ImageSpans(np.array([[0, IMAGE_ROWS]], np.int32), SELF_SEEING[model])
            steps.append(replace(_rows(((IMAGE_ROWS, 0),), block_size), image_spans=spans))
        for rows in steps:
            q = mx.zeros((rows.num_tokens, layer.num_heads, layer.head_dim + layer.rope_dim), dtype)
            attention = backend.for_step(rows)
            attention.attend(
                q,
                state,
                scale=1.0,
                window=WINDOW if layer.window else None,
                softcap=SOFTCAP if layer.softcap else None,
                sinks=mx.zeros((layer.num_heads,), dtype) if layer.sinks else None,
            )
            if sinks is None and not (layer.window or layer.softcap):
                self._record_indexes(attention, rows, q, state)

    def _record_indexes(self, attention: MetalStep, rows: StepRows, q: mx.array, state: KVState) -> None:
        """Record the kernels of models whose index selects the keys of a layer."""
        needed_by = self.models
        for model in sorted(needed_by & INDEXES.keys()):
            self.models = {model}
            heads, head_dim, size = INDEXES[model]
            keys = IndexState(IndexSpec(head_dim, q.dtype))
            keys.allocate(_NUM_BLOCKS, rows.block_size)
            queries = mx.zeros((rows.num_tokens, heads, head_dim), q.dtype)
            weights = mx.zeros((rows.num_tokens, heads), q.dtype)
            index = IndexQueries(queries, weights if size.block_size == 1 else None, size)
            plan = plan_selection(rows, size.num_keys, index.dims, GPU_LIMITS)
            if plan is not None:
                selection = attention.select_keys(plan, index, keys, lambda positions: positions)
                attention.attend(q, state, scale=1.0, selection=selection)
        self.models = needed_by


def _quantized(dtype: mx.Dtype) -> tuple[str, ...]:
    return QUANTIZED if dtype in QUANTIZED_DTYPES else ()


def _block_sizes(layer: Attention) -> Sequence[int]:
    return BLOCK_SIZES if layer == COMMON_LAYER else (EngineArgs(model="").block_size,)


def _rows(segments: Sequence[tuple[int, int]], block_size: int) -> StepRows:
    query_lens, context_lens = np.array(segments, np.int32).T
    table = np.zeros((len(segments), -(-int((query_lens + context_lens).max()) // block_size)), np.int32)
    return step_rows(table, context_lens, query_lens, block_size)


def _call_recurrence(kernels: MetalRecurrence, layer: Layer, dtype: mx.Dtype) -> None:
    """Call the kernel of a recurrent layer with one segment of eight rows."""
    n = 8
    tables = mx.array([0, n], mx.int32), mx.array([-1], mx.int32)

    def rows(*shape: int) -> mx.array:
        return mx.zeros((n, *shape), dtype)

    match layer:
        case GatedDelta():
            k = rows(layer.num_k_heads, layer.key_dim)
            columns = (layer.key_dim,) if layer.vector_gate else ()
            g = mx.zeros((n, layer.num_v_heads, *columns), mx.float32)
            states = mx.zeros((1, layer.num_v_heads, layer.value_dim, layer.key_dim), mx.float32)
            v, beta = rows(layer.num_v_heads, layer.value_dim), rows(layer.num_v_heads)
            kernels.gated_delta(k, k, v, g, beta, states, *tables)
        case Mamba2():
            x, b = rows(layer.num_heads, layer.head_dim), rows(layer.num_groups, layer.columns)
            dt = mx.zeros((n, layer.num_heads), mx.float32)
            states = mx.zeros((1, layer.num_heads, layer.head_dim, layer.columns), mx.float32)
            # Checkpoints have A_log and D in float32, or in the type of the other weights.
            for of_heads in {dtype, mx.float32}:
                a_log = mx.zeros((layer.num_heads,), of_heads)
                kernels.ssm_update(x, a_log, b, b, a_log, dt, states, *tables)
        case Convolution():
            x, weight = rows(_NUM_CHANNELS), mx.zeros((_NUM_CHANNELS, layer.kernel_size), dtype)
            bias = mx.zeros((_NUM_CHANNELS,), dtype) if layer.bias else None
            states = mx.zeros((1, layer.kernel_size - 1, _NUM_CHANNELS), dtype)
            kernels.convolve(x, weight, bias, states, *tables, silu=False)
        case _:
            raise TypeError(f"{layer} carries no state")


def record_variants(layers: dict[str, list[Layer]], dtypes: Sequence[mx.Dtype] = DTYPES) -> Recorder:
    """Record every variant for these layers of architectures in every dtype. Each layer is recorded once."""
    models: dict[Layer, set[str]] = {}
    for model_type, kinds in layers.items():
        for layer in kinds:
            models.setdefault(layer, set()).add(model_type)
    recorder = Recorder()
    for layer, needed_by in models.items():
        for dtype in dtypes:
            recorder.record(layer, needed_by, dtype)
            if isinstance(layer, Attention):
                recorder.record_tensor_ops(layer, needed_by, dtype)
                for kv_cache_dtype in _quantized(dtype):
                    recorder.record_quantized(layer, needed_by, dtype, kv_cache_dtype)
    # Tried cuts follow all defaults, because a cut whose work equals the work of any layer's default is not recorded.
    # No cuts are tried for float32, which only tests use.
    for layer, needed_by in models.items():
        for dtype in dtypes if isinstance(layer, Attention) else ():
            for kv_cache_dtype in ("auto", *_quantized(dtype)) if dtype != mx.float32 else ():
                recorder.record_tried_cuts(layer, needed_by, dtype, kv_cache_dtype)
    return recorder

"""The ``metal`` backend: one kernel launch per layer for any mix of segments.

The kernel factory is an argument: ``mx.fast.metal_kernel`` on a Mac, ``tools.metal_sim.metal_kernel`` elsewhere. Both
use the same host code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionKind, StepTables, size_class
from metal_engine.attention.indexed import Common, IndexQueries, KeySelection, SelectionPlan, attend_selected
from metal_engine.attention.metal.attention_kernel import KernelFactory, attention_kernel
from metal_engine.attention.metal.cuts import DEFAULT_CUT, THREADGROUPS_PER_CORE, Cut
from metal_engine.attention.metal.indexed import IndexKernels, SelectedRows
from metal_engine.attention.metal.layer_kinds import LayerKind, ShapeKey, make_kind, make_shape, shape_key
from metal_engine.attention.metal.planning import WorkItems, plan_work_items
from metal_engine.attention.metal.variants import THREADS, AttentionShape, KernelVariant, fits_tensor_ops, variant_of
from metal_engine.attention.portable.indexed import select_keys, tile_attention
from metal_engine.device.metal_kernels import DEVICE_ELEMENTS, kernel_text, on_device
from metal_engine.kv_cache.quantized import numbers_of_groups
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.state import IndexState, KVState

UNKNOWN_GPU_CORES = 12

# group, num_kv_heads, window, chunk, key_step, tile_rows, threadgroups_per_core
_ItemsKey = tuple[int, int, int | None, int | None, int, int, int]


@dataclass(frozen=True)
class _Uploaded:
    """Work items on the device."""

    num_items: int
    num_partial_rows: int
    table: mx.array
    rows: mx.array | None  # rows to merge; None if nothing is split


@dataclass(frozen=True, slots=True)
class _Launch:
    """Launch parameters of the kernels, shared by layers with equal arguments. Only the layers' arrays are missing.

    Attributes:
        kernel: the attention kernel.
        tables: inputs after q, K and V, without the sinks.
        options: arguments of the kernel's launch other than inputs.
        merge_rows: input of the merge kernel that lists the rows to merge; None if nothing is split.
        merge_options: arguments of the merge kernel's launch other than inputs.
    """

    kernel: Callable[..., Any]
    tables: list[mx.array]
    options: dict[str, Any]
    merge_rows: mx.array | None
    merge_options: dict[str, Any]


@dataclass
class MetalStep:
    """Attention of one step.

    Layers of a kind share tables and launch parameters. The checks of arguments run at the first call for a kind.
    """

    rows: StepRows
    backend: MetalBackend
    _uploaded: dict[_ItemsKey, _Uploaded] = field(default_factory=dict)
    _launches: dict[tuple[object, ...], _Launch] = field(default_factory=dict)
    _block_table: mx.array | None = None
    is_planned: bool = False  # True if the work is given, so that planning from the rows is an error
    _selected: SelectedRows = field(default_factory=SelectedRows)

    @property
    def work_keys(self) -> tuple[_ItemsKey, ...]:
        """Parameters of the work items that layers have requested."""
        return tuple(self._uploaded)

    def _items(
        self, shape: AttentionShape, variant: KernelVariant, window: int | None, chunk: int | None, per_core: int
    ) -> _Uploaded:
        key = (shape.group, shape.num_kv_heads, window, chunk, variant.bk, variant.tile_rows, per_core)
        if key not in self._uploaded:
            if self.is_planned:
                raise RuntimeError(f"a layer requests work items {key}, which no layer has requested before")
            items = self.backend.plan(self.rows, key)
            rows = on_device(items.rows) if items.is_split else None
            self._uploaded[key] = _Uploaded(len(items.table), items.num_partial_rows, on_device(items.table), rows)
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
        chunk: int | None = None,
        selection: KeySelection | None = None,
    ) -> mx.array:  # [N, Hq, Dv], dtype of q; for latents, the latent_dim columns
        """See :meth:`metal_engine.attention.backend.StepAttention.attend`.

        For a selection, the kernel needs sorted positions, separately for each KV head. MLX's operations compute
        attention to other selections.

        Raises:
            UnsupportedAttentionError: the kernel does not support the shape.
            ValueError: the arrays do not match each other or the step.
        """
        if selection is not None:
            size = selection.sorted_size
            if size is not None and selection.positions[0].shape[2] == state.spec.num_kv_heads:
                kind = self.backend.kind_of(shape_key(q, state), False, False, None, is_selected=True)
                self._check(q, state, kind.shape, None)
                attend_tile = self._selected.attention(self, kind, q, state, scale, size)
            else:
                attend_tile = tile_attention(q, state, scale, selection.plan.limits)
            return attend_selected(selection, self, self.backend.for_step, q, state, scale, attend_tile)
        key = (state.spec, state.block_size, q.shape, q.dtype, scale, window, softcap, sinks is not None, chunk)
        launch = self._launches.get(key)
        if launch is None:
            sinks_dtype = None if sinks is None else sinks.dtype
            launch = self._launches[key] = self._launch(q, state, scale, window, softcap, sinks_dtype, chunk)
        sink_values = sinks if sinks is not None else self.backend.no_sinks
        out, partial_out, partial_lse = launch.kernel(
            inputs=[*(q, state.keys, state.values, *numbers_of_groups(state)), *(*launch.tables, sink_values)],
            **launch.options,
        )
        if launch.merge_rows is None:
            return out
        (merged,) = self.backend.merge(
            inputs=[out, partial_out, partial_lse, launch.merge_rows, sink_values], **launch.merge_options
        )
        return merged

    def _launch(
        self,
        q: mx.array,
        state: KVState,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: mx.Dtype | None,
        chunk: int | None,
    ) -> _Launch:
        """Check a layer's arguments, and return their launch. The caller reuses it for layers with equal arguments.

        ``sinks`` is the type of the attention sinks; None without sinks.
        """
        has_images = self.rows.spans_of_layer(window) is not None
        kind = self.backend.kind_of(shape_key(q, state), window is not None, bool(softcap), sinks, has_images)
        shape = kind.shape
        self._check(q, state, shape, window)
        uploaded = self._items(shape, kind.variant, window, chunk, kind.cut.threadgroups_per_core)
        # MLX does not support empty outputs, and the merge takes these as inputs.
        partial_rows = max(DEVICE_ELEMENTS, uploaded.num_partial_rows)
        numbers = self.backend.constant([scale, softcap or 0.0], mx.float32)
        window_size = self.backend.constant([window or 0], mx.int32)
        partial_shape = (partial_rows, shape.num_kv_heads, shape.v_head_dim)
        out_shape = (*q.shape[:2], shape.v_head_dim)
        return _Launch(
            self.backend.attention_for(shape, kind.cut),
            [self.block_table, uploaded.table, numbers, window_size],
            {
                "template": kind.template,
                "grid": (uploaded.num_items * THREADS, shape.num_kv_heads, 1),
                "threadgroup": (THREADS, 1, 1),
                "output_shapes": [out_shape, partial_shape, partial_shape[:2]],
                "output_dtypes": [q.dtype, mx.float32, mx.float32],
            },
            uploaded.rows,
            {
                "template": kind.merge_template,
                "grid": (shape.v_head_dim, shape.num_heads, self.rows.num_tokens),
                "threadgroup": (min(shape.v_head_dim, THREADS), 1, 1),
                "output_shapes": [out_shape],
                "output_dtypes": [q.dtype],
            },
        )

    def select_keys(self, plan: SelectionPlan, index: IndexQueries, state: IndexState, common: Common) -> KeySelection:
        """See :meth:`metal_engine.attention.backend.StepAttention.select_keys`.

        If the kernels do not support the shape of the index, MLX's operations select the keys.
        """
        kernels = self.backend.index_kernels
        if kernels is None or kernels.unsupported(index, state.spec, self.rows.block_size):
            return select_keys(plan, index, state, common)
        target = self.backend.target_threadgroups
        positions = [
            common(kernels.select(self._selected.tables(tile), index, state, self.block_table, target))
            for tile in plan.tiles
        ]
        return KeySelection(plan, positions, index.size)

    @property
    def block_table(self) -> mx.array:
        """Block table of the step, on the device."""
        if self._block_table is None:
            self._block_table = on_device(self.rows.block_table)
        return self._block_table

    def _check(self, q: mx.array, state: KVState, shape: AttentionShape, window: int | None) -> None:
        keys, values = state.keys, state.values
        if q.shape[0] != self.rows.num_tokens or shape.block_size != self.rows.block_size:
            raise ValueError(f"q {q.shape} and keys {keys.shape} do not belong to this step")
        if state.spec.dtype != q.dtype or values.shape[:2] != keys.shape[:2]:
            raise ValueError(f"q is {q.dtype}; {state.spec.dtype} keys {keys.shape}, values {values.shape}")
        if q.shape[2] != shape.head_dim:
            raise ValueError(f"q {q.shape} does not match keys of {state.spec}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")


def _with_rows(table: np.ndarray, num_rows: int) -> np.ndarray:
    """Return a table padded with zero rows to ``num_rows`` rows."""
    if len(table) == num_rows:
        return table
    larger = np.zeros((num_rows, table.shape[1]), table.dtype)
    larger[: len(table)] = table
    return larger


class MetalBackend:
    """Creates each step's attention. Holds the kernels. MLX compiles each variant at its first use.

    Args:
        kernel_factory: ``mx.fast.metal_kernel`` or the simulator's function.
        target_threadgroups: approximate number of threadgroups into which each request is split; None for the default
            of an unknown GPU.
        tensor_ops: True to compute prefill of supported shapes with Metal's tensor operations. The GPU must have them.

    Attributes:
        cuts: cut of the work for each kind of layer. Other kinds have the default cut.
        index_kernels: kernels that select keys and attend to them; None if MLX's operations do both.
    """

    name = "metal"

    def __init__(
        self,
        kernel_factory: KernelFactory = mx.fast.metal_kernel,
        target_threadgroups: int | None = None,
        *,
        tensor_ops: bool = False,
    ):
        self.cuts: Mapping[AttentionKind, Cut] = {}
        self._kinds: dict[tuple[object, ...], LayerKind] = {}
        self._constants: dict[tuple[object, ...], mx.array] = {}
        # Created from host data once: mx.zeros would launch one more kernel in every layer.
        self.no_sinks = mx.array([0.0], mx.float32)
        self.target_threadgroups = target_threadgroups or THREADGROUPS_PER_CORE * UNKNOWN_GPU_CORES
        self.attention = attention_kernel(kernel_factory)
        self.quantized_attention = attention_kernel(kernel_factory, quantized=True)
        self.tensor_attention = self.quantized_tensor_attention = None
        if tensor_ops:
            self.tensor_attention = attention_kernel(kernel_factory, tensor_ops=True)
            self.quantized_tensor_attention = attention_kernel(kernel_factory, tensor_ops=True, quantized=True)
        self.index_kernels: IndexKernels | None = IndexKernels(kernel_factory)
        self.merge = kernel_factory(
            name="merge_splits",
            input_names=["whole", "partial_out", "partial_lse", "rows", "sinks"],
            output_names=["out"],
            source=kernel_text("merge_splits.metal"),
        )

    def constant(self, values: list[float] | list[int], dtype: mx.Dtype) -> mx.array:
        """Return an array with these values. Layers and steps share it: each array is created once."""
        key = (*values, dtype)
        if key not in self._constants:
            self._constants[key] = mx.array(values, dtype)
        return self._constants[key]

    @property
    def has_tensor_ops(self) -> bool:
        """True if some shapes use tensor operations."""
        return self.tensor_attention is not None

    def uses_tensor_ops(self, shape: AttentionShape) -> bool:
        """Return True if prefill of a shape uses tensor operations."""
        return self.attention_for(shape) in (self.tensor_attention, self.quantized_tensor_attention)

    def kind_of(
        self,
        key: ShapeKey,
        has_window: bool,
        has_softcap: bool,
        sinks: mx.Dtype | None,
        has_images: bool = False,
        is_selected: bool = False,
    ) -> LayerKind:
        """Return the shape, variant and template arguments of a kind of layer. Each kind is computed once.

        Args:
            key: result of :func:`shape_key`.
            sinks: type of the attention sinks; None without sinks.
            has_images: True if rows of images attend to later rows.
            is_selected: True for attention to selected keys. All work items are then direct items
                (:mod:`metal_engine.attention.metal.variants`), because staged items do not support selected keys.

        Raises:
            UnsupportedAttentionError: the kernel does not support the shape.
        """
        whole_key = (key, has_window, has_softcap, sinks, has_images, is_selected)
        kind = self._kinds.get(whole_key)
        if kind is None:
            dtype, num_heads, spec, _ = key
            cut = self.cuts.get(AttentionKind(spec, num_heads, dtype, has_window, has_softcap, sinks), DEFAULT_CUT)
            cut = replace(cut, staged_parts=0) if is_selected else cut
            kind = make_kind(make_shape(*key), cut, has_window, has_softcap, sinks is not None, has_images)
            self._kinds[whole_key] = kind
        return kind

    def work_of(self, kind: AttentionKind, block_size: int, cut: Cut) -> Hashable:
        """Return a key of the launches for a kind of layer with a cut. Cuts with equal keys have equal launches."""
        shape = make_shape(kind.dtype, kind.num_heads, kind.spec, block_size)
        uses_tensor_ops = self.has_tensor_ops and fits_tensor_ops(shape, cut)
        return variant_of(shape, cut), cut.threadgroups_per_core, uses_tensor_ops

    def attention_for(self, shape: AttentionShape, cut: Cut = DEFAULT_CUT) -> Callable[..., Any]:
        """Return the kernel for all steps of a shape, with and without prefills."""
        with_tensor_ops = self.quantized_tensor_attention if shape.bits else self.tensor_attention
        if with_tensor_ops is not None and fits_tensor_ops(shape, cut):
            return with_tensor_ops
        return self.quantized_attention if shape.bits else self.attention

    def without_tensor_ops(self) -> MetalBackend:
        """Return a backend with the same kernels, except the kernels for tensor operations."""
        other = copy(self)
        other.tensor_attention = other.quantized_tensor_attention = None
        return other

    def without_index_kernels(self) -> MetalBackend:
        """Return a backend without the kernels of indexes. MLX's operations select keys instead."""
        other = copy(self)
        other.index_kernels = None
        return other

    def with_cuts(self, cuts: Mapping[AttentionKind, Cut]) -> MetalBackend:
        """Return a backend with the same kernels and these cuts. Kinds of layers without a cut have the default."""
        other = copy(self)
        other.cuts, other._kinds = cuts, {}
        return other

    def splitting(self) -> MetalBackend:
        """Return a backend with the same kernels that splits every context that may be split."""
        other = copy(self)
        other.target_threadgroups = 1 << 30
        return other

    def for_step(self, rows: StepRows) -> MetalStep:
        """Return a step's attention. Work items are planned when the first layer of a kind attends."""
        return MetalStep(rows, self)

    @property
    def num_cores(self) -> int:
        """Approximate number of cores of the GPU."""
        return self.target_threadgroups // THREADGROUPS_PER_CORE

    def threadgroups_of(self, per_core: int) -> int:
        """Return the approximate number of threadgroups into which a request is split.

        ``per_core`` is the cut's number of threadgroups for each core.
        """
        return self.target_threadgroups * per_core // THREADGROUPS_PER_CORE

    def plan(self, rows: StepRows, key: _ItemsKey) -> WorkItems:
        """Plan the work items of a step for one kind of layer."""
        group, num_kv_heads, window, chunk, key_step, tile_rows, per_core = key
        return plan_work_items(
            rows,
            group=group,
            num_kv_heads=num_kv_heads,
            window=window,
            chunk=chunk,
            target_threadgroups=self.threadgroups_of(per_core),
            key_step=key_step,
            tile_rows=tile_rows,
        )

    def tables(self, rows: StepRows, work_keys: Hashable) -> StepTables:
        """See :meth:`metal_engine.attention.backend.ReplayableBackend.tables`. Items without rows pad the tables."""
        assert isinstance(work_keys, tuple)
        num_rows = rows.num_tokens
        arrays = [on_device(_with_rows(rows.block_table, num_rows))]
        sizes: list[tuple[int, int]] = []  # items, and rows of splits
        for key in work_keys:
            items = self.plan(rows, key)
            num_items = size_class(len(items.table))
            num_partial = 1 << (items.num_partial_rows - 1).bit_length() if items.is_split else 0
            sizes.append((num_items, num_partial))
            arrays.append(on_device(_with_rows(items.table, num_items)))
            if items.is_split:
                arrays.append(on_device(items.rows))

        def attention(tables: list[mx.array]) -> MetalStep:
            given = iter(tables)
            block_table = next(given)
            uploaded = {
                key: _Uploaded(num_items, num_partial, next(given), next(given) if num_partial else None)
                for key, (num_items, num_partial) in zip(work_keys, sizes, strict=True)
            }
            return MetalStep(rows, self, uploaded, _block_table=block_table, is_planned=True)

        return StepTables((num_rows, arrays[0].shape, tuple(sizes)), arrays, attention)

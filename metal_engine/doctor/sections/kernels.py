"""Kernels that a model needs: time to compile, errors against float64, and the check at load."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionKind
from metal_engine.attention.choice import BackendChoice
from metal_engine.attention.index_selftest import (
    SEGMENTS,
    IndexKind,
    random_index,
    select_random,
    selecting_kinds,
    tried_size,
    unsupported_index,
)
from metal_engine.attention.indexed import KeySelection
from metal_engine.attention.kernel_selftest import attend_random, random_state, selftest_steps, shuffled_rows
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.sample_steps import attend_options, random_queries, random_sinks
from metal_engine.checkpoints.loader import LoadedModel
from metal_engine.device.info import has_tensor_ops
from metal_engine.doctor.figures import Figure, at_most, not_measured
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.references import recurrence as references
from metal_engine.doctor.references.attention import TOLERANCE, paged_attention, selected_keys
from metal_engine.doctor.section_process import Item
from metal_engine.doctor.sections.common import (
    KERNEL_ERRORS,
    MLX_FLAG,
    NO_KERNEL,
    failed_kernel,
    has_metal,
    kernel_factory,
    load_plain_model,
    tolerance,
)
from metal_engine.doctor.sections.recurrences import kernel_error
from metal_engine.errors import ConfigError, UnsupportedModelError
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.spec import KVSpec, LatentSpec, kv_cache_spec
from metal_engine.kv_cache.state import KVState
from metal_engine.models.attention_kinds import attention_kinds
from metal_engine.models.check import LOGITS_TOLERANCE, check_paged_model
from metal_engine.models.indexer import index_kind
from metal_engine.models.own_caches_model import open_paged_model
from metal_engine.recurrence.metal import MetalRecurrence

_BLOCK_SIZE = 16
_KV_CACHE_DTYPES = ("auto", "int8", "int4")
# Longest time to compile all variants of a model that does not make the first start seem stuck.
_COMPILE_SECONDS = 60.0


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield errors and times of the kernels that a model needs."""
    yield from _measure(plan, load_plain_model(model))


def _measure(plan: Plan, loaded: LoadedModel) -> Iterator[Item]:
    factory = kernel_factory(plan)
    clock = None if factory is None else CompileClock(factory)
    recurrence = None if clock is None else RecordingRecurrence(clock.make)
    paged = open_paged_model(loaded.model, recurrence)
    kinds = list(dict.fromkeys(attention_kinds(paged)))
    yield "kinds of attention", "; ".join(map(str, kinds)) or "none"
    index = index_kind(paged.model, paged.pool.states)
    choice = BackendChoice(None)
    if clock is None:
        yield NO_KERNEL
    else:
        metal = MetalBackend(clock.make, tensor_ops=has_tensor_ops())
        yield "tensor operations", "on" if metal.has_tensor_ops else "off: this GPU or this macOS lacks them"
        for kind in kinds:
            yield from attention_errors(metal, kind)
        if index is not None:
            yield from index_errors(metal, index, kinds)
        choice = BackendChoice(metal if has_metal() else None)
    chosen = choice.for_layers(kinds, _BLOCK_SIZE)
    backend = (chosen if index is None else choice.for_index(chosen, index, _BLOCK_SIZE)).backend
    try:
        gap, note = check_paged_model(paged, backend, paged.vocab_size, _BLOCK_SIZE), ""
    except UnsupportedModelError as error:
        gap, note = failed_kernel(error)
    title = "check at load: largest error of a logit, relative to the largest logit"
    promise = at_most(LOGITS_TOLERANCE[paged.dtype], required=True, flag=MLX_FLAG)
    yield Figure(title, gap, promise=promise, note=note)
    if recurrence is not None:
        yield from recurrence.errors()
    if clock is not None:
        slowest = max(clock.seconds.values(), default=0.0)
        note = f"{len(clock.seconds)} variants, the slowest in {slowest:.2g} s"
        title, simulated = "time to compile and first run all variants", not has_metal()
        seconds = sum(clock.seconds.values())
        yield Figure(title, seconds, "s", at_most(_COMPILE_SECONDS, flag=MLX_FLAG), note, is_simulated=simulated)


def attention_errors(metal: MetalBackend, kind: AttentionKind) -> Iterator[Figure]:
    """Yield the largest error of the attention kernel for one kind of layer: one figure for each KV cache dtype."""
    for kv_cache_dtype in _KV_CACHE_DTYPES:
        try:
            spec = kv_cache_spec(kind.spec, kv_cache_dtype)
        except ConfigError:  # no group size divides the heads
            continue
        assert isinstance(kind.spec, KVSpec | LatentSpec)
        stored = AttentionKind(spec, kind.num_heads, kind.dtype, kind.has_window, kind.has_softcap, kind.sinks)  # type: ignore[arg-type]
        name = f"attention, {stored}: largest error of a row"
        promise = at_most(tolerance(TOLERANCE[kind.dtype]), required=True, flag=MLX_FLAG)
        try:
            error, note = max(_error(backend, stored, segments) for segments, backend in selftest_steps(metal)), ""
        except UnsupportedAttentionError as unsupported:
            yield not_measured(name, f"the kernel does not support it: {unsupported}")
            continue
        except KERNEL_ERRORS as failed:  # the other kernels may work
            error, note = failed_kernel(failed)
        yield Figure(name, error, promise=promise, note=note, is_simulated=not has_metal())


def index_errors(metal: MetalBackend, index: IndexKind, kinds: Sequence[AttentionKind]) -> Iterator[Figure]:
    """Yield the number of rows for which the kernels of a sparse attention's index select wrong keys.

    If it is 0, also yield a figure for each kind of layer: the largest error of attention to the selected keys.
    """
    name = "rows for which the index selects other keys than in float64"
    if why := unsupported_index(metal, index, kinds, _BLOCK_SIZE):
        yield not_measured(name, f"MLX's operations select keys: the kernels do not support {why}")
        return
    rows = shuffled_rows(SEGMENTS, _BLOCK_SIZE)
    queries, keys = random_index(replace(index, size=tried_size(index.size)), rows)
    backend, selection, note = metal.splitting(), None, ""
    arrays = (queries.queries, queries.weights, keys.arrays["index_keys"])
    numbers = (None if array is None else np.array(array.astype(mx.float32)) for array in arrays)
    expected = selected_keys(rows, queries.size, *numbers)  # type: ignore[arg-type]
    try:
        selection = select_random(backend, rows, queries, keys)
        wrong = float((selection.by_row() != expected).any(axis=(1, 2)).sum())
    except KERNEL_ERRORS as failed:
        wrong, note = failed_kernel(failed)
    yield Figure(name, wrong, promise=at_most(0, required=True, flag=MLX_FLAG), note=note, is_simulated=not has_metal())
    for kind in () if wrong else selecting_kinds(metal, index, kinds, _BLOCK_SIZE):
        name = f"attention to selected keys, {kind}: largest error of a row"
        promise = at_most(tolerance(TOLERANCE[kind.dtype]), required=True, flag=MLX_FLAG)
        try:
            error, note = _error(backend, kind, SEGMENTS, selection), ""
        except KERNEL_ERRORS as failed:
            error, note = failed_kernel(failed)
        yield Figure(name, error, promise=promise, note=note, is_simulated=not has_metal())


def _error(
    backend: MetalBackend, kind: AttentionKind, segments: list[tuple[int, int]], selection: KeySelection | None = None
) -> float:
    """Return the largest error of a head's row, relative to the norm of the expected row. NaN counts as infinite."""
    rows = shuffled_rows(segments, _BLOCK_SIZE)
    state = random_state(kind, rows)
    got = attend_random(backend, kind, rows, state, selection)
    expected = _reference(kind, rows, state, selection)
    errors = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.nan_to_num(errors, nan=np.inf).max())


def _reference(kind: AttentionKind, rows: StepRows, state: KVState, selection: KeySelection | None) -> np.ndarray:
    """Return attention over the K and V that ``state`` holds, computed in float64: [N, Hq, Dv]."""
    spec = kind.spec
    keys, values = (np.array(array) for array in state.read_tokens(slice(None)))
    k_cache = keys.reshape(-1, rows.block_size, spec.num_kv_heads, spec.head_dim)
    v_cache = values.reshape(*k_cache.shape[:3], -1)
    if spec.latent_dim is not None:
        v_cache = k_cache[..., : spec.latent_dim]
    sinks = random_sinks(kind)
    return paged_attention(
        np.array(random_queries(kind, rows.num_tokens).astype(mx.float32)),
        k_cache,
        v_cache,
        rows.cu_seqlens_q.tolist(),
        rows.seq_lens.tolist(),
        rows.block_table,
        sinks=None if sinks is None else np.array(sinks.astype(mx.float32)),
        selected=None if selection is None else selection.by_row(),
        **attend_options(kind),
    )


class CompileClock:
    """Kernel factory that measures the first launch of each variant, which compiles it.

    Attributes:
        seconds: variant -> duration of its first launch, in seconds.
    """

    def __init__(self, factory: Callable[..., Any]) -> None:
        self._factory = factory
        self.seconds: dict[Hashable, float] = {}

    def make(self, **arguments: Any) -> Callable[..., Any]:
        """Make a kernel from ``arguments``. Return a launch function that times the first launch of each variant."""
        kernel, name = self._factory(**arguments), arguments["name"]

        def launch(*, inputs: list[mx.array], template: Any = (), **options: Any) -> Any:
            variant = name, str(template), tuple(str(array.dtype) for array in inputs)
            if variant in self.seconds:
                return kernel(inputs=inputs, template=template, **options)
            mx.eval(inputs)
            start = time.perf_counter()
            outputs = kernel(inputs=inputs, template=template, **options)
            mx.eval(outputs)
            self.seconds[variant] = time.perf_counter() - start
            return outputs

        return launch


class RecordingRecurrence(MetalRecurrence):
    """Kernels of recurrent layers that record the first call for each combination of shapes, with its results."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        super().__init__(factory)
        self._calls: dict[Hashable, tuple[str, tuple[Any, ...], dict[str, Any], Any]] = {}

    def _record(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        results = getattr(super(), name)(*arguments, **options)
        shapes = tuple(None if array is None else (array.shape[1:], str(array.dtype)) for array in arguments)
        self._calls.setdefault((name, shapes), (name, arguments, options, results))
        return results

    def gated_delta(self, *arguments: Any) -> Any:
        """Record :meth:`MetalRecurrence.gated_delta`."""
        return self._record("gated_delta", arguments, {})

    def ssm_update(self, *arguments: Any) -> Any:
        """Record :meth:`MetalRecurrence.ssm_update`."""
        return self._record("ssm_update", arguments, {})

    def convolve(self, *arguments: Any, **options: Any) -> Any:
        """Record :meth:`MetalRecurrence.convolve`."""
        return self._record("convolve", arguments, options)

    def errors(self) -> Iterator[Figure]:
        """Yield the largest relative error of a row for each recorded call, compared with float64."""
        for name, arguments, options, results in self._calls.values():
            expected = getattr(references, name)(*arguments, **options)
            dtype = arguments[0].dtype
            shape = " x ".join(map(str, arguments[0].shape[1:]))
            yield kernel_error(f"`{name}`, {shape}, {str(dtype).removeprefix('mlx.core.')}", results, expected, dtype)

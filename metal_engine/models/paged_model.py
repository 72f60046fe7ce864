"""Run any mlx-lm model over a packed batch and a paged KV cache.

A packed batch is fed as *tokens as batch*: N tokens become a batch of N sequences of length 1, so every
activation is [N, 1, ...] and a layer that mixes no tokens needs no change. Three things do mix tokens:

- RoPE reads ``cache.offset``: here the [N] array of positions, one per row;
- ``cache.update_and_fetch`` stores K and V: here into the layer's state (``kv_cache``);
- attention itself: mlx-lm's ``scaled_dot_product_attention`` is replaced (``seam``) by a function that asks
  one of our caches (``layer_cache``) for the step's attention, and calls the original for any other cache.

Layers that carry a state from token to token mix tokens, too: ``recurrent`` gives them their rows by segments.

The layer caches share one :class:`CurrentStep`, set for the length of a forward; there is no global.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from metal_engine.attention.backend import StepAttention
from metal_engine.device.info import computes_on_cpu
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.rows import StepRows, TracedRows
from metal_engine.kv_cache.spec import QuantizedKVSpec, RecurrentSpec, kv_cache_spec
from metal_engine.kv_cache.state import KVState
from metal_engine.lora.layers import AdaptedLayers, AdapterRows
from metal_engine.models.cache_tree import map_caches
from metal_engine.models.cpu_ops import StepPositions
from metal_engine.models.current_step import CurrentStep
from metal_engine.models.layer_cache import LayerCache, layer_cache
from metal_engine.models.mlx_lm_patch import hidden_states_problem, open_model
from metal_engine.models.recurrent.install import install_states
from metal_engine.models.recurrent.recording import RecordingState
from metal_engine.models.recurrent.state_cache import StateCache
from metal_engine.models.refusals import forward_fails, refuse_half_experts
from metal_engine.recurrence.metal import MetalRecurrence


def release_weights(model: nn.Module) -> None:
    """Let go of a model's weights, whoever may still hold the model. It must not be used after that."""
    for module in model.modules():
        module.clear()


class PagedModel:
    """An mlx-lm model that runs packed batches over a paged KV cache.

    Construction installs the attention seam; ``pool.allocate`` makes the cache; a call runs one step.

    Args:
        model: a loaded mlx-lm model; it is changed in place (its trunk returns selected rows).
        recurrence: kernels for layers that carry a state; None: MLX's own operations, segment by segment.
        kv_cache_dtype: as ``--kv-cache-dtype``: in what keys and values are kept.
        is_sketch: its weights are not to be computed: it is looked at, and cannot run steps.
        whole_modules: run recurrent layers module by module (:func:`install_states`).

    Raises:
        UnsupportedModelError: the model keeps state of a kind that is not known here, or has no seam to use.
        ConfigError: its keys and values cannot be kept in ``kv_cache_dtype``.

    Attributes:
        pool: what its layers keep; nothing is allocated at first.
        layer_caches: what mlx-lm's layers see of it, one for each of the pool's states.
        kv_bits: of a number of K and V, where they are quantized; else None.
        dtype: type of the first K and V; of the first state where no layer has them.
        windows: sizes of the sliding windows that layers use.
        vocab_size: number of logits of a row.
        adapters: the layers that adapters add to, after :meth:`adapt`.
        hidden_problem: reason to refuse embeddings: the rows of ``hidden_indices`` are not hidden states. Else None.
    """

    def __init__(
        self,
        model: nn.Module,
        recurrence: MetalRecurrence | None = None,
        *,
        kv_cache_dtype: str = "auto",
        is_sketch: bool = False,
        whole_modules: bool = False,
    ) -> None:
        self.model = model
        self._step = CurrentStep(recurrence)
        opened = open_model(model, self._step)
        self.pool = StatePool.of(kv_cache_spec(spec, kv_cache_dtype) for spec in opened.specs)
        self.layer_caches = [layer_cache(self._step, state) for state in self.pool.states]
        by_recorder = dict(zip(map(id, opened.recorders), self.layer_caches, strict=True))
        self._caches = map_caches(lambda recorder: by_recorder[id(recorder)], opened.caches)
        self.hidden_problem: str | None = None
        if not is_sketch:
            pairs = zip(opened.recorders, self.layer_caches, strict=True)
            refuse_half_experts(model)
            try:
                for output in opened.outputs if self.pool.is_recurrent else ():
                    mx.eval(output)  # install_states reads the states; ranks of a pipeline exchange data for them here
                self.hidden_problem = hidden_states_problem(model, opened)
            except RuntimeError as error:
                raise forward_fails(error) from error
            states = [(r, c) for r, c in pairs if isinstance(r, RecordingState) and isinstance(c, StateCache)]
            install_states(states, opened.trace, whole_modules=whole_modules)
        quantized = [state.spec for state in self.pool.states if isinstance(state.spec, QuantizedKVSpec)]
        self.kv_bits = quantized[0].bits if quantized else None
        kv_dtypes = [spec.dtype for spec in opened.specs if not isinstance(spec, RecurrentSpec)]
        self.dtype = (kv_dtypes or [spec.dtype for spec in opened.specs])[0]
        self.windows, self.vocab_size = opened.windows, opened.vocab_size
        self.adapters: AdaptedLayers | None = None
        self._positions: type[mx.array] = StepPositions if computes_on_cpu() else mx.array

    @contextmanager
    def over(self, pool: StatePool) -> Iterator[None]:
        """Run over another pool for a while.

        Args:
            pool: has a state for each of the model's layers that keeps the same in some other way, or the same state.
        """
        own = self.pool
        self._keep_in(pool)
        try:
            yield
        finally:
            self._keep_in(own)

    def _keep_in(self, pool: StatePool) -> None:
        for cache, state in zip(self.layer_caches, pool.states, strict=True):
            if isinstance(cache, LayerCache) and isinstance(state, KVState):
                cache.state = state
        self.pool = pool

    @property
    def has_recurrence_kernels(self) -> bool:
        return self._step.recurrence is not None and self.pool.is_recurrent

    def drop_recurrence_kernels(self) -> None:
        """Use MLX's own operations from now on."""
        self._step.recurrence = None

    def release_weights(self) -> None:
        """See :func:`release_weights`."""
        release_weights(self.model)

    def adapt(self, names: Iterable[str], max_loras: int, max_rank: int) -> AdaptedLayers:
        """Have adapters add to linear layers, the model's modules of these names; once.

        Args:
            max_loras: adapters at once.
            max_rank: of their products.
        """
        modules = dict(self.model.named_modules())
        chosen = {name: modules[name] for name in names}
        self.adapters = AdaptedLayers(chosen, self._step, max_loras, max_rank, self.dtype)
        return self.adapters

    def __call__(
        self,
        input_ids: mx.array,
        rows: StepRows,
        attention: StepAttention,
        logits_indices: mx.array | None = None,
        adapters: AdapterRows | None = None,
    ) -> mx.array:
        """Returns the logits of :meth:`forward`."""
        return self.forward(input_ids, rows, attention, logits_indices, adapters=adapters)[0]

    def forward(
        self,
        input_ids: mx.array,
        rows: StepRows,
        attention: StepAttention,
        logits_indices: mx.array | None = None,
        hidden_indices: mx.array | None = None,
        adapters: AdapterRows | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """One forward over a packed batch.

        Args:
            input_ids: [N] int32.
            rows: of this step.
            attention: the attention backend's, for ``rows``.
            logits_indices: [R] int32, rows whose logits are wanted; None: those that sample.
            hidden_indices: [P] int32, rows whose hidden states are wanted; None: none. They do not go through the head.
            adapters: which adapter each row goes through; None: none goes through any.

        Returns:
            Logits, [R, vocab_size], and the hidden states that the LM head would be given, [P, hidden_size].
        """
        step = self._step
        step.rows, step.attention = rows, attention
        step.positions = self._positions(rows.positions)
        step.logits_indices = mx.array(rows.logits_indices) if logits_indices is None else logits_indices
        step.hidden_indices = hidden_indices
        step.adapters = adapters
        return self._run(input_ids)

    def forward_of_arrays(
        self, input_ids: mx.array, positions: mx.array, rows: TracedRows, attention: StepAttention
    ) -> mx.array:
        """A forward that knows its rows by arrays alone, as a trace does that other steps replay.

        Without adapters.

        Args:
            input_ids: [N] int32.
            positions: [N] int32.
            rows: with segments where layers are recurrent.
            attention: over this step's rows.

        Returns:
            The logits of all rows, [N, vocab_size].
        """
        step = self._step
        step.rows, step.attention, step.positions = rows, attention, self._positions(positions)
        return self._run(input_ids)[0]

    def _run(self, input_ids: mx.array) -> tuple[mx.array, mx.array | None]:
        step = self._step
        try:
            logits = self.model(input_ids[:, None], cache=self._caches)  # [R, 1, vocab_size]
            hidden = step.hidden
        finally:
            step.rows = step.attention = step.positions = step.logits_indices = None
            step.hidden_indices = step.hidden = step.adapters = None
        return logits[:, 0], None if hidden is None else hidden[:, 0]

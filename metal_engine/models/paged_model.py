"""Runs any mlx-lm model over a packed batch and a paged KV cache.

A packed batch is passed as *tokens as batch*: N tokens become a batch of N sequences of length 1. Every activation is
then [N, 1, ...], and layers that do not mix tokens work unchanged. Three operations do mix tokens:

- RoPE reads ``cache.offset``. Our caches return the positions of the rows, [N].
- ``cache.update_and_fetch`` stores K and V. Our caches store them in the layer's state (``kv_cache``).
- Attention: ``mlx_lm_patch`` replaces mlx-lm's ``scaled_dot_product_attention``. The replacement requests attention
  from one of our caches (``layer_cache``), and calls the original function for any other cache.

Recurrent layers also mix tokens. ``recurrent`` divides the rows into segments for them. A segment has the rows of one
request (:mod:`metal_engine.kv_cache.segments`).

The layer caches share one :class:`CurrentStep`, which is set during a forward pass. There is no global state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from metal_engine.attention.backend import StepAttention
from metal_engine.device.info import computes_on_cpu
from metal_engine.errors import UnsupportedModelError
from metal_engine.kv_cache.pool import StatePool, make_state
from metal_engine.kv_cache.rows import StepRows, TracedRows
from metal_engine.kv_cache.spec import QuantizedKVSpec, RecurrentSpec, StateSpec, kv_cache_spec
from metal_engine.kv_cache.state import KVState, LayerState
from metal_engine.lora.layers import AdaptedLayers, AdapterRows
from metal_engine.models.cache_tree import map_caches
from metal_engine.models.cpu_ops import StepPositions
from metal_engine.models.current_step import CurrentStep
from metal_engine.models.indexer import indexers
from metal_engine.models.layer_cache import LayerCache, layer_cache, link_indexes
from metal_engine.models.mlx_lm_patch import hidden_states_problem, patch_model
from metal_engine.models.multimodal.axes_rope import rotary_positions
from metal_engine.models.multimodal.encoder import ImageEncoder
from metal_engine.models.multimodal.merging import ImageInput, StepImages
from metal_engine.models.recurrent.install import install_states
from metal_engine.models.recurrent.recording import RecordingState
from metal_engine.models.recurrent.state_cache import StateCache
from metal_engine.recurrence.metal import MetalRecurrence

logger = logging.getLogger(__name__)


class PagedModel:
    """An mlx-lm model that runs packed batches over a paged KV cache.

    The constructor replaces mlx-lm's functions in the model. The cache must be allocated with ``pool.allocate`` before
    the first step. A call runs one step.

    Args:
        model: a loaded mlx-lm model. It is changed in place: its trunk returns selected rows.
        recurrence: kernels for recurrent layers; None to use MLX's operations, segment by segment.
        kv_cache_dtype: type in which keys and values are stored, as in ``--kv-cache-dtype``.
        is_sketch: True for a model that is only inspected. Its weights are never computed, and it cannot run steps.
        whole_modules: True to run recurrent layers module by module (:func:`install_states`).

    Raises:
        UnknownCacheError: a layer has a cache that packed steps do not support.
        UnsupportedModelError: a layer has an unsupported kind of state, or mlx-lm's functions cannot be replaced.
        ConfigError: the keys and values cannot be stored in ``kv_cache_dtype``.

    Attributes:
        pool: states of the layers, and states added by :meth:`add_state`; not allocated at first.
        layer_caches: caches that mlx-lm's layers use, one for each of the layers' states in the pool, in order.
        kv_bits: bits per number of quantized K and V; None if they are not quantized.
        dtype: type of the first K and V, or of the first recurrent state if no layer has K and V.
        windows: sizes of the layers' sliding windows, in tokens.
        vocab_size: number of logits of a row.
        adapters: layers with LoRA adapters, set by :meth:`enable_lora`; None before.
        images: image input, set by :meth:`add_image_encoder`; None if the model takes text only.
        index_top_k: largest number of keys that an index selects for a row; None if no layer has an index.
        own_caches_reason: reason why requests run alone over mlx-lm's own caches; empty if they are packed.
        hidden_problem: reason to refuse embeddings and draft heads: the rows that :meth:`forward` returns for
            ``hidden_indices`` are not hidden states. None if they are.
    """

    own_caches_reason = ""

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
        self._kv_cache_dtype = kv_cache_dtype
        self._step = CurrentStep(recurrence)
        patched = patch_model(model, self._step)
        self.pool = StatePool.of(kv_cache_spec(spec, kv_cache_dtype) for spec in patched.specs)
        self.layer_caches = [
            layer_cache(self._step, state, chunk) for state, chunk in zip(self.pool.states, patched.chunks, strict=True)
        ]
        by_recorder = dict(zip(map(id, patched.recorders), self.layer_caches, strict=True))
        self._caches = map_caches(lambda recorder: by_recorder[id(recorder)], patched.caches)
        link_indexes(self._caches)
        self.index_top_k = max((index.size.num_keys for index in indexers(model)), default=None)
        self.hidden_problem: str | None = None
        if not is_sketch:
            pairs = zip(patched.recorders, self.layer_caches, strict=True)
            refuse_half_precision_experts(model)
            try:
                for output in patched.outputs if self.pool.is_recurrent else ():
                    # Computes the recurrent states, which install_states reads. Ranks of a pipeline exchange data here.
                    mx.eval(output)
                self.hidden_problem = hidden_states_problem(model, patched)
            except RuntimeError as error:
                raise forward_error(error) from error
            states = [(r, c) for r, c in pairs if isinstance(r, RecordingState) and isinstance(c, StateCache)]
            install_states(states, patched.trace, whole_modules=whole_modules)
        quantized = [state.spec for state in self.pool.states if isinstance(state.spec, QuantizedKVSpec)]
        self.kv_bits = quantized[0].bits if quantized else None
        kv_dtypes = [spec.dtype for spec in patched.specs if not isinstance(spec, RecurrentSpec)]
        self.dtype = (kv_dtypes or [spec.dtype for spec in patched.specs])[0]
        self.windows, self.vocab_size = patched.windows, patched.vocab_size
        self.adapters: AdaptedLayers | None = None
        self.images: ImageInput | None = None
        self._positions: type[mx.array] = StepPositions if computes_on_cpu() else mx.array

    @contextmanager
    def using_pool(self, pool: StatePool) -> Iterator[None]:
        """Use another pool within a ``with`` block. Only possible before :meth:`add_state` is called.

        Args:
            pool: pool with a state for each layer of the model: the state in :attr:`pool`, or another state for the
                keys and values of the same layer, e.g. without quantization.
        """
        own = self.pool
        self._use_pool(pool)
        try:
            yield
        finally:
            self._use_pool(own)

    def _use_pool(self, pool: StatePool) -> None:
        for cache, state in zip(self.layer_caches, pool.states, strict=True):
            if isinstance(cache, LayerCache) and isinstance(state, KVState):
                cache.state = state
        self.pool = pool

    def add_state(self, spec: StateSpec) -> LayerState:
        """Create the state of a layer outside the model, and set :attr:`pool` to a new pool that includes it.

        Call it before the pool is allocated. The state's keys and values have the type ``kv_cache_dtype`` of the model.
        It is allocated, rolled back and released together with the model's own states, and uses the same blocks.
        """
        state = make_state(kv_cache_spec(spec, self._kv_cache_dtype))
        self.pool = StatePool([*self.pool.states, state])
        return state

    @property
    def has_recurrence_kernels(self) -> bool:
        return self._step.recurrence is not None and self.pool.is_recurrent

    def drop_recurrence_kernels(self) -> None:
        """Use MLX's own operations for recurrent layers from now on."""
        self._step.recurrence = None

    def enable_lora(self, names: Iterable[str], max_loras: int, max_rank: int) -> AdaptedLayers:
        """Prepare linear layers for LoRA adapters, set :attr:`adapters`, and return it. Can be called once.

        Args:
            names: names of the linear layers in the model.
            max_loras: maximum number of adapters that are loaded at the same time.
            max_rank: maximum LoRA rank.
        """
        modules = dict(self.model.named_modules())
        chosen = {name: modules[name] for name in names}
        self.adapters = AdaptedLayers(chosen, self._step, max_loras, max_rank, self.dtype)
        return self.adapters

    def add_image_encoder(self, encoder: ImageEncoder) -> None:
        """Prepare the model for features of images, and set :attr:`images`. Can be called once.

        Raises:
            UnsupportedModelError: the model cannot take features.
        """
        self.images = ImageInput(self.model, self._step, encoder)

    def __call__(
        self,
        input_ids: mx.array,
        rows: StepRows,
        attention: StepAttention,
        logits_indices: mx.array | None = None,
        adapters: AdapterRows | None = None,
        images: StepImages | None = None,
    ) -> mx.array:
        """Run :meth:`forward` and return only the logits."""
        return self.forward(input_ids, rows, attention, logits_indices, adapters=adapters, images=images)[0]

    def forward(
        self,
        input_ids: mx.array,
        rows: StepRows,
        attention: StepAttention,
        logits_indices: mx.array | None = None,
        hidden_indices: mx.array | slice | None = None,
        adapters: AdapterRows | None = None,
        images: StepImages | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Run a forward pass over a packed batch.

        Args:
            input_ids: token ids, [N] int32.
            rows: rows of this step.
            attention: attention of the backend for ``rows``.
            logits_indices: rows whose logits are returned, [R] int32; None for the rows that sample.
            hidden_indices: rows whose hidden states are returned, [P] int32 or a slice; None for no rows. The LM head
                does not read them.
            adapters: LoRA adapter of each row; None if no row has an adapter.
            images: features of images; None if no row has features.

        Returns:
            Logits, [R, vocab_size], and hidden states, which are rows of the trunk's output, [P, hidden_size]. The
            hidden states are None if ``hidden_indices`` is None.
        """
        step = self._step
        step.rows, step.attention = rows, attention
        step.positions = rotary_positions(rows, self._positions)
        step.images = images
        step.logits_indices = mx.array(rows.logits_indices) if logits_indices is None else logits_indices
        step.hidden_indices = hidden_indices
        step.adapters = adapters
        return self._run(input_ids)

    def forward_of_arrays(
        self,
        input_ids: mx.array,
        positions: mx.array,
        rows: TracedRows,
        attention: StepAttention,
        hidden_indices: slice | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Run a forward pass whose rows are given only as arrays, for a trace that other steps will replay.

        LoRA adapters and images are not supported.

        Args:
            input_ids: token ids, [N] int32.
            positions: rotary positions of the rows, [N] int32.
            rows: writes, and segments if layers are recurrent.
            attention: attention of the backend for these rows.
            hidden_indices: rows whose hidden states are returned; None for no rows.

        Returns:
            Logits of all rows, [N, vocab_size], and hidden states as :meth:`forward` returns them.
        """
        step = self._step
        step.rows, step.attention, step.positions = rows, attention, self._positions(positions)
        step.hidden_indices = hidden_indices
        return self._run(input_ids)

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Compute logits from hidden states, with only the modules after the trunk.

        Args:
            hidden: hidden states as :meth:`forward` returns them, or the output of a draft head, [R, hidden_size].

        Returns:
            Logits, [R, vocab_size].
        """
        self._step.given = hidden[:, None]
        try:
            return self.model(mx.zeros((hidden.shape[0], 1), mx.int32), cache=self._caches)[:, 0]
        finally:
            self._step.given = None

    def _run(self, input_ids: mx.array) -> tuple[mx.array, mx.array | None]:
        step = self._step
        try:
            logits = self.model(input_ids[:, None], cache=self._caches)  # [R, 1, vocab_size]
            hidden = step.hidden
        finally:
            step.rows = step.attention = step.positions = step.logits_indices = None
            step.hidden_indices = step.hidden = step.adapters = step.images = None
            step.selection_plans = {}
        return logits[:, 0], None if hidden is None else hidden[:, 0]


def refuse_half_precision_experts(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the model has experts in half precision and runs on a CPU.

    MLX multiplies unquantized experts on a CPU in float32 only. Quantized experts run in any type.
    """
    if not computes_on_cpu():
        return
    for module in model.modules():
        if isinstance(module, SwitchLinear) and module.weight.dtype != mx.float32:
            dtype = str(module.weight.dtype).removeprefix("mlx.core.")
            raise UnsupportedModelError(f"its experts are in {dtype}, and MLX on a CPU needs --dtype float32 for them")


def forward_error(error: Exception) -> UnsupportedModelError:
    """Return the exception to raise for an error of a forward pass, with only the error's first line.

    Logs the whole error if it has several lines. An example is MLX's RuntimeError for an operation that the device does
    not support, such as half-precision experts on a CPU.
    """
    first, *others = f"{type(error).__name__}: {error}".splitlines()
    if others:
        logger.error("a packed forward fails: %s", "\n".join([first, *others]))
    return UnsupportedModelError(f"its forward does not run over a paged cache ({first})")

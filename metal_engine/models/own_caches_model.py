"""Runs a model over mlx-lm's own caches, one request after another, if a packed step does not support its caches.

The scheduler, the sampling and the memory budget work as for packed models. Blocks of the pool only account for the
memory that grows with each token, and a state slot holds a request's caches. A step runs one forward pass for each of
its requests, so batching does not increase the throughput.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from metal_engine.attention.backend import StepAttention
from metal_engine.errors import UnknownCacheError, UnsupportedModelError
from metal_engine.kv_cache.own_caches import num_bytes
from metal_engine.kv_cache.pool import StatePool
from metal_engine.kv_cache.rows import StepRows
from metal_engine.kv_cache.segments import ZERO_STATE_SLOT
from metal_engine.kv_cache.spec import OwnCachesSpec
from metal_engine.lora.layers import AdapterRows
from metal_engine.models.multimodal.encoder import ImageEncoder
from metal_engine.models.multimodal.merging import StepImages
from metal_engine.models.paged_model import PagedModel, forward_error, refuse_half_precision_experts
from metal_engine.recurrence.metal import MetalRecurrence

logger = logging.getLogger(__name__)

# Lengths in tokens at which the size of the caches is measured. Caches grow evenly between the last two, unless they
# have a larger window. No forward pass is computed: sizes follow from the graph.
_LENGTHS = (1, 257, 4096, 8192)


def open_paged_model(
    model: nn.Module,
    recurrence: MetalRecurrence | None = None,
    *,
    kv_cache_dtype: str = "auto",
    is_sketch: bool = False,
) -> PagedModel:
    """Return a model for packed steps, or an :class:`OwnCachesModel` if a layer has an unknown kind of cache.

    :class:`PagedModel` describes the arguments and exceptions. An :class:`OwnCachesModel` ignores ``recurrence`` and
    ``kv_cache_dtype``.
    """
    try:
        return PagedModel(model, recurrence, kv_cache_dtype=kv_cache_dtype, is_sketch=is_sketch)
    except UnknownCacheError as error:
        return OwnCachesModel(model, str(error), is_sketch=is_sketch)


class OwnCachesModel(PagedModel):
    """An mlx-lm model that computes the requests of a step one after another, over mlx-lm's own caches.

    Does not support LoRA adapters, images, hidden states, replay, quantized KV, or several ranks.

    Args:
        model: a loaded mlx-lm model.
        reason: reason why packed steps do not support the model.
        is_sketch: as for :class:`PagedModel`.

    Raises:
        UnsupportedModelError: the model's forward pass does not run over its own caches.
    """

    def __init__(self, model: nn.Module, reason: str, *, is_sketch: bool = False) -> None:
        self.model = model
        self.own_caches_reason = reason
        try:
            vocab_size, dtype, spec = _measure(model)
        except Exception as error:
            raise forward_error(error) from error
        if not is_sketch:
            refuse_half_precision_experts(model)
        self.pool = StatePool.of([spec])
        self.layer_caches = []
        self.windows = frozenset(map(_window, make_prompt_cache(model))) - {0}
        self.vocab_size, self.dtype = vocab_size, dtype
        self.index_top_k = self.kv_bits = self.adapters = self.images = None
        self.hidden_problem = "it runs over mlx-lm's own caches, which give no hidden states"

    @property
    def has_recurrence_kernels(self) -> bool:
        return False

    def add_image_encoder(self, encoder: ImageEncoder) -> None:
        raise UnsupportedModelError("its requests run alone over mlx-lm's own caches, which take no images")

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
        """Run a forward pass for each request. Arguments and results are as for :meth:`PagedModel.forward`.

        ``adapters``, ``images`` and ``hidden_indices`` must be None. ``attention`` is ignored. If any row of a request
        needs logits, the LM head computes all its rows.
        """
        own = self.pool.own_caches
        assert own is not None and hidden_indices is None and adapters is None and images is None
        wanted = rows.logits_indices if logits_indices is None else np.array(logits_indices)
        parts, order = [], []
        for request, (first, end) in enumerate(zip(rows.cu_seqlens_q[:-1], rows.cu_seqlens_q[1:], strict=True)):
            read, write = int(rows.state_reads[request]), int(rows.state_writes[request])
            caches = make_prompt_cache(self.model) if read == ZERO_STATE_SLOT else own.copy_of(read)
            logits = self.model(input_ids[None, int(first) : int(end)], cache=caches)[0]  # [query_len, vocab_size]
            own.store(write, caches)
            ours = np.flatnonzero((wanted >= first) & (wanted < end))
            if len(ours):
                parts.append(logits[mx.array(wanted[ours] - first)])
                order.append(ours)
        if not parts:
            return mx.zeros((0, self.vocab_size), self.dtype), None
        # The wanted rows may be in any order.
        return mx.concatenate(parts)[mx.array(np.argsort(np.concatenate(order)))], None


def _measure(model: nn.Module) -> tuple[int, mx.Dtype, OwnCachesSpec]:
    """Return the number of logits of a row, their type, and the sizes of the caches. Computes nothing."""
    sizes = []  # for each length, the bytes of each layer's cache
    for length in _LENGTHS:
        caches: list[Any] = make_prompt_cache(model)
        logits = model(mx.zeros((1, length), mx.int32), cache=caches)
        sizes.append([num_bytes(cache) for cache in caches])
    tokens = _LENGTHS[-1] - _LENGTHS[-2]
    growth = [-(-(last - before) // tokens) for before, last in zip(sizes[-2], sizes[-1], strict=True)]
    fixed = max(sum(size) - sum(growth) * length for size, length in zip(sizes, _LENGTHS, strict=True))
    # A step that extends a cache by copying it holds both for a moment. Layers run one after another.
    spec = OwnCachesSpec(logits.dtype, sum(growth) + max(growth), max(1, fixed))
    return logits.shape[-1], logits.dtype, spec


def _window(cache: Any) -> int:
    """Return the size of a cache's window in tokens, or 0 without a window."""
    return getattr(cache, "window_size", None) or getattr(cache, "max_size", None) or 0

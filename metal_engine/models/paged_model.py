"""Run any mlx-lm model over a packed batch and a paged KV cache.

A packed batch is fed as *tokens as batch*: N tokens become a batch of N sequences of length 1, so every
activation is [N, 1, ...] and a layer that mixes no tokens needs no change. Three things do mix tokens:

- RoPE reads ``cache.offset``: here the [N] array of positions, one per row;
- ``cache.update_and_fetch`` stores K and V: here into the paged cache;
- attention itself: mlx-lm's ``scaled_dot_product_attention`` is replaced (``seam``) by a function that asks
  one of our caches (``layer_cache``) for the step's attention, and calls the original for any other cache.

The layer caches share one :class:`StepState`, set for the length of a forward; there is no global.
"""

from __future__ import annotations

import logging
import time
from typing import NoReturn

import mlx.core as mx
import mlx.nn as nn

from metal_engine.attention.backend import AttentionMetadata, AttentionPlan
from metal_engine.device.streams import synchronize
from metal_engine.models.cpu_ops import StepPositions
from metal_engine.models.layer_cache import LatentLayerCache, LayerCache, StepState
from metal_engine.models.seam import open_model
from metal_engine.step import KVCacheLostError

logger = logging.getLogger(__name__)

KVSnapshot = list[tuple[mx.array, mx.array]]
"""K and V of each layer cache at some time."""


class PagedModel:
    """An mlx-lm model that runs packed batches over a paged KV cache.

    Construction installs the attention seam; :meth:`allocate` makes the cache; a call runs one step.

    Args:
        model: a loaded mlx-lm model; it is changed in place (its trunk returns selected rows).

    Raises:
        UnsupportedModelError: the model keeps state other than plain K and V, or has no seam to use.

    Attributes:
        kv_specs: shape and type of each layer's K and V.
        windows: sizes of the sliding windows that layers use.
        vocab_size: number of logits of a row.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._step = StepState()
        opened = open_model(model, self._step)
        self.kv_specs, self.windows = opened.kv_specs, opened.windows
        self.vocab_size = opened.vocab_size
        self.layer_caches: list[LayerCache] = []

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.kv_specs)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV cache, dropping an earlier one."""
        self.layer_caches = []
        self._pool = (num_blocks, block_size)
        for spec in self.kv_specs:
            kind = LatentLayerCache if spec.latent_dim else LayerCache
            self.layer_caches.append(kind(self._step, spec, num_blocks, block_size))
        self.eval_caches()

    def release(self) -> None:
        """Drop the KV cache, layer by layer: freeing gigabytes holds Python's lock, and others have things to say."""
        while self.layer_caches:
            self.layer_caches.pop()
            time.sleep(0.001)

    def eval_caches(self) -> None:
        """Wait until every write to the KV cache has happened."""
        mx.eval([array for cache in self.layer_caches for array in (cache.keys, cache.values)])

    def written(self) -> mx.array:
        """An array that is computed when every write to the KV cache has happened.

        It can be evaluated asynchronously. The cache's arrays cannot: they would not be written in place again.
        """
        arrays = [array for cache in self.layer_caches for array in (cache.keys, cache.values)]
        return mx.depends([mx.zeros((1,))], arrays)[0]

    def snapshot(self) -> KVSnapshot:
        """The KV cache's arrays as they are. While it is held, a step that is evaluated copies them."""
        # Objects of our own, over the same memory: assignment to elements changes what the caches' objects stand for.
        return [
            (cache.keys.reshape(cache.keys.shape), cache.values.reshape(cache.values.shape))
            for cache in self.layer_caches
        ]

    def restore(self, snapshot: KVSnapshot) -> None:
        """Forget what has been built, and not evaluated, since a snapshot."""
        for cache, (keys, values) in zip(self.layer_caches, snapshot, strict=True):
            cache.restore(keys, values)

    def recover_from(self, error: Exception) -> None:
        """After a step that failed: make sure that the next one finds a KV cache it can use.

        Layers before the failure have writes pending, of KV that nobody will read; they are carried out. Where
        that fails too, the old arrays are gone (writes are in place), so the cache is made anew, and empty.

        Raises:
            KVCacheLostError: the cache had to be made anew.
        """
        try:
            self.eval_caches()
        except Exception:
            logger.exception("the KV cache cannot be evaluated any more")
            self.renew_cache(error)

    def renew_cache(self, error: Exception) -> NoReturn:
        """Give up the KV cache for an empty one because of an error.

        Raises:
            KVCacheLostError: always.
        """
        logger.warning("making the KV cache anew")
        self.layer_caches = []
        try:
            synchronize()
        except Exception:
            logger.exception("what was still running failed, too")
        self.allocate(*self._pool)
        raise KVCacheLostError(f"{type(error).__name__}: {error}") from error

    def __call__(
        self,
        input_ids: mx.array,
        positions: mx.array,
        metadata: AttentionMetadata,
        plan: AttentionPlan,
        logits_indices: mx.array,
    ) -> mx.array:
        """One forward over a packed batch.

        Args:
            input_ids: [N] int32.
            positions: [N] int32, absolute.
            metadata: of this step; its ``slot_mapping`` says where K and V go.
            plan: the attention backend's plan for ``metadata``.
            logits_indices: [R] int32, rows whose logits are wanted.

        Returns:
            Logits, [R, vocab_size].
        """
        step = self._step
        step.plan, step.metadata = plan, metadata
        step.positions, step.logits_indices = StepPositions(positions), logits_indices
        try:
            logits = self.model(input_ids[:, None], cache=self.layer_caches)  # [R, 1, vocab_size]
        finally:
            step.plan = step.metadata = step.positions = step.logits_indices = None
        return logits[:, 0]

"""Converts a loaded model to a paged KV cache, and checks that it computes correctly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from metal_engine.device.limits_trial import trying_limits
from metal_engine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from metal_engine.attention.choice import BackendChoice, ChosenAttention
    from metal_engine.checkpoints.loader import LoadedModel
    from metal_engine.distributed.ranks import Ranks
    from metal_engine.models.draft_head import PagedDraftHead
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.settings.args import EngineArgs
    from metal_engine.settings.config import ModelInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class OpenedModel:
    """Model that has been verified to work with a paged KV cache.

    Attributes:
        paged: model with its pool of KV blocks.
        info: facts about the model.
        attention: chosen attention backend, and the layers that it covers.
    """

    paged: PagedModel
    info: ModelInfo
    attention: ChosenAttention

    def step_bytes(
        self,
        block_size: int,
        num_tokens: int,
        num_seqs: int,
        head: PagedDraftHead | None = None,
        *,
        max_over_ranks: Callable[[str, int], int],
    ) -> int:
        """Run a step, and after it ``head`` if given. Return the memory in bytes that they take besides weights and KV.

        :func:`measure_step_bytes` describes the arguments, and raises the errors.
        """
        from metal_engine.runner.step_memory import measure_step_bytes

        longest = self.info.max_position_embeddings
        with trying_limits():
            return measure_step_bytes(
                self.paged,
                self.attention.backend,
                block_size,
                longest,
                num_tokens,
                num_seqs,
                head=head,
                max_over_ranks=max_over_ranks,
            )


def open_model(
    args: EngineArgs, loaded: LoadedModel, choice: BackendChoice, ranks: Ranks, *, is_checked: bool = False
) -> OpenedModel:
    """Convert a loaded model to a paged KV cache, and check that it computes correctly.

    Args:
        is_checked: True if an earlier process has checked the model. The check is then left out, unless it decides
            whether kernels for recurrent layers are used.

    Raises:
        UnsupportedModelError: the model's architecture is not supported, or the check fails.
    """
    from metal_engine.attention.metal.variants import UnsupportedAttentionError
    from metal_engine.models.attention_kinds import attention_kinds
    from metal_engine.models.check import check_paged_model
    from metal_engine.models.indexer import index_kind
    from metal_engine.models.info import model_info
    from metal_engine.models.own_caches_model import open_paged_model
    from metal_engine.recurrence.metal import MetalRecurrence

    try:
        recurrence = MetalRecurrence() if choice.metal is not None else None
        paged = open_paged_model(loaded.model, recurrence, kv_cache_dtype=args.kv_cache_dtype)
        info = ranks.sync_model_info(model_info(loaded, paged))
        kinds = _with_recurrence(paged, ranks, lambda: attention_kinds(paged))
        attention = choice.for_layers(kinds, args.block_size)
        index = index_kind(paged.model, paged.pool.states)
        if index is not None:
            attention = choice.for_index(attention, index, args.block_size, ranks.max_over_ranks)
        attention = choice.tuned(
            attention, args.block_size, from_rank_zero=ranks.from_rank_zero, max_over_ranks=ranks.max_over_ranks
        )
        # Larger blocks need longer test requests. Only compiled kernels depend on the block size.
        sizes = (info.vocab_size,) if choice.metal is None else (info.vocab_size, args.block_size)
        if not is_checked or paged.has_recurrence_kernels:
            logger.info("checking that %s computes correctly with a paged KV cache", loaded.name)
            _with_recurrence(
                paged,
                ranks,
                lambda: check_paged_model(paged, attention.backend, *sizes, max_over_ranks=ranks.max_over_ranks),
            )
    except (UnsupportedModelError, UnsupportedAttentionError) as error:
        raise cannot_run(args.model, loaded.config, error) from error
    if paged.own_caches_reason:
        logger.warning(
            "%s runs the requests of a step one after another over mlx-lm's own caches: %s",
            loaded.name,
            paged.own_caches_reason,
        )
    if paged.index_top_k is not None:
        has_kernels = attention.metal is not None and not attention.layers.no_index_kernels
        logger.info(
            "%s select %d keys for each token, and attend to them, in contexts of more tokens",
            "Metal kernels" if has_kernels else "MLX's operations",
            paged.index_top_k,
        )
    return OpenedModel(paged, info, attention)


def _with_recurrence(paged: PagedModel, ranks: Ranks, run: Callable[[], T]) -> T:
    """Return the result of ``run``, without the kernels for recurrent layers if it fails with them.

    If ``run`` raises UnsupportedModelError and the model has these kernels, all ranks drop them and call ``run`` again.

    Raises:
        UnsupportedModelError: ``run`` failed without the kernels.
    """
    try:
        return run()
    except UnsupportedModelError as error:
        if not paged.has_recurrence_kernels:
            raise
        logger.warning(
            "not using the kernels for recurrent layers, because the model does not run with them: %s", error
        )
        ranks.barrier("no kernels for recurrent layers")
        paged.drop_recurrence_kernels()
        return run()


def cannot_run(name: str, config: dict[str, Any], error: Exception) -> UnsupportedModelError:
    """Return the error for a model whose architecture does not run, with the reason."""
    return UnsupportedModelError(f"{name} (architecture {config.get('model_type')}) cannot run here: {error}")

"""Runs a step: the plan becomes packed arrays, one forward pass, one sampling pass."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, AttentionMetadata, BlockWrites
from metal_engine.config import CacheConfig, SchedulerConfig
from metal_engine.models.paged_model import PagedModel
from metal_engine.platform.streams import end_streams_of_thread
from metal_engine.runner.batch import PackedBatch, RequestTable, whole_block_rows
from metal_engine.runner.step_sampling import StepSampling
from metal_engine.step import ModelOutput, SchedulerOutput


class ModelRunner:
    """Executes plans on a model with a paged KV cache.

    Belongs to the thread that loaded the model: MLX arrays and streams do.
    """

    def __init__(
        self,
        model: PagedModel,
        backend: AttentionBackend,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache_config = cache_config
        self._writes_blocks = scheduler_config.page_aligned_scheduling
        self._table = RequestTable(
            scheduler_config.max_num_seqs, scheduler_config.max_model_len, cache_config.block_size
        )
        model.allocate(cache_config.num_blocks, cache_config.block_size)

    def execute(self, plan: SchedulerOutput) -> PendingStep:
        """Start a step: builds the graph of one forward over every packed row and one sampling pass.

        Raises:
            KVCacheLostError: it failed, and the KV cache with it.
        """
        try:
            return self._start(plan)
        except Exception as error:
            self._model.recover_from(error)
            raise

    def _start(self, plan: SchedulerOutput) -> PendingStep:
        block_size = self._cache_config.block_size
        batch = self._table.pack(plan)
        batch.validate(self._cache_config.num_tokens, block_size)
        metadata = AttentionMetadata(
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slot_mapping=mx.array(batch.slot_mapping),
            block_size=block_size,
            block_writes=_block_writes(batch, block_size) if self._writes_blocks else None,
        )
        sampling = StepSampling(self._table, plan, batch)
        logits = self._model(
            mx.array(batch.input_ids),
            mx.array(batch.positions),
            metadata,
            self._backend.plan(metadata),
            mx.array(sampling.logits_indices),
        )
        if sampling.has_masks:
            mx.async_eval(logits)  # the forward runs while the host computes the masks
            sampling.compute_masks(logits.shape[-1])
        sampling.build(logits)
        return PendingStep(self._model, self._table, plan.sampled_req_ids, sampling)

    def close(self) -> None:
        """Free the KV cache, in the thread that ran the steps."""
        self._model.release()
        end_streams_of_thread()


def _block_writes(batch: PackedBatch, block_size: int) -> BlockWrites | None:
    rows = whole_block_rows(batch, block_size)
    if len(rows) == 0:
        return None
    others = np.setdiff1d(np.arange(len(batch.slot_mapping), dtype=np.int32), rows)
    return BlockWrites(
        rows=mx.array(rows.ravel()),
        block_ids=mx.array(batch.slot_mapping[rows[:, 0]] // block_size),
        other_rows=mx.array(others),
        other_slots=mx.array(batch.slot_mapping[others]),
    )


class PendingStep:
    """A step under way (:class:`metal_engine.step.StepHandle`)."""

    def __init__(
        self, model: PagedModel, table: RequestTable, sampled_req_ids: list[str], sampling: StepSampling
    ) -> None:
        self._model = model
        self._table = table
        self._sampled_req_ids = sampled_req_ids
        self._sampling = sampling

    def result(self) -> ModelOutput:
        """Wait for the step and return what came of it.

        Raises:
            KVCacheLostError: it failed, and the KV cache with it.
        """
        try:
            if not self._sampling.arrays:
                # Only intermediate chunks: what matters is the KV they leave behind.
                self._model.eval_caches()
                return ModelOutput([])
            # NumPy alone would wait as well, but pass over an error of an operation and take what it left.
            mx.eval(self._sampling.arrays)
        except Exception as error:
            self._model.recover_from(error)
            raise
        output = self._sampling.result()
        self._table.append_tokens(self._sampled_req_ids, np.array(output.sampled_token_ids, np.int32))
        return output

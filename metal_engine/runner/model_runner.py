"""Runs a step: the plan becomes packed arrays, one forward pass, one sampling pass."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, AttentionMetadata, BlockWrites
from metal_engine.config import CacheConfig, SchedulerConfig
from metal_engine.kv_transfer.runner_side import KVConnectorRunner, StepSaves
from metal_engine.models.paged_model import PagedModel
from metal_engine.platform.streams import end_streams_of_thread
from metal_engine.runner.batch import PackedBatch, RequestTable, whole_block_rows
from metal_engine.runner.sampler import sample
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
        # Set after construction: what a connector moves depends on the cache that is allocated here.
        self.kv_connector: KVConnectorRunner | None = None
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
        if self.kv_connector is not None:
            self.kv_connector.start_load_kv(plan.kv_connector_metadata)
            for index, layer in enumerate(self._model.layer_caches):
                self.kv_connector.wait_for_layer_load(index, layer)
        logits = self._model(
            mx.array(batch.input_ids),
            mx.array(batch.positions),
            metadata,
            self._backend.plan(metadata),
            mx.array(batch.logits_indices),
        )
        tokens = None
        if plan.sampled_req_ids:
            positions = self._table.num_output_tokens(batch.sampled_rows)
            tokens = sample(logits, self._table.sampling, batch.sampled_rows, positions)
        saves = None
        if self.kv_connector is not None:
            for index, layer in enumerate(self._model.layer_caches):
                self.kv_connector.save_kv_layer(index, layer)
            saves = self.kv_connector.take_saves()
        return PendingStep(self._model, self._table, plan.sampled_req_ids, tokens, saves, self.kv_connector)

    def close(self) -> None:
        """Free the KV cache, in the thread that ran the steps."""
        if self.kv_connector is not None:
            self.kv_connector.close()
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
        self,
        model: PagedModel,
        table: RequestTable,
        sampled_req_ids: list[str],
        tokens: mx.array | None,
        saves: StepSaves | None = None,
        kv_connector: KVConnectorRunner | None = None,
    ) -> None:
        self._model = model
        self._table = table
        self._sampled_req_ids = sampled_req_ids
        self._tokens = tokens  # [R]
        self._saves = saves
        self._kv_connector = kv_connector

    def result(self) -> ModelOutput:
        """Wait for the step and return the tokens it sampled.

        Raises:
            KVCacheLostError: it failed, and the KV cache with it.
        """
        saved = list(self._saves.arrays.values()) if self._saves is not None else []
        try:
            if self._tokens is None:
                # Only intermediate chunks: what matters is the KV they leave behind.
                self._model.eval_caches(saved)
            else:
                # NumPy alone would wait as well, but pass over an error of an operation and take what it left.
                mx.eval(self._tokens, saved)
            if self._kv_connector is not None and self._saves is not None:
                self._kv_connector.wait_for_save(self._saves)
        except Exception as error:
            self._model.recover_from(error)
            raise
        if self._tokens is None:
            return ModelOutput([])
        token_ids = np.array(self._tokens)
        self._table.append_tokens(self._sampled_req_ids, token_ids)
        return ModelOutput(token_ids.tolist())

"""Runs steps: a plan becomes packed arrays, one forward pass, one sampling pass."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, StepAttention
from metal_engine.device.streams import end_streams_of_thread, synchronize
from metal_engine.kv_cache.pool import PoolSnapshot
from metal_engine.kv_cache.writes import choose_writes
from metal_engine.kv_transfer.runner_side import KVConnectorRunner, StepLoads, StepSaves
from metal_engine.models.adapters import AdapterRows
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.batch import PackedBatch, RequestTable
from metal_engine.runner.draft_model import DraftModel
from metal_engine.runner.pooling import StepPooling
from metal_engine.runner.replay import DecodeReplay
from metal_engine.runner.step_sampling import StepSampling
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import DecodeForward, Drafting, ModelOutput, SchedulerOutput


class ModelRunner:
    """Executes plans on a model with a paged KV cache.

    Belongs to the thread that loaded the model: MLX arrays and streams do.

    A step is built (its graph made) and dispatched (given to the device). One is dispatched at a time: while it
    runs, the next can be built on top of its unevaluated arrays, its samples among them; that one is dispatched
    when the first has ended. Dispatched earlier, its writes would find the KV cache still being read, and MLX
    would write to a copy of it.

    Args:
        outlives_model: the thread goes on when the runner is closed: the weights go then, and the streams stay.
    """

    def __init__(
        self,
        model: PagedModel,
        backend: AttentionBackend,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_connector: KVConnectorRunner | None = None,
        draft_model: DraftModel | None = None,
        *,
        outlives_model: bool = False,
    ) -> None:
        self._model = model
        self._pool = model.pool
        self._backend = backend
        self._num_blocks = cache_config.num_blocks
        self._kv_connector = kv_connector
        self._outlives_model = outlives_model
        self._draft_model = draft_model
        self._runs_ahead = scheduler_config.async_scheduling
        self._table = RequestTable(
            scheduler_config.max_num_seqs,
            scheduler_config.max_model_len,
            cache_config.block_size,
            choose_writes(page_aligned=scheduler_config.page_aligned_scheduling),
        )
        self._steps: deque[PendingStep] = deque()  # in order; the first one is dispatched, the others built
        self._num_state_slots = cache_config.num_state_slots
        self._num_adapter_slots = 0 if model.adapters is None else model.adapters.max_loras
        self._replay: DecodeReplay | None = None
        self._decode_forward: DecodeForward | None = None  # of the step built last
        if cache_config.num_trash_blocks:
            self._replay = DecodeReplay(model, backend, trash_block=cache_config.num_blocks)
        num_blocks = cache_config.num_blocks + cache_config.num_trash_blocks
        self._pool.allocate(num_blocks, cache_config.block_size, cache_config.num_state_slots)

    def execute(self, plan: SchedulerOutput) -> PendingStep:
        """Start a step: builds the graph of one forward over every packed row and one sampling pass."""
        if self._steps and not self._runs_ahead:
            raise RuntimeError("without async scheduling, a step is finished before the next one is started")
        before = self._pool.snapshot()
        try:
            self._table.take_in(plan)
            drafting = self._draft(plan)
            sampling, pooling, logits = self._build(plan if drafting is None else plan.with_drafts(drafting))
            # Masks are for the host to compute while the device is busy: with the step before, or with this one.
            is_built = bool(self._steps) or not sampling.has_masks
            if is_built:
                sampling.build(logits, is_dispatched=False)
            saves = self._gather_saves()
        except BaseException:
            self._table.forget_samples()
            self._pool.restore(before)
            raise
        loads = self._kv_connector.take_loads() if self._kv_connector is not None else StepLoads()
        sampled, decode_forward = plan.sampled_req_ids, self._decode_forward
        step = PendingStep(self, sampled, sampling, pooling, before, loads, saves, drafting, decode_forward)
        del before  # the step's own, to let go of
        self._steps.append(step)
        if len(self._steps) == 1:
            self._dispatch(step, None if is_built else logits)
        return step

    def _draft(self, plan: SchedulerOutput) -> Drafting | None:
        """Run the draft model, as far as the plan asks for it."""
        if self._draft_model is None:
            return None
        self._draft_model.take_in(plan)
        return self._draft_model.draft(self._table, plan)

    def _build(self, plan: SchedulerOutput) -> tuple[StepSampling, StepPooling | None, mx.array]:
        """Build a step's forward as a graph, with its pooling.

        Returns its sampling, its pooling, and the logits that it samples from, [R + T, vocab_size].
        """
        batch = self._table.pack(plan)
        batch.validate(self._num_blocks, self._num_state_slots, self._num_adapter_slots)
        if self._draft_model is not None:
            self._draft_model.packed(batch.rows)
        # A recurrent state that has gone on past a token cannot go back.
        sampling = StepSampling(self._table, plan, batch, may_be_late=not self._pool.is_recurrent)
        if self._kv_connector is not None:
            self._kv_connector.bind_connector_metadata(plan.kv_connector_metadata)
            if plan.kv_connector_metadata is not None and plan.kv_connector_metadata.state_loads:
                self._pool.forget_states(set(plan.kv_connector_metadata.state_loads))
        attention = self._backend.for_step(batch.rows)
        adapters = self._adapter_rows(batch)
        if not self._table.pooling:
            return sampling, None, self._forward(plan, batch, attention, sampling.logits_indices, adapters)
        pooling = self._step_pooling(plan, batch)
        num_sampling = len(sampling.logits_indices)
        logits_indices = mx.array(np.concatenate([sampling.logits_indices, pooling.logits_indices]))
        indices = pooling.hidden_indices
        hidden_indices = mx.array(indices) if len(indices) else None
        input_ids = self._input_ids(batch)
        logits, hidden = self._model.forward(input_ids, batch.rows, attention, logits_indices, hidden_indices, adapters)
        pooling.build(hidden, logits[num_sampling:])
        return sampling, pooling, logits[:num_sampling]

    def _forward(
        self,
        plan: SchedulerOutput,
        batch: PackedBatch,
        attention: StepAttention,
        logits_indices: np.ndarray,
        adapters: AdapterRows | None,
    ) -> mx.array:
        """The logits of some rows, [R + T, vocab_size]: replayed, or built as a graph."""
        input_ids = self._input_ids(batch)

        def build() -> mx.array:
            return self._model(input_ids, batch.rows, attention, mx.array(logits_indices), adapters)

        self._decode_forward = None
        if self._replay is None:
            return build()
        if not _is_decode(plan, batch, logits_indices):
            logits = build()
        elif adapters is not None:
            logits = build()
            self._decode_forward = DecodeForward("adapters", self._replay.refusal)
        else:
            logits = self._replay.forward(input_ids, batch.rows, build)
            self._decode_forward = DecodeForward(self._replay.outcome, self._replay.refusal)
        self._replay.learn(attention)
        return logits

    def _adapter_rows(self, batch: PackedBatch) -> AdapterRows | None:
        slots = batch.adapter_slots[batch.rows.request_of_row] if len(batch.adapter_slots) else batch.adapter_slots
        if self._model.adapters is None or not slots.any():
            return None
        return self._model.adapters.rows(slots)

    def _step_pooling(self, plan: SchedulerOutput, batch: PackedBatch) -> StepPooling:
        scheduled = list(plan.num_scheduled_tokens)
        prompts = {r: prompt for r in scheduled if (prompt := self._table.pooling.get(r)) is not None}
        return StepPooling(prompts, scheduled, batch.rows, plan.pooled_req_ids)

    def _gather_saves(self) -> StepSaves | None:
        """Returns the blocks that the step just built saves to a store; None without KV transfer."""
        if self._kv_connector is None:
            return None
        for index, state in enumerate(self._pool.states):
            self._kv_connector.save_kv_layer(index, state)
        return self._kv_connector.take_saves()

    def _input_ids(self, batch: PackedBatch) -> mx.array:
        """[N]; tokens that the step before samples come from its array of them, which need not be computed yet."""
        if not len(batch.pending_rows):
            return mx.array(batch.input_ids)
        samples = self._steps[-1].sampling.tokens
        assert samples is not None
        if batch.is_continued(samples.size):
            return samples
        input_ids = mx.array(batch.input_ids)
        input_ids[mx.array(batch.pending_rows)] = samples[mx.array(batch.pending_samples)]
        return input_ids

    def _dispatch(self, step: PendingStep, logits: mx.array | None = None) -> None:
        """Give a step to the device. An error is kept for its :meth:`PendingStep.result`.

        Args:
            logits: what it samples from, if its sampling has not been built yet.
        """
        try:
            self._load(step)
            step.before = None  # no other owner of the arrays that it writes to
            if logits is not None:
                step.is_async = True
                mx.async_eval(logits)  # the forward runs while the host computes masks
                step.sampling.build(logits, is_dispatched=True)
            results = step.sampling.arrays + (step.pooling.arrays if step.pooling is not None else [])
            # Without any, only intermediate chunks: what matters is the KV they leave behind. Recurrent states matter
            # always: results depend on what a step reads of them, not on what it leaves.
            step.root = [*results, *([self._pool.written()] if self._pool.is_recurrent or not results else [])]
            step.root += step.saves.arrays.values() if step.saves is not None else ()
            if self._runs_ahead:
                step.is_async = True
                mx.async_eval(step.root)  # otherwise it is evaluated, and waited for, by result()
        except Exception as error:  # noqa: BLE001  (raised by result())
            step.error = error

    def _load(self, step: PendingStep) -> None:
        """Write what a step loads into the KV cache as the step before has left it."""
        if self._kv_connector is not None and step.loads:
            assert step.before is not None
            for index, layer in enumerate(step.before):
                self._kv_connector.write_loaded(index, layer.arrays, step.loads)
            step.loads = StepLoads()

    def finish(self, step: PendingStep) -> ModelOutput:
        """See :meth:`PendingStep.result`."""
        if not self._steps or self._steps[0] is not step:
            raise RuntimeError("steps are finished in the order in which they were started, and once")
        self._steps.popleft()
        try:
            step.wait()
        except Exception as error:
            self._recover(step, error)
            raise
        if self._steps:
            self._dispatch(self._steps[0])
        if self._kv_connector is not None and step.saves is not None:
            self._kv_connector.hand_over_saves(step.saves)
        output = step.sampling.result()
        output.decode_forward = step.decode_forward
        if step.drafting is not None:
            output.drafting = step.drafting
            # Those that were planned drafts and got none.
            output.num_accepted_tokens = dict.fromkeys(step.drafting.token_ids, 0) | output.num_accepted_tokens
        self._table.append_tokens(step.sampled_req_ids, output)
        if step.pooling is not None:
            output.pooled = step.pooling.result()
        return output

    def _recover(self, step: PendingStep, error: Exception) -> None:
        """After a step that failed: drop those built on top of it, unevaluated, and see to the KV cache."""
        self._steps.clear()
        self._table.forget_samples()
        if self._replay is not None:
            self._replay.drop_traces()  # whatever made it fail may be in them
        if step.is_async:
            # An asynchronous evaluation may stop anywhere, and its error come up again: nothing is sure of its arrays.
            self._pool.renew(error)
        self._pool.recover(error)

    def close(self) -> None:
        """Free the KV cache and the draft model's; the weights too if the thread goes on, and else its streams.

        In the thread that ran the steps.
        """
        self._steps.clear()
        synchronize()
        if self._draft_model is not None:
            self._draft_model.release()
        if self._kv_connector is not None:
            self._kv_connector.close()
        if self._replay is not None:
            self._replay.drop_traces()
        self._pool.release()
        if self._outlives_model:
            self._model.release_weights()
            mx.clear_cache()
        else:
            end_streams_of_thread()


def _is_decode(plan: SchedulerOutput, batch: PackedBatch, logits_indices: np.ndarray) -> bool:
    """Whether every row samples, once, and nothing is loaded into the cache beneath the step."""
    num_rows = batch.rows.num_tokens
    kv = plan.kv_connector_metadata
    return len(batch.rows.logits_indices) == len(logits_indices) == num_rows and (
        kv is None or not (kv.loads or kv.state_loads)
    )


@dataclass(eq=False)
class PendingStep:
    """A step under way (:class:`metal_engine.step.StepHandle`).

    Attributes:
        sampling: what it does with its logits.
        pooling: what it does with its hidden states; None if no request is to be pooled.
        before: the KV cache's arrays as the step found them, until it is dispatched.
        loads: KV that comes from a store, until it is dispatched.
        saves: KV that goes to a store.
        drafting: what the draft model has done for it; None if nothing.
        decode_forward: see :class:`metal_engine.step.ModelOutput`.
        root: what the device computes last, from the dispatch on.
        error: why it could not be dispatched.
        is_async: whether some of it was evaluated asynchronously.
    """

    runner: ModelRunner
    sampled_req_ids: list[str]
    sampling: StepSampling
    pooling: StepPooling | None
    before: PoolSnapshot | None
    loads: StepLoads
    saves: StepSaves | None
    drafting: Drafting | None = None
    decode_forward: DecodeForward | None = None
    root: list[mx.array] | None = None
    error: Exception | None = None
    is_async: bool = False

    def wait(self) -> None:
        """Wait until the device is done with the step and has let go of all it read; raises what it raised."""
        if self.error is not None:
            raise self.error
        # NumPy alone would wait as well, but pass over an error of an operation and take what it left.
        try:
            mx.eval(self.root)
        except Exception:
            # Streams that met the same error would raise it in the step after this one.
            with suppress(Exception):
                synchronize()
            raise
        synchronize()

    def result(self) -> ModelOutput:
        """Wait for the step, dispatch the next one, and return the output of this one.

        Raises:
            KVCacheLostError: it failed, and the KV cache with it.
        """
        return self.runner.finish(self)

"""Model runner: turns a plan into packed arrays, one forward pass and one sampling pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, StepAttention
from metal_engine.device.info import computes_on_cpu
from metal_engine.device.streams import end_streams_of_thread, synchronize
from metal_engine.errors import clear_traceback_frames
from metal_engine.kv_cache.pool import PoolSnapshot
from metal_engine.kv_cache.writes import choose_writes
from metal_engine.kv_transfer.runner_side import KVConnectorRunner, StepLoads, StepSaves
from metal_engine.lora.layers import AdapterRows
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.batch import PackedBatch, RequestTable
from metal_engine.runner.drafting import Drafter, TargetStep
from metal_engine.runner.features import FeatureCache
from metal_engine.runner.pending_step import PendingStep
from metal_engine.runner.replay import DecodeReplay, ForwardResult, is_decode
from metal_engine.runner.step_pooling import StepPooling
from metal_engine.runner.step_sampling import StepSampling
from metal_engine.runner.token_broadcast import TokenBroadcast
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from metal_engine.step import DecodeForward, DecodeOutcome, Drafting, ModelOutput, RunnerLostError, SchedulerOutput


class ModelRunner:
    """Executes plans on a model with a paged KV cache.

    Belongs to the thread that loaded the model, because MLX arrays and streams belong to a thread.

    A step is built (its graph is created) and then dispatched (submitted to the device). While a step runs, the next
    step can be built on its unevaluated arrays, including its samples. The next step is dispatched after the first step
    ends, or queued behind the running step. A step writes to the KV cache in place only if no other reference to the
    arrays exists. A command buffer refers to the arrays that it reads until it has completed. Steps are therefore
    queued only if a trial has shown that nothing is copied (:mod:`metal_engine.runner.dispatch`).

    On a GPU, asynchronously planned steps are dispatched in two parts, because MLX blocks its caller while the device
    is far behind. Between the two parts, the tokens of the previous step are returned.

    Args:
        broadcast: distributes rank 0's tokens to all ranks; None if there is one rank.
        allow_queued_dispatch: True to queue steps behind running steps, if nothing in a step prevents it.
        in_parts: True to dispatch steps in two parts. None: only on a GPU, with async scheduling and one rank.

    Attributes:
        pool: KV cache and recurrent states of the model.
        allow_queued_dispatch: value of the argument. The caller may change it between steps.
        replay: traces of decode steps; None if steps are never replayed.
        replays: True to replay decode steps if possible. The caller may change it between steps.
    """

    def __init__(
        self,
        model: PagedModel,
        backend: AttentionBackend,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_connector: KVConnectorRunner | None = None,
        drafter: Drafter | None = None,
        *,
        broadcast: TokenBroadcast | None = None,
        allow_queued_dispatch: bool = False,
        in_parts: bool | None = None,
    ) -> None:
        self._broadcast = broadcast
        self.allow_queued_dispatch = allow_queued_dispatch
        self._model = model
        self.pool = model.pool
        self._backend = backend
        self._num_blocks = cache_config.num_blocks
        self._kv_connector = kv_connector
        self._drafter = drafter
        needs_hidden = drafter is not None and drafter.needs_hidden
        self._hidden_indices = slice(None) if needs_hidden else None
        self._is_async = scheduler_config.async_scheduling
        if in_parts is None:
            in_parts = self._is_async and broadcast is None and not computes_on_cpu()
        self._in_parts = in_parts
        self._table = RequestTable(
            scheduler_config.max_num_seqs,
            scheduler_config.max_model_len,
            cache_config.block_size,
            choose_writes(page_aligned=scheduler_config.page_aligned_scheduling),
            needs_next_images=needs_hidden,
        )
        self._features = FeatureCache(model)
        self._steps: deque[PendingStep] = deque()  # steps in flight, in order; later steps may not be dispatched yet
        self._num_state_slots = cache_config.num_state_slots
        self._num_adapter_slots = 0 if model.adapters is None else model.adapters.max_loras
        self.replay: DecodeReplay | None = None
        self.replays = cache_config.num_padding_blocks > 0
        if self.replays:
            self.replay = DecodeReplay(
                model,
                backend,
                padding_block=cache_config.num_blocks,
                max_num_seqs=scheduler_config.max_num_seqs,
                needs_hidden=needs_hidden,
            )
        num_blocks = cache_config.num_blocks + cache_config.num_padding_blocks
        self.pool.allocate(num_blocks, cache_config.block_size, cache_config.num_state_slots)

    def execute(self, plan: SchedulerOutput, on_built: Callable[[], None] = lambda: None) -> PendingStep:
        """Build and start a step: one forward over every packed row and one sampling pass.

        Raises any error of building the step. The cache is then unchanged, but requests of the plan may have been added
        or dropped. An error of the dispatch is raised by :meth:`PendingStep.result`.

        Args:
            on_built: callback that is called when the plan has been accepted, before the step is dispatched.
        """
        if self._steps and not self._is_async:
            raise RuntimeError("without async scheduling, finish a step before starting the next step")
        self.dispatch_second_part()
        self.pool.reallocate()
        before = None
        try:
            self._table.update(plan)
            if self.pool.own_caches is not None:
                self.pool.own_caches.keep(self._table.state_slots)
            self.pool.begin_step()
            drafting = self._draft(plan)
            before = self.pool.snapshot()  # not earlier: a drafter may write to the pool, in place
            step, logits = self._build_step(plan, drafting, before)
        except BaseException as error:
            self._table.forget_samples()
            if before is not None:
                self.pool.restore(before)
            del before
            clear_traceback_frames(error)
            raise
        del before  # the step holds the only snapshot, and releases it later
        self._steps.append(step)
        on_built()
        if len(self._steps) == 1:
            self._dispatch(step, logits)
        elif self.allow_queued_dispatch and not any(one.needs_exclusive_device for one in self._steps):
            self._steps[-2].has_queued_successor = True
            self._dispatch(step)
        return step

    def dispatch_second_part(self) -> None:
        """See :meth:`metal_engine.step.Runner.dispatch_second_part`."""
        for step in self._steps:
            step.dispatch_second_part()

    @property
    def replay_refusal(self) -> str | None:
        """See :class:`metal_engine.step.Runner`."""
        if self.replay is None or self.replay.refusal is not None or self._drafter is None:
            return None if self.replay is None else self.replay.refusal
        refusal = self._drafter.replay_refusal
        return None if refusal is None else f"for the draft head: {refusal}"

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Ignore the callback. Only :class:`metal_engine.distributed.leader.LeaderRunner` calls it."""

    def _build_step(
        self, plan: SchedulerOutput, drafting: Drafting | None, before: PoolSnapshot
    ) -> tuple[PendingStep, mx.array | None]:
        """Build a step's graph. Return the step, and its logits if its sampling has not been built yet."""
        step, logits = self._build(plan if drafting is None else plan.with_drafts(drafting))
        step.before, step.drafting = before, drafting
        if self._kv_connector is not None:
            step.loads = self._kv_connector.take_loads()
        # The host computes grammar masks while the device is busy with the previous step or with this step.
        is_built = bool(self._steps) or not step.sampling.has_masks
        if is_built:
            step.build_sampling(logits, is_dispatched=False)
            step.saves = self._gather_saves()
        step.moves_states = self.pool.has_moved_states
        step.shared = logits if self._broadcast is not None else None
        if self._in_parts and is_built:
            step.first_part = self.pool.half_done_marker()
        return step, None if is_built else logits

    def _draft(self, plan: SchedulerOutput) -> Drafting | None:
        """Compute the drafts that the plan requests."""
        if self._drafter is None:
            return None
        self._drafter.update(plan)
        return self._drafter.draft(self._table, plan)

    def _build(self, plan: SchedulerOutput) -> tuple[PendingStep, mx.array]:
        """Build the graph of a step's forward and pooling. Return the step, and the logits that it samples from."""
        batch = self._table.pack(plan)
        batch.validate(self._num_blocks, self._num_state_slots, self._num_adapter_slots)
        # A recurrent state that has advanced past a token cannot go back.
        allow_late_masks = not self.pool.is_recurrent
        sampling = StepSampling(self._table, plan, batch, allow_late_masks=allow_late_masks, broadcast=self._broadcast)
        if self._kv_connector is not None:
            self._kv_connector.bind_connector_metadata(plan.kv_connector_metadata)
            if plan.kv_connector_metadata is not None and plan.kv_connector_metadata.state_loads:
                self.pool.forget_states(set(plan.kv_connector_metadata.state_loads))
        encoding = self._features.update(plan)
        attention = self._backend.for_step(batch.rows)
        pooling, decode_forward = None, None
        if self._table.pooling:
            pooling = StepPooling.of(self._table.pooling, plan, batch.rows)
            logits, hidden = self._forward_with_pooling(batch, attention, sampling, pooling)
        else:
            (logits, hidden), decode_forward = self._forward(plan, batch, attention, sampling.logits_indices)
        step = PendingStep(
            self.finish, plan.sampled_req_ids, sampling, pooling, decode_forward=decode_forward, encoding=encoding
        )
        if self._drafter is not None:
            next_images = self._features.kept_of_step(batch.next_images)
            target = TargetStep(self._table, plan, batch, attention, hidden, next_images)
            step.follow = partial(self._drafter.follow, target)
        return step, logits

    def _forward_with_pooling(
        self, batch: PackedBatch, attention: StepAttention, sampling: StepSampling, pooling: StepPooling
    ) -> ForwardResult:
        """Build a forward and the pooling of its hidden states and logits.

        Returns the forward's result, without the logits that only the pooling needs.
        """
        num_sampling, pooled = len(sampling.logits_indices), mx.array(pooling.hidden_indices)
        logits, hidden = self._model.forward(
            self._input_ids(batch),
            batch.rows,
            attention,
            mx.array(np.concatenate([sampling.logits_indices, pooling.logits_indices])),
            self._hidden_indices or (pooled if pooled.size else None),
            self._adapter_rows(batch),
            self._features.of_step(batch.images),
        )
        of_all = None if self._hidden_indices is None else hidden
        pooling.build(hidden if of_all is None else of_all[pooled], logits[num_sampling:])
        return logits[:num_sampling], of_all

    def _forward(
        self, plan: SchedulerOutput, batch: PackedBatch, attention: StepAttention, logits_indices: np.ndarray
    ) -> tuple[ForwardResult, DecodeForward | None]:
        """Run a step's forward, replayed or newly built.

        Returns:
            First, the logits of the rows ``logits_indices``, [R + T, vocab_size], with the hidden states if a drafter
            needs them. Second, the outcome of replay; None if some rows do not sample, or if replay is off.
        """
        input_ids, adapters = self._input_ids(batch), self._adapter_rows(batch)

        def build() -> ForwardResult:
            indices, images = mx.array(logits_indices), self._features.of_step(batch.images)
            return self._model.forward(
                input_ids, batch.rows, attention, indices, self._hidden_indices, adapters, images
            )

        replay = self.replay
        if replay is None:
            return build(), None
        outcome: DecodeOutcome | None = None
        if not self.replays or not is_decode(plan, batch.rows, len(logits_indices)):
            result = build()
        elif adapters is not None:
            result, outcome = build(), "adapters"
        else:
            result, outcome = replay.forward((input_ids,), batch.rows, build)
        replay.learn(attention)
        return result, None if outcome is None else DecodeForward(outcome, self.replay_refusal)

    def _adapter_rows(self, batch: PackedBatch) -> AdapterRows | None:
        slots = batch.adapter_slots[batch.rows.request_of_row] if len(batch.adapter_slots) else batch.adapter_slots
        if self._model.adapters is None or not slots.any():
            return None
        return self._model.adapters.rows(slots)

    def _gather_saves(self) -> StepSaves | None:
        """Return the blocks that the newly built step saves to a store; None without KV transfer."""
        if self._kv_connector is None:
            return None
        for index, state in enumerate(self.pool.states):
            self._kv_connector.save_kv_layer(index, state)
        return self._kv_connector.take_saves()

    def _input_ids(self, batch: PackedBatch) -> mx.array:
        """Return the input tokens, [N]. Tokens that the previous step samples are taken from its unevaluated array."""
        if not len(batch.pending_rows):
            return mx.array(batch.input_ids)
        samples = self._steps[-1].sampling.tokens
        if samples is None:  # the previous step has failed before its sampling was built, so this step is dropped
            assert self._steps[-1].error is not None
            return mx.array(batch.input_ids)
        if batch.is_continued(samples.size):
            return samples
        input_ids = mx.array(batch.input_ids)
        input_ids[mx.array(batch.pending_rows)] = samples[mx.array(batch.pending_samples)]
        return input_ids

    def _dispatch(self, step: PendingStep, logits: mx.array | None = None) -> None:
        """Dispatch a step. An error is stored, and raised by :meth:`PendingStep.result`.

        Args:
            logits: logits that the step samples from, if its sampling has not been built yet.
        """
        step.is_dispatched = True
        try:
            self._load(step)
            step.before = None  # no other reference to the arrays that the step writes to
            if step.shared is not None:
                # Evaluate the logits first, on every rank. Their graph is the same on all ranks, so all ranks exchange
                # the same arrays in the same order.
                step.is_async = True
                mx.async_eval(step.shared)
                step.shared = None
            if logits is not None:
                step.is_async = True
                mx.async_eval(logits)  # the forward runs while the host computes masks
                step.build_sampling(logits, is_dispatched=True)
                step.saves = self._gather_saves()
            step.root = [*step.results, *self._remaining_writes(step)]
            step.root += step.followed.arrays if step.followed is not None else []
            step.root += step.saves.arrays.values() if step.saves is not None else ()
            if step.first_part is not None:
                step.is_async, first, step.first_part = True, step.first_part, None
                step.has_second_part = True
                mx.async_eval(first)
            elif self._is_async:
                step.is_async = True
                mx.async_eval(step.root)  # otherwise result() evaluates the step and waits for it
        except Exception as error:  # noqa: BLE001  (raised by result())
            step.error = error

    def _remaining_writes(self, step: PendingStep) -> list[mx.array]:
        """Return the arrays to evaluate so that all writes of the step to the cache are executed.

        Empty if the evaluation of the step's results executes all writes.
        """
        if not step.results or step.moves_states:  # only intermediate chunks, or copied states
            return [self.pool.writes_done_marker()]
        # Results depend on the recurrent states that a step reads, but not on the states that it writes.
        return [self.pool.states_done_marker()] if self.pool.is_recurrent else []

    def _load(self, step: PendingStep) -> None:
        """Write the KV that a step loads from a store into the cache's arrays, after the previous step's writes."""
        if self._kv_connector is not None and step.loads:
            assert step.before is not None
            for index, layer in enumerate(step.before):
                self._kv_connector.write_loaded(index, layer.arrays, step.loads)
            step.loads = StepLoads()

    def finish(self, step: PendingStep) -> ModelOutput:
        """Wait for the oldest step in flight, dispatch the next step, and return the output of the oldest step.

        See :meth:`PendingStep.result`. Raises RuntimeError if ``step`` is not the oldest step in flight.
        """
        if not self._steps or self._steps[0] is not step:
            raise RuntimeError("finish each step once, in the order in which the steps were started")
        step.dispatch_second_part()
        self._steps.popleft()
        try:
            step.next_encoding = self._steps[0].encoding if self._steps else None
            step.wait()
            if self._steps and not self._steps[0].is_dispatched:
                self._dispatch(self._steps[0])
            return self._output(step)
        except Exception as error:
            self._recover(step, error)
            raise

    def _output(self, step: PendingStep) -> ModelOutput:
        """Collect the results of a completed step."""
        output = step.sampling.result()
        output.decode_forward, output.encode_seconds = step.decode_forward, step.encode_seconds
        if step.drafting is not None:
            output.drafting = step.drafting
            # Include requests for which the drafter returned no drafts.
            output.num_accepted_tokens = dict.fromkeys(step.drafting.token_ids, 0) | output.num_accepted_tokens
        if step.followed is not None:
            step.followed.finish(output)
        self._table.append_tokens(step.sampled_req_ids, output)
        if waiting := self._table.follow_phases(step.sampled_req_ids, output):
            for later in self._steps:
                later.sampling.void_samples(waiting)
        if step.pooling is not None:
            output.pooled = step.pooling.result()
        if self._kv_connector is not None and step.saves is not None:
            self._kv_connector.hand_over_saves(step.saves)
        return output

    def _recover(self, step: PendingStep, error: Exception) -> None:
        """Recover from a failed step: drop the steps built on it, and make the KV cache usable again.

        If a part of the step was evaluated asynchronously, the cache's arrays are unreliable. The cache is then
        reallocated and empty.

        Raises:
            KVCacheLostError: the cache was reallocated.
        """
        if self.replay is not None:
            behind = [s.decode_forward for s in self._steps if s.is_dispatched and s.decode_forward]
            self.replay.failed(step.decode_forward, behind, error)
        if self._drafter is not None:
            self._drafter.failed(error)
        # First release all arrays of the cache: there is no memory for two caches.
        for failed_or_void in (step, *self._steps):
            failed_or_void.release()
        clear_traceback_frames(error)
        self._steps.clear()
        self._table.forget_samples()
        if step.is_async:
            # An asynchronous evaluation may stop anywhere and raise its error again, so its arrays are unreliable.
            self.pool.renew(error)
        self.pool.recover(error)

    def forget(self, req_ids: list[str]) -> None:
        """Drop requests between steps, as the next plan would. Unknown ids are ignored."""
        plan = SchedulerOutput(0, dropped_req_ids=req_ids)
        self._table.update(plan)
        if self.pool.own_caches is not None:
            self.pool.own_caches.keep(self._table.state_slots)
        if self._drafter is not None:
            self._drafter.update(plan)

    def release_cache(self) -> bool:
        """See :meth:`metal_engine.step.Runner.release_cache`. A draft model keeps its cache."""
        synchronize()
        self.pool.release()
        self._features.clear()
        mx.clear_cache()
        return True

    def close(self) -> None:
        """Free the KV caches of the model and the drafter, close the KV connector, and end the thread's MLX streams.

        Call it in the thread that ran the steps.
        """
        self._steps.clear()
        synchronize()
        if self._drafter is not None:
            self._drafter.release()
        if self._kv_connector is not None:
            self._kv_connector.close()
        if self.replay is not None:
            self.replay.drop_traces()
        self.pool.release()
        self._features.clear()
        end_streams_of_thread()

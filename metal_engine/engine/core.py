"""The engine's step loop: schedule, execute, update.

Single-threaded. Does not depend on MLX, asyncio or HTTP.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable

from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.step_observer import FrameSink, StepObserver
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import PreparedRequest, Request, RequestOptions, RequestOutput, RequestStatus, client_id
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig
from metal_engine.step import KVCacheLostError, Runner, RunnerLostError, SchedulerOutput, StepHandle
from metal_engine.text.output_processor import OutputProcessor, under_client_ids
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LOAD_WAIT_SECONDS = 0.01  # wait in one step if every request is waiting for KV to be loaded


class EngineCore:
    """Accepts prepared requests and produces outputs, one packed step at a time.

    With ``async_scheduling``, a step is planned and built while the previous step runs and its tokens are still
    unknown. A stop is therefore detected one step late, and the token sampled in the extra step is dropped.

    Args:
        config: configuration with every value resolved.
        runner: executes plans. Tests pass a runner that computes nothing.
        tokenizer: decodes text and provides the end-of-sequence ids.
        kv_connector: scheduler half of the KV connector, which loads and saves KV. The runner has the other half.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        kv_connector: KVConnectorScheduler | None = None,
    ) -> None:
        self.config = config
        self._eos_token_ids = tokenizer.eos_token_ids
        proposer = None if (given := config.scheduler.speculative) is None else make_proposer(given)
        self.scheduler = Scheduler(config.scheduler, config.cache, kv_connector, proposer)
        self._runner = runner
        self._outputs = OutputProcessor(tokenizer)
        self.metrics = EngineMetrics(None if kv_connector is None else kv_connector.stats, runner.replay_refusal)
        self._seeds = random.Random(config.seed)
        self._serials = itertools.count()
        self._ids: dict[str, str] = {}  # client's request id -> internal request id
        # Steps in flight with their start times, and how many may be in flight when step() returns.
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle, float]] = deque()
        self._num_ahead = int(config.scheduler.async_scheduling)
        self.num_steps = 0
        self._observer: StepObserver | None = None

    # --- requests ---

    def add_request(
        self,
        request_id: str,
        prepared: PreparedRequest,
        options: RequestOptions | None = None,
        *,
        index: int = 0,
        arrival_time: float | None = None,
    ) -> None:
        """Queue one output of a prepared request.

        Args:
            index: index of the output among the ``n`` outputs of the request; selects the seed.
            arrival_time: arrival of the request in seconds of ``time.monotonic``. Default: now.

        Raises:
            ValueError: the id is in use.
        """
        if request_id in self._ids:
            raise ValueError(f"request id {request_id!r} is in use")
        params, options = prepared.params, options or RequestOptions()
        seed = params.seed_of(index)
        if seed is None:
            # Drawn once, so that the request samples with the same random numbers after preemption.
            seed = 0 if params.is_greedy else self._seeds.getrandbits(63)
        request = Request(
            f"{request_id}#{next(self._serials)}",
            prepared.prompt_token_ids,
            params,
            max_tokens=prepared.max_tokens,
            rules=prepared.rules,
            seed=seed,
            eos_token_ids=self._eos_token_ids,
            options=options,
            cache_salt=prepared.cache_salt,
            block_hashes=list(prepared.block_hashes),
            needs_prompt_rows=params.prompt_logprobs is not None,
            num_lasting_tokens=prepared.num_lasting_tokens,
            num_instruction_tokens=prepared.num_instruction_tokens,
            pooling_params=prepared.pooling_params,
            adapter=prepared.adapter,
        )
        self.scheduler.add_request(request)
        if prepared.pooling_params is None:  # pooling produces no text
            self._outputs.add_request(request)
        self._ids[request_id] = request.request_id
        self.metrics.arrived(request.request_id, request.num_prompt_tokens, arrival_time)

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks. Unknown ids are ignored."""
        if request_id in self._ids:
            self.metrics.finished(self._ids[request_id], "abort")
            self._forget(self._ids[request_id], RequestStatus.FINISHED_ABORTED)

    def _forget(self, request_id: str, status: RequestStatus) -> None:
        self.scheduler.finish_request(request_id, status)
        self._outputs.remove_request(request_id)
        self._ids.pop(client_id(request_id), None)

    def close(self) -> None:
        """Close the runner.

        Call it in the thread that ran the steps. The engine cannot be used afterwards.
        """
        self._runner.close()

    @property
    def request_ids(self) -> list[str]:
        """Client ids of all unfinished requests."""
        return list(self._ids)

    @property
    def has_requests(self) -> bool:
        """True if requests or steps are left. A step in flight must be finished even if all its requests are gone."""
        return self.scheduler.has_requests or bool(self._in_flight)

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    def watch(self, on_frame: FrameSink | None) -> None:
        """Set the callback that receives frames about steps, replacing the previous one. None turns frames off."""
        self._observer = None if on_frame is None else StepObserver(self.scheduler, on_frame)

    def flush_frames(self) -> bool:
        """Send a pending frame to the callback. Call it while the engine is idle. Return True if more is pending."""
        return self._observer is not None and self._observer.flush_frames()

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Set a callback for the loss of another rank (:meth:`metal_engine.step.Runner.on_rank_lost`)."""
        self._runner.on_rank_lost(callback)

    # --- a step ---

    def dispatch_second_part(self) -> None:
        """Dispatch the rest of the step in flight, so that the device does not wait for planning or new requests."""
        self._runner.dispatch_second_part()

    def step(self) -> list[RequestOutput]:
        """Plan and start a step, then finish the oldest step in flight and return its outputs.

        With ``async_scheduling``, the step just started stays in flight, so that the next step is planned while it
        runs. A step that raises fails only its own requests.

        Raises:
            AssertionError: the scheduler's state is inconsistent, even after every request was failed.
            RunnerLostError: no further step can run.
        """
        started = time.monotonic()
        self.dispatch_second_part()
        try:
            plan = self.scheduler.schedule()
        except Exception as error:  # noqa: BLE001  (logged there)
            return self._fail_everything(error)
        if self._observer is not None:
            self._observer.planned(plan, started)
        failed = self._failed_loads()
        if plan.num_scheduled_tokens:
            self.num_steps += 1
            self.metrics.scheduled(plan, started, is_ahead=bool(self._in_flight))
            try:
                handle = self._runner.execute(plan)
            except Exception as error:  # noqa: BLE001  (logged there)
                self.scheduler.refused(plan)
                outputs = failed + self._fail(plan, error)
                # The next plan cannot follow directly on the steps in flight, because this failed plan came between.
                while self._in_flight:
                    outputs += self._finish_oldest()
                return outputs
            self._in_flight.append((plan, handle, started))
            if len(self._in_flight) <= self._num_ahead:
                return failed
        elif not (self._in_flight or failed) and self.scheduler.connector is not None:
            self.scheduler.connector.wait(_LOAD_WAIT_SECONDS)  # every remaining request waits for KV
        return failed + (self._finish_oldest() if self._in_flight else [])

    def _failed_loads(self) -> list[RequestOutput]:
        """End the requests whose KV could not be loaded, if the load failure policy demands it."""
        connector = self.scheduler.connector
        failed = [] if connector is None else list(connector.failed_loads.items())
        return under_client_ids([self._fail_request(r, message) for r, message in failed])

    def _finish_oldest(self) -> list[RequestOutput]:
        plan, handle, started = self._in_flight.popleft()
        try:
            model_output = handle.result()
        except Exception as error:  # noqa: BLE001  (logged there)
            outputs = self._fail(plan, error)
            for void_plan, _, _ in self._in_flight:
                self.scheduler.cancel(void_plan)
            self._in_flight.clear()
            return outputs
        self.metrics.computed(model_output)
        if plan.scheduled_spec_decode_tokens:
            self.metrics.speculated(plan, model_output)
        for request_id, prompt_logprobs in model_output.prompt_logprobs.items():
            self._outputs.add_prompt_logprobs(request_id, prompt_logprobs)
        try:
            outputs = self.scheduler.update(plan, model_output)
        except Exception as error:  # noqa: BLE001  (logged there)
            return self._fail_everything(error)
        outputs = [self._process(output) for output in outputs]
        self.metrics.produced(outputs, started, time.monotonic())
        return under_client_ids(outputs)

    def _process(self, output: RequestOutput) -> RequestOutput:
        """Fill in one request's new text. A stop string in the text also ends the request in the scheduler."""
        request_id = output.request_id
        if output.error is not None:
            return self._fail_request(request_id, output.error, caused_by_request=output.caused_by_request)
        try:
            if output.pooled is None:
                self._outputs.process(output)
        except Exception as error:
            logger.exception("no text for %s from tokens %s", request_id, output.token_ids)
            return self._fail_request(request_id, f"its tokens cannot be decoded: {error}")
        if output.finished:  # no effect in the scheduler, except after a stop string
            self._forget(request_id, RequestStatus.FINISHED_STOPPED)
        return output

    def _fail(self, plan: SchedulerOutput, error: Exception) -> list[RequestOutput]:
        if isinstance(error, RunnerLostError):
            raise error
        logger.error("step %d failed: %s", plan.step_id, plan.composition, exc_info=error)
        self.metrics.num_failed_steps += 1
        self.scheduler.failed(plan)
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        scheduled = [r for r in plan.num_scheduled_tokens if r in self.scheduler.requests]
        outputs = [self._fail_request(request_id, message) for request_id in scheduled]
        if isinstance(error, KVCacheLostError):
            self.scheduler.preempt_all()  # the KV of all other requests is lost too
        return under_client_ids(outputs)

    def _fail_everything(self, error: Exception) -> list[RequestOutput]:
        """Fail every request after an error in the scheduler. The scheduler is then empty and can continue."""
        logger.exception("scheduling failed: %s", self.stats)
        self.metrics.num_failed_steps += 1
        self._abandon_steps()
        message = f"scheduling failed: {type(error).__name__}: {error}"
        outputs = [self._fail_request(request_id, message) for request_id in list(self.scheduler.requests)]
        self.scheduler.failed()
        self.scheduler.check_integrity()
        return under_client_ids(outputs)

    def _abandon_steps(self) -> None:
        """Wait for the steps in flight and discard their results."""
        while self._in_flight:
            _, handle, _ = self._in_flight.popleft()
            try:
                handle.result()
            except Exception:
                logger.exception("a step in flight failed, too")
                self._in_flight.clear()  # steps after a failed one are void

    def _fail_request(self, request_id: str, message: str, *, caused_by_request: bool = False) -> RequestOutput:
        self.metrics.finished(request_id, "error")
        self._forget(request_id, RequestStatus.FINISHED_ERROR)
        return RequestOutput(request_id, finish_reason="error", error=message, caused_by_request=caused_by_request)

"""The engine's step loop: schedule, execute, update.

Takes and returns token ids, which the client converts to text (``engine_client.py``). Single-threaded. Does not depend
on MLX, asyncio or HTTP.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.step_observer import FrameSink, StepObserver
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.request import (
    MAX_FAILURES,
    PreparedRequest,
    Request,
    RequestOptions,
    RequestOutput,
    RequestStatus,
    TokenLogprobs,
)
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig
from metal_engine.step import KVCacheLostError, PromptLogprobs, Runner, RunnerLostError, SchedulerOutput, StepHandle

logger = logging.getLogger(__name__)

# Types of errors that a broken device may cause in every step. MLX raises RuntimeError.
_DEVICE_ERRORS = (RuntimeError, MemoryError, KVCacheLostError)
_LOAD_WAIT_SECONDS = 0.01  # wait in one step if every request is waiting for KV to be loaded


class EngineCore:
    """Accepts prepared requests and produces outputs, one packed step at a time.

    With ``async_scheduling``, a step is planned and built while the previous step runs and its tokens are still
    unknown. A stop is therefore detected one step late, and the token sampled in the extra step is dropped.

    Args:
        config: configuration with every value resolved.
        runner: executes plans. Tests pass a runner that computes nothing.
        kv_connector: scheduler half of the KV connector, which loads and saves KV. The runner has the other half.
    """

    def __init__(self, config: EngineConfig, runner: Runner, kv_connector: KVConnectorScheduler | None = None) -> None:
        self.config = config
        proposer = None if (given := config.scheduler.speculative) is None else make_proposer(given)
        self.scheduler = Scheduler(config.scheduler, config.cache, kv_connector, proposer)
        self.runner = runner
        self.metrics = EngineMetrics(None if kv_connector is None else kv_connector.stats, runner.replay_refusal)
        # Log probabilities of prompts whose requests have no output yet, by request, if requested.
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        # Steps in flight with their start times, and how many may be in flight when step() returns.
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle, float]] = deque()
        self._num_ahead = int(config.scheduler.async_scheduling)
        self.num_steps = 0
        self._has_released = False  # True if the runner has freed the KV cache since the last step
        self._observer: StepObserver | None = None
        # Called with each plan before it runs, so that the server knows the requests of a step that kills this process.
        self.on_plan: Callable[[SchedulerOutput], None] | None = None
        # True if a new process continues the requests when this engine ends.
        self.is_replaceable = False
        self._num_failed_in_row = 0  # number of device errors since the last step that has not failed

    # --- requests ---

    def add_request(
        self,
        request_id: str,
        prepared: PreparedRequest,
        seed: int = 0,
        options: RequestOptions | None = None,
        *,
        so_far: RequestOutput | None = None,
        num_failures: int = 0,
        arrival_time: float | None = None,
    ) -> None:
        """Queue one output of a prepared request.

        A request that another engine has begun continues after its output ``so_far``. Later outputs have the same
        tokens, log probabilities and counts as if one engine had computed the whole request.

        Args:
            request_id: id that no request of this engine has had. A step in flight may still compute an ended request,
                so an id cannot be used again.
            seed: seed of the output's random draws.
            so_far: all outputs of the other engine, merged, at least one token; None for a new request.
            num_failures: :attr:`Request.num_failures` in the other engine.
            arrival_time: arrival of the request in seconds of ``time.monotonic``. Default: now.

        Raises:
            ValueError: the id is in use.
        """
        params = prepared.params
        request = Request(
            request_id,
            prepared.prompt_token_ids,
            params,
            max_tokens=prepared.max_tokens,
            rules=prepared.rules,
            seed=seed,
            eos_token_ids=prepared.eos_token_ids,
            options=options or RequestOptions(),
            cache_salt=prepared.cache_salt,
            block_hashes=list(prepared.block_hashes),
            needs_prompt_rows=params.prompt_logprobs is not None,
            num_lasting_tokens=prepared.num_lasting_tokens,
            num_instruction_tokens=prepared.num_instruction_tokens,
            pooling_params=prepared.pooling_params,
            adapter=prepared.adapter,
            images=prepared.images,
            so_far=so_far,
            num_failures=num_failures,
        )
        self.scheduler.add_request(request)
        if request.needs_prompt_rows and so_far is None:
            self._prompt_logprobs[request_id] = [None]
        self.metrics.arrived(request, arrival_time)

    def end_request(self, request_id: str, status: RequestStatus, num_output_tokens: int | None = None) -> None:
        """End a request, and free its blocks. Unknown ids are ignored.

        Called if the client has aborted the request, found a stop string, or failed to decode the tokens. The engine
        does not see the text, so the metrics count the end of a request with stop strings only in this call.

        Args:
            status: final status, with a finish reason.
            num_output_tokens: number of output tokens up to the stop string. Default: all tokens.
        """
        assert status.finish_reason is not None
        self.metrics.finished(request_id, status.finish_reason, num_output_tokens)
        self._forget(request_id, status)

    def _forget(self, request_id: str, status: RequestStatus) -> None:
        self.scheduler.finish_request(request_id, status)
        self._prompt_logprobs.pop(request_id, None)
        self._release_own_caches()

    def _release_own_caches(self) -> None:
        """Free mlx-lm's own caches if the last request has ended.

        While requests are left, their next step frees the caches of ended requests. No effect unless
        :attr:`ModelInfo.own_caches_reason` is set.
        """
        if self.config.model.own_caches_reason and not self.has_requests and not self._has_released:
            self._has_released = self.runner.release_cache()

    def release_memory(self) -> None:
        """Free the KV cache until the next step, and drop all cached prefixes. No effect if there are requests."""
        if self.has_requests or self._has_released:
            return
        self._has_released = True
        if self.runner.release_cache():
            logger.warning("memory is short: the KV cache is freed until the next request")
            self.scheduler.forget_cached()

    def close(self) -> None:
        """Close the runner.

        Call it in the thread that ran the steps. The engine cannot be used afterwards.
        """
        self.runner.close()

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self.scheduler.requests)

    @property
    def has_requests(self) -> bool:
        """True if requests or steps are left. A step in flight must be finished even if all its requests are gone."""
        return self.scheduler.has_requests or bool(self._in_flight)

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    def watch(self, on_frame: FrameSink | None) -> None:
        """Set the callback for frames about steps, replacing the previous callback. None turns frames off."""
        self._observer = None if on_frame is None else StepObserver(self.scheduler, on_frame)

    def flush_frames(self) -> bool:
        """Send a pending frame to the callback. Call it while the engine is idle.

        Returns True if a further call is necessary to report the whole pool.
        """
        return self._observer is not None and self._observer.flush_frames()

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """Set the callback for the loss of another rank. See :meth:`metal_engine.step.Runner.on_rank_lost`."""
        self.runner.on_rank_lost(callback)

    # --- a step ---

    def dispatch_second_part(self) -> None:
        """Dispatch the rest of the step in flight, so that the device does not wait for planning or new requests."""
        self.runner.dispatch_second_part()

    def step(self) -> list[RequestOutput]:
        """Plan and start a step, then finish the oldest step in flight and return its outputs.

        With ``async_scheduling``, the step just started stays in flight, so that the next step is planned while it
        runs.

        If a step raises, its requests are preempted and computed again. A request is a suspect after two failed steps
        since its last token, and suspects run one at a time until they get a token. A third failed step fails the
        request. If no step has succeeded between three failures of the device, the device may be broken. An engine with
        ``is_replaceable`` then raises RunnerLostError, so that a new process can continue the requests.

        Raises:
            AssertionError: the scheduler's state is inconsistent, even after every request was failed.
            RunnerLostError: no further step can run, or the device of a replaceable engine fails in every step.
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
            self._has_released = False
            self.metrics.scheduled(plan, started, is_ahead=bool(self._in_flight))
            if self.on_plan is not None:
                self.on_plan(plan)
            try:
                handle = self.runner.execute(plan)
            except RunnerLostError:
                raise
            except Exception as error:  # noqa: BLE001  (logged there)
                self.scheduler.refused(plan)
                # The next plan cannot follow directly on the steps in flight, because this failed plan came between.
                # Finish them before the failure is counted: their tokens were computed before it.
                while self._in_flight:
                    failed += self._finish_oldest()
                return failed + self._retry(plan, error)
            self._in_flight.append((plan, handle, started))
            if len(self._in_flight) <= self._num_ahead:
                return failed
        elif not (self._in_flight or failed) and self.scheduler.connector is not None:
            self.scheduler.connector.wait(_LOAD_WAIT_SECONDS)  # every remaining request waits for KV
        return failed + (self._finish_oldest() if self._in_flight else [])

    def _failed_loads(self) -> list[RequestOutput]:
        """End the requests that must fail because their KV could not be loaded. Return their error outputs."""
        connector = self.scheduler.connector
        failed = [] if connector is None else list(connector.failed_loads.items())
        return [self._fail_request(request_id, message) for request_id, message in failed]

    def _finish_oldest(self) -> list[RequestOutput]:
        plan, handle, started = self._in_flight.popleft()
        try:
            model_output = handle.result()
        except RunnerLostError:
            raise
        except Exception as error:  # noqa: BLE001  (logged there)
            outputs = self._retry(plan, error)
            for void_plan, _, _ in self._in_flight:
                self.scheduler.cancel(void_plan)
            self._in_flight.clear()
            return outputs
        self._num_failed_in_row = 0
        self.metrics.computed(model_output)
        if plan.scheduled_spec_decode_tokens:
            self.metrics.speculated(plan, model_output)
        try:
            outputs = self.scheduler.update(plan, model_output)
        except Exception as error:  # noqa: BLE001  (logged there)
            return self._fail_everything(error)
        if self._prompt_logprobs:
            self._add_prompt_logprobs(outputs, model_output.prompt_logprobs)
        self.metrics.produced(outputs, started, time.monotonic())
        self._release_own_caches()
        return outputs

    def _add_prompt_logprobs(self, outputs: list[RequestOutput], parts: dict[str, PromptLogprobs]) -> None:
        """Collect a step's log probabilities of prompts, and add them to each request's first output.

        If a preempted request computes its prompt again, the first values are kept.

        Args:
            outputs: outputs of the step, which are changed.
            parts: log probabilities of prompt tokens that the step has computed, by request.
        """
        for request_id, part in parts.items():
            known = self._prompt_logprobs.get(request_id)
            if known is not None:
                known += part.tokens[len(known) - part.start :]
        for output in outputs:
            output.prompt_logprobs = self._prompt_logprobs.pop(output.request_id, None)

    def _retry(self, plan: SchedulerOutput, error: Exception) -> list[RequestOutput]:
        """Preempt the requests of a failed step. Return the error outputs of requests that have failed too often.

        Raises:
            RunnerLostError: the device fails in every step, and a new process can replace this engine.
        """
        self.metrics.num_failed_steps += 1
        self._num_failed_in_row += isinstance(error, _DEVICE_ERRORS)
        if self.is_replaceable and self._num_failed_in_row == MAX_FAILURES:
            problem = f"{MAX_FAILURES} steps in a row have failed, the last with {type(error).__name__}: {error}"
            raise RunnerLostError(problem) from error
        self.scheduler.cancel(plan)
        if isinstance(error, KVCacheLostError):
            self.scheduler.preempt_all()  # the KV of all other requests is lost too
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        requests = [request for r in plan.num_scheduled_tokens if (request := self.scheduler.requests.get(r))]
        outputs = []
        for request in requests:
            request.num_failures += 1
            if request.num_failures == MAX_FAILURES:
                outputs.append(self._fail_request(request.request_id, message))
        num_retried = len(requests) - len(outputs)
        self.metrics.num_retried_requests += num_retried
        retries = f"{num_retried} requests are retried, {len(outputs)} fail"
        logger.error("step %d failed: %s; %s", plan.step_id, plan.composition, retries, exc_info=error)
        return outputs

    def _fail_everything(self, error: Exception) -> list[RequestOutput]:
        """Fail every request after an error in the scheduler, and return their error outputs.

        The scheduler is then empty and can continue. Raises AssertionError if its state is inconsistent.
        """
        logger.exception("scheduling failed: %s", self.stats)
        self.metrics.num_failed_steps += 1
        self._abandon_steps()
        message = f"scheduling failed: {type(error).__name__}: {error}"
        outputs = [self._fail_request(request_id, message) for request_id in list(self.scheduler.requests)]
        self.scheduler.failed()
        self.scheduler.check_integrity()
        return outputs

    def _abandon_steps(self) -> None:
        """Wait for the steps in flight and discard their results."""
        while self._in_flight:
            _, handle, _ = self._in_flight.popleft()
            try:
                handle.result()
            except Exception:
                logger.exception("a step in flight failed, too")
                self._in_flight.clear()  # steps after a failed step are void

    def _fail_request(self, request_id: str, message: str, *, caused_by_request: bool = False) -> RequestOutput:
        self.metrics.finished(request_id, "error")
        self._forget(request_id, RequestStatus.FINISHED_ERROR)
        return RequestOutput(request_id, finish_reason="error", error=message, caused_by_request=caused_by_request)

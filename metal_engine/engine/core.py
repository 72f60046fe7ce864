"""The step loop: schedule, execute, update. Single-threaded; knows nothing of MLX, asyncio or HTTP."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque

from metal_engine.cancellation import check_cancelled
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.pooling_defaults import resolve_pooling
from metal_engine.engine.step_observer import FrameSink, StepObserver
from metal_engine.engine.token_rules import TokenRulesMaker
from metal_engine.errors import ContextLengthError, ParameterError, PromptError
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.lora_adapter import Adapter
from metal_engine.pooling_params import PoolingParams
from metal_engine.request import PreparedRequest, Request, RequestOptions, RequestOutput, RequestStatus, client_id
from metal_engine.sampling_params import NO_RULES, SamplingParams, TokenRules
from metal_engine.scheduling.prefix_cache import prompt_block_hashes
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.speculation.proposals import make_proposer
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig
from metal_engine.step import KVCacheLostError, RankFailureSource, Runner, RunnerLostError, SchedulerOutput, StepHandle
from metal_engine.text.output_processor import OutputProcessor, under_client_ids
from metal_engine.text.prompt_boundaries import PromptBoundaries
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LOAD_WAIT_SECONDS = 0.01  # how long a step waits for KV to be loaded when every request does
# A request to pool has a result where others have a first token.
_POOLING = SamplingParams(max_tokens=1, temperature=0.0)
_IDS_AT_ONCE = 1 << 16  # token ids looked at in one call, which no other thread can interrupt: 3 ms


class EngineCore:
    """Requests in, outputs out, one packed step at a time.

    With ``async_scheduling`` a step is planned and built while the one before it runs, whose tokens are not known
    yet; so a stop is noticed one step late, and the token sampled meanwhile is dropped.

    Args:
        config: everything resolved.
        runner: executes plans; tests give one that computes nothing.
        tokenizer: for text and end-of-sequence ids.
        kv_connector: loads and saves KV; the runner has its other half.
        adapters: LoRA adapters, whose weights the runner has; None: the model was not made for any.
        ranks: processes that share the model with the runner; None: there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        kv_connector: KVConnectorScheduler | None = None,
        adapters: AdapterRegistry | None = None,
        ranks: RankFailureSource | None = None,
    ) -> None:
        self.config, self.ranks = config, ranks
        self.adapters, self.tokenizer = adapters, tokenizer
        proposer = None if (given := config.scheduler.speculative) is None else make_proposer(given)
        self.scheduler = Scheduler(config.scheduler, config.cache, kv_connector, proposer)
        self._runner = runner
        self._outputs = OutputProcessor(tokenizer)
        self._rules = TokenRulesMaker(tokenizer, config.model.vocab_size)
        self._parts = PromptBoundaries(tokenizer) if config.cache.num_state_slots else None
        self.metrics = EngineMetrics(None if kv_connector is None else kv_connector.stats, runner.replay_refusal)
        self._seeds = random.Random(config.seed)
        self._serials = itertools.count()
        self._ids: dict[str, str] = {}  # the client's -> ours
        # Steps started and not finished, with their times; and how many there may be when step() returns.
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle, float]] = deque()
        self._num_ahead = int(config.scheduler.async_scheduling)
        self.num_steps = 0
        self._watch: StepObserver | None = None

    # --- requests ---

    def prepare(self, prompt_token_ids: list[int], params: SamplingParams, cache_salt: str = "") -> PreparedRequest:
        """Check a prompt and its parameters, once, and work out what they mean for this model.

        Thread-safe, and called outside the engine's thread, which must not wait for it: it may compile a grammar.

        Raises:
            ParameterError: the model cannot follow the parameters, or the prompt has token ids that it lacks.
            ContextLengthError: the prompt, or the prompt and its output, are longer than the model's context.
            PromptError: the prompt is empty, or the request larger than the KV cache.
        """
        return self.prepare_all([prompt_token_ids], params, cache_salt)[0]

    def prepare_all(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        cache_salt: str = "",
        rules: TokenRules | None = None,
        adapter: Adapter | None = None,
    ) -> list[PreparedRequest]:
        """:meth:`prepare` for prompts that share their parameters, which are resolved once; or were, to ``rules``."""
        if not self.config.model.can_generate:
            raise PromptError(f"{self.config.model.name} has no LM head: it gives embeddings, and cannot generate")
        rules = rules or self.rules_for(params)
        prepared = []
        for prompt in prompts:
            check_cancelled()
            kept = self._truncated(prompt, params.truncate_prompt_tokens, params.max_tokens or 1)
            max_tokens = self._max_tokens(len(kept), params)
            self._check_token_ids(kept)
            hashes = prompt_block_hashes(kept, self.config.cache, cache_salt, adapter)
            request = PreparedRequest(kept, params, max_tokens, rules, cache_salt, hashes, adapter=adapter)
            prepared.append(request if self._parts is None else self._parts.marked(request))
        return prepared

    def prepare_pooling(
        self, prompts: list[list[int]], params: PoolingParams, cache_salt: str = "", adapter: Adapter | None = None
    ) -> list[PreparedRequest]:
        """:meth:`prepare_all` for prompts that are to be pooled.

        Raises:
            ParameterError: the model cannot follow the parameters, or a prompt has token ids that it lacks.
            ContextLengthError: a prompt is longer than the model's context.
            PromptError: a prompt is empty, or larger than the KV cache.
        """
        whole = resolve_pooling(params, self.config.model)
        prepared = []
        for prompt in prompts:
            check_cancelled()
            kept = self._truncated(prompt, params.truncate_prompt_tokens, 0)
            self._check_fits_alone(len(kept))
            self._check_token_ids(kept)
            hashes = prompt_block_hashes(kept, self.config.cache, cache_salt, adapter)
            prepared.append(PreparedRequest(kept, _POOLING, 1, NO_RULES, cache_salt, hashes, whole, adapter=adapter))
        return prepared

    def rules_for(self, params: SamplingParams) -> TokenRules:
        """Returns parameters in the terms of this model. Thread-safe; compiles their grammar, if they have one.

        Raises:
            ParameterError: the model cannot follow the parameters.
            OverloadedError: too many grammars wait to be compiled.
        """
        return self._rules.rules_for(params)

    def _truncated(self, prompt_token_ids: list[int], limit: int | None, room: int) -> list[int]:
        """The prompt's last tokens, as many as ``truncate_prompt_tokens`` says; -1 leaves room for so many others."""
        max_model_len = self.config.scheduler.max_model_len
        if limit is None:
            return prompt_token_ids
        if limit > max_model_len:
            message = f"{limit} is more than the maximum context length {max_model_len}"
            raise ParameterError("truncate_prompt_tokens", message)
        if limit == -1:
            limit = max(max_model_len - room, 1)
        return prompt_token_ids[-limit:]

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens that may follow a prompt of this length; raises what :meth:`prepare` raises if there is no room."""
        max_model_len = self.config.scheduler.max_model_len
        if num_prompt_tokens >= max_model_len:
            message = f"the prompt has {num_prompt_tokens} tokens, but the maximum context length is {max_model_len} "
            raise ContextLengthError("prompt", message + "tokens and must leave room for at least one more")
        max_tokens = params.max_tokens if params.max_tokens is not None else max_model_len - num_prompt_tokens
        if params.min_tokens > max_tokens:
            message = f"{params.min_tokens} is more than the {max_tokens} tokens there is room for"
            raise ParameterError("min_tokens", message)
        self.scheduler.check_fits(num_prompt_tokens, max_tokens)
        return max_tokens

    def _check_fits_alone(self, num_prompt_tokens: int) -> None:
        """Raises what :meth:`prepare_pooling` raises for a prompt that is too long."""
        max_model_len = self.config.scheduler.max_model_len
        if num_prompt_tokens > max_model_len:
            message = f"the prompt has {num_prompt_tokens} tokens, but the maximum context length is {max_model_len}"
            raise ContextLengthError("prompt", message)
        self.scheduler.check_fits(num_prompt_tokens, 0)

    def _check_token_ids(self, prompt: list[int]) -> None:
        vocab_size = self.config.model.vocab_size
        for start in range(0, len(prompt), _IDS_AT_ONCE):
            ids = prompt[start : start + _IDS_AT_ONCE]
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                raise ParameterError("prompt", f"has token ids outside the vocabulary of {vocab_size}")

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
            index: which of its ``n`` outputs; decides the seed.
            arrival_time: when it arrived (seconds of ``time.monotonic``), if that is not now.

        Raises:
            ValueError: the id is in use.
        """
        if request_id in self._ids:
            raise ValueError(f"request id {request_id!r} is in use")
        params, options = prepared.params, options or RequestOptions()
        seed = params.seed_of(index)
        if seed is None:
            # Drawn once, so that a request draws the same numbers again after preemption.
            seed = 0 if params.is_greedy else self._seeds.getrandbits(63)
        request = Request(
            f"{request_id}#{next(self._serials)}",
            prepared.prompt_token_ids,
            params,
            max_tokens=prepared.max_tokens,
            rules=prepared.rules,
            seed=seed,
            eos_token_ids=self.tokenizer.eos_token_ids,
            options=options,
            # Hashes of another salt would let it share what it must not.
            block_hashes=list(prepared.block_hashes) if prepared.cache_salt == options.cache_salt else [],
            needs_prompt_rows=params.prompt_logprobs is not None,
            num_lasting_tokens=prepared.num_lasting_tokens,
            num_instruction_tokens=prepared.num_instruction_tokens,
            pooling_params=prepared.pooling_params,
            adapter=prepared.adapter,
        )
        self.scheduler.add_request(request)
        if prepared.pooling_params is None:  # what is pooled has no text
            self._outputs.add_request(request)
        self._ids[request_id] = request.request_id
        self.metrics.arrived(request.request_id, request.num_prompt_tokens, arrival_time)

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; an unknown id is ignored."""
        if request_id in self._ids:
            self.metrics.finished(self._ids[request_id], "abort")
            self._forget(self._ids[request_id], RequestStatus.FINISHED_ABORTED)

    def _forget(self, request_id: str, status: RequestStatus) -> None:
        self.scheduler.finish_request(request_id, status)
        self._outputs.remove_request(request_id)
        self._ids.pop(client_id(request_id), None)

    def close(self) -> None:
        """Close the runner, in the thread that ran the steps. The engine must not be used after that."""
        self._rules.close()
        self._runner.close()

    @property
    def request_ids(self) -> list[str]:
        """Unfinished requests, by the ids they were submitted under."""
        return list(self._ids)

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to do; a step under way whose requests have all gone must still be finished."""
        return self.scheduler.has_requests or bool(self._in_flight)

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    def watch(self, on_frame: FrameSink | None) -> None:
        """Tell ``on_frame`` what steps do from now on, in place of whom they were told before; None: nobody."""
        self._watch = None if on_frame is None else StepObserver(self.scheduler, on_frame)

    def flush_frames(self) -> bool:
        """Tell who watches what is left to tell; for when there is nothing to do. Returns whether there is more."""
        return self._watch is not None and self._watch.flush_frames()

    # --- a step ---

    def dispatch_second_part(self) -> None:
        """Give the device the rest of the step under way: it is not to wait for a plan, nor for requests that come."""
        self._runner.dispatch_second_part()

    def step(self) -> list[RequestOutput]:
        """Plan and start a step, then finish the oldest one under way and return its outputs.

        With ``async_scheduling``, a step that was just started stays under way, so that the next one is planned while
        it runs. A step that raises fails its own requests only.

        Raises:
            AssertionError: the scheduler's state is broken, and cannot be mended by failing every request.
            RunnerLostError: no step can run any more.
        """
        started = time.monotonic()
        self.dispatch_second_part()
        try:
            plan = self.scheduler.schedule()
        except Exception as error:  # noqa: BLE001  (logged there)
            return self._fail_everything(error)
        if self._watch is not None:
            self._watch.planned(plan, started)
        failed = self._failed_loads()
        if plan.num_scheduled_tokens:
            self.num_steps += 1
            self.metrics.scheduled(plan, started, is_ahead=bool(self._in_flight))
            try:
                handle = self._runner.execute(plan)
            except Exception as error:  # noqa: BLE001  (logged there)
                self.scheduler.refused(plan)
                outputs = failed + self._fail(plan, error)
                # No later plan can follow directly on those under way: this one came between.
                while self._in_flight:
                    outputs += self._finish_oldest()
                return outputs
            self._in_flight.append((plan, handle, started))
            if len(self._in_flight) <= self._num_ahead:
                return failed
        elif not (self._in_flight or failed) and self.scheduler.connector is not None:
            self.scheduler.connector.wait(_LOAD_WAIT_SECONDS)  # all that is left to do waits for KV
        return failed + (self._finish_oldest() if self._in_flight else [])

    def _failed_loads(self) -> list[RequestOutput]:
        """End the requests whose KV could not be loaded, where that is asked for."""
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
        """Fill in one request's new text. A stop string in it ends the request in the scheduler, too."""
        request_id = output.request_id
        if output.error is not None:
            return self._fail_request(request_id, output.error, caused_by_request=output.caused_by_request)
        try:
            if output.pooled is None:
                self._outputs.process(output)
        except Exception as error:
            logger.exception("no text for %s from tokens %s", request_id, output.token_ids)
            return self._fail_request(request_id, f"its tokens cannot be decoded: {error}")
        if output.finished:  # the scheduler knows, unless it was a stop string
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
            self.scheduler.preempt_all()  # the others' KV is gone too
        return under_client_ids(outputs)

    def _fail_everything(self, error: Exception) -> list[RequestOutput]:
        """The scheduler itself failed: without requests its state is simple enough to go on from."""
        logger.exception("scheduling failed: %s", self.stats)
        self.metrics.num_failed_steps += 1
        self._abandon_steps()
        message = f"scheduling failed: {type(error).__name__}: {error}"
        outputs = [self._fail_request(request_id, message) for request_id in list(self.scheduler.requests)]
        self.scheduler.failed()
        self.scheduler.check_integrity()
        return under_client_ids(outputs)

    def _abandon_steps(self) -> None:
        """Wait for the steps under way and drop their results."""
        while self._in_flight:
            _, handle, _ = self._in_flight.popleft()
            try:
                handle.result()
            except Exception:
                logger.exception("a step under way failed, too")
                self._in_flight.clear()  # void

    def _fail_request(self, request_id: str, message: str, *, caused_by_request: bool = False) -> RequestOutput:
        self.metrics.finished(request_id, "error")
        self._forget(request_id, RequestStatus.FINISHED_ERROR)
        return RequestOutput(request_id, finish_reason="error", error=message, caused_by_request=caused_by_request)

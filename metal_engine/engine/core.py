"""The step loop: schedule, execute, update. Single-threaded; knows nothing of MLX, asyncio or HTTP."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

from metal_engine.config import EngineConfig
from metal_engine.engine.output_processor import OutputProcessor
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.request import Request, RequestOptions, RequestOutput, RequestStatus, SamplingParams
from metal_engine.scheduling.scheduler import Scheduler, SchedulerStats
from metal_engine.step import KVCacheLostError, Runner, SchedulerOutput, TokenOutput

logger = logging.getLogger(__name__)

# When every request waits for KV to be loaded, a step waits for it as long as this before it returns.
_LOAD_WAIT_SECONDS = 0.01


class EngineCore:
    """Requests in, outputs out, one packed step at a time.

    Args:
        config: everything resolved.
        runner: executes plans; tests give one that computes nothing.
        tokenizer: for text and end-of-sequence ids.
        kv_connector: loads and saves KV; the runner has its other half.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        kv_connector: KVConnectorScheduler | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(config.scheduler, config.cache, kv_connector)
        self._runner = runner
        self._outputs = OutputProcessor(tokenizer)
        self._seeds = random.Random(config.seed)
        self.num_steps = 0
        self.num_failed_steps = 0

    # --- requests ---

    def resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens the request may generate. Thread-safe: reads only the frozen configuration.

        Raises:
            ValueError: a prompt of this length, with these parameters, can never be served.
        """
        max_model_len = self.config.scheduler.max_model_len
        if num_prompt_tokens >= max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, but the maximum context length is {max_model_len} "
                f"tokens and must leave room for at least one more"
            )
        max_tokens = params.max_tokens if params.max_tokens is not None else max_model_len - num_prompt_tokens
        self.scheduler.check_fits(num_prompt_tokens, max_tokens)
        return max_tokens

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
    ) -> None:
        """Queue a request. Raises ValueError if it can never be served, or its id is in use."""
        vocab_size = self.config.model.vocab_size
        if prompt_token_ids and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab_size:
            raise ValueError(f"the prompt has token ids outside the vocabulary of {vocab_size}")
        max_tokens = self.resolve_max_tokens(len(prompt_token_ids), params)
        if params.seed is None and not params.is_greedy:
            # Drawn once, so that a request draws the same numbers again after preemption.
            params = replace(params, seed=self._seeds.getrandbits(63))
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_tokens=max_tokens,
            eos_token_ids=self.tokenizer.eos_token_ids,
            options=options,
        )
        self.scheduler.add_request(request)
        self._outputs.add_request(request)

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; one that is not there (any more) is ignored."""
        self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ABORTED)
        self._outputs.remove_request(request_id)

    def close(self) -> None:
        """Let the runner go, in the thread that stepped it; nothing may follow."""
        self._runner.close()

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats

    @property
    def kv_transfer_stats(self) -> KVTransferStats | None:
        """What KV transfer has done so far; None without it."""
        connector = self.scheduler.connector
        return None if connector is None else connector.stats

    # --- a step ---

    def step(self) -> list[RequestOutput]:
        """Run one packed forward over whatever is to be done. A step that raises fails its own requests only.

        Raises:
            AssertionError: the scheduler's state is broken, and cannot be mended by failing every request.
        """
        try:
            plan = self.scheduler.schedule()
        except Exception as error:  # noqa: BLE001  (logged there)
            return self._fail_everything(error)
        failed = self._failed_loads()
        if not plan.num_scheduled_tokens and self.scheduler.connector is not None:
            if not failed:  # all that is left to do waits for KV
                self.scheduler.connector.wait(_LOAD_WAIT_SECONDS)
            return failed
        self.num_steps += 1
        try:
            model_output = self._runner.execute(plan).result()
        except Exception as error:
            logger.exception("step %d failed: %s", plan.step_id, _composition(plan))
            return failed + self._fail(plan, error)
        try:
            token_outputs = self.scheduler.update(plan, model_output)
        except Exception as error:  # noqa: BLE001  (logged there)
            return self._fail_everything(error)
        return failed + [self._process(output) for output in token_outputs]

    def _failed_loads(self) -> list[RequestOutput]:
        """End the requests whose KV could not be loaded, where that is asked for."""
        connector = self.scheduler.connector
        if connector is None:
            return []
        return [self._fail_request(r, message) for r, message in list(connector.failed_loads.items())]

    def _process(self, token_output: TokenOutput) -> RequestOutput:
        """One request's new text; ends the request in the scheduler too where its text ends it."""
        request_id = token_output.request_id
        try:
            output = self._outputs.process(token_output)
        except Exception as error:
            logger.exception("no text for %s from tokens %s", request_id, token_output.token_ids)
            return self._fail_request(request_id, f"its tokens cannot be decoded: {error}")
        if output.finished and token_output.finish_reason is None:  # a stop string
            self.scheduler.finish_request(request_id, RequestStatus.FINISHED_STOPPED)
        return output

    def _fail(self, plan: SchedulerOutput, error: Exception) -> list[RequestOutput]:
        self.num_failed_steps += 1
        self.scheduler.prefix_cache.forget()  # some of the blocks may never have been written
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        scheduled = [r for r in plan.num_scheduled_tokens if r in self.scheduler.requests]
        outputs = [self._fail_request(request_id, message) for request_id in scheduled]
        if isinstance(error, KVCacheLostError):
            self.scheduler.preempt_all()  # the others' KV is gone too
        return outputs

    def _fail_everything(self, error: Exception) -> list[RequestOutput]:
        """The scheduler itself failed: without requests its state is simple enough to go on from."""
        logger.exception("scheduling failed: %s", self.stats)
        self.num_failed_steps += 1
        message = f"scheduling failed: {type(error).__name__}: {error}"
        outputs = [self._fail_request(request_id, message) for request_id in list(self.scheduler.requests)]
        self.scheduler.prefix_cache.forget()
        self.scheduler.check_integrity()
        return outputs

    def _fail_request(self, request_id: str, message: str) -> RequestOutput:
        self.scheduler.finish_request(request_id, RequestStatus.FINISHED_ERROR)
        self._outputs.remove_request(request_id)
        return RequestOutput(request_id, finish_reason="error", error=message)


def _composition(plan: SchedulerOutput) -> str:
    lengths = list(plan.num_scheduled_tokens.values())
    decodes = sum(length == 1 for length in lengths)
    return f"{sum(lengths)} tokens of {len(lengths)} requests ({decodes} of one token, {len(plan.new_requests)} new)"

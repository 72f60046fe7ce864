"""Offline generation: ``LLM("demo").generate(prompts, SamplingParams(...))``."""

from __future__ import annotations

import itertools
import operator
import queue
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.chat_answers import ChatAnswers
from metal_engine.answers.llm_results import (
    EmbeddingOutput,
    EmbeddingResult,
    GenerationResult,
    generation_result,
    read_answers,
)
from metal_engine.answers.tool_plan import Tool, ToolPlan, plan_tools
from metal_engine.answers.tool_prompts import with_instructions
from metal_engine.engine.engine_client import EngineClient
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.errors import ParameterError
from metal_engine.loading.build import build_engine
from metal_engine.lora_adapter import Adapter, LoRARequest
from metal_engine.media.local_messages import insert_images, split_images
from metal_engine.pooling_params import PoolingParams
from metal_engine.prompt_images import PromptImages
from metal_engine.request import PreparedRequest, RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import EngineConfig
from metal_engine.text.chat_template import REASONING_SWITCHES
from metal_engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray
Message = dict[str, Any]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Loaded model that generates for many prompts at once.

    :meth:`close`, the end of a ``with`` block, or the deletion of the last reference frees its memory.

    Args:
        model: ``demo``, a ``.gguf`` file, a local model directory, or a Hugging Face repository.
        tool_call_parser: format of the model's tool calls, as in ``--tool-call-parser``.
        reasoning_parser: format of the model's reasoning, as in ``--reasoning-parser``.
        engine_args: any field of :class:`metal_engine.settings.args.EngineArgs`.

    Raises:
        ModelLoadError: the model cannot be loaded or run.
        ConfigError: the settings cannot work.
    """

    def __init__(
        self, model: str, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto", **engine_args: Any
    ) -> None:
        args = EngineArgs(model=model, **engine_args)
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._answer_formats: dict[str, AnswerFormat] = {}  # by tool call parser
        # Request id -> queue of the call that waits for it: concurrent calls may come from several threads.
        self._queues: dict[str, queue.SimpleQueue[RequestOutput]] = {}
        self._thread = EngineThread(lambda: build_engine(args))
        # A weak reference, because the thread must not keep an unused LLM in memory.
        dispatch = weakref.WeakMethod(self._dispatch)

        def receive(outputs: list[RequestOutput]) -> None:
            if (found := dispatch()) is not None:
                found(outputs)

        engine = self._thread.start(receive)
        self._core, self._preparer, self._adapters = engine.core, engine.preparer, engine.adapters
        self._client = EngineClient(self._thread, self.tokenizer, self.config.seed)
        # Also runs if the program ends without close(): a thread in MLX would abort the process, and other ranks would
        # wait.
        self._shutdown = weakref.finalize(self, self._thread.shutdown)
        self._ids = itertools.count()

    @property
    def config(self) -> EngineConfig:
        return self._core.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._preparer.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Parameters that the checkpoint recommends (``generation_config``), and defaults for all other parameters."""
        return SamplingParams(**self.config.model.default_sampling)  # type: ignore[arg-type]

    @property
    def stats(self) -> SchedulerStats:
        """Current state of the scheduler, for live views."""
        return self._core.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[GenerationResult]:
        """Generate for each prompt (text, or token ids). Results are in the order of the prompts.

        Args:
            sampling_params: parameters for all prompts, or one entry for each prompt. None:
                :attr:`default_sampling_params`.
            use_tqdm: True to show a progress bar. The name is vLLM's.
            lora_request: LoRA adapter for all prompts, or a list with an adapter or None for each prompt. With
                ``enable_lora``, an adapter is loaded if necessary.

        Raises:
            ValueError: a prompt can never be served or has invalid token ids, an adapter cannot be loaded, or a list
                has another length than ``prompts``. Raised before any generation.
            RuntimeError: a request failed, or the engine has stopped.
        """
        each: list[Any] = list(prompts) if _is_batch(prompts) else [prompts]
        params = self._params_for(each, sampling_params)
        for one in params:
            _check_for_text(one)
        return self._run([self._token_ids(p) for p in each], params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] = (),
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> list[GenerationResult]:
        """Generate the assistant's answer to each conversation.

        Each answer is split into content, reasoning and tool calls. If special tokens mark these parts, the result's
        ``text`` includes special tokens. A structured output begins after the reasoning. If the grammar of the format
        is known, the text after the mark that begins a tool call must match the tool's schema.

        Images are parts of a message's content (:func:`metal_engine.media.local_messages.split_images`): paths of files
        or ``data:`` URLs.

        Args:
            messages: one conversation, or a list of conversations.
            sampling_params: parameters for all conversations, or one entry for each conversation. None:
                :attr:`default_sampling_params`.
            tools: functions that the model may call, in OpenAI's format. If the chat template takes no tools, a system
                message describes them. With the ``tool_call_parser`` ``none``, calls stay in the text.
            use_tqdm: True to show a progress bar.
            lora_request: as in :meth:`generate`.
            chat_template_kwargs: variables of the chat template, such as ``enable_thinking``, as in vLLM.
            template_kwargs: further variables of the chat template.

        Raises:
            ConfigError: the format of the model's tool calls or reasoning is not known.
            ValueError: a conversation can never be served, or the model does not support these tools. Raised before
                any generation.
            RuntimeError: a request failed, or the engine has stopped.
        """
        template_kwargs = {**(chat_template_kwargs or {}), **template_kwargs}
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        answer_format = self._answer_format(self._tool_call_parser if tools else "none")
        plan = self._tool_plan(tools, answer_format)
        if plan.shown:
            template_kwargs["tools"] = plan.shown
        if plan.instructions is not None:
            conversations = [with_instructions(list(c), plan.instructions) for c in conversations]
        is_off = any(template_kwargs.get(name) is False for name in REASONING_SWITCHES)
        prompts: list[list[int]] = []
        images: list[PromptImages | None] = []
        applied: list[tuple[ChatAnswers, SamplingParams]] = []
        # Parameters that several conversations share remain shared.
        known: dict[tuple[int, bool, bool], tuple[ChatAnswers, SamplingParams]] = {}
        for messages_, params in zip(conversations, self._params_for(conversations, sampling_params), strict=True):
            budget = 0 if is_off else params.thinking_token_budget
            variables = dict(template_kwargs)
            for name in filter(self.tokenizer.template_mentions, REASONING_SWITCHES if budget == 0 else ()):
                variables.setdefault(name, False)
            given, sources = split_images(messages_)
            prompt = self.tokenizer.apply_chat_template(given, **variables)
            continued = None
            if template_kwargs.get("continue_final_message"):
                content = given[-1].get("content")
                continued = content if isinstance(content, str) else ""
            answers = ChatAnswers.for_prompt(answer_format, plan, prompt, self.tokenizer.decode, continued=continued)
            key = (id(params), answers.in_reasoning, answers.past_reasoning)
            if key not in known:
                known[key] = answers.applied_to(params, budget=budget)
            prompt, images_of_prompt = insert_images(self._preparer.images, prompt, sources, self.config)
            prompts.append(prompt)
            images.append(images_of_prompt)
            applied.append(known[key])
        results = self._run(prompts, [params for _, params in applied], use_tqdm, lora_request, images)
        return [read_answers(result, answers) for result, (answers, _) in zip(results, applied, strict=True)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingResult]:
        """Compute a vector for each prompt (text, or token ids), in the order of the prompts.

        Args:
            pooling_params: parameters for all prompts, or one entry for each prompt. Default: the checkpoint's
                settings.
            use_tqdm: True to show a progress bar.

        Raises:
            ValueError: a prompt can never be served, the model does not support embeddings or the parameters, or
                ``pooling_params`` has another length than ``prompts``. Raised before any computation.
            RuntimeError: a request failed, or the engine has stopped.
        """
        given: list[Any] = list(prompts) if _is_batch(prompts) else [prompts]
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            pooling_params = [pooling_params or PoolingParams()] * len(given)
        if len(pooling_params) != len(given):
            raise ValueError(f"{len(given)} prompts but {len(pooling_params)} pooling_params")
        prepare = self._preparer.prepare_pooling
        requests = [prepare([self._token_ids(p)], one)[0] for p, one in zip(given, pooling_params, strict=True)]
        ids = [str(next(self._ids)) for _ in requests]
        outputs = self._collect([(request, 0) for request in requests], ids, use_tqdm, "Embedding")
        results = []
        for request_id, request in zip(ids, requests, strict=True):
            vector = outputs[request_id][0].pooled
            assert vector is not None
            results.append(EmbeddingResult(request.prompt_token_ids, EmbeddingOutput(vector.tolist())))
        return results

    def _tool_plan(self, tools: Sequence[Tool], answer_format: AnswerFormat) -> ToolPlan:
        """Return how the prompt lists the tools for the model, and how the model's output is searched for calls.

        Raises ParameterError if the model does not support these tools.
        """
        takes_tools = self.tokenizer.template_takes_tools
        if tools and takes_tools and not answer_format.finds_calls:
            return ToolPlan(shown=list(tools))
        return plan_tools(tools, "auto", answer_format, template_takes_tools=takes_tools, auto_tool_choice=True)

    def _answer_format(self, tool_call_parser: str) -> AnswerFormat:
        # This import loads MLX, which must not happen before the engine has loaded its BLAS.
        from metal_engine.checkpoints.answer_formats import find_answer_format

        found = self._answer_formats.get(tool_call_parser)
        if found is None:
            found = find_answer_format(
                self.tokenizer.hf_tokenizer,
                tool_call_parser,
                self._reasoning_parser,
                model_type=self.config.model.model_type,
            )
            self._answer_formats[tool_call_parser] = found
        return found

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> Generator[RequestOutput]:
        """Yield outputs of one prompt as they arrive. Closing the generator early aborts the request.

        The request is checked and submitted when the iteration begins, not when this method is called.

        Raises:
            ValueError: ``n`` is not 1, or the request can never be served.
            RuntimeError: a request failed, or the engine has stopped.
        """
        params = sampling_params or self.default_sampling_params
        _check_type(params)
        if params.n != 1:
            raise ValueError("n must be 1 to stream")
        _check_for_text(params)
        (prepared,) = self._prepared([self._token_ids(prompt)], params, self._adapter(lora_request))
        yield from self._outputs_of([(prepared, 0)], [str(next(self._ids))])

    def _run(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        lora_request: LoRARequests,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[GenerationResult]:
        # Validate all requests before any request runs.
        each = zip(
            prompts,
            self._params_for(prompts, sampling_params),
            self._adapters_for(prompts, lora_request),
            images or [None] * len(prompts),
            strict=True,
        )
        requests: list[PreparedRequest] = []
        for _, group in itertools.groupby(each, key=lambda one: (id(one[1]), id(one[2]))):
            same = list(group)
            requests += self._prepared([one[0] for one in same], *same[0][1:3], images=[one[3] for one in same])
        sequences = [(request, i) for request in requests for i in range(request.params.n)]
        ids = [str(next(self._ids)) for _ in sequences]
        outputs = self._collect(sequences, ids, show_progress, "Generating")
        remaining = iter(ids)
        return [
            generation_result(request.prompt_token_ids, [outputs[next(remaining)] for _ in range(request.params.n)])
            for request in requests
        ]

    def _collect(
        self, sequences: list[tuple[PreparedRequest, int]], ids: list[str], show_progress: bool, title: str
    ) -> dict[str, list[RequestOutput]]:
        """Run requests to completion with a progress bar titled ``title``. Return the outputs of each request by id."""
        outputs: dict[str, list[RequestOutput]] = {request_id: [] for request_id in ids}
        num_tokens = 0
        # The generator is closed at once if a step fails, so that the other requests are aborted.
        with _progress_bar(show_progress) as progress, closing(self._outputs_of(sequences, ids)) as stream:
            task = progress.add_task(title, total=len(sequences), rate="")
            for output in stream:
                outputs[output.request_id].append(output)
                num_tokens += len(output.token_ids)
                elapsed = progress.tasks[task].elapsed or 0.0
                rate = f"{num_tokens / elapsed:.1f} tok/s" if elapsed > 0 else ""
                progress.update(task, advance=int(output.finished), rate=rate)
        return outputs

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, dict):  # vLLM's form
            raise ValueError("a prompt must be a text or a list of token ids, not a dictionary")
        try:
            return [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise ValueError(f"a prompt must be a text or a list of token ids: {error}") from error

    def _prepared(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        adapter: Adapter | None = None,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[PreparedRequest]:
        """Prepare prompts that share their parameters. Raises ValueError if a prompt can never be served."""
        return self._preparer.prepare_all(prompts, params, adapter=adapter, images=images)

    def _outputs_of(self, sequences: list[tuple[PreparedRequest, int]], ids: list[str]) -> Generator[RequestOutput]:
        """Yield outputs of several requests as they arrive. Aborts unfinished requests if the iteration ends early.

        Args:
            sequences: pairs of a request and the index of its output, from 0 to ``n`` - 1.
            ids: new id for each pair, in the same order.

        Raises:
            RuntimeError: a request failed, or the engine has stopped.
        """
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        unfinished = dict.fromkeys(ids)
        self._queues.update(dict.fromkeys(ids, outputs))
        try:
            for request_id, (request, index) in zip(ids, sequences, strict=True):
                self._client.submit(request_id, request, index)
            while unfinished:
                output = outputs.get()
                if output.finished:
                    del unfinished[output.request_id]
                if output.finish_reason == "error":
                    raise RuntimeError(output.error)
                yield output
        finally:
            for request_id in ids:
                del self._queues[request_id]
            for request_id in unfinished:
                self._client.abort(request_id)

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        """Pass each output of the engine to the call of its request. Drop the outputs of calls that have ended.

        Runs in the engine thread, so that a stop string ends its request before the next step.
        """
        for output in self._client.receive(outputs):
            waiting = self._queues.get(output.request_id)
            if waiting is not None:
                waiting.put(output)

    def _params_for(
        self, prompts: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self.default_sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
        for one in sampling_params:
            _check_type(one)
        return list(sampling_params)

    def _adapters_for(self, prompts: list[list[int]], lora_request: LoRARequests) -> list[Adapter | None]:
        if lora_request is None or isinstance(lora_request, LoRARequest):
            return [self._adapter(lora_request)] * len(prompts)
        if len(lora_request) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(lora_request)} lora_requests")
        return [self._adapter(one) for one in lora_request]

    def _adapter(self, request: LoRARequest | None) -> Adapter | None:
        if request is None:
            return None
        if self._adapters is None:
            raise ValueError("lora_request requires an LLM created with enable_lora=True or lora_modules")
        found = self._adapters.find(request.lora_name)
        if found is not None and request.lora_path in ("", found.path):
            return found
        if not request.lora_path:
            raise ValueError(f"no LoRA adapter {request.lora_name!r} is loaded, and its lora_request has no lora_path")
        return self._adapters.load(request.lora_name, request.lora_path, self._thread.call, in_place=True)

    def unload_lora_adapter(self, lora_name: str) -> bool:
        """Unload an adapter. Return True if an adapter with this name was loaded.

        Its slot becomes free when no request uses the adapter any more.
        """
        return self._adapters is not None and self._adapters.unload(lora_name)

    def close(self) -> None:
        """Stop the engine's thread after the step in flight. Requests cannot be submitted afterwards."""
        self._shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _is_batch(prompts: Prompt | Sequence[Prompt]) -> bool:
    is_prompt = isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
    return not is_prompt


def _check_type(params: SamplingParams) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")


def _check_for_text(params: SamplingParams) -> None:
    """Check the parameters of a prompt that is not a chat. Raises ParameterError if a parameter requires a chat."""
    if params.thinking_token_budget is not None:
        raise ParameterError("thinking_token_budget", "needs a chat, whose reasoning has known marks")


def _progress_bar(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        disable=not show,
    )

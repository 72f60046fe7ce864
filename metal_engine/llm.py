"""Offline generation: ``LLM("demo").generate(prompts, SamplingParams(...))``."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metal_engine.build import build_engine
from metal_engine.config import EngineArgs, EngineConfig
from metal_engine.engine.engine_thread import EngineThread
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.request import RequestOutput, SamplingParams
from metal_engine.scheduling.scheduler import SchedulerStats

Prompt = str | list[int]
Message = dict[str, Any]


@dataclass(frozen=True)
class GenerationResult:
    """A finished request.

    ``finish_reason`` is ``stop`` or ``length``; ``stop_reason`` the stop string or token id that ended it.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None


class LLM:
    """A model, loaded, ready to generate for many prompts at once.

    Args:
        model: ``demo``, a ``.gguf`` file, a local model directory, or a Hugging Face repository.
        engine_args: any field of :class:`metal_engine.config.EngineArgs`.

    Raises:
        ModelLoadError: the model cannot be loaded or run.
        ConfigError: the settings cannot work.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        self._start(EngineArgs(model=model, **engine_args))

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLM:
        """An LLM for arguments that are together already."""
        llm = cls.__new__(cls)
        llm._start(args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        # One queue per call under way, under the ids of its requests: calls may come from several threads.
        self._queues: dict[str, queue.SimpleQueue[RequestOutput]] = {}
        self._thread = EngineThread(lambda: build_engine(args), self._dispatch)
        self._core = self._thread.start()
        self._ids = itertools.count()

    @property
    def config(self) -> EngineConfig:
        return self._core.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """For prompts without any: the defaults, and what the checkpoint recommends (``generation_config``)."""
        return SamplingParams(**self.config.model.default_sampling)  # type: ignore[arg-type]

    @property
    def stats(self) -> SchedulerStats:
        """Where the scheduler stands, for live views."""
        return self._core.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Generate for each prompt (text, or token ids); results come in the prompts' order.

        Args:
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar. (The name is vLLM's.)

        Raises:
            ValueError: a prompt can never be served; nothing has been generated then.
            RuntimeError: a step failed, or the engine has stopped.
        """
        each: list[Any] = list(prompts) if _is_batch(prompts) else [prompts]
        token_ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in each]
        return self._run(token_ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[GenerationResult]:
        """Generate the assistant's answer to one conversation, or to each of several."""
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], dict) else list(messages)
        )
        token_ids = [self.tokenizer.apply_chat_template(list(c), **template_kwargs) for c in conversations]
        return self._run(token_ids, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Outputs of one prompt as they come. Leaving the iteration early aborts the request."""
        prompt_token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        params = sampling_params or self.default_sampling_params
        self._core.resolve_max_tokens(len(prompt_token_ids), params)
        yield from self._outputs_of([prompt_token_ids], [params], [str(next(self._ids))])

    def _run(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[GenerationResult]:
        params = self._params_for(prompts, sampling_params)
        for prompt, one in zip(prompts, params, strict=True):
            self._core.resolve_max_tokens(len(prompt), one)  # refuse before anything runs
        ids = [str(next(self._ids)) for _ in prompts]
        outputs: dict[str, list[RequestOutput]] = {request_id: [] for request_id in ids}
        num_tokens = 0
        # Closed at once if a step fails, so that the other requests do not go on unseen.
        with (
            _progress_bar(show_progress) as progress,
            closing(self._outputs_of(prompts, params, ids)) as stream,
        ):
            task = progress.add_task("Generating", total=len(prompts), rate="")
            for output in stream:
                outputs[output.request_id].append(output)
                num_tokens += len(output.token_ids)
                elapsed = progress.tasks[task].elapsed or 0.0
                rate = f"{num_tokens / elapsed:.1f} tok/s" if elapsed > 0 else ""
                progress.update(task, advance=int(output.finished), rate=rate)
        return [_result(prompt, outputs[i]) for prompt, i in zip(prompts, ids, strict=True)]

    def _outputs_of(
        self, prompts: list[list[int]], params: list[SamplingParams], ids: list[str]
    ) -> Generator[RequestOutput]:
        """Outputs of several requests as they come; aborts what is left if the iteration ends early."""
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        unfinished = dict.fromkeys(ids)
        self._queues.update(dict.fromkeys(ids, outputs))
        try:
            for request_id, prompt, one in zip(ids, prompts, params, strict=True):
                self._thread.submit(request_id, prompt, one)
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
                self._thread.abort(request_id)

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        """In the engine's thread: hand each output to the call it belongs to, if that still waits."""
        for output in outputs:
            waiting = self._queues.get(output.request_id)
            if waiting is not None:
                waiting.put(output)

    def _params_for(
        self, prompts: list[list[int]], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self.default_sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
        return list(sampling_params)

    def close(self) -> None:
        """Stop the engine's thread."""
        self._thread.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _is_batch(prompts: Prompt | Sequence[Prompt]) -> bool:
    return not isinstance(prompts, str) and not (len(prompts) > 0 and isinstance(prompts[0], int))


def _result(prompt: list[int], outputs: list[RequestOutput]) -> GenerationResult:
    return GenerationResult(
        prompt_token_ids=prompt,
        text="".join(output.text for output in outputs),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        finish_reason=outputs[-1].finish_reason or "",
        stop_reason=outputs[-1].stop_reason,
    )


def _progress_bar(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        disable=not show,
    )

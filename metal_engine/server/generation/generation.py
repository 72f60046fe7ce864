"""One request in the engine, as all generating endpoints see it: its sequences, their outputs, its usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from metal_engine.answers.chat_answers import AnswerReader
from metal_engine.answers.deltas import AnswerDelta
from metal_engine.engine.async_engine import AsyncEngine, Reservation
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, TokenLogprobs
from metal_engine.server.errors import SHUTTING_DOWN, APIError, engine_dead, invalid
from metal_engine.server.generation.logprobs import num_entries, prompt_logprobs_json
from metal_engine.server.json_parts import JSONParts, Placeholder, ids_json
from metal_engine.server.logs import note
from metal_engine.server.protocol import FinishReason, KVTransferHandover
from metal_engine.server.usage import CompletionTokensDetails, PredictedTokensDetails, PromptTokensDetails, Usage
from metal_engine.text.tokenizer import Tokenizer

# Log probabilities of one answer that is no stream, or of its prompts: 100 bytes each while they are collected, and as
# many as JSON.
MAX_LOGPROB_ENTRIES = 1 << 17
# Tokens and log probabilities of an answer that is read and encoded outside the event loop.
_LONG = 1 << 11

# Sequences that begin, or end, before the event loop does other things: 3 ms.
_TASKS_AT_ONCE = 256

# The index of a choice, an output of it, and what the output's text comes to; nothing where that is not read.
ChoiceOutput = tuple[int, RequestOutput, list[AnswerDelta]]
# Outputs of a step or more, each with the index of its choice.
_Batch = list[tuple[int, RequestOutput]]


@dataclass
class Choice:
    """What one sequence has come to so far.

    Attributes:
        echo: the prompt's text, if it is wanted back.
        reader: reads the answer; None if it is plain text.
        token_ids: generated tokens, the one that ended generation included.
        token_ends: where the text of each token ends in the choice's text.
        latest: the last output, which has the counts of tokens.
        deltas: what the whole text comes to, after :meth:`Generation.finish`.
    """

    index: int
    prompt_token_ids: list[int]
    echo: str | None = None
    reader: AnswerReader | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_ends: list[int] = field(default_factory=list)
    deltas: list[AnswerDelta] = field(default_factory=list)
    text_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    latest: RequestOutput = field(default_factory=lambda: RequestOutput(""))
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_calls(self) -> int:
        """Tool calls in what has been read of the answer."""
        return 0 if self.reader is None else self.reader.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning in what has been read of the answer."""
        return 0 if self.reader is None else self.reader.num_reasoning_tokens

    def add(self, output: RequestOutput, *, keep: bool) -> None:
        """Takes an output; ``keep`` is whether its text will be wanted again."""
        if keep:
            self.texts.append(output.text)
            self.token_ids += output.token_ids
            self.token_ends += output.token_ends
            self.text_logprobs += output.text_logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.latest = output
        self.finish_reason = finish_reason(output)
        self.stop_reason = output.stop_reason


@dataclass
class Generation:
    """One request in the engine: ``n`` sequences for each prompt, under one id.

    Attributes:
        reservation: a place for each sequence.
        requests: one for each prompt, all of the same parameters.
        echoes: each prompt's text, where it is wanted back.
        is_echo_only: whether nothing but the prompts' texts is wanted.
        shows_prompt_logprobs: whether the prompts' log probabilities are part of the answer.
        shows_token_ids: whether the token ids of prompts and outputs are part of the answer.
        spells_ids: whether log probabilities name tokens by their ids.
        reader: makes a reader for a choice's answer; None if answers are plain text.
        choices: what each sequence has come to; complete once :meth:`outputs` is exhausted.
        first_output_time: when the first output came, by :func:`time.monotonic`.
        parts: of the answer's JSON, made apart.
    """

    engine: AsyncEngine
    reservation: Reservation
    request_id: str
    model: str
    requests: list[PreparedRequest]
    options: RequestOptions
    timeout: float
    echoes: list[str] | None
    is_echo_only: bool
    shows_prompt_logprobs: bool
    reader: Callable[[], AnswerReader | None]
    shows_token_ids: bool = False
    spells_ids: bool = False

    def __post_init__(self) -> None:
        self._timed_out = False
        self._num_entries = 0
        self.first_output_time: float | None = None
        self.parts = JSONParts()
        self.params = self.requests[0].params
        self.created = int(time.time())
        self.choices = [
            Choice(
                i * self.params.n + j,
                request.prompt_token_ids,
                None if self.echoes is None else self.echoes[i],
                self.reader(),
            )
            for i, request in enumerate(self.requests)
            for j in range(self.params.n)
        ]

    async def outputs(self, *, read: bool = True) -> AsyncGenerator[list[ChoiceOutput], None]:
        """Outputs as they come, those that came together in one batch. Closing it aborts what is unfinished.

        Args:
            read: whether answers are read as they come.

        Raises:
            APIError: a sequence failed; the others are aborted.
            EngineDeadError: the engine has ended.
        """
        streams = [
            self.engine.generate(
                f"{self.request_id}-{choice.index}",
                self.requests[choice.index // self.params.n],
                choice.index % self.params.n,
                self.options,
                self.reservation,
            )
            for choice in self.choices
        ]
        timer = None
        if self.timeout:
            timer = asyncio.get_running_loop().call_later(self.timeout, self._time_out)
        try:
            async with aclosing(_merge(streams)) as batches:
                async for batch in batches:
                    if self.first_output_time is None:
                        self.first_output_time = time.monotonic()
                    arrived: list[ChoiceOutput] = []
                    for index, output in batch:
                        if output.finish_reason in ("error", "abort"):
                            raise failure(self.engine, output, self.timeout if self._timed_out else None)
                        if self.is_echo_only:
                            _hide_output(output)
                        choice = self.choices[index]
                        choice.add(output, keep=not read)
                        if not read:
                            self._check_size(output)
                        deltas: list[AnswerDelta] = []
                        if read and choice.reader is not None:
                            deltas = choice.reader.add(output.text, output.token_ends, choice.finish_reason)
                        arrived.append((index, output, deltas))
                    yield arrived
        finally:
            self.reservation.release()
            if timer is not None:
                timer.cancel()
        self._note()

    def _time_out(self) -> None:
        self._timed_out = True
        for choice in self.choices:
            self.engine.cut_request(f"{self.request_id}-{choice.index}", "the request took too long")

    def _note(self) -> None:
        usage = self.usage
        note(
            id=self.request_id,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=",".join(str(choice.finish_reason) for choice in self.choices),
        )

    def _check_size(self, output: RequestOutput) -> None:
        """Refuse to collect more log probabilities than there is memory for."""
        self._num_entries += num_entries(len(output.text_logprobs or ()), self.params.logprobs)
        if self._num_entries > MAX_LOGPROB_ENTRIES:
            problem = f" with more than {MAX_LOGPROB_ENTRIES} log probabilities in one answer: ask for a stream"
            raise invalid(problem, where="logprobs")

    async def finish(self) -> None:
        """Runs to the end. Raises what :meth:`outputs` raises."""
        async with aclosing(self.outputs(read=False)) as batches:
            async for _ in batches:
                pass

    @property
    def is_long(self) -> bool:
        """Whether reading the answers and making JSON of them takes more than 10 ms."""
        num_tokens = sum(choice.latest.num_output_tokens for choice in self.choices)
        num_prompt = sum(len(choice.prompt_logprobs or ()) for choice in self.choices)
        entries = num_entries(num_tokens, self.params.logprobs) + num_entries(num_prompt, self.params.prompt_logprobs)
        num_ids = sum(len(choice.prompt_token_ids) for choice in self.choices) if self.shows_token_ids else 0
        return num_tokens + entries + num_ids > _LONG

    def read(self) -> None:
        """Reads the answers whole, once they are complete."""
        for choice in self.choices:
            if choice.reader is not None:
                choice.deltas = choice.reader.add(choice.text, choice.token_ends, choice.finish_reason)

    @property
    def head(self) -> dict[str, Any]:
        """What OpenAI's answers and chunks of them begin with."""
        return {"id": self.request_id, "created": self.created, "model": self.model}

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; known before there is any output."""
        return sum(len(choice.prompt_token_ids) for choice in self.choices[:: self.params.n])

    @property
    def usage(self) -> Usage:
        firsts = self.choices[:: self.params.n]  # a prompt counts once
        prompt_tokens = sum(choice.latest.num_prompt_tokens for choice in firsts)
        completion_tokens = sum(choice.latest.num_output_tokens for choice in self.choices)
        details = PromptTokensDetails(
            cached_tokens=sum(choice.latest.num_cached_tokens for choice in firsts),
            kv_store_tokens=sum(choice.latest.num_external_tokens for choice in firsts),
        )
        completion_details = CompletionTokensDetails(
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices)
        )
        if self.options.predicted_token_ids:
            counts = [choice.latest.num_predicted_tokens for choice in self.choices]
            completion_details = PredictedTokensDetails(
                **completion_details.model_dump(),
                accepted_prediction_tokens=sum(num_accepted for num_accepted, _ in counts),
                rejected_prediction_tokens=sum(num_rejected for _, num_rejected in counts),
            )
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=details,
            completion_tokens_details=completion_details,
        )

    @property
    def kv_handover(self) -> KVTransferHandover | None:
        """What another engine is told that is to go on with the prompt; None unless this one computes it for others.

        It does if all it does with KV is to save it, or if the request said so.
        """
        is_for_others = self.engine.config.kv_role == "kv_producer" or self.options.do_remote_decode
        return KVTransferHandover() if is_for_others and self.engine.config.saves_kv else None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def prompt_logprobs(self, choice: Choice) -> Placeholder | None:
        """Log probabilities of a choice's prompt, if they are wanted beside the answer."""
        if not self.shows_prompt_logprobs or choice.prompt_logprobs is None:
            return None
        return self.parts.add(prompt_logprobs_json(self.tokenizer, choice.prompt_logprobs))

    def token_ids(self, ids: list[int]) -> Placeholder | None:
        """Token ids of a prompt or an output, if they are wanted. Called in the order of the answer's fields."""
        return self.parts.add(ids_json(ids)) if self.shows_token_ids else None


def failure(engine: AsyncEngine, output: RequestOutput, timed_out: float | None) -> APIError:
    """What to tell the client of a request that the engine did not finish.

    Args:
        output: its last.
        timed_out: seconds after which it was cut because they were all it had; None if it was not.
    """
    if engine.error is not None:
        return engine_dead(engine.error)
    if timed_out is not None:
        message = f"the request was not done within {timed_out:g} s (--request-timeout)"
        return APIError(504, message, code="timeout")
    if output.finish_reason == "abort":
        return APIError(503, output.error or "the request was aborted", code=SHUTTING_DOWN)
    status = 400 if output.caused_by_request else 500
    return APIError(status, output.error or "the request failed", code="generation_failed")


def _hide_output(output: RequestOutput) -> None:
    output.text, output.token_ids, output.token_ends, output.num_output_tokens = "", [], [], 0
    output.text_logprobs = None if output.text_logprobs is None else []
    output.finish_reason, output.stop_reason = "length", None


def finish_reason(output: RequestOutput) -> FinishReason | None:
    """OpenAI's finish reason of an output that is no failure."""
    match output.finish_reason:
        case "stop" | "length" | None as reason:
            return reason
        case other:
            raise AssertionError(f"unexpected finish reason {other!r}")


async def _merge(streams: list[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[_Batch, None]:
    """Outputs of all streams as they come. Closes every stream when it is closed itself."""
    if len(streams) == 1:  # spares each token a task switch
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield [(0, output)]
        return
    # Bounded: what a slow reader leaves waits in the streams, which merge it.
    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(2 * len(streams))

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await arrived.put((index, output))
        except Exception as error:  # noqa: BLE001  (raised again by the reader)
            await arrived.put((index, error))

    tasks: list[asyncio.Task[None]] = []
    try:
        for i, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(i, stream)))
            if len(tasks) % _TASKS_AT_ONCE == 0:
                await asyncio.sleep(0)
        num_open = len(streams)
        while num_open:
            items = [await arrived.get()]
            while not arrived.empty():
                items.append(arrived.get_nowait())
            batch: _Batch = []
            for index, item in items:
                if isinstance(item, Exception):
                    raise item
                batch.append((index, item))
                num_open -= item.finished
            yield batch
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels tasks, some at a time."""
    try:
        for start in range(0, len(tasks), _TASKS_AT_ONCE):
            some = tasks[start : start + _TASKS_AT_ONCE]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:  # who waits for it may be cancelled, too
        for task in tasks:
            task.cancel()

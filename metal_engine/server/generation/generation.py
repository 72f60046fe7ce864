"""A client's request in the engine: its sequences, outputs and token usage. Used by all generating endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from metal_engine.answers.chat_answers import AnswerReader
from metal_engine.answers.deltas import AnswerDelta
from metal_engine.engine.async_engine import AsyncEngine, Reservation
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, TokenLogprobs
from metal_engine.server.errors import SHUTTING_DOWN, APIError, engine_dead, invalid
from metal_engine.server.generation.logprobs import num_entries, prompt_logprobs_json
from metal_engine.server.json_parts import JSONParts, Placeholder
from metal_engine.server.logs import add_log_fields
from metal_engine.server.response_bodies import FinishReason, KVTransferHandover
from metal_engine.server.usage import CompletionTokensDetails, PredictedTokensDetails, PromptTokensDetails, Usage
from metal_engine.text.tokenizer import Tokenizer

# Maximum number of log probabilities of the outputs, and of the prompts, in a response that is not a stream. Each takes
# 100 bytes while it is collected, and another 100 bytes as JSON.
MAX_LOGPROB_ENTRIES = 1 << 17
# Number of tokens and log probabilities above which a response is parsed and encoded outside the event loop.
_LONG = 1 << 11

# Number of sequences to start or end before other tasks of the event loop may run. Starting 256 sequences takes 3 ms.
_TASKS_AT_ONCE = 256

# Index of a choice, one output of that choice, and the deltas parsed from the output's text. The list of deltas is
# empty if the output is not parsed.
ChoiceOutput = tuple[int, RequestOutput, list[AnswerDelta]]
# Outputs that arrived together, each with the index of its choice.
_Batch = list[tuple[int, RequestOutput]]


@dataclass
class Choice:
    """State of one sequence of a :class:`Generation`, which is one choice of the response.

    Attributes:
        index: index of the choice in the response.
        echo: text of the prompt; None if the response does not repeat the prompt.
        reader: parser of the output; None if the output is plain text.
        texts: pieces of the generated text. Stays empty if :meth:`Generation.outputs` parses outputs as they arrive.
            Then ``token_ids``, ``token_ends`` and ``text_logprobs`` stay empty, too.
        token_ids: generated tokens, including the token that ended generation.
        token_ends: end of each token's text within the choice's text, in characters.
        deltas: deltas parsed from the complete text, set by :meth:`Generation.read`.
        text_logprobs: log probabilities of the generated tokens.
        prompt_logprobs: log probabilities of the prompt's tokens; None before the first output, and if not requested.
        latest: last output, which has the token counts. All counts are 0 before the first output.
        finish_reason: reason of the last output; None while generation continues.
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
        """Number of tool calls in the text parsed so far."""
        return 0 if self.reader is None else self.reader.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens in the text parsed so far."""
        return 0 if self.reader is None else self.reader.num_reasoning_tokens

    def parse(self, text: str, token_ends: list[int]) -> list[AnswerDelta]:
        """Parse the next piece of text. Return the resulting deltas; an empty list if there is no reader.

        Call :meth:`add` with the same output first. It sets :attr:`finish_reason`, which tells the parser that the text
        is complete.

        Args:
            token_ends: end of each token's text in characters, as in :attr:`RequestOutput.token_ends`.
        """
        if self.reader is None:
            return []
        return self.reader.add(text, token_ends, self.finish_reason, self.stop_reason)

    def add(self, output: RequestOutput, *, keep: bool) -> None:
        """Record an output. ``keep`` is True to also store its text, tokens and log probabilities."""
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
    """One client request in the engine: ``n`` sequences for each prompt, under one id.

    Attributes:
        reservation: reserved queue places, one for each sequence.
        requests: one prepared request for each prompt. All have the same parameters.
        timeout: maximum duration in seconds, from the start of :meth:`outputs`; 0 for no limit.
        echoes: text of each prompt; None if the response does not repeat the prompts.
        is_echo_only: True if the client wants only the prompts' texts.
        shows_prompt_logprobs: True if the response contains the prompts' log probabilities.
        shows_token_ids: True if the response contains the token ids of prompts and outputs.
        spells_ids: True if log probabilities name tokens by their ids.
        reader: function that creates the parser of a choice's output; it returns None if outputs are plain text.
        choices: state of each sequence. Complete once :meth:`outputs` is exhausted.
        first_output_time: time of the first output in seconds of :func:`time.monotonic`; None before it.
        parts: large values of the response, which are encoded as JSON separately.
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
        """Yield outputs as they arrive. Outputs that arrive together form one batch.

        Closing the generator aborts unfinished sequences. The end of the generator releases the reservation. If all
        sequences have succeeded, the usage is added to the request's log line.

        Args:
            read: True to parse outputs as they arrive. False to keep their text for :meth:`read`.

        Raises:
            APIError: a sequence failed or took too long (:func:`failure`). If ``read`` is False, also for more than
                ``MAX_LOGPROB_ENTRIES`` log probabilities. The other sequences are aborted.
            EngineDeadError: the engine has stopped.
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
                    choice_outputs: list[ChoiceOutput] = []
                    for index, output in batch:
                        if output.finish_reason in ("error", "abort"):
                            raise failure(self.engine, output, self.timeout if self._timed_out else None)
                        if self.is_echo_only:
                            _hide_output(output)
                        choice = self.choices[index]
                        choice.add(output, keep=not read)
                        if not read:
                            self._check_size(output)
                        deltas = choice.parse(output.text, output.token_ends) if read else []
                        choice_outputs.append((index, output, deltas))
                    yield choice_outputs
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
        add_log_fields(
            id=self.request_id,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=",".join(str(choice.finish_reason) for choice in self.choices),
        )

    def _check_size(self, output: RequestOutput) -> None:
        """Count the log probabilities of an output.

        Raises APIError, a 400, if all outputs so far have more than ``MAX_LOGPROB_ENTRIES``.
        """
        self._num_entries += num_entries(len(output.text_logprobs or ()), self.params.logprobs)
        if self._num_entries > MAX_LOGPROB_ENTRIES:
            problem = f": one response can have at most {MAX_LOGPROB_ENTRIES} log probabilities; set stream to true"
            raise invalid(problem, where="logprobs")

    async def finish(self) -> None:
        """Run the generation to its end, and keep the outputs for :meth:`read`. Raises as :meth:`outputs`."""
        async with aclosing(self.outputs(read=False)) as batches:
            async for _ in batches:
                pass

    @property
    def is_long(self) -> bool:
        """True if parsing the outputs and encoding the response may take more than 10 ms. Valid after :meth:`finish`.

        The estimate is the number of tokens and log probabilities.
        """
        num_tokens = sum(choice.latest.num_output_tokens for choice in self.choices)
        num_prompt = sum(len(choice.prompt_logprobs or ()) for choice in self.choices)
        entries = num_entries(num_tokens, self.params.logprobs) + num_entries(num_prompt, self.params.prompt_logprobs)
        num_ids = sum(len(choice.prompt_token_ids) for choice in self.choices) if self.shows_token_ids else 0
        return num_tokens + entries + num_ids > _LONG

    def read(self) -> None:
        """Parse the complete output of each choice. Store the result in :attr:`Choice.deltas`."""
        for choice in self.choices:
            choice.deltas = choice.parse(choice.text, choice.token_ends)

    @property
    def head(self) -> dict[str, Any]:
        """Fields at the start of every OpenAI response and chunk: ``id``, ``created`` and ``model``."""
        return {"id": self.request_id, "created": self.created, "model": self.model}

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts. Available before the first output."""
        return sum(len(choice.prompt_token_ids) for choice in self.choices[:: self.params.n])

    @property
    def usage(self) -> Usage:
        firsts = self.choices[:: self.params.n]  # count each prompt only once
        prompt_tokens = sum(choice.latest.num_prompt_tokens for choice in firsts)
        completion_tokens = sum(choice.latest.num_output_tokens for choice in self.choices)
        details = PromptTokensDetails(
            cached_tokens=sum(choice.latest.num_cached_tokens for choice in firsts),
            kv_store_tokens=sum(choice.latest.num_external_tokens for choice in firsts),
            image_tokens=self._num_image_tokens,
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
    def _num_image_tokens(self) -> int | None:
        """Number of prompt tokens that stand for images; None without images."""
        counts = [request.images.num_features for request in self.requests if request.images is not None]
        return sum(counts) if counts else None

    @property
    def kv_handover(self) -> KVTransferHandover | None:
        """Value of ``kv_transfer_params`` in the response; None unless another engine continues with the prompt.

        Another engine continues if this engine saves KV, and if its KV role is ``kv_producer`` or the request has
        ``do_remote_decode``.
        """
        is_for_others = self.engine.config.kv_role == "kv_producer" or self.options.do_remote_decode
        return KVTransferHandover() if is_for_others and self.engine.config.saves_kv else None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def prompt_logprobs(self, choice: Choice) -> Placeholder | None:
        """Encode the log probabilities of a choice's prompt. Return their placeholder in the response.

        Returns None if the response must not contain them. Call this method and :meth:`token_ids` in the order of the
        response's fields, as :meth:`JSONParts.add` requires.
        """
        if not self.shows_prompt_logprobs or choice.prompt_logprobs is None:
            return None
        return self.parts.add(prompt_logprobs_json(self.tokenizer, choice.prompt_logprobs))

    def token_ids(self, ids: list[int]) -> Placeholder | None:
        """Encode the token ids of a prompt or an output. Return their placeholder in the response.

        Returns None if the response must not contain them. For the order of calls, see :meth:`prompt_logprobs`.
        """
        return self.parts.add(to_json(ids)) if self.shows_token_ids else None


def failure(engine: AsyncEngine, output: RequestOutput, timed_out: float | None) -> APIError:
    """Return the error for the client of a request that the engine did not finish.

    Its status is 503 if the engine has stopped or the request was aborted, 504 after a time limit, 400 if the request
    caused the error, and otherwise 500.

    Args:
        output: last output of the request.
        timed_out: time limit in seconds that aborted the request; None for another cause.
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
    """Remove the generated token from the output of an echo-only request, and set its finish reason to ``length``."""
    output.text, output.token_ids, output.token_ends, output.num_output_tokens = "", [], [], 0
    output.text_logprobs = None if output.text_logprobs is None else []
    output.finish_reason, output.stop_reason = "length", None


def finish_reason(output: RequestOutput) -> FinishReason | None:
    """Return OpenAI's finish reason of an output that is not a failure; None if the request continues."""
    match output.finish_reason:
        case "stop" | "length" | None as reason:
            return reason
        case other:
            raise AssertionError(f"unexpected finish reason {other!r}")


async def _merge(streams: list[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[_Batch, None]:
    """Merge the outputs of all streams as they arrive.

    The first exception of a stream is raised here. Closing this generator closes every stream.
    """
    if len(streams) == 1:  # avoids a task switch for each token
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield [(0, output)]
        return
    # Bounded. If the client reads slowly, outputs stay in the streams, which merge them.
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
    """Cancel tasks and wait for them, ``_TASKS_AT_ONCE`` at a time."""
    try:
        for start in range(0, len(tasks), _TASKS_AT_ONCE):
            some = tasks[start : start + _TASKS_AT_ONCE]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:  # this coroutine itself may be cancelled while it waits
        for task in tasks:
            task.cancel()

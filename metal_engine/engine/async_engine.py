"""Asyncio interface of the engine: submit a request, iterate over its outputs. Never blocks the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from metal_engine.engine.engine_client import EngineClient
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.step_observer import Frame, FrameSink
from metal_engine.engine.transport import AdapterTable, StartedEngine, Transport
from metal_engine.lora_adapter import Adapter
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, RequestStatus, merge_outputs
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig
from metal_engine.text.tokenizer import Tokenizer

# Maximum number of log probabilities in a request's unread outputs. Each takes 110 bytes.
MAX_UNREAD = 1 << 18
# Number of unread outputs that are merged into one, to save memory.
_UNMERGED = 64


class _Mailbox:
    """Unread outputs of one request, for its only reader. Used in the event loop only."""

    __slots__ = ("_arrived", "_max_unread", "_num_merged", "_num_unread", "_waiter", "num_prompt_tokens")

    def __init__(self, num_prompt_tokens: int, max_unread: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens  # prompt length; 0 after the first output
        self._max_unread = max_unread
        self._num_unread = 0
        self._arrived: list[RequestOutput] = []
        self._num_merged = 0  # number of leading entries that are merges of several outputs
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        if self._arrived and self._arrived[-1].finished:
            return  # from a step that was running when the request was aborted
        self._arrived.append(output)
        for logprobs in output.text_logprobs or ():
            self._num_unread += len(logprobs.top) + 1
        if len(self._arrived) - self._num_merged >= _UNMERGED:
            self._arrived[self._num_merged :] = [merge_outputs(self._arrived[self._num_merged :])]
            self._num_merged += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_overfull(self) -> bool:
        """True if the unread outputs have more log probabilities than the constructor's ``max_unread``."""
        return self._num_unread > self._max_unread

    async def take(self) -> RequestOutput:
        """Wait until there is an unread output. Remove all unread outputs, and return them merged into one."""
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        self._num_unread = self._num_merged = 0
        return merge_outputs(arrived)


class Reservation:
    """Places in the engine's queue for the prompts of one client. Used in the event loop only.

    A client may send thousands of prompts at once. Its prompts are submitted gradually, as its earlier prompts end.
    Other clients therefore wait only for the submitted prompts, and the queue is not filled with prompts that cannot
    start soon.

    Each prompt has a place, which counts as a waiting request until the prompt is submitted. Deleting the reservation
    gives up its unused places.

    Args:
        engine: engine that gets the requests.
        prompt_lens: prompt lengths in tokens.
        num_at_once: maximum number of requests of this reservation in the engine at once.
    """

    def __init__(self, engine: AsyncEngine, prompt_lens: list[int], num_at_once: int) -> None:
        self._engine = engine
        self._left = Counter(prompt_lens)  # number of unused places by prompt length
        self._num_left = 0
        self._num_at_once = num_at_once
        self._places = asyncio.Semaphore(num_at_once)
        self._change(len(prompt_lens), sum(prompt_lens))

    def _change(self, num_places: int, num_tokens: int) -> None:
        num_held = max(self._num_left - self._num_at_once, 0)
        self._num_left += num_places
        self._engine._reserve(num_places, num_tokens, max(self._num_left - self._num_at_once, 0) - num_held)

    async def take(self, num_prompt_tokens: int) -> None:
        """Wait until the next request may be submitted. Use up one place for a prompt of ``num_prompt_tokens`` tokens.

        Call :meth:`end_request` when the request has ended.

        Raises ValueError if the reservation has no unused place for a prompt of this length.
        """
        if not self._left[num_prompt_tokens]:
            raise ValueError(f"no place is reserved for a prompt of {num_prompt_tokens} tokens")
        await self._places.acquire()
        self._left[num_prompt_tokens] -= 1
        self._change(-1, -num_prompt_tokens)

    def end_request(self) -> None:
        """Record that a submitted request has ended, so that another request of the reservation can be submitted."""
        self._places.release()

    def release(self) -> None:
        """Give up the unused places. They no longer count as waiting requests."""
        self._change(-self._num_left, -sum(self._left.elements()))
        self._left.clear()

    def __del__(self) -> None:
        self.release()


class AsyncEngine:
    """Access to an engine from one event loop.

    Args:
        transport: engine that has not been started, in a thread or in a process of its own.

    Attributes:
        last_used: time of the last end of a request, in seconds of ``time.monotonic``. Initially the time of creation.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, _Mailbox] = {}
        self._num_queued_tokens = 0
        self._num_reserved = 0
        self._num_held = 0
        self._engine: StartedEngine | None = None
        self._client: EngineClient  # set in `start`
        self._cut: str | None = None
        self.last_used = time.monotonic()

    def start(self) -> None:
        """Start the engine, and block until its model is loaded. Raises as :meth:`Transport.start`."""
        self._engine = self._transport.start(self._on_outputs, self._on_end)
        self._client = EngineClient(self._transport, self.tokenizer, self.config.seed)

    def shutdown(self, timeout: float | None = 10.0) -> bool:
        """Stop the engine. See :meth:`Transport.shutdown`. Call it outside the event loop, because it blocks."""
        return self._transport.shutdown(timeout)

    def cut_requests(self, message: str) -> None:
        """End every current and future request with an output of ``finish_reason`` ``abort`` and the error ``message``.

        Call in the event loop.
        """
        self._cut = message
        for request_id in self._queues:
            self.cut_request(request_id, message)

    def cut_request(self, request_id: str, message: str) -> None:
        """End one request with an output of ``finish_reason`` ``abort`` and the error ``message``.

        Unknown ids are ignored. Call in the event loop.
        """
        if request_id in self._queues:
            self._queues[request_id].put(RequestOutput(request_id, finish_reason="abort", error=message))
            self._client.abort(request_id)

    @property
    def _started(self) -> StartedEngine:
        assert self._engine is not None, "start() has not been called"
        return self._engine

    @property
    def config(self) -> EngineConfig:
        return self._started.config

    @property
    def preparer(self) -> RequestPreparer:
        """Prepares requests. Call its methods in a thread, because they may take long."""
        return self._started.preparer

    @property
    def tokenizer(self) -> Tokenizer:
        return self._started.preparer.tokenizer

    @property
    def stats(self) -> SchedulerStats:
        """Current numbers of the scheduler."""
        return self._started.stats

    @property
    def metrics(self) -> EngineMetrics:
        """Counters and histograms of the engine."""
        return self._started.metrics

    @property
    def error(self) -> BaseException | None:
        """Error that ended the engine; None while it runs or after a shutdown."""
        return self._transport.error

    @property
    def is_restarting(self) -> bool:
        """True while requests wait for a new engine, because the previous engine has ended."""
        return self._transport.is_restarting

    @property
    def num_open_requests(self) -> int:
        return len(self._queues)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not running, including reserved places and requests in the engine's inbox."""
        return max(len(self._queues) + self._num_reserved - self.stats.num_running, 0)

    @property
    def num_queued(self) -> int:
        """Number of waiting requests that a new request has to queue behind.

        Unlike :attr:`num_waiting`, counts at most ``num_at_once`` unused places of each reservation. The prompts of its
        other places are submitted only after earlier requests of the same reservation have ended.
        """
        return max(self.num_waiting - self._num_held, 0)

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens of requests that have no output yet, including prompts with a reserved place."""
        return self._num_queued_tokens

    def reserve(self, prompt_lens: list[int]) -> Reservation:
        """Reserve places for the prompts of later calls of :meth:`generate`, one for each length in ``prompt_lens``.

        At most ``2 * max_num_seqs`` requests of the reservation are in the engine at once.

        Args:
            prompt_lens: prompt lengths in tokens.
        """
        return Reservation(self, prompt_lens, 2 * self.config.scheduler.max_num_seqs)

    def _reserve(self, num_requests: int, num_tokens: int, num_held: int) -> None:
        self._num_reserved += num_requests
        self._num_held += num_held
        self._num_queued_tokens += num_tokens

    @property
    def adapters(self) -> AdapterTable | None:
        """LoRA adapters by name; None if the model was loaded without LoRA support."""
        return self._started.adapters

    def load_adapter(self, name: str, path: str, within: Path, *, in_place: bool = False) -> Adapter:
        """See :meth:`Transport.load_adapter`. Call it in a thread, because it takes long."""
        return self._transport.load_adapter(name, path, within, in_place=in_place)

    def release_memory(self) -> None:
        """See :meth:`Transport.release_memory`."""
        self._transport.release_memory()

    async def generate(
        self,
        request_id: str,
        prepared: PreparedRequest,
        index: int = 0,
        options: RequestOptions | None = None,
        reservation: Reservation | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit output ``index`` of a request, and yield its new text and tokens.

        The request is submitted when the iteration begins. A request with a ``reservation`` first waits for its place.
        All outputs that arrive between two reads are merged into one item. A pooling request yields one item with its
        vector.

        The last item has a ``finish_reason``. If the request fails or is cut after its submission, ``finish_reason`` is
        ``error`` or ``abort``, and the item has an ``error`` message. No exception is raised.

        Leaving the iteration early, by ``aclose`` or cancellation, aborts the request.

        Args:
            index: index of the output among the ``n`` outputs of the request.

        Raises:
            EngineDeadError: the engine had ended before the request was submitted.
            ValueError: ``request_id`` is in use, or ``reservation`` has no unused place for the prompt.
        """
        if request_id in self._queues:
            raise ValueError(f"request id {request_id!r} is in use")
        if reservation is not None:
            await reservation.take(len(prepared.prompt_token_ids))
            if request_id in self._queues:  # since then
                reservation.end_request()
                raise ValueError(f"request id {request_id!r} is in use")
        self._loop = asyncio.get_running_loop()
        outputs = _Mailbox(len(prepared.prompt_token_ids), MAX_UNREAD // prepared.params.n)
        self._num_queued_tokens += outputs.num_prompt_tokens
        self._queues[request_id] = outputs
        finished = False
        try:
            if self._cut is not None:
                finished = True
                yield RequestOutput(request_id, finish_reason="abort", error=self._cut)
                return
            self._client.submit(request_id, prepared, index, options)
            while not finished:
                output = await outputs.take()
                if outputs.num_prompt_tokens:
                    self._begun(outputs)
                finished = output.finished
                yield output
        finally:
            del self._queues[request_id]
            self.last_used = time.monotonic()
            self._begun(outputs)
            self._client.abort(request_id)
            if reservation is not None:
                reservation.end_request()

    def watch(self, on_frame: FrameSink) -> None:
        """Set the callback for frames, replacing the previous callback.

        Call it in the event loop, which then calls ``on_frame`` with each frame.
        """
        loop = asyncio.get_running_loop()

        def hand_over(frame: Frame) -> None:
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(on_frame, frame)

        self._transport.watch(hand_over)

    def unwatch(self) -> None:
        """Turn frames off. Frames already queued for the event loop are still delivered."""
        self._transport.watch(None)

    def _begun(self, outputs: _Mailbox) -> None:
        self._num_queued_tokens -= outputs.num_prompt_tokens
        outputs.num_prompt_tokens = 0

    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Pass a step's outputs to the event loop in one call. Runs in a thread of the engine."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._dispatch, outputs)
        except RuntimeError:  # the loop has closed, so there are no readers
            for output in outputs:
                self._transport.end(output.request_id, RequestStatus.FINISHED_ABORTED)

    def _on_end(self, message: str) -> None:
        """End the requests that are still open. Runs in a thread of the engine when the engine ends."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._end_all, message)

    def _end_all(self, message: str) -> None:
        for request_id, queue in self._queues.items():
            queue.put(RequestOutput(request_id, finish_reason="error", error=message))

    def _dispatch(self, outputs: list[RequestOutput]) -> None:
        for output in self._client.receive(outputs):
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put(output)
                if queue.is_overfull and not output.finished:
                    problem = "the client does not read its response"
                    queue.put(
                        RequestOutput(output.request_id, finish_reason="error", error=problem, caused_by_request=True)
                    )
                    self._client.abort(output.request_id)

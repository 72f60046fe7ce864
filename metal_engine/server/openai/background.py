"""Responses in the background. They continue after the client that requested them has disconnected."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from starlette.requests import Request

from metal_engine.server.errors import APIError, invalid, renaming, shutting_down, to_api_error
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.preparation import prepare
from metal_engine.server.generation.response_runner import stream_events
from metal_engine.server.openai.event_log import EventLog
from metal_engine.server.openai.response_state import AskedResponse, ResponseState
from metal_engine.server.openai.response_store import ResponseStore
from metal_engine.server.openai.responses import ResponsesEndpoint
from metal_engine.server.openai.responses_protocol import RENAMED
from metal_engine.server.protocol import ChatCompletionBody

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _BackgroundRun:
    """Generation of a response in the background.

    Attributes:
        log: events of a streamed response. Empty for other responses.
        is_prepared: event that is set when the engine's queue has admitted the request, or the response has ended.
        is_awaited: True while the client's request waits for ``is_prepared``.
        problem: error for the client if the response failed while ``is_awaited`` was True, otherwise None.
        task: task that generates the response.
    """

    log: EventLog = field(default_factory=EventLog)
    is_prepared: asyncio.Event = field(default_factory=asyncio.Event)
    is_awaited: bool = False
    problem: APIError | None = None
    task: asyncio.Task[None] = field(init=False)

    async def cancel(self) -> None:
        """Cancel the response, and wait until its task has ended. No effect on a finished response."""
        self.task.cancel()
        await asyncio.wait([self.task])


class BackgroundResponses:
    """Generates responses in the background, and keeps their events. Used in the event loop only.

    Args:
        store: store of the responses. When it drops a response, the response's events are deleted, too.

    Attributes:
        num_ended: number of responses that ended, by model and status. Excludes responses that ended with an error
            before :meth:`start` returned, because the client received the error instead.
    """

    def __init__(self, models: ModelProvider, store: ResponseStore) -> None:
        self._models = models
        self._store = store
        # Weak keys: entries of responses that the store has dropped disappear.
        self._runs: WeakKeyDictionary[ResponseState, _BackgroundRun] = WeakKeyDictionary()
        self._is_ending = False
        self.num_ended: Counter[tuple[str, str]] = Counter()

    @property
    def unfinished(self) -> Iterator[ResponseState]:
        """Responses that have not ended."""
        return (state for state in self._runs if not state.is_finished)

    async def start(
        self, request: Request, chat: ChatCompletionBody, asked: AskedResponse
    ) -> tuple[ResponseState, EventLog]:
        """Begin a response. Return its state and its events.

        If its model is loaded, this method returns after the request was checked and admitted to the engine's queue.
        Otherwise, it returns at once. An error of the load or the check then becomes the error of the response.

        Args:
            request: request of the client, whose body has been read.
            chat: chat that the client's body was converted to.

        Raises:
            APIError: the request cannot be served, the store cannot hold the response, or the server is shutting down.
        """
        if self._is_ending:
            raise shutting_down()
        is_ready = self._models.is_ready(chat.model)
        state = ResponseState(asked, chat.model or self._models.names[0])
        self._store.put_unfinished(state)
        run = self._runs[state] = _BackgroundRun(is_awaited=is_ready)
        self._log(state, run, state.create())
        run.task = asyncio.create_task(self._run(state, run, request, chat))
        try:
            # A task that is cancelled before its first step would not end the response.
            await (run.is_prepared.wait() if is_ready else asyncio.sleep(0))
        except asyncio.CancelledError:  # the client has disconnected and does not know the response
            run.task.cancel()
            self._store.discard(state.id)
            raise
        finally:
            run.is_awaited = False
        # The traceback of an error refers to the response. If the error was kept, the response would be, too.
        problem, run.problem = run.problem, None
        if problem is not None:
            self._store.discard(state.id)
            raise problem
        return state, run.log

    def log(self, response_id: str) -> EventLog:
        """Return the events of a stored response.

        Raises:
            APIError: status 404, for an unknown response; 400, if it was not created with ``background`` and
                ``stream``.
        """
        state = self._store.get(response_id)
        if state not in self._runs or not state.asked.is_streamed:
            problem = ": only responses that were created with background and stream can be streamed again"
            raise invalid(problem, where="stream")
        return self._runs[state].log

    async def cancel(self, response_id: str) -> ResponseState:
        """Cancel a response, and wait for its end. A response that has finished is returned unchanged.

        Raises:
            APIError: status 404, for an unknown response; 400, if it was not created with ``background``.
        """
        state = self._store.get(response_id)
        if state not in self._runs:
            raise invalid("only responses that were created with background can be cancelled", param="response_id")
        await self._runs[state].cancel()
        return state

    async def delete(self, response_id: str) -> None:
        """Delete a response, and cancel it if it is unfinished. Raises APIError, a 404, for an unknown response."""
        state = self._store.delete(response_id)
        if state in self._runs:
            await self._runs[state].cancel()

    def cancel_unread(self) -> None:
        """Cancel the responses whose events no client reads, and reject new responses.

        The server calls it when it begins to shut down.
        """
        self._is_ending = True
        self._cancel([run.task for run in self._runs.values() if not run.log.num_readers])

    def cancel_all(self) -> None:
        """Cancel all responses, and reject new responses."""
        self._is_ending = True
        self._cancel([run.task for run in self._runs.values()])

    def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        unfinished = [task for task in tasks if not task.done()]
        if unfinished:
            logger.warning("shutting down: cancelled %d responses in the background", len(unfinished))
        for task in unfinished:
            task.cancel()

    def _log(self, state: ResponseState, run: _BackgroundRun, events: bytes) -> None:
        before = run.log.num_characters
        run.log.append(events)
        self._grow(state, run, run.log.num_characters - before)

    def _grow(self, state: ResponseState, run: _BackgroundRun, num_characters: int) -> None:
        """Count more characters of a response. If the store is then too large, drop the response's oldest events."""
        while not self._store.grow(state.id, num_characters) and run.log.num_characters:
            before = run.log.num_characters
            run.log.shrink()
            num_characters = run.log.num_characters - before

    async def _run(self, state: ResponseState, run: _BackgroundRun, request: Request, chat: ChatCompletionBody) -> None:
        try:
            await self._generate(state, run, request, chat)
        except asyncio.CancelledError:
            if not state.is_finished:
                self._log(state, run, state.cancel())
        except Exception as error:
            problem = to_api_error(error)
            if problem is not error:
                logger.exception("response %s failed", state.id)
            if run.is_awaited:
                run.problem = problem
            self._log(state, run, state.fail(problem))
        finally:
            self._grow(state, run, state.num_characters - state.asked.num_characters)
            run.log.close()
            run.is_prepared.set()
            if run.problem is None:  # the client gets a response instead of an error
                self.num_ended[state.model, state.status] += 1
            logger.info("response %s in the background: %s", state.id, state.status)

    async def _generate(
        self, state: ResponseState, run: _BackgroundRun, request: Request, chat: ChatCompletionBody
    ) -> None:
        # The model must stay loaded after the client's request has ended.
        with self._models.detached(request, chat.model) as own, renaming(RENAMED):
            served = await self._models.use(own, chat.model)
            endpoint = ResponsesEndpoint(served, self._store, state)
            generation = await prepare(request, served, endpoint, chat, state.id)
            run.is_prepared.set()
            async with aclosing(stream_events(generation, endpoint, chat)) as events:
                async for data in events:
                    self._log(state, run, data)

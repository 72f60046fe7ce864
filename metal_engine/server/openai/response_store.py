"""Responses of ``/v1/responses`` in memory, for clients that retrieve or continue them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from metal_engine.server.errors import APIError, invalid
from metal_engine.server.generation.queue_limit import overloaded
from metal_engine.server.openai.input_items import Item
from metal_engine.server.openai.response_state import ResponseState

# Statuses of responses that can be continued with `previous_response_id`.
_CONTINUABLE = ("completed", "incomplete")


@dataclass
class _Stored:
    """A response, and the number of characters of the response, its conversation and its stored events."""

    state: ResponseState
    size: int


class ResponseStore:
    """Recent responses, in memory. Thread-safe.

    If there are too many responses or characters, the least recently used finished responses are dropped. Unfinished
    responses are never dropped.

    Args:
        max_responses: maximum number of responses.
        max_characters: maximum number of characters of all responses, their conversations and their events.

    Attributes:
        num_dropped: number of dropped responses by model, without responses that clients deleted.
    """

    def __init__(self, max_responses: int, max_characters: int = 1 << 26) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()
        self.num_dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, state: ResponseState) -> None:
        """Store a finished response. Drop the least recently used responses if necessary.

        If the response alone exceeds a limit of the store, it is dropped, too, after all other finished responses.
        Does nothing if the maximum number of responses is 0.
        """
        if not self._max_responses:
            return
        with self._lock:
            self._add(state)
            self._make_room()

    def put_unfinished(self, state: ResponseState) -> None:
        """Store a response that is to run in the background.

        Raises:
            APIError: status 400, if even an empty store could not hold the response; 503, if other unfinished responses
                fill the store.
        """
        if not self._max_responses:
            raise invalid(" needs a server that stores responses (setting max-stored-responses)", where="background")
        if state.num_characters > self._max_characters:
            raise invalid(" is too long to be stored, which a response in the background needs", where="input")
        with self._lock:
            self._add(state)
            self._make_room()
            if self._is_overfull:
                self._remove(state.id)
                raise overloaded("responses in the background fill its memory (setting max-stored-responses)")

    def grow(self, response_id: str, num_characters: int) -> bool:
        """Count more characters of a response in the background. If necessary, drop other finished responses.

        Args:
            response_id: id of the response. It is not dropped itself. If it is not stored, its characters do not count.
            num_characters: number of additional characters. Negative for dropped events.

        Returns:
            True if the store is within its limits now. False if it is still too large.
        """
        with self._lock:
            if response_id in self._stored:
                self._stored[response_id].size += num_characters
                self._num_characters += num_characters
                self._make_room(kept=response_id)
            return not self._is_overfull

    def get(self, response_id: str, param: str | None = None) -> ResponseState:
        """Return a stored response, and mark it as just used.

        Args:
            param: request field to name in the error.

        Raises:
            APIError: status 404, for an unknown or dropped response.
        """
        with self._lock:
            found = self._stored.get(response_id)
            if found is not None:
                self._stored.move_to_end(response_id)
                return found.state
        problem = "it was not stored, or was replaced by newer responses"
        message = f"there is no response {response_id[:100]!r}: {problem}"
        raise APIError(404, message, param=param, code="response_not_found")

    def conversation(self, response_id: str | None) -> list[Item]:
        """Return the items of the conversation up to ``previous_response_id``, including that response.

        Raises:
            APIError: as :meth:`get`; status 400, if the response has not finished, has failed or was cancelled.
        """
        if response_id is None:
            return []
        state = self.get(response_id, "previous_response_id")
        if state.status not in _CONTINUABLE:
            problem = f": response {response_id} is {state.status}, so it cannot be continued"
            raise invalid(problem, where="previous_response_id")
        return state.conversation

    def num_characters(self, response_id: str) -> int:
        """Return the number of characters of a response, its conversation and its events; 0 if it is not stored."""
        with self._lock:
            return self._stored[response_id].size if response_id in self._stored else 0

    def delete(self, response_id: str) -> ResponseState:
        """Delete a stored response, and return it. Raises as :meth:`get`."""
        state = self.get(response_id)
        self.discard(response_id)
        return state

    def discard(self, response_id: str) -> None:
        """Delete a response if it is stored."""
        with self._lock:
            self._remove(response_id)

    @property
    def _is_overfull(self) -> bool:
        return len(self._stored) > self._max_responses or self._num_characters > self._max_characters

    def _add(self, state: ResponseState) -> None:
        size = state.num_characters
        self._stored[state.id] = _Stored(state, size)
        self._num_characters += size

    def _remove(self, response_id: str) -> None:
        removed = self._stored.pop(response_id, None)
        if removed is not None:
            self._num_characters -= removed.size

    def _make_room(self, kept: str | None = None) -> None:
        if not self._is_overfull:
            return
        finished = [stored.state for stored in self._stored.values() if stored.state.is_finished]
        for state in finished:
            if state.id == kept:
                continue
            self._remove(state.id)
            self.num_dropped[state.model] += 1
            if not self._is_overfull:
                return

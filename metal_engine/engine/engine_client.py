"""Client half of an engine: random seeds for requests, and text for the engine's tokens."""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import dataclass
from typing import Protocol

from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput, RequestStatus, client_id
from metal_engine.text.output_text import OutputText
from metal_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class TokenEngine(Protocol):
    """Interface of an engine that :class:`EngineClient` uses."""

    def submit(
        self, request_id: str, prepared: PreparedRequest, seed: int, options: RequestOptions | None = None
    ) -> None:
        """Queue a request. Its outputs are passed to the client's :meth:`EngineClient.receive`.

        Args:
            request_id: id that is new to the engine.
            seed: seed of the output's random draws.

        Raises:
            EngineDeadError: the engine has ended.
        """

    def end(self, request_id: str, status: RequestStatus, num_output_tokens: int | None = None) -> None:
        """End a request. See :meth:`metal_engine.engine.core.EngineCore.end_request`."""


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """Unfinished request: its id in the engine, and the text of its output. ``text`` is None for a pooling request."""

    engine_id: str
    text: OutputText | None


class EngineClient:
    """Submits requests to an engine, and converts the engine's outputs to text.

    The engine has only token ids. This class draws the seeds, decodes the tokens, counts them and finds stop strings. A
    stop string ends the request: tokens that the engine generates in the meantime are dropped.

    Submitting and receiving may happen in two threads.

    Args:
        engine: engine of the requests.
        tokenizer: tokenizer of the model.
        seed: seed from which the seeds of requests without their own seed are drawn.
    """

    def __init__(self, engine: TokenEngine, tokenizer: Tokenizer, seed: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._serials = itertools.count()
        self._open: dict[str, _OpenRequest] = {}

    def submit(
        self, request_id: str, prepared: PreparedRequest, index: int = 0, options: RequestOptions | None = None
    ) -> None:
        """Submit output ``index`` of a request.

        Raises:
            EngineDeadError: the engine has ended.
            ValueError: the id is in use.
        """
        if request_id in self._open:
            raise ValueError(f"request id {request_id!r} is in use")
        params = prepared.params
        seed = params.seed_of(index)
        if seed is None:
            # Drawn once, so that the request samples with the same random numbers if it is computed again.
            seed = 0 if params.is_greedy else self._seeds.getrandbits(63)
        # The id is new, because the engine may still be computing a request with the client's id that was aborted.
        engine_id = f"{request_id}#{next(self._serials)}"
        text = OutputText(prepared, self._tokenizer) if prepared.pooling_params is None else None
        self._open[request_id] = _OpenRequest(engine_id, text)
        try:
            self._engine.submit(engine_id, prepared, seed, options)
        except BaseException:
            del self._open[request_id]
            raise

    def abort(self, request_id: str) -> None:
        """End a request without a further output. Unknown ids are ignored."""
        opened = self._open.pop(request_id, None)
        if opened is not None:
            self._engine.end(opened.engine_id, RequestStatus.FINISHED_ABORTED)

    def receive(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Convert the engine's outputs: fill in text and counts, and replace the engine's ids by the client's.

        Changes the given outputs and returns them. Outputs of requests that have been aborted or have finished are left
        out. If an output's tokens cannot be decoded, an error output takes its place, and the request ends.
        """
        received = []
        for output in outputs:
            request_id = client_id(output.request_id)
            opened = self._open.get(request_id)
            if opened is None or opened.engine_id != output.request_id:
                continue
            output.request_id = request_id
            if opened.text is not None and output.error is None:
                output = self._with_text(output, opened.text, opened.engine_id)
            if output.finish_reason is not None:
                self._open.pop(request_id, None)
            received.append(output)
        return received

    def _with_text(self, output: RequestOutput, text: OutputText, engine_id: str) -> RequestOutput:
        """Fill in an output's text, and return the output. End the request in the engine if the text has ended it.

        If the tokens cannot be decoded, end the request and return an error output.
        """
        try:
            text.add(output)
        except Exception as error:
            logger.exception("no text for %s from tokens %s", engine_id, output.token_ids)
            self._engine.end(engine_id, RequestStatus.FINISHED_ERROR)
            message = f"its tokens cannot be decoded: {error}"
            return RequestOutput(output.request_id, finish_reason="error", error=message)
        if output.finish_reason is not None and text.has_stop_strings:
            self._engine.end(engine_id, RequestStatus.of(output.finish_reason), output.num_output_tokens)
        return output

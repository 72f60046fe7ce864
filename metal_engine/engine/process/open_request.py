"""Unfinished request of an engine in another process, with everything that a new process needs to continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metal_engine.engine.process.packed_requests import packed_request
from metal_engine.engine.process.remote import RemoteGrammar
from metal_engine.engine.process.remote_images import RemoteImageInputs
from metal_engine.engine.process.wire import Submit
from metal_engine.request import PreparedRequest, RequestOptions, RequestOutput


@dataclass
class OpenRequest:
    """Request that the process has not finished, with its output so far.

    Attributes:
        so_far: output up to now, with all of its tokens; None before the first token.
        image_inputs: inputs of the request's images. The process keeps them while these objects exist.
        num_failures: number of processes that have ended while they computed the request. A new token resets it to 0.
    """

    prepared: PreparedRequest
    seed: int
    options: RequestOptions | None
    so_far: RequestOutput | None
    image_inputs: Sequence[RemoteImageInputs] = ()
    num_failures: int = 0

    def message(self, request_id: str) -> Submit:
        """Return the message that submits the request."""
        grammar = self.prepared.rules.grammar
        key = grammar.message.call if isinstance(grammar, RemoteGrammar) else None
        images = {one.content_hash: one.key for one in self.image_inputs}
        state = self.so_far, self.num_failures
        return packed_request(request_id, self.prepared, self.seed, self.options, *state, key, images)

    def add(self, output: RequestOutput) -> None:
        """Add the tokens and counts of an output to :attr:`so_far`, and reset :attr:`num_failures`.

        No effect if the output has no tokens.
        """
        if not output.token_ids:
            return
        if self.so_far is None:
            self.so_far = RequestOutput(output.request_id)
        self.so_far.token_ids += output.token_ids
        self.so_far.num_cached_tokens, self.so_far.num_external_tokens = (
            output.num_cached_tokens,
            output.num_external_tokens,
        )
        self.so_far.num_predicted_tokens = output.num_predicted_tokens
        self.num_failures = 0

"""Tests of the resources that the engine's process lends to requests of the server."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from metal_engine.engine.process import wire
from metal_engine.engine.process.keyed_resources import KeyedResources
from metal_engine.engine.process.packed_requests import packed_grammar
from metal_engine.errors import ParameterError
from metal_engine.grammars.compiler import GrammarRefusedError
from metal_engine.sampling_params import StructuredOutputsParams


@pytest.mark.parametrize(
    ("error", "num_errors", "was_made", "num_calls", "is_made"),
    [
        pytest.param(GrammarRefusedError("took too long", 1.0), 3, True, 4, True, id="made before"),
        pytest.param(GrammarRefusedError("took too long", 1.0), 9, True, 4, False, id="made before, and now refused"),
        pytest.param(GrammarRefusedError("took too long", 1.0), 9, False, 1, False, id="new"),
        pytest.param(ParameterError("structured_outputs", "full"), 9, True, 1, False, id="another error"),
    ],
)
def test_a_grammar_that_an_earlier_process_has_made_is_tried_again(
    error: Exception, num_errors: int, was_made: bool, num_calls: int, is_made: bool
) -> None:
    calls: list[Any] = []

    def grammar_for(*args: Any) -> str:
        calls.append(args)
        if len(calls) <= num_errors:
            raise error
        return "grammar"

    built: Any = SimpleNamespace(preparer=SimpleNamespace(grammars=SimpleNamespace(grammar_for=grammar_for)))
    thread: Any = SimpleNamespace(error=None)
    sent: queue.Queue[Any] = queue.Queue()
    message = wire.MakeGrammar(7, *packed_grammar(StructuredOutputsParams(regex="[0-9]"), None), b"", was_made)
    KeyedResources(thread, lambda: built, sent.put).make_grammar(message)
    reply = sent.get(timeout=60)
    assert reply.call == 7 and (reply.error is None) is is_made and len(calls) == num_calls

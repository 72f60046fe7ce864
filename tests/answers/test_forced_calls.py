"""Text that a grammar forced to be calls: cut anywhere, truncated, and with free white space."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from metal_engine.answers.deltas import ArgumentsDelta, CallStart, TextDelta
from metal_engine.answers.forced_calls import ForcedCallSplitter, forced_schema
from metal_engine.json_schemas.closed import closed
from tests.support.splitting import cuts, deltas, run
from tests.support.tool_formats import TRAINS, WEATHER


def test_forced_calls() -> None:
    for parts in cuts(json.dumps([{"name": name, "parameters": arguments} for name, arguments in (WEATHER, TRAINS)])):
        assert run(ForcedCallSplitter(None), parts)[:3] == ("", "", [WEATHER, TRAINS])
        assert run(ForcedCallSplitter(None, parallel=False), parts)[:3] == ("", "", [WEATHER])
    arguments = json.dumps(WEATHER[1])
    for parts in cuts(arguments):
        assert run(ForcedCallSplitter("get_weather"), parts)[2] == [WEATHER]


@pytest.mark.parametrize("strict", [None, False, True])
def test_tools_without_parameters(strict: bool | None) -> None:
    """Their calls have no arguments, except if the schema allows any object."""
    for parameters, allows_more in [(None, False), ({}, False), ({"type": "object"}, not strict)]:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        for name, wrapped in (("f", lambda call: call), (None, lambda call: [{"name": "f", "parameters": call}])):
            schema = Draft202012Validator(closed(forced_schema([tool], name, parallel=True)))
            assert schema.is_valid(wrapped({}))
            assert schema.is_valid(wrapped({"a": 1})) == allows_more


def test_forced_calls_that_are_cut_off() -> None:
    """Complete calls are returned.

    The last call has partial arguments. Text cut off before the first call is content.
    """
    calls = [{"name": name, "parameters": arguments} for name, arguments in (WEATHER, TRAINS)]
    listed = json.dumps(calls, ensure_ascii=False)
    first, second = (listed.index('{"city": ' + city) for city in ('"Z', '"R'))
    for end in range(1, len(listed)):
        told = deltas(ForcedCallSplitter(None), listed[:end], truncated=True)
        arguments = [delta.text for delta in told if isinstance(delta, ArgumentsDelta)]
        if end <= first:
            assert told == [TextDelta("content", listed[:end])]
            continue
        expected = [listed[first:end][: len(json.dumps(WEATHER[1], ensure_ascii=False))]]
        expected += [listed[second:end][: len(json.dumps(TRAINS[1]))]] if end > second else []
        assert arguments == expected
        assert len(told) == 2 * len(arguments)


def test_forced_call_arguments_are_streamed_without_delay() -> None:
    splitter = ForcedCallSplitter(None)
    assert [type(delta) for ch in '[ {"name":"a", "parameters": {' for delta in splitter.add(ch)] == [
        CallStart,
        ArgumentsDelta,
    ]
    for ch in '"b}": [{}]}':
        assert splitter.add(ch) == [ArgumentsDelta(0, ch)]
    assert splitter.add("}, ") == []
    assert not splitter.finish(truncated=False)

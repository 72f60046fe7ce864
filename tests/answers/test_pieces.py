"""Text into content, reasoning and calls: each format, cut anywhere; nothing is lost, nothing leaks."""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import replace

import mlx_lm.tool_parsers
import pytest

from metal_engine.answers.forced_calls import ForcedCallSplitter
from metal_engine.answers.formats import Parsers, ReasoningMarks, begins_in_reasoning
from metal_engine.answers.pieces import (
    CallArguments,
    CallStart,
    MarkSplitter,
    Piece,
    Splitter,
    TextPiece,
)
from metal_engine.checkpoints.answer_formats import call_head
from metal_engine.settings.args import TOOL_PARSER_ALIASES, TOOL_PARSERS
from tests.support.tool_formats import MALFORMED, RECORDED, TOOLS, TRAINS, WEATHER, Recorded

THINK = ReasoningMarks("<think>", "</think>")


def parsers(name: str, reasoning: ReasoningMarks | None = THINK) -> Parsers:
    tool = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return Parsers(tool=tool, call_head=call_head(tool), reasoning=reasoning)


def run(
    splitter: Splitter, parts: Iterable[str], truncated: bool = False
) -> tuple[str, str, list, list[str]]:
    """Content, reasoning, calls, ids."""
    pieces = [piece for part in parts for piece in splitter.add(part)]
    pieces += splitter.finish(truncated=truncated)
    texts = {"content": "", "reasoning": ""}
    names, ids, arguments = [], [], []
    for piece in pieces:
        match piece:
            case TextPiece(kind, text):
                assert text
                texts[kind] += text
            case CallStart(index, call_id, name):
                assert index == len(names)
                names.append(name)
                ids.append(call_id)
                arguments.append("")
            case CallArguments(index, text):
                arguments[index] += text
    calls = [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]
    assert len(set(ids)) == len(ids) and all(ids)
    return texts["content"], texts["reasoning"], calls, ids


def cuts(text: str) -> Iterator[list[str]]:
    """Whole, in single characters, in threes, and in two at every place."""
    yield [text]
    yield list(text)
    yield [text[i : i + 3] for i in range(0, len(text), 3)]
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]


def test_every_parser_of_mlx_lm_is_known_and_tested() -> None:
    modules = {info.name for info in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert set(TOOL_PARSERS) == modules | {"auto", "none"}
    assert {r.parser for r in RECORDED} == modules == MALFORMED.keys()
    assert set(TOOL_PARSER_ALIASES.values()) <= modules


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.parser)
@pytest.mark.parametrize("thought", ["", "I <must> look.\n"])
@pytest.mark.parametrize("incremental", [False, True])
def test_recorded_formats(recorded: Recorded, thought: str, incremental: bool) -> None:
    text = f"<think>\n{thought}</think>\n\n{recorded.text}" if thought else recorded.text
    for parts in cuts(text):
        splitter = MarkSplitter(parsers(recorded.parser), TOOLS, incremental=incremental)
        content, reasoning, calls, ids = run(splitter, parts)
        assert splitter.num_calls == len(calls)
        assert (content, reasoning, calls) == (recorded.content, thought.strip(), recorded.calls)
        assert not recorded.ids or ids == recorded.ids


def deltas(splitter: Splitter, text: str, truncated: bool = False) -> list[Piece]:
    """What a text comes to that arrives in single characters; neighbours of one kind joined."""
    joined: list[Piece] = []
    for piece in [*(p for ch in text for p in splitter.add(ch)), *splitter.finish(truncated=truncated)]:
        if joined and not isinstance(piece, CallStart) and type(piece) is type(joined[-1]):
            joined[-1] = replace(joined[-1], text=joined[-1].text + piece.text)  # type: ignore[union-attr]
        else:
            joined.append(piece)
    return joined


HEADS = {
    "json_tools": ('<tool_call>\n{"name": "find_trains", "arguments": ', "}\n</tool_call>"),
    "mistral": ("[TOOL_CALLS]find_trains[ARGS]", ""),
}


@pytest.mark.parametrize("name", HEADS)
def test_arguments_come_as_they_are_written(name: str) -> None:
    head, tail = HEADS[name]
    arguments = '{"city": "R\\u00f6m }", "tags": ["a", {"b": -1.5e3}]}'
    splitter = MarkSplitter(parsers(name), TOOLS, incremental=True)
    (start,) = [piece for ch in head + "{" for piece in splitter.add(ch) if isinstance(piece, CallStart)]
    assert (start.index, start.name) == (0, "find_trains")
    for ch in arguments[1:-1]:
        assert splitter.add(ch) == [CallArguments(0, ch)]
    # The last brace waits until the call has proved to be one.
    assert splitter.add("}") == [] and splitter.num_calls == 0
    assert [*splitter.add(tail), *splitter.finish(truncated=False)] == [CallArguments(0, "}")]
    assert splitter.num_calls == 1


# Parser -> what comes of the arguments before it proves to be no call.
SPOILT = [
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"city": Rome}}</tool_call>', '{"city": '),
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"city": 1} or so</tool_call>', '{"city": 1'),
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"a": NaN}}</tool_call>', '{"a": '),
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"a": 1}, "name": "get_weather"}</tool_call>',
     '{"a": 1'),
    ("mistral", MALFORMED["mistral"].removeprefix("Hm. "), '{"city": '),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments"), SPOILT)
def test_a_begun_call_that_is_none_is_text_too(
    name: str, text: str, arguments: str, caplog: pytest.LogCaptureFixture
) -> None:
    splitter = MarkSplitter(parsers(name), TOOLS, incremental=True)
    start, begun, content = deltas(splitter, text)
    assert isinstance(start, CallStart) and splitter.num_calls == 0
    assert (begun, content) == (CallArguments(0, arguments), TextPiece("content", text))
    (record,) = caplog.records
    assert "malformed" in record.getMessage()


def test_a_begun_call_that_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    text = '<tool_call>{"name": "find_trains", "arguments": {"city": "Ro'
    splitter = MarkSplitter(parsers("json_tools"), TOOLS, incremental=True)
    start, begun = deltas(splitter, text, truncated=True)
    assert isinstance(start, CallStart) and begun == CallArguments(0, '{"city": "Ro')
    assert splitter.num_calls == 0
    (record,) = caplog.records
    assert "cut off" in record.getMessage()


def test_only_calls_of_tools_begin() -> None:
    for text in (
        '<tool_call>{"name": "no_such_tool", "arguments": {"city": "Rome"}}</tool_call>',
        '<tool_call>{"name": "find_trains", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "find_trains", "arguments": "{}"}</tool_call>',
    ):
        (content,) = deltas(MarkSplitter(parsers("json_tools"), TOOLS, incremental=True), text)
        assert content == TextPiece("content", text)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_are_text(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for parts in cuts(MALFORMED[name]):
        content, reasoning, calls, _ = run(MarkSplitter(parsers(name), TOOLS), parts)
        assert (content, reasoning, calls) == (MALFORMED[name], "", [])
    caplog.set_level(logging.WARNING)
    run(MarkSplitter(parsers(name), TOOLS), [MALFORMED[name]])
    (record,) = caplog.records
    assert "malformed" in record.getMessage()


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.parser)
def test_cut_off_anywhere(recorded: Recorded) -> None:
    """An answer that the token limit ends: no call is made up, and no character of an incomplete one is lost."""
    for end in range(len(recorded.text)):
        text = recorded.text[:end]
        content, _, calls, _ = run(MarkSplitter(parsers(recorded.parser), TOOLS), [text], truncated=True)
        assert calls == recorded.calls[: len(calls)]
        if not calls:
            assert content == text
        else:
            assert content.startswith(recorded.content)
            assert text.endswith(content.removeprefix(recorded.content))


def test_a_call_left_open_by_a_model_that_has_finished() -> None:
    text = '<tool_call>\n{"name": "find_trains", "arguments": {"city": "Rome"}}\n'
    for parts in cuts(text):
        assert run(MarkSplitter(parsers("json_tools"), TOOLS), parts)[:3] == ("", "", [TRAINS])
        assert run(MarkSplitter(parsers("json_tools"), TOOLS), parts, truncated=True)[:3] == (text, "", [])


BAD_CALLS = [
    '{"name": "no_such_tool", "arguments": {}}',
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": "get_weather", "arguments": "{}"}',
    '{"name": "get_weather", "arguments": {"city": NaN}}',
    '{"name": 5, "arguments": {}}',
    '{"name": ["get_weather"], "arguments": {}}',
    '["get_weather"]', "[]", "5", "null", "", "{}",
    '{"a":' * 5000,
]  # fmt: skip


@pytest.mark.parametrize("body", BAD_CALLS)
def test_calls_of_nothing(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert run(MarkSplitter(parsers("json_tools"), TOOLS), [text])[:3] == (text, "", [])


def test_text_between_calls_is_content() -> None:
    call = '<tool_call>{"name": "find_trains", "arguments": {"city": "Rome"}}</tool_call>'
    text = f"One. {call} Two.\n{call}\n{call} Three. "
    for parts in cuts(text):
        content, _, calls, _ = run(MarkSplitter(parsers("json_tools"), TOOLS), parts)
        assert content == "One.Two.Three. " and calls == [TRAINS] * 3


@pytest.mark.parametrize("incremental", [False, True])
def test_only_one_call_if_told_so(incremental: bool) -> None:
    recorded = RECORDED[0]
    for parts in cuts(recorded.text):
        splitter = MarkSplitter(parsers("json_tools"), TOOLS, parallel=False, incremental=incremental)
        assert run(splitter, parts)[2] == [WEATHER]


def test_without_tools_calls_are_text() -> None:
    for recorded in RECORDED:
        for parts in ([recorded.text], list(recorded.text)):
            content, _, calls, _ = run(MarkSplitter(parsers(recorded.parser), []), parts)
            assert content == recorded.text and not calls


REASONED = [
    # prompt has begun it, text, content, reasoning
    (True, "hm\nhm\n</think>\n\nYes. ", "Yes. ", "hm\nhm"),
    (True, "\n\nhm", "", "hm"),
    (True, "</think>Yes", "Yes", ""),
    (False, "<think></think>Yes", "Yes", ""),
    (False, "<think>\n\n</think>\n\nYes", "Yes", ""),
    (False, "Yes <think>or no</think> yes", "Yesyes", "or no"),
    (False, "a < b, <thin> </think> <think", "a < b, <thin> </think> <think", ""),
    (False, "  spaces  ", "  spaces  ", ""),
    (False, "<think>never ends ", "", "never ends "),
]


@pytest.mark.parametrize(("begun", "text", "content", "reasoning"), REASONED)
def test_reasoning(begun: bool, text: str, content: str, reasoning: str) -> None:
    for parts in cuts(text):
        splitter = MarkSplitter(Parsers(reasoning=THINK), in_reasoning=begun)
        assert run(splitter, parts)[:2] == (content, reasoning)


def test_content_is_not_held_back_longer_than_it_must() -> None:
    splitter = MarkSplitter(parsers("json_tools"), TOOLS)
    assert splitter.add("one two <") == [TextPiece("content", "one two")]
    assert splitter.add("b>") == [TextPiece("content", " <b>")]
    assert splitter.add("<tool_cal") == []
    assert splitter.add("m") == [TextPiece("content", "<tool_calm")]


def test_where_a_prompt_ends() -> None:
    assert begins_in_reasoning(THINK, "assistant\n<think>\n", continues=False)
    assert not begins_in_reasoning(THINK, "assistant\n<think>\n\n</think>\n\n", continues=False)
    assert not begins_in_reasoning(THINK, "say <think> please. assistant\n", continues=False)
    assert begins_in_reasoning(THINK, "assistant\n<think>Well", continues=True)
    assert not begins_in_reasoning(THINK, "assistant\n<think>Well</think>So", continues=True)


def test_forced_calls() -> None:
    listed = json.dumps([{"name": name, "parameters": arguments} for name, arguments in (WEATHER, TRAINS)])
    for parts in cuts(listed):
        assert run(ForcedCallSplitter(None), parts)[:3] == ("", "", [WEATHER, TRAINS])
        assert run(ForcedCallSplitter(None, parallel=False), parts)[:3] == ("", "", [WEATHER])
    arguments = json.dumps(WEATHER[1])
    for parts in cuts(arguments):
        assert run(ForcedCallSplitter("get_weather"), parts)[2] == [WEATHER]


def test_forced_calls_that_are_cut_off() -> None:
    """Complete calls are calls; of the last one there is what there is; before the first, it is text."""
    calls = [{"name": name, "parameters": arguments} for name, arguments in (WEATHER, TRAINS)]
    listed = json.dumps(calls, ensure_ascii=False)
    first, second = (listed.index('{"city": ' + city) for city in ('"Z', '"R'))
    for end in range(1, len(listed)):
        pieces = deltas(ForcedCallSplitter(None), listed[:end], truncated=True)
        arguments = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
        if end <= first:
            assert pieces == [TextPiece("content", listed[:end])]
            continue
        expected = [listed[first:end][: len(json.dumps(WEATHER[1], ensure_ascii=False))]]
        expected += [listed[second:end][: len(json.dumps(TRAINS[1]))]] if end > second else []
        assert arguments == expected
        assert len(pieces) == 2 * len(arguments)


def test_forced_arguments_come_as_they_are_written() -> None:
    splitter = ForcedCallSplitter(None)
    assert [type(piece) for ch in '[ {"name":"a", "parameters": {' for piece in splitter.add(ch)] == [
        CallStart,
        CallArguments,
    ]
    for ch in '"b}": [{}]}':
        assert splitter.add(ch) == [CallArguments(0, ch)]
    assert splitter.add("}, ") == []
    assert not splitter.finish(truncated=False)

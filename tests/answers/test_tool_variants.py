"""Calls that deviate from the model's format: parsed for any cut of the text, or left in the content."""

from __future__ import annotations

import logging

import pytest

from metal_engine.answers.deltas import TextDelta
from metal_engine.answers.mark_splitter import MarkSplitter
from tests.support.splitting import answer_format, cuts, run
from tests.support.tool_formats import TOOLS, TRAINS
from tests.support.tool_variants import UNREADABLE, VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("thought", ["", "I <must> look.\n"])
@pytest.mark.parametrize("incremental", [False, True])
def test_variants_are_calls(name: str, thought: str, incremental: bool) -> None:
    recorded = VARIANTS[name]
    text = f"<think>\n{thought}</think>\n\n{recorded.text}" if thought else recorded.text
    for parts in cuts(text):
        splitter = MarkSplitter(answer_format(recorded.parser), TOOLS, incremental=incremental)
        content, reasoning, calls, ids = run(splitter, parts)
        assert (content, reasoning, calls) == (recorded.content, thought.strip(), recorded.calls), parts
        assert splitter.num_calls == len(calls)
        assert not recorded.ids or ids == recorded.ids


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_that_are_cut_off(name: str) -> None:
    """A truncated output consists of whole calls and text, without loss."""
    recorded = VARIANTS[name]
    for end in range(len(recorded.text)):
        text = recorded.text[:end]
        for parts in ([text], list(text)):
            splitter = MarkSplitter(answer_format(recorded.parser), TOOLS)
            content, _, calls, _ = run(splitter, parts, truncated=True)
            assert calls == recorded.calls[: len(calls)]
            assert calls or content == text


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_content(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    parser, text = UNREADABLE[name]
    for parts in cuts(text):
        for truncated in (False, True):
            splitter = MarkSplitter(answer_format(parser), TOOLS)
            assert run(splitter, parts, truncated) == (text, "", [], []), parts
            assert splitter.num_calls == 0


@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_of_several_objects(parallel: bool) -> None:
    recorded = VARIANTS["hermes two objects"]
    for incremental in (False, True):
        for parts in cuts(recorded.text):
            splitter = MarkSplitter(answer_format("json_tools"), TOOLS, parallel=parallel, incremental=incremental)
            assert run(splitter, parts)[2] == recorded.calls[: 2 if parallel else 1]


REPEATED_IDS = [
    '[TOOL_CALLS]find_trains[CALL_ID]abc[ARGS]{"city": "Rome"}' * 2,
    '[TOOL_CALLS]find_trains[CALL_ID]abc[ARGS]{"city": "Rome"}find_trains[CALL_ID]abc[ARGS]{"city": "Rome"}',
]


@pytest.mark.parametrize("text", REPEATED_IDS)
@pytest.mark.parametrize("incremental", [False, True])
def test_calls_with_the_same_id_get_ids_of_their_own(text: str, incremental: bool) -> None:
    for parts in cuts(text):
        splitter = MarkSplitter(answer_format("mistral"), TOOLS, incremental=incremental)
        _, _, calls, ids = run(splitter, parts)  # checks that the ids differ
        assert calls == [TRAINS] * 2 and ids[0] == "abc"


def test_an_opening_of_no_tool_is_not_held_back() -> None:
    splitter = MarkSplitter(answer_format("qwen3_coder"), TOOLS)
    assert splitter.add("See <function=get_") == [TextDelta("content", "See")]
    assert splitter.add("news> here.") == [TextDelta("content", " <function=get_news> here.")]


@pytest.mark.parametrize("quoted", ["'\\", '"\\', "'", '"\\"'])
def test_open_strings_are_searched_once(quoted: str) -> None:
    """A quadratic search would take minutes."""
    text = f"[find_trains({quoted * 100_000}\\"
    assert run(MarkSplitter(answer_format("pythonic"), TOOLS), [text])[:3] == (text, "", [])


@pytest.mark.parametrize("end", ["", "</function>", "</parameter></function>"])
def test_unclosed_parameters_are_searched_once(end: str) -> None:
    """A quadratic search would take seconds."""
    arguments = {f"p{i}": "Rome" for i in range(8000)}
    text = "<function=find_trains>" + "".join(f"<parameter={name}>Rome" for name in arguments) + end
    calls = run(MarkSplitter(answer_format("qwen3_coder"), TOOLS), [text])[2]
    assert calls == [("find_trains", arguments)]

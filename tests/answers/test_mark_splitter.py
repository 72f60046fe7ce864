"""Splitting text with marks into content, reasoning and calls: each format, cut anywhere, without loss or leaks."""

from __future__ import annotations

import pkgutil
import re
import warnings
from types import SimpleNamespace
from typing import Any

import mlx_lm.tool_parsers
import pytest

from metal_engine.answers import call_end
from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.answers.deltas import ArgumentsDelta, CallStart, TextDelta
from metal_engine.answers.mark_splitter import MarkSplitter, _CallsAtEnd
from metal_engine.settings.format_names import TOOL_PARSER_ALIASES, TOOL_PARSERS
from tests.support.golden import calling_cases
from tests.support.splitting import THINK, answer_format, cuts, deltas, run
from tests.support.tool_formats import TOOLS, TRAINS


def test_every_parser_of_mlx_lm_is_known() -> None:
    modules = {info.name for info in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    own = {"deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "llama3_json", "llama4_pythonic", "olmo3"}
    assert not own & modules and set(TOOL_PARSERS) == modules | own | {"auto", "none"}
    assert set(TOOL_PARSER_ALIASES.values()) <= modules


HEADS = {
    "json_tools": ('<tool_call>\n{"name": "find_trains", "arguments": ', "}\n</tool_call>"),
    "mistral": ("[TOOL_CALLS]find_trains[ARGS]", ""),
    "llama3_json": ('{"name": "find_trains", "parameters": ', "}"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find_trains\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find_trains<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_call_arguments_are_streamed_without_delay(name: str) -> None:
    head, tail = HEADS[name]
    arguments = '{"city": "R\\u00f6m }", "tags": ["a", {"b": -1.5e3}]}'
    splitter = MarkSplitter(answer_format(name), TOOLS, incremental=True)
    (start,) = [delta for ch in head + "{" for delta in splitter.add(ch) if isinstance(delta, CallStart)]
    assert (start.index, start.name) == (0, "find_trains")
    for ch in arguments[1:-1]:
        assert splitter.add(ch) == [ArgumentsDelta(0, ch)]
    # The last brace is held until the call has been parsed.
    assert splitter.add("}") == [] and splitter.num_calls == 0
    assert [*splitter.add(tail), *splitter.finish(truncated=False)] == [ArgumentsDelta(0, "}")]
    assert splitter.num_calls == 1


# Parser, text of a malformed call, and the arguments that are streamed before the error is detected.
@pytest.mark.parametrize(("name", "text", "arguments"), [
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"city": Rome}}</tool_call>', '{"city": '),
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"city": 1} or so</tool_call>', '{"city": 1'),
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"a": NaN}}</tool_call>', '{"a": '),
    ("json_tools", '<tool_call>{"name": "find_trains", "arguments": {"a": 1}, "name": "get_weather"}</tool_call>',
     '{"a": 1'),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": So be it.', '{"city": '),
])  # fmt: skip
def test_a_begun_call_that_is_none_is_text_too(
    name: str, text: str, arguments: str, caplog: pytest.LogCaptureFixture
) -> None:
    splitter = MarkSplitter(answer_format(name), TOOLS, incremental=True)
    start, begun, content = deltas(splitter, text)
    assert isinstance(start, CallStart) and splitter.num_calls == 0
    assert (begun, content) == (ArgumentsDelta(0, arguments), TextDelta("content", text))
    (record,) = caplog.records
    assert "malformed" in record.getMessage()


def test_a_begun_call_that_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    text = '<tool_call>{"name": "find_trains", "arguments": {"city": "Ro'
    splitter = MarkSplitter(answer_format("json_tools"), TOOLS, incremental=True)
    start, begun = deltas(splitter, text, truncated=True)
    assert isinstance(start, CallStart) and begun == ArgumentsDelta(0, '{"city": "Ro')
    assert splitter.num_calls == 0
    (record,) = caplog.records
    assert "cut off" in record.getMessage()


def test_only_calls_of_tools_begin() -> None:
    for text in (
        '<tool_call>{"name": "no_such_tool", "arguments": {"city": "Rome"}}</tool_call>',
        '<tool_call>{"name": "find_trains", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "find_trains", "arguments": "city"}</tool_call>',
    ):
        (content,) = deltas(MarkSplitter(answer_format("json_tools"), TOOLS, incremental=True), text)
        assert content == TextDelta("content", text)


@pytest.mark.parametrize(("name", "text"), [
    ("json_tools", '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'),
    ("qwen3_coder", "<tool_call><function=no_such_tool></function></tool_call>"),
    ("pythonic", "<|tool_call_start|>[no_such_tool(a=1)]<|tool_call_end|>"),
])  # fmt: skip
def test_a_call_of_an_unknown_tool_is_logged_with_its_name(
    name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(MarkSplitter(answer_format(name), TOOLS), [text])[:3] == (text, "", [])
    assert "there is no tool 'no_such_tool'" in caplog.text


@pytest.mark.parametrize("body", [
    '{"name": "no_such_tool", "arguments": {}}',
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": "get_weather", "arguments": "city"}',
    '{"name": "get_weather", "arguments": "[1]"}',
    '{"name": "get_weather", "arguments": "{\\"city\\": NaN}"}',
    '{"name": "get_weather", "arguments": {"city": "Rome"}, "parameters": {"city": "Rome"}}',
    '{"name": "get_weather", "args": {"city": "Rome"}}',
    '{"name": "get_weather", "arguments": {"city": "Rome"}} {"name": "find_trains"',
    '{"name": "get_weather", "arguments": {"city": "Rome"}} and text',
    '{"name": "get_weather", "arguments": {"city": NaN}}',
    '{"name": 5, "arguments": {}}',
    '{"name": ["get_weather"], "arguments": {}}',
    '["get_weather"]', "[]", "5", "null", "", "{}",
    '{"a":' * 5000,
])  # fmt: skip
def test_invalid_tool_calls_remain_content(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert run(MarkSplitter(answer_format("json_tools"), TOOLS), [text])[:3] == (text, "", [])


CALL = '{"name": "find_trains", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize("arguments", ['{"city": "\\ud83d"}', '"{\\"city\\": \\"\\ud83d\\"}"'])
def test_half_a_surrogate_pair_can_be_encoded(arguments: str) -> None:
    text = f'<tool_call>{{"name": "find_trains", "arguments": {arguments}, "id": "x\\ud83d"}}</tool_call>'
    start, delta = deltas(MarkSplitter(answer_format("json_tools"), TOOLS), text)
    assert isinstance(start, CallStart) and start.id.startswith("call_")
    assert delta == ArgumentsDelta(0, '{"city": "\\ud83d"}')


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("text", [f"<tool_call>{CALL}\n{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>\n" * 2])
def test_several_calls(text: str, parallel: bool) -> None:
    for incremental in (False, True):
        for parts in cuts(text):
            splitter = MarkSplitter(answer_format("json_tools"), TOOLS, parallel=parallel, incremental=incremental)
            assert run(splitter, parts)[2] == [TRAINS] * (2 if parallel else 1)


def test_without_tools_calls_are_text() -> None:
    for case in calling_cases():
        for parts in ([case.text], list(case.text)):
            content, _, calls, _ = run(MarkSplitter(answer_format(case.parser), []), parts)
            assert content == case.text and not calls


@pytest.mark.parametrize(("begun", "text", "content", "reasoning"), [
    # True if the prompt starts the reasoning; text, content, reasoning
    (True, "hm\nhm\n</think>\n\nYes. ", "Yes. ", "hm\nhm"),
    (True, "\n\nhm", "", "hm"),
    (True, "</think>Yes", "Yes", ""),
    (False, "<think></think>Yes", "Yes", ""),
    (False, "<think>\n\n</think>\n\nYes", "Yes", ""),
    (False, "Yes <think>or no</think> yes", "Yes yes", "or no"),
    (False, "a < b, <thin> </think> <think", "a < b, <thin> </think> <think", ""),
    (False, "  spaces  ", "  spaces  ", ""),
    (False, "<think>never ends ", "", "never ends "),
])  # fmt: skip
def test_reasoning(begun: bool, text: str, content: str, reasoning: str) -> None:
    for parts in cuts(text):
        assert run(MarkSplitter(AnswerFormat(reasoning=THINK), in_reasoning=begun), parts)[:2] == (content, reasoning)


def test_content_is_held_back_only_while_a_mark_is_possible() -> None:
    splitter = MarkSplitter(answer_format("json_tools"), TOOLS)
    assert splitter.add("one two <") == [TextDelta("content", "one two")]
    assert splitter.add("b>") == [TextDelta("content", " <b>")]
    assert splitter.add("<tool_cal") == []
    assert splitter.add("m") == [TextDelta("content", "<tool_calm")]


def test_prose_about_calls_is_not_held_back_within_reasoning() -> None:
    splitter = MarkSplitter(answer_format("json_tools"), TOOLS, in_reasoning=True)
    splitter.add("I could write <tool_call>")
    assert splitter.add(" with find_trains in it, or ask the user for more, or do both.") != []
    assert splitter.add(" Hm.") == [TextDelta("reasoning", " Hm.")]
    assert splitter.add('\n<tool_call>{"name": "find_trains", "arguments": {"city": "') == []
    assert splitter.add('Rome"}}</tool_call>') == []
    assert splitter.add(" No.")[0].kind == "reasoning"  # type: ignore[union-attr]


class CountedText(str):
    """Text that counts its slices."""

    num_slices = 0

    def __getitem__(self, key: Any) -> str:
        CountedText.num_slices += 1
        return super().__getitem__(key)


def test_calls_within_reasoning_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    find = _CallsAtEnd.find
    monkeypatch.setattr(_CallsAtEnd, "find", lambda search, text: find(search, CountedText(text)))
    monkeypatch.setattr(CountedText, "num_slices", 0)
    text = f"\n<tool_call>{CALL}</tool_call>" * 100
    splitter = MarkSplitter(answer_format("json_tools"), TOOLS, in_reasoning=True)
    begun = [delta for place in range(0, len(text), 5) for delta in splitter.add(text[place : place + 5])]
    assert begun == [] and CountedText.num_slices < len(text)
    assert run(splitter, ["\n"])[2] == [TRAINS] * 100


def test_a_string_without_an_end_does_not_hide_later_calls() -> None:
    text = CALL.replace('Rome"', "a").join(["<tool_call>", "</tool_call>"])
    for parts in cuts(f"{text}<tool_call>{CALL}</tool_call>"):
        assert run(MarkSplitter(answer_format("json_tools"), TOOLS), parts)[:3] == (text, "", [TRAINS])


@pytest.mark.parametrize("text", [
    '[TOOL_CALLS]find_trains[CALL_ID]abc[ARGS]{"city": "Rome"}' * 2,
    '[TOOL_CALLS]find_trains[CALL_ID]abc[ARGS]{"city": "Rome"}find_trains[CALL_ID]abc[ARGS]{"city": "Rome"}',
])  # fmt: skip
@pytest.mark.parametrize("incremental", [False, True])
def test_calls_with_the_same_id_get_ids_of_their_own(text: str, incremental: bool) -> None:
    for parts in cuts(text):
        splitter = MarkSplitter(answer_format("mistral"), TOOLS, incremental=incremental)
        _, _, calls, ids = run(splitter, parts)  # checks that the ids differ
        assert calls == [TRAINS] * 2 and ids[0] == "abc"


def test_call_head_of_an_unknown_tool_is_not_held_back() -> None:
    splitter = MarkSplitter(answer_format("qwen3_coder"), TOOLS)
    assert splitter.add("See <function=get_") == [TextDelta("content", "See")]
    assert splitter.add("news> here.") == [TextDelta("content", " <function=get_news> here.")]


@pytest.mark.parametrize(("name", "text"), [
    ("pythonic", r"<|tool_call_start|>[find_trains(tags=['\d'])]<|tool_call_end|>"),
    ("qwen3_coder", r"<tool_call><function=find_trains><parameter=tags>['\d']</parameter></function></tool_call>"),
])  # fmt: skip
def test_unknown_escapes_are_not_logged(name: str, text: str) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        calls = run(MarkSplitter(answer_format(name), TOOLS), [text])[2]
    assert calls == [("find_trains", {"tags": [r"\d"]})] and not caught


@pytest.mark.parametrize("quoted", ["'\\", '"\\', "'", '"\\"'])
def test_open_strings_are_searched_once(quoted: str) -> None:
    """A quadratic search would take minutes."""
    text = f"[find_trains({quoted * 100_000}\\"
    assert run(MarkSplitter(answer_format("pythonic"), TOOLS), [text])[:3] == (text, "", [])


LLAMA = '{"name": "find_trains", "parameters": {"city": "Rome"}}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁calls▁end｜>"


@pytest.mark.parametrize(("name", "text", "calls"), [
    ("llama3_json", LLAMA + "{} Yes.", [TRAINS]),
    ("deepseek_v31", DEEPSEEK.replace("{}", 'find_trains<｜tool▁sep｜>{"city": "Rome"}{} Yes.'), []),
    ("deepseek_v31", DEEPSEEK, []),
])  # fmt: skip
def test_long_white_space_beside_a_call_is_searched_once(name: str, text: str, calls: list) -> None:
    """A quadratic search would take more than ten minutes."""
    text = text.replace("{}", "\n" * 500_000)
    content, _, found, _ = run(MarkSplitter(answer_format(name), TOOLS), [text])
    assert found == calls and content in ("Yes.", text)


@pytest.mark.parametrize("end", ["", "</function>", "</parameter></function>"])
def test_unclosed_parameters_are_searched_once(end: str) -> None:
    """A quadratic search would take seconds."""
    arguments = {f"p{i}": "Rome" for i in range(8000)}
    text = "<function=find_trains>" + "".join(f"<parameter={name}>Rome" for name in arguments) + end
    assert run(MarkSplitter(answer_format("qwen3_coder"), TOOLS), [text])[2] == [("find_trains", arguments)]


class CountedPattern:
    """Regular expression that counts the characters that its searches pass.

    Attributes:
        num_passed: number of characters that searches of all patterns have passed.
    """

    num_passed = 0

    def __init__(self, *arguments: Any) -> None:
        self._pattern = re.compile(*arguments)

    def search(self, text: str, at: int) -> re.Match[str] | None:
        found = self._pattern.search(text, at)
        CountedPattern.num_passed += (len(text) if found is None else found.end()) - at
        return found


@pytest.mark.parametrize(("name", "text"), [
    ("longcat", '<longcat_tool_call>{"name": "find_trains", "arguments": {"city": "'),
    ("qwen3_coder", "<tool_call><function=find_trains><parameter=bad name>"),
])  # fmt: skip
def test_calls_that_arrive_in_pieces_are_searched_once(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedPattern, "num_passed", 0)
    counted = SimpleNamespace(compile=CountedPattern, escape=re.escape, DOTALL=re.DOTALL)
    monkeypatch.setattr(call_end, "re", counted)
    splitter = MarkSplitter(answer_format(name), TOOLS)
    pieces = [text, *["Rome " for _ in range(400)]]
    assert [delta for piece in pieces for delta in splitter.add(piece)] == []
    assert CountedPattern.num_passed < 100 * len(pieces)

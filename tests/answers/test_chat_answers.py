"""Parsing of outputs while they arrive: the parts of the text, and the reasoning tokens, for all ways to cut them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_engine.answers.answer_format import AnswerFormat, ReasoningMarks, begins_in_reasoning
from metal_engine.answers.chat_answers import AnswerReader, ChatAnswers
from metal_engine.answers.deltas import AnswerDelta, TextDelta, assemble
from metal_engine.answers.harmony import harmony_format
from metal_engine.answers.tool_plan import NO_TOOLS, ToolPlan, plan_tools
from metal_engine.errors import ParameterError
from metal_engine.output_phases import OutputPhases, ReasoningPhase
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.splitting import THINK, answer_format, cuts
from tests.support.tool_formats import TOOLS

PARSED = ToolPlan(shown=TOOLS, parsed=TOOLS)
CALL = '<tool_call>{"name": "find_trains", "arguments": {"city": "Rome"}}</tool_call>'
FRAGMENTS = ["<think>", "</think>", "<thi", "nk>", "</", "think>", "hm ", "\n", "é", "x", CALL, "<tool_call>", "{}"]
CHANNELS = [
    "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant", "<|end|>", "<|call|>",
    "<|channel|>commentary to=functions.find_trains<|message|>", '{"city": "Rome"}', "hm ", "\n", "<|", "to=", "x",
]  # fmt: skip


# A text, the ends of its tokens, and two ways to cut it into outputs, each as numbers of tokens.
Cut = tuple[str, list[int], list[int], list[int]]


@st.composite
def outputs(draw: st.DrawFn, fragments: list[str]) -> Cut:
    text = "".join(draw(st.lists(st.sampled_from(fragments), max_size=12)))
    ends = [*sorted(draw(st.lists(st.integers(0, len(text)), max_size=40))), len(text)]
    sizes = st.lists(st.integers(1, 6), max_size=12)
    return text, ends, draw(sizes), draw(sizes)


def read(
    reader: AnswerReader, text: str, ends: list[int], sizes: list[int], reason: str
) -> tuple[list[AnswerDelta], list[int]]:
    """Parse a text in outputs of the given sizes.

    Return the deltas, and the count of reasoning tokens after each output.
    """
    deltas: list[AnswerDelta] = []
    counts = [0] * (len(ends) + 1)
    at = shown = 0
    for size in [*sizes, len(ends)]:
        if at < len(ends):
            some = ends[at : at + size]
            at += len(some)
            deltas += reader.add(text[shown : some[-1]], some, reason if at == len(ends) else None)
            shown = some[-1]
            counts[at] = reader.num_reasoning_tokens
    return deltas, counts


TAGS = [
    "<tool_call>", "</tool_call>", "<function=find_trains>", "<function=", "other>", "</function>", "<parameter=city>",
    "<parameter=days>", "</parameter>", "Rome", "3", "\n", "<", "<think>", "</think>", "x",
]  # fmt: skip
LISTS = [
    '[find_trains(city="Rome")]', "[find_trains(", "[find_", "days=3", ")]", "[", ", ", "\n", "x", "<think>",
    "</think>", "<|tool_call_start|>", "<|tool_call_end|>",
]  # fmt: skip
HEADERS = [
    "[TOOL_CALLS]", "find_trains", "[CALL_ID]", "abc", "[ARGS]", '{"city": "Rome"}', '{"city": ', " ", "\n", "[", "x",
    '[{"name": "find_trains", "arguments": {}}]', "<think>", "</think>",
]  # fmt: skip
FORMATS = {
    "marks": (answer_format("json_tools"), FRAGMENTS),
    "harmony": (harmony_format(), CHANNELS),
    "qwen3_coder": (answer_format("qwen3_coder"), TAGS),
    "pythonic": (answer_format("pythonic"), LISTS),
    "mistral": (answer_format("mistral"), HEADERS),
}


@pytest.mark.parametrize(("known", "fragments"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("plan", [NO_TOOLS, PARSED], ids=["plain", "tools"])
@settings(max_examples=60)
@given(
    data=st.data(), incremental=st.booleans(), in_reasoning=st.booleans(), reason=st.sampled_from(["stop", "length"])
)
def test_cuts_make_no_difference(
    known: AnswerFormat,
    fragments: list[str],
    plan: ToolPlan,
    data: st.DataObject,
    incremental: bool,
    in_reasoning: bool,
    reason: str,
) -> None:
    text, ends, one, other = data.draw(outputs(fragments))
    answers = ChatAnswers(known, plan, in_reasoning)
    whole, counts = read(answers.reader(incremental=incremental), text, ends, one, reason)
    again, counts_again = read(answers.reader(incremental=incremental), text, ends, other, reason)
    # Call ids are random. Streamed parts of a malformed call depend on the cuts.
    if not incremental:
        a, b = assemble(whole), assemble(again)
        assert (a.content, a.reasoning) == (b.content, b.reasoning)
        assert [(c.name, c.arguments) for c in a.tool_calls] == [(c.name, c.arguments) for c in b.tool_calls]
    assert counts[-1] == counts_again[-1]
    assert all(x == y for x, y in zip(counts, counts_again, strict=True) if x and y)


def in_reasoning_after(text: str, begun: bool) -> list[bool]:
    """Return for each position in the text whether the next character is reasoning, by definition."""
    states = [begun]
    since = 0
    for end in range(1, len(text) + 1):
        crossed = text[since:end].endswith(THINK.end if states[-1] else THINK.start)
        since = end if crossed else since
        states.append(states[-1] != crossed)
    return states


@settings(max_examples=150)
@given(given_outputs=outputs(FRAGMENTS), begun=st.booleans())
def test_tokens_of_reasoning(given_outputs: Cut, begun: bool) -> None:
    """A token counts if there is reasoning directly before it, in it, or directly after it."""
    text, ends, sizes, _ = given_outputs
    _, counts = read(
        ChatAnswers(AnswerFormat(reasoning=THINK), NO_TOOLS, begun).reader(incremental=False),
        text, ends, sizes, "stop",
    )  # fmt: skip
    states = in_reasoning_after(text, begun)
    tokens = [any(states[begin : end + 1]) for begin, end in pairwise([0, *ends])]
    for place, count in enumerate(counts):
        assert count in (0, sum(tokens[:place]))
    assert counts[-1] == sum(tokens)


def test_harmony_header_of_at_most_1000_characters_is_parsed_for_any_split() -> None:
    """A longer header is text."""
    for length in range(990, 1010):
        header = "<|channel|>analysis".ljust(length)
        text = f"{header}<|message|>hm<|end|>"
        reader = ChatAnswers(harmony_format(), NO_TOOLS).reader
        whole = assemble(reader(incremental=False).add(text, (), "stop"))
        one = reader(incremental=False)
        assert assemble([delta for ch in text for delta in one.add(ch, ())] + one.add("", (), "stop")) == whole
        assert whole.reasoning == ("hm" if length <= 1000 else None)


def test_special_tokens_are_needed_only_if_parsed_marks_are_special() -> None:
    marks = ReasoningMarks("[THINK]", "[/THINK]")
    known = AnswerFormat(tool=answer_format("json_tools").tool, special=True)
    forced = ToolPlan(shown=TOOLS, forced=True)
    for each, plan, needs in [
        (known, NO_TOOLS, False),
        (known, PARSED, True),
        (known, forced, False),
        (AnswerFormat(reasoning=marks, special=True), forced, True),
        (AnswerFormat(reasoning=marks, special=True), NO_TOOLS, True),
        (AnswerFormat(reasoning=marks), PARSED, False),
    ]:
        assert ChatAnswers(each, plan).needs_special_tokens == needs


ARGUMENTS = '{"city": "<think>"}'
LISTED = f'[{{"name": "find_trains", "parameters": {ARGUMENTS}}}]'


@pytest.mark.parametrize(("name", "text"), [("find_trains", ARGUMENTS), (None, LISTED)], ids=["named", "required"])
@pytest.mark.parametrize(("before", "in_reasoning", "past_reasoning", "reasoning"), [
    ("hm\n</think>\n\n", True, False, "hm"),
    ("<think>\nhm</think>", False, False, "hm"),
    ("", False, False, None),
    ("", False, True, None),
], ids=["begun", "own", "none", "past"])  # fmt: skip
def test_forced_calls_follow_the_reasoning(
    name: str | None, text: str, before: str, in_reasoning: bool, past_reasoning: bool, reasoning: str | None
) -> None:
    forced = ToolPlan(shown=TOOLS, asked_for=True, forced=True, name=name)
    answers = ChatAnswers(AnswerFormat(reasoning=THINK), forced, in_reasoning, past_reasoning)
    for parts in cuts(before + text):
        assert parsed(answers, parts) == (None, reasoning, [("find_trains", ARGUMENTS)])
    reader = answers.reader(incremental=True)
    reader.add(before + text, [len(before), len(before + text)], "stop")
    assert reader.num_reasoning_tokens == (reasoning is not None)


def test_forced_calls_of_gpt_oss_follow_its_reasoning() -> None:
    forced = ToolPlan(shown=TOOLS, asked_for=True, forced=True, name="find_trains")
    for arguments in (ARGUMENTS, '{"city": "<|end|><|call|><|start|>"}'):
        for parts in cuts(f"{HARMONY_THOUGHT}<|channel|>final<|message|>{arguments}"):
            assert parsed(ChatAnswers(harmony_format(), forced), parts) == (None, "hm hm", [("find_trains", arguments)])


def test_a_forced_output_that_is_cut_off_within_its_reasoning_has_no_call() -> None:
    forced = ToolPlan(shown=TOOLS, asked_for=True, forced=True, name="find_trains")
    reader = ChatAnswers(AnswerFormat(reasoning=THINK), forced, True).reader(incremental=True)
    assert reader.add("hm", [2], "length") == [TextDelta("reasoning", "hm")]
    assert reader.num_calls == 0


@pytest.mark.parametrize(("given", "content", "has_phase"), [
    ({"json": {"type": "object"}}, '{"a": "<think>"}', True),
    ({"json_object": True}, "{}", True),
    ({"choice": ("yes", "no")}, "yes", True),
    ({"regex": "[ab]+"}, "abba", True),
    ({"grammar": 'start: "a"+'}, "aa", True),
    # The grammar spells out the mark that ends reasoning, so it includes the reasoning.
    ({"regex": r"[a-z ]+</think>\d+"}, "7", False),
])  # fmt: skip
def test_a_structured_output_follows_the_reasoning(given: dict[str, Any], content: str, has_phase: bool) -> None:
    known = answer_format("json_tools")
    begun = ChatAnswers.for_prompt(known, NO_TOOLS, [], lambda ids: "assistant\n<think>\n")
    own = ChatAnswers.for_prompt(known, NO_TOOLS, [], lambda ids: "assistant\n")
    for answers, before in ((begun, "hm hm</think>"), (own, "<think>hm hm</think>"), (own, "")):
        under, params = answers.applied_to(SamplingParams(structured_outputs=StructuredOutputsParams(**given)))
        phase = ReasoningPhase("<think>", "</think>", begins_inside=answers.in_reasoning)
        assert params.phases == (OutputPhases(phase) if has_phase else None)
        if not has_phase and not before:
            continue
        for parts in cuts(before + content):
            for incremental in (False, True):
                found = parsed(under, parts, incremental=incremental)
                assert found == (content, "hm hm" if before else None, [])


STRUCTURE = '{"a": "<think></think><tool_call><|end|><|call|><|return|><|channel|>analysis<|message|>"}'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>hm hm<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.find_trains <|constrain|>json<|message|>{"city": "Rome"}<|call|>'


@pytest.mark.parametrize("plan", [NO_TOOLS, PARSED], ids=["plain", "tools"])
@pytest.mark.parametrize(("known", "before", "content_start", "call"), [
    (answer_format("json_tools"), "<think>hm hm</think>\n", "", CALL),
    (answer_format("mistral"), "<think>hm hm</think>", "", '[TOOL_CALLS]find_trains[ARGS]{"city": "Rome"}'),
    (replace(answer_format("pythonic"), reasoning=None), "", "",
     '<|tool_call_start|>[find_trains(city="Rome")]<|tool_call_end|>'),
    (harmony_format(), HARMONY_THOUGHT, "<|channel|>final<|message|>", HARMONY_CALL),
    (harmony_format(), "", "<|channel|>final<|message|>", HARMONY_CALL),
], ids=["hermes", "mistral", "pythonic", "harmony", "harmony at once"])  # fmt: skip
def test_a_structured_output_or_calls(
    known: AnswerFormat, before: str, content_start: str, call: str, plan: ToolPlan
) -> None:
    """The content is exactly the structured output, with any marks in it. With tools, calls may replace the content."""
    answers = ChatAnswers.for_prompt(known, plan, [], lambda ids: "assistant")
    for structure in (STRUCTURE, '["[TOOL_CALLS]"]', '"<tool_call>"', "{}"):
        under, _ = answers.applied_to(SamplingParams(structured_outputs=StructuredOutputsParams(json=True)))
        for parts in cuts(before + content_start + structure):
            assert parsed(under, parts) == (structure, "hm hm" if before else None, [])
    for parts in cuts(before + call) if plan is PARSED else ():
        content, reasoning, calls = parsed(under, parts)
        assert (content, reasoning, calls) == (None, "hm hm" if before else None, [("find_trains", '{"city": "Rome"}')])


def parsed(
    answers: ChatAnswers, parts: list[str], *, incremental: bool = True
) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """Return the content, the reasoning, and the calls of an answer."""
    reader = answers.reader(incremental=incremental)
    deltas = [delta for part in parts for delta in reader.add(part, ())]
    answer = assemble(deltas + reader.add("", (), "stop"))
    assert reader.num_calls == len(answer.tool_calls)
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


def test_structure_of_a_continued_gpt_oss_message_starts_at_the_first_token() -> None:
    continued = ChatAnswers.for_prompt(harmony_format(), PARSED, [], lambda ids: '<|message|>{"a"', continued="")
    given = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    answers, params = continued.applied_to(given)
    assert params is given
    assert parsed(answers, [': "<|end|>"}']) == (': "<|end|>"}', None, [])


@pytest.mark.parametrize(
    ("prompt", "continued"),
    [("assistant\n<think>\n\n</think>\n\n", None), ("assistant\n</think>", None), ("assistant\nSo:", "So:")],
)
def test_a_prompt_after_the_reasoning(prompt: str, continued: str | None) -> None:
    """The grammar applies from the first token. A budget changes nothing."""
    answers = ChatAnswers.for_prompt(answer_format("json_tools"), NO_TOOLS, [], lambda ids: prompt, continued=continued)
    assert answers.past_reasoning and not answers.in_reasoning
    for more in ({}, {"structured_outputs": StructuredOutputsParams(json_object=True)}, {"stop": ("a",)}):
        params = SamplingParams(**more)  # type: ignore[arg-type]
        under, applied = answers.applied_to(params, budget=0)
        # Only the search for stop strings needs to know reasoning that the model begins again.
        again = OutputPhases(ReasoningPhase("<think>", "</think>", is_past=True)) if params.stop else None
        assert applied.phases == again and not applied.has_phase_rules
        assert params.stop or applied is params
        deltas = under.reader(incremental=True).add('{"a": "</think>"}', (), "stop")
        assert assemble(deltas).content == '{"a": "</think>"}'


@pytest.mark.parametrize(("prompt", "budget", "drops"), [
    ("assistant\n<think>\n\n</think>\n\n", None, True),
    ("assistant\n<think>\n", 7, True),
    ("assistant\n", 7, True),
    ("assistant\n<think>\n", None, False),
    ("assistant\n", None, False),
])  # fmt: skip
@pytest.mark.parametrize("plan", [NO_TOOLS, PARSED], ids=["plain", "tools"])
def test_repeated_end_mark_is_dropped_if_budget_or_prompt_ends_reasoning(
    plan: ToolPlan, prompt: str, budget: int | None, drops: bool
) -> None:
    """It is dropped. A quoted one is content."""
    given = ChatAnswers.for_prompt(answer_format("json_tools"), plan, [], lambda ids: prompt)
    answers, params = given.applied_to(SamplingParams(), budget=budget)
    assert params.phases is None or params.phases.reasoning is None or params.phases.reasoning.drops_end == drops
    begun = "<think>'hm'</think>" if not given.past_reasoning and not given.in_reasoning else ""
    begun = "'hm'</think>" if given.in_reasoning else begun
    reasoning = "'hm'" if begun else None
    for content, expected in (
        ("so\n</think>\n\nYes.", "so\nYes."),
        ("</think>\n</think>Yes.", "Yes."),
        ("`</think>`, '</think>' \"</think>", None),
        ("`</think></think>", "`</think>"),
        ("so `</think>", None),
        ('so "\n</think>', 'so "'),
    ):
        for parts in cuts(begun + content):
            assert parsed(answers, parts) == (content if expected is None or not drops else expected, reasoning, [])


@pytest.mark.parametrize("is_structured", [False, True])
def test_a_stop_string_within_an_argument_cuts_the_call_off(is_structured: bool) -> None:
    """A call is complete if its closing mark is the stop string, or if the model itself ends the output."""
    text = "<tool_call>\n<function=find_trains>\n<parameter=city>\nRome"
    for end, stop, is_call in (
        ("", "\n\n", False), ("", None, True), ("\n</parameter>\n</function>\n", "</tool_call>", True),
    ):  # fmt: skip
        answers = ChatAnswers(answer_format("qwen3_coder"), PARSED, is_structured=is_structured)
        answer = assemble(answers.reader(incremental=False).add(text + end, (), "stop", stop))
        assert [call.arguments for call in answer.tool_calls] == ['{"city": "Rome"}'] * is_call
        assert answer.content == (None if is_call else text)


def test_call_after_a_repeated_reasoning_end_mark_is_parsed() -> None:
    prompt = "assistant\n<think>\n\n</think>\n\n"
    answers = ChatAnswers.for_prompt(answer_format("pythonic"), PARSED, [], lambda ids: prompt)
    for parts in cuts('</think>\n[find_trains(city="Rome")]'):
        assert parsed(answers, parts) == (None, None, [("find_trains", '{"city": "Rome"}')])


def test_no_end_mark_is_dropped_without_reasoning() -> None:
    for known in (AnswerFormat(), replace(answer_format("json_tools"), reasoning=None)):
        answers, _ = ChatAnswers.for_prompt(known, PARSED, [], lambda ids: "</think>").applied_to(
            SamplingParams(), budget=5
        )
        assert parsed(answers, ["so</think> Yes."]) == ("so</think> Yes.", None, [])


def test_outputs_without_rules_have_no_phases() -> None:
    answers = ChatAnswers.for_prompt(answer_format("json_tools"), NO_TOOLS, [], lambda ids: "assistant\n<think>\n")
    params = SamplingParams()
    assert answers.applied_to(params) == (answers, params)
    without = ChatAnswers.for_prompt(AnswerFormat(), NO_TOOLS, [], lambda ids: "")
    assert without.applied_to(params, budget=3) == (without, params)


@pytest.mark.parametrize(("budget", "end_text"), [(0, ""), (5, "So be it."), (None, "")])
def test_reasoning_phase_has_the_end_text_only_with_a_positive_budget(budget: int | None, end_text: str) -> None:
    marks = ReasoningMarks("<think>", "</think>", "So be it.")
    answers = ChatAnswers(AnswerFormat(reasoning=marks), NO_TOOLS, in_reasoning=True)
    _, params = answers.applied_to(SamplingParams(stop=("a",)), budget=budget)
    phase = ReasoningPhase("<think>", "</think>", begins_inside=True, budget=budget, end_text=end_text)
    assert params.phases == OutputPhases(phase)


def test_the_grammar_of_calls() -> None:
    """Calls that the model begins have a grammar, except with parameters that exclude grammars."""
    answers = ChatAnswers(answer_format("json_tools"), PARSED)
    phases = answers.applied_to(SamplingParams())[1].phases
    assert phases is not None and phases.calls is not None and phases.reasoning is not None
    assert [trigger.mark for trigger in phases.calls.triggers] == ["<tool_call>"]
    assert phases.reasoning.calls is None
    stopping = answers.applied_to(SamplingParams(stop=("a",)))[1].phases
    assert stopping is not None and stopping.reasoning is not None and stopping.reasoning.calls is not None
    assert stopping.reasoning.calls.starts == ("<tool_call>",)
    for more in ({"bad_words": ("a",)}, {"allowed_token_ids": (1,)}, {"ignore_eos": True}):
        assert answers.applied_to(SamplingParams(**more))[1].phases is None  # type: ignore[arg-type]
    for tool_grammar in ("required", "never"):
        assert answers.applied_to(SamplingParams(), tool_grammar=tool_grammar)[1].phases is None
    for fields, has_calls in (({"json_object": True}, True), ({"json": {}}, True), ({"choice": ("a",)}, False)):
        phases = answers.applied_to(SamplingParams(structured_outputs=StructuredOutputsParams(**fields)))[1].phases
        assert phases is not None and (phases.calls is not None) == has_calls


def test_forced_call_grammar_replaces_the_structured_output_of_the_request() -> None:
    plan = plan_tools(TOOLS, "required", AnswerFormat(), template_takes_tools=True, auto_tool_choice=True)
    forced = ChatAnswers(AnswerFormat(reasoning=THINK), plan, in_reasoning=True)
    given = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    answers, params = forced.applied_to(given, budget=7)
    assert answers is forced
    assert params.structured_outputs is not None and params.structured_outputs.json == plan.schema
    assert params.phases == OutputPhases(ReasoningPhase("<think>", "</think>", begins_inside=True, budget=7))


@pytest.mark.parametrize("takes_tools", [True, False])
def test_required_calls_without_a_grammar_are_requested_in_the_prompt(takes_tools: bool) -> None:
    for name, text in ((None, "Answer with a function call."), ("find_trains", "call of the function find_trains.")):
        plan = plan_tools(
            TOOLS, "required", answer_format("json_tools"), name=name, template_takes_tools=takes_tools,
            auto_tool_choice=False, forces_calls=False,
        )  # fmt: skip
        assert plan.instructions is not None and plan.instructions.endswith(text)
        given = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
        answers, params = ChatAnswers(answer_format("json_tools"), plan).applied_to(given, tool_grammar="never")
        assert params.structured_outputs is None and params.phases is None
        answer = assemble(answers.reader(incremental=False).add(CALL, (), "stop"))
        assert [call.name for call in answer.tool_calls] == ["find_trains"]


def test_tools_without_marks_to_look_for() -> None:
    """If the format of calls is not known, all text is content."""
    reader = ChatAnswers(AnswerFormat(), PARSED).reader(incremental=True)
    assert reader.add("<tool_call>", (), "stop") == [TextDelta("content", "<tool_call>")]


def test_tools_that_do_not_fit() -> None:
    options = {"template_takes_tools": True, "auto_tool_choice": True}
    for parameters in ([], "", 0, False, True, {"type": 5}):
        tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
        with pytest.raises(ParameterError) as caught:
            plan_tools(tools, "auto", answer_format("json_tools"), **options)
        assert caught.value.name == "tools[1].function.parameters"
    assert plan_tools(TOOLS, "none", answer_format("json_tools"), **options) == NO_TOOLS
    with pytest.raises(ParameterError, match="--tool-call-parser"):
        plan_tools(TOOLS, "auto", AnswerFormat(finds_calls=False), template_takes_tools=False, auto_tool_choice=True)


def test_output_begins_in_reasoning_only_if_the_prompt_ends_in_reasoning() -> None:
    assert begins_in_reasoning(THINK, "assistant\n<think>\n", continues=False)
    assert not begins_in_reasoning(THINK, "assistant\n<think>\n\n</think>\n\n", continues=False)
    assert not begins_in_reasoning(THINK, "say <think> please. assistant\n", continues=False)
    assert begins_in_reasoning(THINK, "assistant\n<think>Well", continues=True)
    assert not begins_in_reasoning(THINK, "assistant\n<think>Well</think>So", continues=True)

"""Creates the readers that parse a chat's outputs while their text arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metal_engine.answers.answer_format import AnswerFormat, begins_in_reasoning, is_past_reasoning
from metal_engine.answers.deltas import AnswerDelta, TextDelta
from metal_engine.answers.forced_calls import ForcedCallSplitter
from metal_engine.answers.format_phases import call_phase, call_text, reasoning_phase
from metal_engine.answers.harmony import HarmonySplitter
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.answers.splitter import Splitter
from metal_engine.answers.structured_splitters import (
    CallsOrStructureSplitter,
    HandoverSplitter,
    ReasoningThenContentSplitter,
)
from metal_engine.answers.tool_plan import NO_TOOLS, ToolPlan
from metal_engine.answers.tool_prompts import prompted_format
from metal_engine.output_phases import OutputPhases, ReasoningPhase
from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams

# Number of tokens at the end of a prompt that are checked for a start of reasoning.
_PROMPT_END_TOKENS = 64


class AnswerReader:
    """Parser of one output. Parses the text while it arrives, and counts the tokens of reasoning.

    Args:
        splitter: splitter of the output's text.
        hides_reasoning: True to leave out the text of the reasoning.

    Attributes:
        num_reasoning_tokens: tokens of reasoning so far. A token that completes the opening mark counts, and so does
            every token of the closing mark.
    """

    def __init__(self, splitter: Splitter, *, hides_reasoning: bool = False) -> None:
        self.num_reasoning_tokens = 0
        self._hides_reasoning = hides_reasoning
        self._splitter = splitter
        self._bounds = splitter.reasoning_bounds
        self._num_passed = 0  # number of bounds at or before the end of the last token

    @property
    def num_calls(self) -> int:
        """Number of tool calls parsed successfully so far."""
        return self._splitter.num_calls

    def add(
        self,
        text: str,
        token_ends: Sequence[int],
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> list[AnswerDelta]:
        """Parse the next piece of text, which can end at any character. Return the resulting deltas.

        Args:
            token_ends: end positions of the tokens, as in :class:`metal_engine.request.RequestOutput`.
            finish_reason: reason for the end of the output; None if more text follows. After ``length``, an incomplete
                call becomes content, or keeps incomplete arguments if it is forced or was streamed. The same applies if
                a stop string cuts off an argument.
            stop_reason: stop string or id of the stop token that ended the output; None if neither did.
        """
        deltas = self._splitter.add(text)
        if self._bounds:
            self._count(token_ends)
        if finish_reason is not None:
            is_cut = finish_reason == "length" or (isinstance(stop_reason, str) and self._splitter.is_in_value)
            deltas += self._splitter.finish(truncated=is_cut)
        if not self._hides_reasoning:
            return deltas
        return [delta for delta in deltas if not (isinstance(delta, TextDelta) and delta.kind == "reasoning")]

    def _count(self, token_ends: Sequence[int]) -> None:
        bounds = self._bounds
        passed = self._num_passed
        for end in token_ends:
            before = passed
            while passed < len(bounds) and bounds[passed] <= end:
                passed += 1
            # After an odd number of bounds, the text is reasoning.
            self.num_reasoning_tokens += before % 2 == 1 or passed > before
        self._num_passed = passed


@dataclass(frozen=True)
class ChatAnswers:
    """Format and tools that all outputs of one chat prompt share.

    Attributes:
        format: output format of the model.
        plan: use of the request's tools.
        in_reasoning: True if the prompt ends within reasoning.
        past_reasoning: True if the output cannot begin with reasoning, because the prompt ends the reasoning.
        is_structured: True if the text after the reasoning is a structured output. If ``plan`` allows calls, the model
            may write tool calls instead of it. Marks within a structured output are ordinary text.
        has_budget: True if a token budget may end the reasoning.
    """

    format: AnswerFormat
    plan: ToolPlan
    in_reasoning: bool = False
    past_reasoning: bool = False
    is_structured: bool = False
    has_budget: bool = False

    @classmethod
    def for_prompt(
        cls,
        answer_format: AnswerFormat,
        plan: ToolPlan,
        prompt: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        *,
        continued: str | None = None,
    ) -> ChatAnswers:
        """Return the ChatAnswers of a tokenized prompt.

        Args:
            answer_format: output format of the model.
            plan: use of the request's tools.
            prompt: token ids of the prompt.
            decode: converts tokens to text, including special tokens.
            continued: text of the assistant's message with which the prompt ends. The output continues this message.
                None if the output begins a new message.
        """
        if plan.prompted:
            answer_format = prompted_format(answer_format)
        marks = answer_format.reasoning
        if marks is None:
            return cls(answer_format, plan)
        continues = continued is not None
        # A long message may have begun its reasoning before these tokens.
        prompt_end = max(decode(prompt[-_PROMPT_END_TOKENS:]), (continued or "").rstrip(), key=len)
        if begins_in_reasoning(marks, prompt_end, continues=continues):
            return cls(answer_format, plan, in_reasoning=True)
        # The end mark of gpt-oss ends messages of all kinds.
        is_past = continues if answer_format.harmony else is_past_reasoning(marks, prompt_end, continues=continues)
        return cls(answer_format, plan, past_reasoning=is_past)

    def applied_to(
        self, params: SamplingParams, *, budget: int | None = None, tool_grammar: str = "auto"
    ) -> tuple[ChatAnswers, SamplingParams]:
        """Adapt the sampling parameters to this format and plan. Return the ChatAnswers and the parameters to use.

        These fields of the sampling parameters can change:

        - ``structured_outputs``: the JSON schema of forced calls; None for required calls without a grammar.
        - ``phases``: the phases of reasoning and tool calls (:class:`metal_engine.output_phases.OutputPhases`).
        - ``skip_special_tokens``: False if parsing needs special tokens.

        If no field changes, ``params`` itself is returned.

        Args:
            params: sampling parameters of the request.
            budget: maximum number of tokens of the reasoning; None: no limit. Ignored if the model does not reason.
            tool_grammar: ``auto`` to constrain calls that the model begins by itself with a grammar. Other values leave
                these calls unconstrained. Forced calls have a grammar in any case.

        Raises:
            ParameterError: the parameters exclude each other, or a tool's parameters have no valid schema.
        """
        structured = params.structured_outputs
        if self.plan.forced:
            structured = StructuredOutputsParams(json=self.plan.schema)
        elif self.plan.asked_for:  # an output that must be a call has no content for the client's format
            structured = None
        calls = None
        if tool_grammar == "auto" and self._may_call(params, structured):
            calls = call_phase(self.format, self.plan.parsed, parallel=self.plan.parallel)
        answers = self if structured is None else self._under(structured, may_call=calls is not None)
        if structured is None and budget is not None and self._reasons:
            answers = replace(self, has_budget=True)
        if self.past_reasoning and calls is None:
            budget = None  # the prompt has ended the reasoning
        reasoning = None
        if structured is not None:
            reasoning = answers._structured_reasoning(structured, budget)
        elif calls is not None or budget is not None or params.stop:
            reasoning = self._reasoning(budget, is_structured=False)
        if reasoning is not None and params.stop and self._finds_calls:
            reasoning = replace(reasoning, calls=call_text(self.format, self.plan.parsed))
        changes: dict[str, Any] = {}
        if structured is not params.structured_outputs:
            changes["structured_outputs"] = structured
        if reasoning is not None or calls is not None:
            changes["phases"] = OutputPhases(reasoning, calls)
        if answers.needs_special_tokens and params.skip_special_tokens:
            changes["skip_special_tokens"] = False
        return answers, params.changed(**changes) if changes else params

    def _may_call(self, params: SamplingParams, structured: StructuredOutputsParams | None) -> bool:
        """Return True if the model may begin tool calls that a grammar constrains.

        ``structured`` is the structured output that such calls would replace; None if the content is free text.
        """
        if not self._finds_calls or params.excludes_grammars:
            return False
        if structured is None:
            return True
        # Other structured outputs describe the whole content. A continued message of gpt-oss cannot become a call.
        is_json = structured.json is not None or bool(structured.json_object)
        return is_json and not (self.format.harmony and self.past_reasoning)

    def _under(self, structured: StructuredOutputsParams, *, may_call: bool) -> ChatAnswers:
        """Return the ChatAnswers for outputs with a grammar: structured outputs, or forced calls.

        A client's regular expression or context-free grammar may itself contain a mark of calls or the end mark of
        reasoning. The marks in the output are then parsed as usual. Otherwise, all of the structured output is content.

        Args:
            structured: structured output that follows the reasoning, or the schema of forced calls.
            may_call: True if the model may write tool calls instead of the structured output.
        """
        if self.plan.forced:
            return self
        if may_call:
            return replace(self, is_structured=True)
        spelled = structured.regex or structured.grammar or ""
        tool, marks = self.format.tool, self.format.reasoning
        spells = (tool is not None and tool.tool_call_start in spelled) or (marks is not None and marks.end in spelled)
        return self if spelled and spells else replace(self, plan=NO_TOOLS, is_structured=True)

    def _structured_reasoning(self, structured: StructuredOutputsParams, budget: int | None) -> ReasoningPhase | None:
        """Return the reasoning phase before a structured output.

        Return None if the structured output begins at the first token, or if its grammar includes the reasoning.
        """
        marks = self.format.reasoning
        spelled = structured.regex or structured.grammar or ""
        if self.past_reasoning or marks is None or marks.end in spelled:
            return None
        return self._reasoning(budget, is_structured=True)

    def _reasoning(self, budget: int | None, *, is_structured: bool) -> ReasoningPhase | None:
        begins_inside = self.in_reasoning
        phase = reasoning_phase(self.format, begins_inside=begins_inside, is_structured=is_structured, budget=budget)
        marks = self.format.reasoning
        if phase is None or marks is None:
            return phase
        # A budget of 0 leaves no reasoning whose end needs an explanation.
        end_text = marks.budget_text if budget else ""
        return replace(phase, end_text=end_text, is_past=self.past_reasoning)

    @property
    def needs_special_tokens(self) -> bool:
        """True if parsing the outputs needs text that includes special tokens."""
        if self.is_structured or self.plan.forced:
            return self.format.special and (self._reasons or self._finds_calls)
        return self.format.special and self._has_marks

    @property
    def _finds_calls(self) -> bool:
        """True if tool calls are parsed from the text."""
        return bool(self.plan.parsed) and self.format.tool is not None

    @property
    def _has_marks(self) -> bool:
        """True if marks in the text start or end tool calls or reasoning."""
        return self._finds_calls or self.format.reasoning is not None

    @property
    def _reasons(self) -> bool:
        """True if an output can begin with reasoning."""
        return self.format.reasoning is not None and not self.past_reasoning

    def reader(self, *, incremental: bool, hides_reasoning: bool = False) -> AnswerReader:
        """Return a parser for one output.

        Args:
            incremental: True to stream the arguments of calls if the format allows it.
            hides_reasoning: True to leave out the text of the reasoning.
        """
        return AnswerReader(self._splitter(incremental), hides_reasoning=hides_reasoning)

    def _splitter(self, incremental: bool) -> Splitter:
        plan, known = self.plan, self.format
        options: dict[str, Any] = {"parallel": plan.parallel, "incremental": incremental}
        if not (plan.forced or self.is_structured):
            if not self._has_marks:
                return Splitter()
            options |= {"in_reasoning": self.in_reasoning, "drops_end": self.past_reasoning or self.has_budget}
            if known.harmony:
                return HarmonySplitter(known, plan.parsed, in_content=self.past_reasoning, **options)
            return MarkSplitter(known, plan.parsed, **options)
        content: Splitter | None = None
        if plan.forced:
            content = ForcedCallSplitter(plan.name, parallel=plan.parallel)
        elif self._finds_calls and not known.harmony:
            assert known.tool is not None
            calls = MarkSplitter(replace(known, reasoning=None, bare=None), plan.parsed, **options)
            content = CallsOrStructureSplitter(known.tool.tool_call_start, calls)
        if not self._reasons:
            return content or Splitter()
        assert known.reasoning is not None
        first: Splitter = ReasoningThenContentSplitter(known.reasoning, in_reasoning=self.in_reasoning)
        if known.harmony:
            options |= {"in_reasoning": self.in_reasoning, "is_structured": True}
            first = HarmonySplitter(known, plan.parsed, **options)
        return first if content is None else HandoverSplitter(first, content)

"""Creates the readers that parse a chat's outputs while their text arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from metal_engine.answers.answer_format import AnswerFormat, begins_in_reasoning
from metal_engine.answers.deltas import AnswerDelta
from metal_engine.answers.forced_calls import ForcedCallSplitter
from metal_engine.answers.harmony import HarmonySplitter
from metal_engine.answers.mark_splitter import MarkSplitter
from metal_engine.answers.splitter import Splitter
from metal_engine.answers.tool_plan import NO_TOOLS, ToolPlan
from metal_engine.answers.tool_prompts import prompted_format
from metal_engine.sampling_params import StructuredOutputsParams

# Number of tokens at the end of a prompt that are checked for a start of reasoning.
_PROMPT_END_TOKENS = 64


class AnswerReader:
    """Parser of one output. Parses the text while it arrives, and counts the tokens of reasoning.

    Attributes:
        num_reasoning_tokens: tokens of reasoning so far. A token that completes the opening mark counts, and so does
            every token of the closing mark.
    """

    def __init__(self, splitter: Splitter) -> None:
        self.num_reasoning_tokens = 0
        self._splitter = splitter
        self._bounds = splitter.reasoning_bounds
        self._num_passed = 0  # number of bounds at or before the end of the last token

    @property
    def num_calls(self) -> int:
        """Number of tool calls parsed successfully so far."""
        return self._splitter.num_calls

    def add(self, text: str, token_ends: Sequence[int], finish_reason: str | None = None) -> list[AnswerDelta]:
        """Parse the next piece of text, which can end at any character. Return the resulting deltas.

        Args:
            token_ends: ends of the tokens of this text, as in :class:`metal_engine.request.RequestOutput`.
            finish_reason: ``stop`` or ``length`` if the output ends with this text.
        """
        deltas = self._splitter.add(text)
        if self._bounds:
            self._count(token_ends)
        if finish_reason is not None:
            deltas += self._splitter.finish(truncated=finish_reason == "length")
        return deltas

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
    """

    format: AnswerFormat
    plan: ToolPlan
    in_reasoning: bool = False

    @classmethod
    def for_prompt(
        cls,
        answer_format: AnswerFormat,
        plan: ToolPlan,
        prompt: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        *,
        continues: bool = False,
    ) -> ChatAnswers:
        """Return the ChatAnswers of a tokenized prompt.

        Args:
            answer_format: output format of the model.
            plan: use of the request's tools.
            prompt: token ids of the prompt.
            decode: converts tokens to text, including special tokens.
            continues: True if the prompt ends within the assistant's message.
        """
        if plan.prompted:
            answer_format = prompted_format(answer_format)
        marks = answer_format.reasoning
        if marks is None:
            return cls(answer_format, plan)
        prompt_end = decode(prompt[-_PROMPT_END_TOKENS:])
        return cls(answer_format, plan, begins_in_reasoning(marks, prompt_end, continues=continues))

    def under(self, grammar: StructuredOutputsParams | None) -> ChatAnswers:
        """Return the ChatAnswers of the same prompt with a grammar that applies from the first output token.

        The grammar decides whether the model can write a mark:

        - JSON, and texts to choose from, have no marks. The whole output is content.
        - A regular expression or a context-free grammar may spell marks out. The output begins as reasoning only if the
          grammar spells out the mark that ends reasoning.
        """
        if grammar is None or self.plan.forced:
            return self
        spelled = grammar.regex or grammar.grammar
        if spelled is None:
            return ChatAnswers(AnswerFormat(), NO_TOOLS)
        marks = self.format.reasoning
        return replace(self, in_reasoning=self.in_reasoning and marks is not None and marks.end in spelled)

    @property
    def needs_special_tokens(self) -> bool:
        """True if parsing the outputs needs text that includes special tokens."""
        return self.format.special and self._has_marks and not self.plan.forced

    @property
    def _has_marks(self) -> bool:
        """True if marks in the text start or end tool calls or reasoning."""
        finds_calls = bool(self.plan.parsed) and self.format.tool is not None
        return finds_calls or self.format.reasoning is not None

    def reader(self, *, incremental: bool) -> AnswerReader:
        """Return a parser for one output.

        Args:
            incremental: True to stream the arguments of calls if the format allows it.
        """
        return AnswerReader(self._splitter(incremental))

    def _splitter(self, incremental: bool) -> Splitter:
        plan = self.plan
        if plan.forced:
            return ForcedCallSplitter(plan.name, parallel=plan.parallel)
        if not self._has_marks:
            return Splitter()
        make = HarmonySplitter if self.format.harmony else MarkSplitter
        return make(
            self.format, plan.parsed, in_reasoning=self.in_reasoning, parallel=plan.parallel, incremental=incremental
        )

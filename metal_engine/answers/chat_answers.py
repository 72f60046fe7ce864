"""From a chat's prompt to its answers: how each is read while its text comes."""

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

# Tokens at the end of a prompt that tell whether its template has begun the reasoning.
_PROMPT_END_TOKENS = 64


class AnswerReader:
    """Reads one answer while it comes, and counts its tokens of reasoning.

    Attributes:
        num_reasoning_tokens: tokens of reasoning so far. A token that completes the opening mark counts, and so does
            every token of the closing mark.
    """

    def __init__(self, splitter: Splitter) -> None:
        self.num_reasoning_tokens = 0
        self._splitter = splitter
        self._bounds = splitter.reasoning_bounds
        self._num_passed = 0  # of the bounds: as many lie at or before the last token's end

    @property
    def num_calls(self) -> int:
        """Tool calls so far; a call counts once it has proved to be one."""
        return self._splitter.num_calls

    def add(self, text: str, token_ends: Sequence[int], finish_reason: str | None = None) -> list[AnswerDelta]:
        """Takes more text, cut anywhere; returns what it comes to.

        Args:
            token_ends: as in :class:`metal_engine.request.RequestOutput`, those that came with the text.
            finish_reason: of an answer that ends with this text, ``stop`` or ``length``.
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
            # After an odd number of bounds there is reasoning.
            self.num_reasoning_tokens += before % 2 == 1 or passed > before
        self._num_passed = passed


@dataclass(frozen=True)
class ChatAnswers:
    """What the answers to one chat prompt have in common.

    Attributes:
        format: the model's.
        plan: what the request's tools come to.
        in_reasoning: whether the prompt has begun the reasoning already.
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
        """The answers to a prompt of these tokens.

        Args:
            decode: makes text of tokens, special ones included.
            continues: whether the prompt ends within the assistant's own message.
        """
        if plan.told:
            answer_format = prompted_format(answer_format)
        marks = answer_format.reasoning
        if marks is None:
            return cls(answer_format, plan)
        prompt_end = decode(prompt[-_PROMPT_END_TOKENS:])
        return cls(answer_format, plan, begins_in_reasoning(marks, prompt_end, continues=continues))

    def under(self, grammar: StructuredOutputsParams | None) -> ChatAnswers:
        """Return the answers to the same prompt if a grammar holds from their first token.

        The grammar decides whether the model can write a mark:

        - JSON, and texts to choose from, have no marks. The whole answer is content.
        - A regular expression or a context-free grammar may spell marks out. The answer begins as reasoning only if
          the grammar spells out the mark that ends reasoning.
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
        """Whether the answers can be read only from text that has its special tokens."""
        return self.format.special and self._has_marks and not self.plan.forced

    @property
    def _has_marks(self) -> bool:
        """True if a mark in the text begins or ends something."""
        finds_calls = bool(self.plan.parsed) and self.format.tool is not None
        return finds_calls or self.format.reasoning is not None

    def reader(self, *, incremental: bool) -> AnswerReader:
        """A reader for one answer.

        Args:
            incremental: whether to give out calls' arguments as they come, where the format allows it.
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

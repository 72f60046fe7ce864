"""Resolves the phases of an output to the tokens of a model."""

from __future__ import annotations

import numpy as np

from metal_engine.grammars.compiler import GrammarCompiler, GrammarTask
from metal_engine.grammars.mark_scanner import FreePhase, Mark, Segment
from metal_engine.grammars.marks import as_lark, without_marks
from metal_engine.grammars.phases import PhaseRules
from metal_engine.output_phases import OutputPhases, ReasoningPhase
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.text.tokenizer import Tokenizer


class PhaseRulesMaker:
    """Factory of :class:`PhaseRules`. Thread-safe.

    Args:
        tokenizer: tokenizer of the model.
        compiler: compiler of grammars for the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._special = tokenizer.special_token_texts

    def rules_for(
        self, phases: OutputPhases, structured: StructuredOutputsParams | None, stop_token_ids: np.ndarray
    ) -> PhaseRules:
        """Return the rules of an output with phases.

        Waits for the compilation of a structured output, but not for the grammars of tool calls.

        Args:
            structured: structured output after the reasoning; None for free content.
            stop_token_ids: tokens that end generation, [S] int32.

        Raises:
            ParameterError: the structured output is invalid.
            OverloadedError: too many grammars are waiting to be compiled.
        """
        reasoning = phases.reasoning
        after: FreePhase | Segment = "content"
        opening = None
        if structured is not None:
            assert reasoning is not None
            tail = self._tail(reasoning.end)
            task = GrammarTask(self._compiler.compile(structured, tail=tail))
            after = Segment(task, tail.encode(), is_call=False)
            if not reasoning.begins_inside:
                opening = GrammarTask(
                    self._compiler.compile(structured, opening=as_lark(reasoning.start, self._special))
                )
        content: list[Mark] = []
        first: list[Mark] = []
        if reasoning is not None:
            content.append(Mark(reasoning.start.encode(), "reasoning"))
        if phases.calls is not None and structured is None:
            for trigger in phases.calls.triggers:
                tail = self._tail(trigger.mark)
                heads = trigger.heads or (("", "call"),)
                tails = {tail + head: rule for head, rule in heads}
                task = self._compiler.compile_call(without_marks(trigger.grammar, self._special), tails)
                for head, _ in heads:
                    segment = Segment(task, (tail + head).encode(), is_call=True, is_whole=trigger.is_whole)
                    (first if trigger.is_whole else content).append(Mark((trigger.mark + head).encode(), segment))
        return PhaseRules(
            begins_in="reasoning" if reasoning is not None and reasoning.begins_inside else "content",
            marks={"content": content, "reasoning": [] if reasoning is None else [Mark(reasoning.end.encode(), after)]},
            first_marks=first,
            token_bytes=self._tokenizer.token_bytes,
            stop_token_ids=stop_token_ids,
            opening=opening,
            opening_mark=b"" if reasoning is None else reasoning.start.encode(),
            budget=None if reasoning is None else reasoning.budget,
            end_tokens=self._end_tokens(reasoning),
            several_calls=phases.calls is None or phases.calls.parallel,
        )

    def _end_tokens(self, reasoning: ReasoningPhase | None) -> tuple[int, ...]:
        if reasoning is None or reasoning.budget is None:
            return ()
        return tuple(self._tokenizer.encode_within(reasoning.end_text + reasoning.end))

    def _tail(self, mark: str) -> str:
        """Return the part of a mark after its last special token."""
        return mark[max((mark.rfind(text) + len(text) for text in self._special if text in mark), default=0) :]

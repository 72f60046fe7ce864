"""Resolves the phases of an output to the tokens of a model."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import numpy as np

from metal_engine.grammars.call_grammar import CallGrammar, tail
from metal_engine.grammars.compiler import GrammarCompiler, GrammarTask
from metal_engine.grammars.mark_scanner import FreePhase, Mark, Segment
from metal_engine.grammars.marks import as_lark, token_ranges
from metal_engine.grammars.phases import PhaseRules
from metal_engine.output_phases import CallTrigger, OutputPhases, ReasoningPhase
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
        # Requests with the same tools share their triggers.
        self._calls: WeakKeyDictionary[CallTrigger, CallGrammar] = WeakKeyDictionary()
        self._lock = threading.Lock()

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
            end, ranges = tail(reasoning.end, self._special), token_ranges(self._special.values())
            task = GrammarTask(self._compiler.compile(structured, tail=end, special=ranges))
            after = Segment(task, end.encode(), is_call=False)
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
                grammar = self._call_grammar(trigger)
                task = self._compiler.compile_call(grammar)
                for text, tail_text in grammar.marks:
                    segment = Segment(task, tail_text.encode(), is_call=True, is_whole=trigger.is_whole)
                    (first if trigger.is_whole else content).append(Mark(text.encode(), segment))
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

    def _call_grammar(self, trigger: CallTrigger) -> CallGrammar:
        with self._lock:
            known = self._calls.get(trigger)
        if known is None:
            known = CallGrammar(trigger, self._special)
            with self._lock:
                self._calls[trigger] = known
        return known

"""Makes the grammars of outputs with phases (:mod:`metal_engine.output_phases`) for a model's tokenizer."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from metal_engine.grammars.call_grammar import CallGrammar, tail
from metal_engine.grammars.compiler import GrammarCompiler, GrammarRefusedError, GrammarTask
from metal_engine.grammars.grammar_client import CompiledGrammar
from metal_engine.grammars.mark_scanner import FreePhase, Mark, PlainTokens, Segment
from metal_engine.grammars.marks import as_lark, token_ranges
from metal_engine.grammars.phase_matcher import PhaseRules
from metal_engine.output_phases import CallPhase, CallTrigger, OutputPhases, ReasoningPhase
from metal_engine.sampling_params import StructuredOutputsParams
from metal_engine.text.tokenizer import Tokenizer
from metal_engine.token_rules import Grammar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class PhaseRulesMaker:
    """Factory of the grammars of outputs with phases. Thread-safe.

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
        self._plain_tokens: dict[frozenset[bytes], PlainTokens] = {}  # by the first bytes of marks
        self._lock = threading.Lock()

    def rules_for(
        self, phases: OutputPhases, structured: StructuredOutputsParams | None, stop_token_ids: np.ndarray
    ) -> Grammar:
        """Return the grammar of an output with phases.

        The result is a :class:`PhaseRules`, except for a structured output without reasoning, which has no phases to
        separate. The result is then the compiled grammar of the structured output and of the calls that may replace it.

        Waits for the compilation of a structured output. Grammars of tool calls in free content are compiled in the
        background.

        Args:
            structured: structured output after the reasoning; None for free content.
            stop_token_ids: tokens that end generation, [S] int32.

        Raises:
            ParameterError: the structured output is invalid.
            OverloadedError: too many grammars are waiting to be compiled.
            Cancelled: the request was cancelled.
        """
        reasoning, calls = phases.reasoning, phases.calls
        after: FreePhase | Segment = "content"
        opening = None
        content = [] if reasoning is None else [Mark(reasoning.start.encode(), "reasoning")]
        if reasoning is not None and reasoning.drops_end:
            content.append(Mark(reasoning.end.encode(), "content"))
        first: list[Mark] = []
        if structured is not None:
            if reasoning is None:
                return self._beside_calls(calls, partial(self._compiled, structured))
            opening, after = self._beside_calls(calls, partial(self._segments, structured, reasoning))
        elif calls is not None:
            for trigger in calls.triggers:
                grammar = self._call_grammar(trigger)
                task = self._compiler.compile_call(grammar)
                for text, tail_text in grammar.marks:
                    segment = Segment(task, tail_text.encode(), is_call=True, is_whole=trigger.is_whole)
                    (first if trigger.is_whole else content).append(Mark(text.encode(), segment))
        reasoning_marks = [] if reasoning is None else [Mark(reasoning.end.encode(), after)]
        if reasoning is not None and reasoning.content_start and isinstance(after, Segment) and not after.tail:
            # The model may leave out the mark after the reasoning, and write the text between messages at once. The
            # grammar of the structured output includes this text.
            begun = reasoning.next_message.encode()
            reasoning_marks.append(Mark(begun, replace(after, tail=begun)))
        return PhaseRules(
            begins_in="reasoning" if reasoning is not None and reasoning.begins_inside else "content",
            marks={"content": content, "reasoning": reasoning_marks},
            plain={"content": self._plain([*content, *first]), "reasoning": self._plain(reasoning_marks)},
            first_marks=first,
            token_bytes=self._tokenizer.token_bytes,
            stop_token_ids=stop_token_ids,
            opening=opening,
            budget=None if reasoning is None else reasoning.budget,
            end_tokens=self._end_tokens(reasoning),
            several_calls=calls is None or calls.parallel,
        )

    def _segments(
        self, structured: StructuredOutputsParams, reasoning: ReasoningPhase, beside: Mapping[str, Any]
    ) -> tuple[Segment | None, Segment]:
        """Compile a structured output for two places: the start of an output, and after its reasoning.

        Args:
            beside: tool calls that may take the place of the structured output (:mod:`metal_engine.grammars.source`).

        Returns:
            The segment at the start, None if the output begins within reasoning, and the segment after the reasoning.
        """
        has_messages = bool(reasoning.content_start)
        opens = {"opening": self._lark(reasoning.start)}
        openings = [reasoning.start]
        if has_messages:
            opens |= {name: self._lark(getattr(reasoning, name)) for name in ("next_message", "content_start")}
            openings.append(reasoning.next_message + reasoning.start)
        texts = tuple(text.encode() for text in openings)
        opening = None
        if not reasoning.begins_inside:
            task = GrammarTask(self._compiled(structured, {**opens, **beside}))
            opening = Segment(task, b"", is_call=False, openings=texts)
        end = tail(reasoning.end, self._special)
        more = opens if has_messages else {}
        task = GrammarTask(self._compiled(structured, {**more, **beside}, end))
        return opening, Segment(task, end.encode(), is_call=False, openings=texts if has_messages else ())

    def _compiled(
        self, structured: StructuredOutputsParams, place: Mapping[str, Any], end: str = ""
    ) -> CompiledGrammar:
        """Compile a structured output that follows the text ``end``.

        Args:
            place: further fields of the wanted grammar (:mod:`metal_engine.grammars.source`): texts and tool calls that
                may precede or replace the structured output.
        """
        special = token_ranges(self._special.values()) if end else ""
        return self._compiler.compile(structured, tail=end, special=special, **place)

    def _beside_calls(self, calls: CallPhase | None, compiled: Callable[[dict[str, Any]], _T]) -> _T:
        """Return the result of ``compiled`` for a structured output that tool calls may replace.

        If the grammar with the calls is refused, the arguments of all tools are left free. If that grammar is refused
        too, the result is a grammar without calls, and the model cannot call tools.

        Args:
            calls: tool calls; None if there are none.
            compiled: compiles the structured output. Its argument is ``{"calls": ...}`` with the tool calls, or ``{}``
                for a grammar without calls.
        """
        if calls is None:
            return compiled({})
        trigger = calls.triggers[0]
        grammar = self._call_grammar(trigger)

        def beside(opened: Collection[int]) -> dict[str, Any]:
            rules = json.loads(grammar.wanted(opened))["call"]
            return {"calls": {"mark": self._lark(trigger.mark), "rules": rules, "several": calls.parallel}}

        try:
            return compiled(beside(grammar.opened))
        except GrammarRefusedError as error:
            problem = error.message
        alone = compiled({})  # raises an error if the structured output is at fault
        logger.warning("tool calls beside a structured output are not constrained by their schemas: %.500s", problem)
        try:
            return compiled(beside(range(grammar.num_arguments)))
        except GrammarRefusedError:
            return alone

    def _lark(self, text: str) -> str:
        return as_lark(text, self._special)

    def _plain(self, marks: list[Mark]) -> PlainTokens:
        first_bytes = frozenset(mark.text[:1] for mark in marks)
        with self._lock:
            if first_bytes not in self._plain_tokens:
                self._plain_tokens[first_bytes] = PlainTokens(first_bytes, self._tokenizer.token_bytes)
            return self._plain_tokens[first_bytes]

    def _end_tokens(self, reasoning: ReasoningPhase | None) -> tuple[int, ...]:
        if reasoning is None or reasoning.budget is None:
            return ()
        structure = reasoning.next_message + reasoning.content_start
        return tuple(self._tokenizer.encode_within(reasoning.end_text + reasoning.end + structure))

    def _call_grammar(self, trigger: CallTrigger) -> CallGrammar:
        with self._lock:
            known = self._calls.get(trigger)
        if known is None:
            known = CallGrammar(trigger, self._special)
            with self._lock:
                self._calls[trigger] = known
        return known

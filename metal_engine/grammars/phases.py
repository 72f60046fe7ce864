"""Grammars of outputs with phases: free text, reasoning within a budget, structured output after it, tool calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from metal_engine.grammars.compiled import GrammarMatcher, SegmentEnd
from metal_engine.grammars.compiler import GrammarTask
from metal_engine.grammars.mark_scanner import FreePhase, Mark, MarkScanner, Segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PhaseRules:
    """Rules of an output's phases for one vocabulary. Implements :class:`metal_engine.sampling_params.Grammar`.

    Attributes:
        begins_in: phase at the start of the output.
        marks: marks that end each free phase.
        first_marks: marks that count only at the beginning of the content.
        token_bytes: returns the UTF-8 bytes of a token.
        stop_token_ids: tokens that end generation, [S] int32.
        opening: grammar of an output that begins with either reasoning or the structured output; None if the output
            begins with free text.
        opening_mark: mark that begins the reasoning of such an output.
        budget: maximum number of reasoning tokens; None: no limit.
        end_tokens: tokens that end the reasoning at the budget.
        several_calls: True if the output may have several tool calls.
    """

    begins_in: FreePhase
    marks: Mapping[FreePhase, Sequence[Mark]]
    token_bytes: Callable[[int], bytes]
    stop_token_ids: np.ndarray
    opening: GrammarTask | None = None
    opening_mark: bytes = b""
    budget: int | None = None
    end_tokens: tuple[int, ...] = ()
    several_calls: bool = True
    first_marks: Sequence[Mark] = ()

    @cached_property
    def begins_free(self) -> bool:
        return self.matcher().is_free

    def matcher(self) -> PhaseMatcher:
        return PhaseMatcher(self)


@dataclass(eq=False)
class _LiveSegment:
    """Segment that an output is in.

    Attributes:
        grammar: grammar of the segment.
        mark: mark that begins the segment; None for the opening of an output.
        is_partial: True if the text is only the beginning of the mark so far.
        unsent: tokens that were not sent to the grammar's process yet.
        sent: tokens that were sent with the last request.
    """

    grammar: GrammarTask
    mark: Mark | None
    is_call: bool
    is_partial: bool
    unsent: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    matcher: GrammarMatcher | None = None

    def send(self, drafts: Sequence[int], deadline: float = 0.0) -> GrammarMatcher | None:
        """Send the tokens, and request masks. Return the matcher; None if compilation has not ended by ``deadline``.

        Raises:
            ValueError: the grammar cannot be compiled.
        """
        if self.matcher is None:
            compiled = self.grammar.result(deadline)
            if compiled is None:
                return None
            self.matcher = compiled.matcher()
        if self.unsent or drafts:
            self.matcher.consume(self.unsent, drafts)
            self.sent, self.unsent = self.unsent, []
        return self.matcher


class PhaseMatcher:
    """Follows one output through its phases. Implements :class:`metal_engine.sampling_params.Matcher`.

    Free text costs no mask. In a segment, the process of the segment's grammar computes the masks.

    Attributes:
        num_unconstrained_calls: number of tool calls whose grammar failed, so that they are free text.
    """

    def __init__(self, rules: PhaseRules) -> None:
        self._rules = rules
        self._scanner = MarkScanner(rules.marks, rules.token_bytes, rules.begins_in, rules.first_marks)
        self._drafts: list[int] = []
        self._segment: _LiveSegment | None = None
        self._opening: bytes | None = None  # text so far, while it may become the opening mark
        self._num_forced: int | None = None  # number of forced tokens so far; None: none are forced
        self._has_ended = False  # True if only a stop token may follow
        self.num_unconstrained_calls = 0
        if rules.opening is not None:
            self._segment = _LiveSegment(rules.opening, None, is_call=False, is_partial=False)
            self._opening = b""
        self._check_budget()

    @property
    def is_free(self) -> bool:
        return self._segment is None and self._num_forced is None and not self._has_ended

    @property
    def must_go_on(self) -> bool:
        return self.is_free and any(
            isinstance(mark.target, Segment) and not mark.target.is_call
            for mark in self._rules.marks[self._scanner.phase]
        )

    def is_free_after(self, drafts: Sequence[int]) -> bool:
        if not self.is_free or not drafts:
            return self.is_free
        scanner = self._scanner.copy()
        return all(scanner.add(draft) is None and not self._is_at_budget(scanner) for draft in drafts)

    def observe(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._opening is not None:
                self._open(token_id)
            elif self._segment is not None and not self._segment.is_partial:
                self._segment.unsent.append(token_id)
            elif not self._has_ended:
                self._scan(token_id)

    def consume(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self.observe(token_ids)
        self._drafts = list(drafts)
        if self._segment is not None:
            try:
                self._segment.send(drafts)
            except ValueError as error:
                self._fail(error)

    def fill_mask(self, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        while (segment := self._segment) is not None:
            try:
                matcher = segment.send((), deadline)
                return matcher is not None and matcher.fill_mask(mask, deadline, num_drafts)
            except SegmentEnd as end:
                self._end_call(segment.sent[end.num_tokens :])
            except ValueError as error:
                if num_drafts:
                    raise
                self._fail(error)
        if self._num_forced is not None:
            return _allow_only(mask, self._rules.end_tokens[self._num_forced + num_drafts :][:1])
        if self._has_ended:
            return _allow_only(mask, self._rules.stop_token_ids)
        if not self.is_free_after(self._drafts[:num_drafts]):
            raise ValueError("the mask after a draft that begins another phase is unknown")
        return True

    def _scan(self, token_id: int) -> None:
        """Process a token of free or forced text."""
        is_forced = self._num_forced is not None
        entry = self._scanner.add(token_id)
        live, self._segment = self._segment, None
        if self._num_forced is not None:
            self._num_forced += 1
            if self._num_forced == len(self._rules.end_tokens):
                self._num_forced = None
        if entry is not None and not (is_forced and entry.is_partial):
            segment = entry.mark.target
            assert isinstance(segment, Segment)
            if live is None or live.mark is not entry.mark:
                live = _LiveSegment(segment.grammar, entry.mark, segment.is_call, entry.is_partial, entry.token_ids)
            else:
                live.unsent.append(token_id)
                live.is_partial = entry.is_partial
            self._segment = live
        elif is_forced and self._num_forced is None and self._scanner.phase == "reasoning":
            # The vocabulary spells the mark in another way than its tokens do.
            self._scanner.enter("content")
        self._check_budget()

    def _open(self, token_id: int) -> None:
        """Process a token of an output that may begin with reasoning."""
        assert self._opening is not None and self._segment is not None
        self._opening += self._rules.token_bytes(token_id)
        text, mark = self._opening.lstrip(), self._rules.opening_mark
        if text.startswith(mark):
            self._segment = self._opening = None
            self._scanner.enter("reasoning", text[len(mark) :])
            self._check_budget()
            return
        self._segment.unsent.append(token_id)
        if not mark.startswith(text):
            self._opening = None

    def _is_at_budget(self, scanner: MarkScanner) -> bool:
        budget = self._rules.budget
        return budget is not None and scanner.phase == "reasoning" and scanner.num_reasoning_tokens >= budget

    def _check_budget(self) -> None:
        """Force the end of the reasoning at the budget."""
        if self.is_free and self._rules.end_tokens and self._is_at_budget(self._scanner):
            self._num_forced = 0

    def _end_call(self, later: Sequence[int]) -> None:
        """End a tool call. ``later`` are tokens after it."""
        assert self._segment is not None and self._segment.mark is not None
        self._has_ended = self._segment.mark.is_whole or not self._rules.several_calls
        self._segment = None
        self._scanner.enter("content")
        self.observe(later)

    def _fail(self, error: ValueError) -> None:
        """Handle the failure of a segment's grammar. A tool call goes on as free text.

        Raises:
            ValueError: the segment is a structured output.
        """
        segment = self._segment
        assert segment is not None
        if not segment.is_call:
            raise error
        if not segment.is_partial:
            self.num_unconstrained_calls += 1
            logger.warning("a tool call is not constrained by its grammar: %s", error)
        self._segment = None
        self._scanner.enter("content")


def _allow_only(mask: np.ndarray, token_ids: Sequence[int] | np.ndarray) -> bool:
    """Write a mask, [W] int32, that allows only some tokens. Returns True.

    Raises:
        ValueError: there are none.
    """
    if not len(token_ids):
        raise ValueError("no token may follow")
    ids = np.array(token_ids, np.int32)
    mask[:] = 0
    np.bitwise_or.at(mask.view(np.uint32), ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return True

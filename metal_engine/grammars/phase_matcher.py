"""Grammars of outputs with phases: free text, reasoning within a budget, structured output after it, tool calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile

import numpy as np

from metal_engine.grammars.compiler import GrammarTask
from metal_engine.grammars.grammar_client import GrammarMatcher, SegmentEnd
from metal_engine.grammars.mark_scanner import FreePhase, Mark, MarkScanner, PlainTokens, Segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PhaseRules:
    """Rules of an output's phases for one vocabulary. Implements :class:`metal_engine.token_rules.Grammar`.

    Reasoning and content are free phases: any text is allowed until a mark ends the phase.

    Attributes:
        begins_in: phase at the start of the output.
        marks: marks that end each free phase.
        plain: tokens without the first byte of any mark, for each free phase.
        first_marks: marks that count only at the beginning of the content.
        token_bytes: returns the UTF-8 bytes of a token.
        stop_token_ids: tokens that end generation, [S] int32.
        opening: segment at the start of an output that begins with either reasoning or the structured output; None if
            the output begins with free text.
        budget: maximum number of reasoning tokens; None: no limit.
        end_tokens: tokens that are forced at the budget, to end the reasoning.
        several_calls: True if the output may have several tool calls.
    """

    begins_in: FreePhase
    marks: Mapping[FreePhase, Sequence[Mark]]
    plain: Mapping[FreePhase, PlainTokens]
    token_bytes: Callable[[int], bytes]
    stop_token_ids: np.ndarray
    opening: Segment | None = None
    budget: int | None = None
    end_tokens: tuple[int, ...] = ()
    several_calls: bool = True
    first_marks: Sequence[Mark] = ()

    @cached_property
    def phases_before_structure(self) -> frozenset[FreePhase]:
        """Free phases with a mark that begins a structured output. A mark that begins a tool call does not count."""
        targets = ((phase, mark.target) for phase, marks in self.marks.items() for mark in marks)
        return frozenset(phase for phase, target in targets if isinstance(target, Segment) and not target.is_call)

    @cached_property
    def begins_free(self) -> bool:
        return self.matcher().is_free

    def matcher(self) -> PhaseMatcher:
        return PhaseMatcher(self)


@dataclass(eq=False)
class _LiveSegment:
    """State of the segment that an output is in.

    Attributes:
        grammar: grammar of the segment.
        mark: mark that begins the segment; None for ``PhaseRules.opening``.
        is_call: True for a tool call; False for a structured output.
        is_partial: True if the output has only the beginning of the mark so far.
        openings: ``Segment.openings`` while the segment's text is the beginning of an opening; empty afterwards.
        begun: text of the segment while ``openings`` has entries.
        unsent: tokens that were not sent to the grammar's process yet.
        sent: tokens of the last message to the grammar's process.
        matcher: matcher of the segment's grammar; None until the grammar is compiled.
    """

    grammar: GrammarTask
    mark: Mark | None
    is_call: bool
    is_partial: bool
    openings: tuple[bytes, ...] = ()
    begun: bytes = b""
    unsent: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    matcher: GrammarMatcher | None = None

    def send(self, drafts: Sequence[int], deadline: float = 0.0) -> GrammarMatcher | None:
        """Send the unsent tokens to the grammar's process, and request the next mask and the masks after the drafts.

        Args:
            drafts: draft tokens after the tokens of the output.
            deadline: latest time to wait for the compilation, of ``time.monotonic`` in seconds; 0: do not wait.

        Returns:
            The matcher; None if the grammar is not compiled yet.

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
    """Matcher that follows one output through its phases. Implements :class:`metal_engine.token_rules.Matcher`.

    Free text needs no masks. In a segment, the process of the segment's grammar computes the masks.

    Attributes:
        num_unconstrained_calls: number of tool calls whose grammar failed, so that they are free text.
    """

    def __init__(self, rules: PhaseRules) -> None:
        self._rules = rules
        self._scanner = MarkScanner(rules.marks, rules.plain, rules.token_bytes, rules.begins_in, rules.first_marks)
        self._drafts: list[int] = []
        self._segment: _LiveSegment | None = None
        self._num_forced: int | None = None  # number of forced tokens so far; None: none are forced
        self._has_ended = False  # True if only a stop token may follow
        self.num_unconstrained_calls = 0
        if (opening := rules.opening) is not None:
            self._segment = _LiveSegment(opening.grammar, None, False, False, opening.openings)
        self._check_budget()

    @property
    def is_free(self) -> bool:
        return self._segment is None and self._num_forced is None and not self._has_ended

    @property
    def must_go_on(self) -> bool:
        return self._scanner.phase in self._rules.phases_before_structure and self.is_free

    @property
    def plain_tokens(self) -> Set[int]:
        counts_tokens = self._scanner.phase == "reasoning" and self._rules.budget is not None
        return self._scanner.known_plain_tokens if self.is_free and not counts_tokens else frozenset()

    def is_free_after(self, drafts: Sequence[int]) -> bool:
        if not self.is_free or not drafts:
            return self.is_free
        scanner = self._scanner.copy()
        return all(scanner.add(draft) is None and not self._is_at_budget(scanner) for draft in drafts)

    def observe(self, token_ids: Sequence[int]) -> None:
        for token_id in dropwhile(self.plain_tokens.__contains__, token_ids):
            segment = self._segment
            if self._num_forced is not None:
                self._num_forced += 1
            if segment is not None and not segment.is_partial:
                segment.unsent.append(token_id)
                if segment.openings:
                    self._reopen(segment, self._rules.token_bytes(token_id))
            elif not self._has_ended:
                self._scan(token_id)
            if self._num_forced == len(self._rules.end_tokens):
                self._end_forced()
            self._check_budget()

    def consume(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self.observe(token_ids)
        self._drafts = list(drafts)
        if self._segment is not None and self._num_forced is None:
            try:
                # The grammar does not have the text after an opening.
                self._segment.send(() if self._segment.openings else drafts)
            except ValueError as error:
                self._fail(error)

    def fill_mask(self, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        if self._num_forced is not None:
            return _allow_only(mask, self._rules.end_tokens[self._num_forced + num_drafts :][:1])
        while (segment := self._segment) is not None:
            if num_drafts and segment.openings:
                raise ValueError("the mask after a draft that may begin another phase is unknown")
            try:
                matcher = segment.send((), deadline)
                return matcher is not None and matcher.fill_mask(mask, deadline, num_drafts)
            except SegmentEnd as end:
                self._end_call(segment.sent[end.num_tokens :])
            except ValueError as error:
                if num_drafts:
                    raise
                self._fail(error)
        if self._has_ended:
            return _allow_only(mask, self._rules.stop_token_ids)
        if not self.is_free_after(self._drafts[:num_drafts]):
            raise ValueError("the mask after a draft that begins another phase is unknown")
        return True

    def _scan(self, token_id: int) -> None:
        """Process a token of free text, or of the beginning of a mark."""
        entry = self._scanner.add(token_id)
        if entry is None and self._segment is None:  # most tokens
            return
        live, self._segment = self._segment, None
        if entry is None:
            return
        segment = entry.mark.target
        assert isinstance(segment, Segment)
        if live is None or live.mark is not entry.mark:
            live = _LiveSegment(segment.grammar, entry.mark, segment.is_call, entry.is_partial, unsent=entry.token_ids)
        else:
            live.unsent.append(token_id)
            live.is_partial = entry.is_partial
        self._segment = live
        if not entry.is_partial and segment.openings:
            live.openings = segment.openings
            self._reopen(live, entry.rest)

    def _reopen(self, live: _LiveSegment, text: bytes) -> None:
        """Begin reasoning if ``text``, the next text of a segment, completes one of the segment's openings."""
        live.begun = (live.begun + text).lstrip()
        for opening in live.openings:
            if live.begun.startswith(opening):
                self._segment = None
                self._scanner.enter("reasoning", live.begun[len(opening) :])
                return
        if not any(opening.startswith(live.begun) for opening in live.openings):
            live.openings = ()

    def _end_forced(self) -> None:
        """Stop forcing tokens after the last token of ``end_tokens``. The reasoning has then ended."""
        self._num_forced = None
        if self._segment is None and self._scanner.phase == "reasoning":
            # The text of the forced tokens differs from the mark, so the scanner has not found the mark.
            self._scanner.enter("content")

    def _is_at_budget(self, scanner: MarkScanner) -> bool:
        budget = self._rules.budget
        return budget is not None and scanner.phase == "reasoning" and scanner.num_reasoning_tokens >= budget

    def _check_budget(self) -> None:
        """Force the end of the reasoning at the budget."""
        if self._rules.end_tokens and self.is_free and self._is_at_budget(self._scanner):
            self._num_forced = 0

    def _end_call(self, later: Sequence[int]) -> None:
        """End a tool call, and process ``later``, the tokens after the call."""
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
    """Write a mask, [W] int32, that allows only ``token_ids``. Return True.

    Raises:
        ValueError: ``token_ids`` is empty.
    """
    if not len(token_ids):
        raise ValueError("no token may follow")
    ids = np.array(token_ids, np.int32)
    mask[:] = 0
    np.bitwise_or.at(mask.view(np.uint32), ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return True

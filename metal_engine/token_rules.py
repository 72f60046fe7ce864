"""Rules for the tokens of outputs: sampling parameters resolved for a model's vocabulary, and grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """Position of one output in its grammar. Belongs to one request. Used by one thread at a time.

    Attributes:
        num_unconstrained_calls: number of tool calls of the output whose grammars have failed. Their text is free.
    """

    num_unconstrained_calls: int

    @property
    def is_free(self) -> bool:
        """True if any token may follow. The next step needs no mask then."""

    @property
    def must_go_on(self) -> bool:
        """True if the text is free now, but the output must not end yet, because a structured output must follow."""

    @property
    def plain_tokens(self) -> Set[int]:
        """Tokens after which the output is still free; empty if the output is not free now.

        The caller may collect these tokens, and pass them to :meth:`observe` or :meth:`consume` only when a token
        follows that is not in the set. The set has only tokens that earlier outputs contained, and grows.
        """

    def is_free_after(self, drafts: Sequence[int]) -> bool:
        """Return True if any token may follow now, and after each of ``drafts``, in order."""

    def observe(self, token_ids: Sequence[int]) -> None:
        """Advance past tokens of the output, without requesting a mask. :meth:`consume` requests the next mask."""

    def consume(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Advance past tokens of the output, and start computing the next mask.

        Args:
            drafts: tokens that may follow. The mask after each draft is computed, too, but the output does not advance
                past the drafts. Must be empty if a mask was requested and :meth:`fill_mask` has not returned it yet.
        """

    def fill_mask(self, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        """Write the mask of the next token: bit ``i % 32`` of word ``i // 32`` of ``mask`` for token ``i``, [W] int32.

        Returns False, without writing, if the mask is not ready at ``deadline``, a time of ``time.monotonic``.

        Args:
            num_drafts: number of drafts between the output and the token. The mask after a draft that is not allowed is
                arbitrary.

        Raises:
            ValueError: the grammar forbids one of the output's tokens or has become too complex, or the mask after the
                drafts is unknown.
        """


class Grammar(Protocol):
    """Compiled grammar, shared by the requests that use it."""

    @property
    def begins_free(self) -> bool:
        """True if any token may begin an output."""

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an output."""


@dataclass(frozen=True, eq=False)
class TokenRules:
    """Sampling parameters resolved for a model's vocabulary. Created once and shared by all outputs of a request.

    Attributes:
        stop_token_ids: tokens that end generation, and that are excluded in the first ``min_tokens`` tokens; [S] int32.
        bad_words: leading tokens of a bad word -> tokens that are excluded after them, because they complete the word.
        allowed: mask of the only allowed tokens: bit ``i % 32`` of word ``i // 32`` for token ``i``, [W] int32; None
            allows all tokens.
        bias_ids: tokens whose logits are biased, [A] int32.
        biases: numbers added to the logits of ``bias_ids``, [A] float32.
        grammar: grammar of the whole output; None without a structured output and without rules for phases.
    """

    stop_token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    bad_words: Mapping[tuple[int, ...], Sequence[int]] = field(default_factory=dict)
    allowed: np.ndarray | None = None
    bias_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    biases: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    grammar: Grammar | None = None


NO_RULES = TokenRules()

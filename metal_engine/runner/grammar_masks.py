"""Masks of the tokens that grammars allow in a step. Other processes compute them while the forward runs."""

from __future__ import annotations

from collections.abc import Sequence, Set

import mlx.core as mx
import numpy as np

from metal_engine.device.info import computes_on_cpu
from metal_engine.token_rules import Grammar


class GrammarState:
    """Position of one request's output in its grammar.

    Args:
        stop_token_ids: tokens that end generation, [S] int32. In the first ``min_tokens`` tokens, they are allowed only
            if the grammar allows no other token.
    """

    def __init__(self, grammar: Grammar, stop_token_ids: np.ndarray, min_tokens: int) -> None:
        self._matcher = grammar.matcher()
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_failed = 0

    @property
    def is_free(self) -> bool:
        """True if any token may follow, so that no mask is needed."""
        return self._matcher.is_free

    @property
    def must_go_on(self) -> bool:
        """True if the text is free now, but the output must not end yet: a structured output must follow."""
        return self._matcher.must_go_on

    @property
    def plain_tokens(self) -> Set[int]:
        """Tokens that need not be observed before another token arrives (:class:`metal_engine.token_rules.Matcher`)."""
        return self._matcher.plain_tokens

    def is_free_after(self, drafts: Sequence[int]) -> bool:
        """Return True if any token may follow now, and after each of ``drafts``, in order."""
        return self._matcher.is_free_after(drafts)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Advance past generated tokens, without computing masks."""
        self._matcher.observe(token_ids)
        self._num_tokens += len(token_ids)

    def take_failed_calls(self) -> int:
        """Return the number of tool calls whose grammars have failed since the last call of this method."""
        failed = self._matcher.num_unconstrained_calls - self._num_failed
        self._num_failed += failed
        return failed

    def consume(self, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Advance past generated tokens. Start computing the masks of the next token and after each draft."""
        self._matcher.consume(token_ids, drafts)
        self._num_tokens += len(token_ids)

    def fill_mask(self, mask: np.ndarray, deadline: float, num_drafts: int = 0) -> bool:
        """Write the mask of the next token, or of the token after ``num_drafts`` drafts, [W] int32.

        Token ``i`` is bit ``i % 32`` of word ``i // 32``. Returns False, without writing, if the mask is not ready at
        ``deadline``, a time of ``time.monotonic``.

        Raises:
            ValueError: the grammar forbids a token, or has become too complex.
        """
        if not self._matcher.fill_mask(mask, deadline, num_drafts):
            return False
        if self._num_tokens + num_drafts < self._min_tokens:
            others = without(mask, self._stop_token_ids)
            if others.any():  # otherwise the grammar is complete
                mask[:] = others
        return True


def without(mask: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Return a mask with the bits of some tokens cleared: [W] int32, token ids [S] int32 -> [W] int32."""
    others = mask.copy()
    bits = np.uint32(1) << (token_ids % 32).astype(np.uint32)
    np.bitwise_and.at(others.view(np.uint32), token_ids // 32, ~bits)
    return others


def apply_masks(logits: mx.array, masks: np.ndarray) -> mx.array:
    """Set the logits of excluded tokens, whose bits are 0, to -inf: [G, V] float32, [G, W] int32 -> [G, V] float32."""
    if not computes_on_cpu():
        from llguidance.mlx import apply_token_bitmask

        return apply_token_bitmask(logits, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little", count=logits.shape[-1])
    return mx.where(mx.array(bits.view(bool)), logits, -np.inf)

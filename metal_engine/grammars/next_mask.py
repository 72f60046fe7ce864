"""Computes the next mask of a matcher, even if plain tokens must spell a special token. Loads only llguidance."""

from __future__ import annotations

import llguidance

# First byte of a special token in llguidance's bytes. UTF-8 has no such byte.
_SPECIAL = b"\xff"


def next_mask(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> bytes:
    """Return the mask of the next token. Bit ``i % 8`` of byte ``i // 8`` is 1 if token ``i`` is allowed.

    If only one text may follow, llguidance's mask has only the first token of this text. If the text begins like a
    special token, the mask has the special token, although the grammar refuses it. This function then returns a mask
    with a plain token instead. A required end-of-sequence token, such as the end of gpt-oss's calls, stays in the mask,
    although llguidance reports it as refused, too.
    """
    mask = bytes(matcher.compute_bitmask())
    only = _only_token(mask)
    if only is None or matcher.is_error() or matcher.is_accepting() or matcher.validate_tokens([only]):
        return mask
    forced = matcher.compute_ff_bytes()
    if forced.startswith(_SPECIAL):
        return mask
    plain = bytearray(len(mask))
    for token in tokenizer.greedy_tokenize(forced.decode(errors="ignore"))[:1]:
        plain[token // 8] = 1 << token % 8
    return bytes(plain)


def _only_token(mask: bytes) -> int | None:
    """Return the only token of a mask; None if there are none or several."""
    after = mask.lstrip(b"\0")
    if not after or after.count(0) != len(after) - 1 or after[0] & (after[0] - 1):
        return None
    return 8 * (len(mask) - len(after)) + after[0].bit_length() - 1

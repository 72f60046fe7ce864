"""When two greedy outputs count as equal, and the check of it.

Matrix products round differently with the number of rows, by about 2.5e-5 in a logit. Where two tokens are closer
than that, either may come first, and what follows differs. So: equal means the same tokens; or, at the first
difference, two tokens whose logits (float32, from the model's own forward over the common beginning) differ by
less than ``MAX_GAP``. Such cases are counted and reported, never more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_GAP = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Two outputs of one prompt. ``first_difference`` is None where they are the same; ``gap`` is the distance of
    the two tokens' logits there (infinite if one output merely ends earlier)."""

    first_difference: int | None = None
    gap: float = 0.0

    @property
    def same(self) -> bool:
        return self.first_difference is None

    @property
    def equal(self) -> bool:
        return self.gap < MAX_GAP


def compare_outputs(model: Any, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Comparison:
    """Compare two greedy outputs of ``prompt``, teacher-forcing ``model`` (a plain mlx-lm model) if they differ."""
    import mlx.core as mx

    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return Comparison() if len(a) == len(b) else Comparison(min(len(a), len(b)), float("inf"))
    logits = model(mx.array([[*prompt, *a[:at]]]))[0, -1].astype(mx.float32)
    return Comparison(at, abs(float(logits[a[at]]) - float(logits[b[at]])))

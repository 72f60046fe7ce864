"""Definition and check of equal greedy outputs.

Matrix products round differently depending on the number of rows, which changes logits by about 2.5e-5. If the logits
of two tokens differ by less, either token can win, and the rest of the output differs. Two outputs are therefore equal
if they have the same tokens, or if the logits of the first differing tokens differ by less than ``MAX_GAP``. These
logits are float32, from the model's own forward on the common prefix. ``Comparison.same`` tells the two cases apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_GAP = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Comparison of two outputs of one prompt.

    Attributes:
        first_difference: index of the first differing token; None if all tokens are equal.
        gap: absolute difference of the logits of the two first differing tokens; 0.0 if all tokens are equal; infinite
            if one output is a prefix of the other.
    """

    first_difference: int | None = None
    gap: float = 0.0

    @property
    def same(self) -> bool:
        return self.first_difference is None

    @property
    def equal(self) -> bool:
        return self.gap < MAX_GAP


def compare_outputs(model: Any, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Comparison:
    """Compare two greedy outputs of ``prompt``, all as token ids.

    If tokens differ, their logits are computed on the common prefix with ``model``, an mlx-lm model.
    """
    import mlx.core as mx

    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return Comparison() if len(a) == len(b) else Comparison(min(len(a), len(b)), float("inf"))
    logits = model(mx.array([[*prompt, *a[:at]]]))[0, -1].astype(mx.float32)
    return Comparison(at, abs(float(logits[a[at]]) - float(logits[b[at]])))

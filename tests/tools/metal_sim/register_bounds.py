"""Bounds on the machine code of kernels for M1 and M2, by shape.

The first line of BOUNDS whose pattern matches "KERNEL DTYPE SHAPE" holds. Another version of the compiler may move
figures a little, so tests allow MARGIN more than a bound says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARGIN = 4  # stores and loads


@dataclass(frozen=True)
class Bound:
    """Largest figures that a kernel may have. None: any.

    Attributes:
        loop_spills: stores and loads of spilled registers in loops.
        outside: stores of spilled registers outside loops.
        loop_size: bytes of the largest loop.
        threadgroups: least number of threadgroups that a core has registers for.
    """

    loop_spills: int | None = 0
    outside: int | None = 16
    loop_size: int | None = None
    threadgroups: int = 1


BOUNDS: tuple[tuple[str, Bound], ...] = (
    # float32 is for comparing results: it takes twice the registers.
    (r" float32 ", Bound(loop_spills=None, outside=None)),
    (r"^(gated_delta|ssm_update) ", Bound(loop_size=4_500, threadgroups=4)),
    (r"^(short_convolution|merge_splits) ", Bound(outside=0, loop_size=500, threadgroups=4)),
    (r"^index_scores ", Bound(outside=0, loop_size=8_000, threadgroups=2)),
    (r"^index_select ", Bound(outside=0, loop_size=2_000)),
    (r"^selected_latents ", Bound(outside=0, loop_size=8_000)),
    # Integers, scales and the numbers of a fragment leave room for one threadgroup. This is so with wide heads, with 24
    # rows, with a window and sinks, and with two row fragments if nothing is staged.
    (r"^paged_attention_quantized \w+ (128, group (20|24)|192:128,.* sinks|256|512|latent)", Bound(loop_size=12_000)),
    (r"^paged_attention_quantized \w+ (96(:64)?|160|192:128),.* nothing staged", Bound(loop_size=12_000)),
    (r"^paged_attention_selected", Bound(loop_size=12_000)),
    # Arrays of 24 rows of a latent take 84 registers.
    (r"^paged_attention \w+ latent 512 \+ 64, group (20|32|64|96|128)", Bound(loop_size=12_000)),
    (r"^paged_attention", Bound(loop_size=12_000, threadgroups=2)),
    (r"", Bound()),
)


def bound_of(description: str) -> Bound:
    """Return the bound of a kernel."""
    return next(bound for pattern, bound in BOUNDS if re.search(pattern, description))

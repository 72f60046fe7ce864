"""Changes how the attention kernels treat images whose rows attend to each other, and tests whether checks detect it.

``python -m tools.metal_sim.image_mutants`` runs all mutants; a number runs that one. See :mod:`kernel_mutants`.
"""

from __future__ import annotations

import sys

import mlx.core as mx

from tools.metal_sim.kernel_mutants import DIRECT, ITEM, STAGED, MutantCase, check_with
from tools.metal_sim.mutants import Mutant, run_mutants

MUTANTS = (
    Mutant(ITEM, "items[item + 7] : 0", "items[item + 7] + 1 : 0",
           equivalent="an image's items end with the image, or with a split"),
    Mutant(ITEM, "items[item + 7] : 0", "items[item + 7] - 1 : 0"),
    Mutant(ITEM, "items[item + 7] : 0", "items[item + 4] : 0"),
    Mutant(ITEM, "items[item + 7] : 0", "0 : 0"),
    Mutant(ITEM, "max(first_position + 1, image_end)", "first_position + 1",
           equivalent="the mask is read for keys that all rows see, and lets them pass"),
    Mutant(ITEM, "max(first_position + 1, image_end)", "last_position + 1"),
    Mutant(ITEM, "max(first_position + 1, image_end)", "key_end"),
    *(Mutant(way, "max(position + 1, image_end)", new) for way in (DIRECT, STAGED)
      for new in ("position + 1", "image_end", "key_end", "max(position + 1, image_end - 1)")),
)  # fmt: skip

# Images of several stages and of few rows, text before and after them, windows that begin within an image, and splits.
CASES = (
    MutantCase([(90, 130), (1, 40)], 2, 1, spans=((3, 80), (81, 86))),
    MutantCase([(90, 130), (1, 40)], 2, 1, window=30, spans=((3, 80), (81, 86))),
    MutantCase([(12, 30), (5, 9)], 2, 1, spans=((0, 3), (4, 8), (12, 14))),
    MutantCase([(12, 30), (5, 9)], 2, 1, window=2, spans=((0, 3), (4, 8), (12, 14))),
    MutantCase([(6, 1300), (40, 1400)], 2, 1, target_threadgroups=1000, spans=((1, 5), (8, 40))),
    # In the chunk of 10, the first row sees all keys of a stage except the last key.
    MutantCase([(10, 72), (60, 90)], 8, 2, spans=((12, 70),)),
    MutantCase([(70, 100)], 1, 1, mx.float16, head_dim=128, tolerance=7e-4, spans=((2, 66),)),
)


caught = check_with(CASES)


if __name__ == "__main__":
    sys.exit(run_mutants(MUTANTS, caught))

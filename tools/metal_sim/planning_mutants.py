"""Changes the plan of the attention kernel's work items in one place at a time and tests whether the checks detect it.

``python -m tools.metal_sim.planning_mutants`` runs all mutants; a number runs that one. A mutant counts as caught when
`tools.fixtures.attention_plan.check_plan` rejects one of its plans, or when planning fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from metal_engine.attention.metal import planning
from tools.fixtures.attention_plan import Options, Planner, Range, check_plan, rows_of
from tools.metal_sim.mutants import Mutant, run_mutants

PLAN = "planning"
SOURCE = Path(planning.__file__).read_text()

MUTANTS = (
    # choice of tiles
    Mutant(PLAN, "if step.num_tokens == step.num_requests and", "if step.num_tokens <= 2 * step.num_requests and"),
    Mutant(PLAN, " and group <= tile_rows:", ":"),
    Mutant(PLAN, "-(-lengths * group // tile_rows)", "lengths * group // tile_rows + 1"),
    Mutant(PLAN, "counts.cumsum() - counts", "counts.cumsum() - counts[0]"),
    # chunks of the context
    Mutant(PLAN, "step.positions % chunk == 0", "step.positions % chunk == 1"),
    Mutant(PLAN, "is_first[step.cu_seqlens_q[:-1]] = True", "is_first[0] = True"),
    Mutant(PLAN, "begins[starts.searchsorted(step.cu_seqlens_q[:-1])]", "begins[: step.num_requests]"),
    Mutant(PLAN, "positions - positions % chunk", "positions % chunk"),
    # images whose rows attend to each other
    Mutant(PLAN, "is_first[edges[edges < step.num_tokens]] = True", ""),
    Mutant(PLAN, "edges = spans.ravel()", "edges = spans[:, 0]"),
    Mutant(PLAN, "edges = spans.ravel()", "edges = spans[:, 1]"),
    Mutant(PLAN, 'searchsorted(tokens, "right") - 1', 'searchsorted(tokens, "left") - 1'),
    Mutant(PLAN, "(own[:, 0] <= tokens) & (tokens < own[:, 1])", "tokens < own[:, 1]"),
    Mutant(PLAN, "(own[:, 0] <= tokens) & (tokens < own[:, 1])", "own[:, 0] <= tokens"),
    Mutant(PLAN, "take(own[:, 1] - 1) + 1)", "take(own[:, 1] - 1))"),
    Mutant(PLAN, "np.maximum(tiles[:, 4], tiles[:, 7])", "tiles[:, 4]"),
    Mutant(PLAN, "begins * tile_rows", "begins"),
    Mutant(PLAN, "np.arange(len(first_rows)) * tile_rows", "np.arange(len(first_rows))"),
    Mutant(PLAN, "tiles[-1, 1] = step.num_tokens * group", "tiles[-1, 1] = step.num_tokens * group - 1"),
    Mutant(PLAN, "tiles[-1, 1] = step.num_tokens * group", "tiles[-1, 1] = step.num_tokens"),
    Mutant(PLAN, "tokens = first_rows // group", "tokens = -(-first_rows // group)"),
    Mutant(PLAN, "step.num_tokens * group) - 1) // group", "step.num_tokens * group)) // group - 1"),
    Mutant(PLAN, "first_rows = tokens * group", "first_rows = tokens"),
    Mutant(PLAN, "= step.positions.take(tokens)", "= step.context_lens.take(step.request_of_row.take(tokens))"),
    Mutant(PLAN, "step.request_of_row.take(tokens)", "0"),
    # choice of keys
    Mutant(PLAN, "positions - (window - 1)", "positions - window"),
    Mutant(PLAN, "positions - (window - 1)", "positions - (window - 2)"),
    Mutant(PLAN, "np.maximum(0, positions", "np.minimum(0, positions"),
    Mutant(PLAN, "step.positions.take(last_tokens) + 1", "positions + 1"),
    Mutant(PLAN, "step.positions.take(last_tokens) + 1", "step.positions.take(last_tokens)"),
    Mutant(PLAN, "stage * key_step + table[:, 3]", "stage * (key_step - 1) + table[:, 3]"),
    Mutant(PLAN, "stage * key_step + table[:, 3]", "stage * key_step"),
    Mutant(PLAN, "= starts[1:]", "= starts[1:] - 1"),
    Mutant(PLAN, "= starts[1:]", "= starts[1:] + key_step"),
    Mutant(PLAN, "table[ends - 1, 4] = tiles[:, 4]", ""),
    Mutant(PLAN, "table[ends - 1, 4] = tiles[:, 4]", "table[-1, 4] = tiles[-1, 4]"),
    Mutant(PLAN, "(keys + (key_step - 1)) // key_step", "keys // key_step"),
    Mutant(PLAN, "np.maximum(index - shorter.repeat(splits), 0)", "0"),
    Mutant(
        PLAN,
        "np.maximum(index - shorter.repeat(splits), 0)",
        "np.minimum(index, (stages - each * splits).repeat(splits))",
    ),
    Mutant(PLAN, "stages - each * splits", "splits - 1"),
    Mutant(PLAN, "(table[:, 3] - table[:, 4])", "(table[:, 4] - table[:, 3])"),
    # number of splits: dependence on requests
    Mutant(PLAN, "work.take(tiles[:, 5])", "work.sum()"),
    Mutant(PLAN, "work.take(tiles[:, 5])", "work.max()"),
    Mutant(PLAN, "np.add.reduceat(stages, begins, dtype=np.int64)", "stages.take(begins)"),
    Mutant(PLAN, " * num_kv_heads  # [B]", "  # [B]"),
    Mutant(PLAN, "* splittable)", "* splittable.all())"),
    Mutant(PLAN, "np.minimum(fair, worth)", "fair"),
    Mutant(PLAN, "np.minimum(fair, worth)", "worth"),
    Mutant(PLAN, "np.minimum(np.minimum(fair, worth), MAX_SPLITS)", "np.minimum(fair, worth)"),
    # number of splits: costs
    Mutant(PLAN, "* splittable)", ")"),
    Mutant(PLAN, "-(-stages // longest)", "most"),
    Mutant(PLAN, "WORTH_MERGING = 0.75", "WORTH_MERGING = 1.0"),
    Mutant(PLAN, "WORTH_MERGING = 0.75", "WORTH_MERGING = 0.25"),
    Mutant(PLAN, "np.maximum.reduceat(lengths, begins).take(tiles[:, 5])", "lengths.max()"),
    Mutant(PLAN, "if len(begins) < len(tiles):", "if False:"),
    Mutant(PLAN, "-(-stages // most)", "stages // most"),
    Mutant(PLAN, "max(MIN_SPLIT_KEYS, 2 * key_step)", "MIN_SPLIT_KEYS"),
    Mutant(PLAN, "MIN_KEYS_TO_SPLIT = 512", "MIN_KEYS_TO_SPLIT = 1024"),
    Mutant(PLAN, "MIN_SPLIT_KEYS = 128", "MIN_SPLIT_KEYS = 64"),
    Mutant(PLAN, "MIN_SPLIT_KEYS = 128", "MIN_SPLIT_KEYS = 256"),
    Mutant(PLAN, "KEYS_PER_ROW = 32", "KEYS_PER_ROW = 8"),
    Mutant(PLAN, "SHORT_ENOUGH_KEYS = 256", "SHORT_ENOUGH_KEYS = 1024"),
    # merging
    Mutant(PLAN, "whole = splits == 1", "whole = splits == 2"),
    Mutant(PLAN, "rows * ~whole", "1 * ~whole"),
    Mutant(PLAN, "rows * ~whole", "rows"),
    Mutant(PLAN, "partial_ends - all_partial_rows", "partial_ends - partial_rows"),
    Mutant(PLAN, "first_partial[whole] = -1", ""),
    Mutant(PLAN, "index * partial_rows.repeat(splits)", "index"),
    Mutant(PLAN, "merges[whole] = 0", ""),
    Mutant(PLAN, "row * (merges[:, 1] > 0)", "0"),
    Mutant(PLAN, "row * (merges[:, 1] > 0)", "row"),
    Mutant(PLAN, "np.arange(len(merges)) - tiles", "np.arange(len(merges)) - 0 * tiles"),
    Mutant(PLAN, "int(partial_ends[-1])", "int(partial_ends[0])"),
)

DECODES = [(1, n) for n in (1, 511, 512, 513, 577, 641, 1000, 1030, 1280, 1559, 4097, 20_000)]
MIX = [(1, 1000), (33, 33), (300, 900), (16, 4097), (17, 4097), (5, 700), (1, 5000), (1, 7)]
MIX_SPANS = ((1, 5), (7, 34), (40, 300), (300, 334), (334, 350), (355, 365))
CASES: tuple[tuple[list[tuple[int, int]], Options] | tuple[list[tuple[int, int]], Options, tuple[Range, ...]], ...] = (
    *((DECODES, Options(group=group, target_threadgroups=320)) for group in (1, 4, 7, 8, 16)),
    *((MIX, Options(group=group, target_threadgroups=1000)) for group in (1, 4, 7, 24)),
    ([*MIX, *DECODES], Options(num_kv_heads=2)),
    ([*MIX, *DECODES], Options(window=700, num_kv_heads=1, key_step=16)),
    ([(1, 900), (2, 2), (64, 1500)], Options(key_step=8, target_threadgroups=1)),
    (DECODES, Options(group=1, key_step=8, target_threadgroups=1000)),
    (DECODES, Options(key_step=128, target_threadgroups=320)),
    ([*MIX, *DECODES], Options(group=24, tile_rows=16, target_threadgroups=1000)),
    ([(1, 600), (1, 40), (3, 1500)], Options(group=128, tile_rows=16, num_kv_heads=1, key_step=8)),
    ([(1, 600), (1, 40)], Options(group=40, tile_rows=32, num_kv_heads=1, key_step=8)),
    ([(1, 3000), (600, 600), (512, 512)], Options(num_kv_heads=2, target_threadgroups=1000)),
    ([*MIX, *DECODES], Options(chunk=700, target_threadgroups=1000)),
    ([(600, 2000), (512, 2048), (1, 5000)], Options(chunk=1024, num_kv_heads=1, target_threadgroups=1000)),
    ([(1, 131_072), (1, 40)], Options(num_kv_heads=1, target_threadgroups=1000, key_step=128)),
    *((MIX, Options(group=group, window=window, target_threadgroups=1000), MIX_SPANS)
      for group in (1, 4, 7) for window in (None, 20, 700)),
    ([(1, 900), (1, 30), (1, 7)], Options(), ((1, 2),)),
)  # fmt: skip


def load_planner(mutant: Mutant | None) -> Planner:
    """Return plan_work_items from a copy of its module that contains the mutation. None: from an unchanged copy."""
    module = ModuleType("mutated_planning")
    sys.modules[module.__name__] = module  # dataclasses look the module up there
    exec(compile(mutant.apply(SOURCE) if mutant else SOURCE, planning.__file__, "exec"), vars(module))
    planner: Planner = module.plan_work_items
    return planner


def caught(mutant: Mutant | None) -> str | None:
    """Return the check's message if the mutant was caught, or None."""
    planner = load_planner(mutant)
    for segments, options, *spans in CASES:
        try:
            with np.errstate(all="raise"):
                check_plan(rows_of(segments, *spans), options, planner)
        except (AssertionError, ArithmeticError, IndexError, ValueError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


if __name__ == "__main__":
    sys.exit(run_mutants(MUTANTS, caught))

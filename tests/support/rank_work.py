"""Runs cases (:mod:`tests.support.rank_cases`) on a rank, each on its own engine in the same group.

Rank 0 writes the results as a JSON list of objects. An element is a text if a rank refused its shard of the model.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_engine.distributed.channel import FrameKind
from metal_engine.distributed.follower import run_frame
from metal_engine.distributed.group import RankGroup, open_group
from metal_engine.errors import UnsupportedModelError
from metal_engine.models.sharding import Sharding
from metal_engine.runner import step_sampling
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.settings.args import EngineArgs
from tests.support.memory import settled_memory
from tests.support.rank_cases import RankCase, make_runner, run_case

WAITS = step_sampling._MASK_SECONDS


def _run(case: RankCase, group: RankGroup) -> Any:
    division = Sharding(group.communication, case.parallel == "pipeline")
    try:
        runner = make_runner(case, division.divide, group.broadcast)
    except UnsupportedModelError as error:
        return str(error)
    memory = Memory(runner)
    if group.rank:
        _follow(runner, group)
        group.exchange("memory", memory.held())
        return None
    step_sampling._MASK_SECONDS = -1.0 if case.late else WAITS
    if case.refused is not None:
        _refuse(runner, case.refused)
    result = run_case(case, group.lead(runner, 600))
    for link in group._links:
        link.send(FrameKind.FIGURES)  # marks the end of this case
    return {**result, "memory": group.exchange("memory", memory.held())}


class Memory:
    """Memory that a rank allocates after this point, in addition to its cache and weights."""

    def __init__(self, runner: ModelRunner) -> None:
        states = runner.pool.states
        self._array_bytes = [array.nbytes for state in states for array in state.arrays.values()]
        mx.eval([state.writes_done_marker() for state in states])
        self._before = settled_memory()

    def held(self) -> dict[str, int]:
        """Return bytes: the peak, the current increase, and the size of the cache's smallest array."""
        most, now = mx.get_peak_memory() - self._before, mx.get_active_memory() - self._before
        return {"most": most, "now": now, "array": min(self._array_bytes)}


def _follow(runner: ModelRunner, group: RankGroup) -> None:
    steps: deque[PendingStep] = deque()
    (leader,) = group._links
    while (frame := leader.receive())[0] is not FrameKind.FIGURES:
        run_frame(runner, steps, leader, *frame)
    # All steps have completed. Only requests that rank 0 has not reported as dropped remain.
    assert not steps


def _refuse(runner: Any, number: int) -> None:
    """Make plan ``number`` fail while its graph is built."""
    count = iter(range(1 << 30))
    for_step = runner._backend.for_step

    def failing(rows: Any) -> Any:
        if next(count) == number:
            raise MemoryError("as asked for")
        return for_step(rows)

    runner._backend.for_step = failing


def _case(told: dict[str, Any]) -> RankCase:
    heads = told.pop("heads")
    return RankCase(**told, heads=None if heads is None else tuple(heads))


def run_cases(cases: str, path: str, num_ranks: int) -> None:
    """Run cases (JSON) as a rank of a group. Rank 0 writes results to a file."""
    told = [_case(one) for one in json.loads(cases)]
    group = open_group(EngineArgs(model="none", tensor_parallel_size=num_ranks, distributed_timeout_seconds=120))
    results = [_run(case, group) for case in told]
    if group.rank == 0:
        Path(path).write_text(json.dumps(results))
    group.exchange("end", {})  # no rank may exit while another rank computes
    for link in group._links:
        link.close()

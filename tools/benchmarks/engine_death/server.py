"""The command ``metal-engine``, with engines in processes that fail on demand (``worker.py``)."""

from __future__ import annotations

from functools import partial

from metal_engine.cli import engine_launch
from metal_engine.cli.main import main
from metal_engine.engine.process.limits import ProcessLimits
from metal_engine.engine.process.spawner import Spawner

WORKER = "tools.benchmarks.engine_death.worker"
# A low limit on the time of a step. With the default, each hang would last a minute.
_LIMITS = ProcessLimits(step_seconds=6.0)

if __name__ == "__main__":
    engine_launch.MODULE = WORKER
    engine_launch.Spawner = partial(Spawner, limits=_LIMITS)  # type: ignore[assignment,misc]
    main()

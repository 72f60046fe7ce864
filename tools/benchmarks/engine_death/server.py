"""The command ``metal-engine``, with engines in processes that fail on demand (``worker.py``)."""

from __future__ import annotations

from typing import Any

from metal_engine.cli import engine_worker
from metal_engine.cli.main import main
from metal_engine.engine.process.supervisor import EngineSupervisor

WORKER = "tools.benchmarks.engine_death.worker"


def _supervisor(module: str, *args: Any, **named: Any) -> EngineSupervisor:
    return EngineSupervisor(WORKER, *args, **named)


if __name__ == "__main__":
    engine_worker.EngineSupervisor = _supervisor  # type: ignore[assignment,misc]
    main()

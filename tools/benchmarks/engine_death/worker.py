"""Process of an engine that fails on demand: after SIGUSR2, its next step raises an error. It also records its loads.

``python -m tools.benchmarks.engine_death.worker`` takes the place of ``metal_engine.cli.engine_worker``.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metal_engine.lazy_packages import make_packages_lazy

# Environment variable: path of a file. Each process appends the start and the end of its load to the file.
LOADS = "ENGINE_DEATH_LOADS"


def failing(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds an engine with ``build``. After each SIGUSR2, the engine's next step fails.

    Installs the signal handler at once. If ``LOADS`` is set, each load appends its start and end to that file.
    """
    is_wanted = threading.Event()
    signal.signal(signal.SIGUSR2, lambda number, frame: is_wanted.set())

    def build_failing(*args: Any, **named: Any) -> Any:
        began = time.monotonic()
        engine = build(*args, **named)
        # This import loads MLX, which must not happen before the engine has set up its BLAS.
        from metal_engine.runner.step_sampling import StepSampling

        result = StepSampling.result

        def result_or_error(sampling: StepSampling) -> Any:
            if is_wanted.is_set():
                is_wanted.clear()
                raise RuntimeError("[METAL] Command buffer execution failed: an error made by the benchmark")
            return result(sampling)

        StepSampling.result = result_or_error  # type: ignore[method-assign]
        if LOADS in os.environ:
            with Path(os.environ[LOADS]).open("a") as file:
                file.write(json.dumps([began, time.monotonic()]) + "\n")
        return engine

    return build_failing


if __name__ == "__main__":
    make_packages_lazy()

    import metal_engine.loading.build

    metal_engine.loading.build.build_engine = failing(metal_engine.loading.build.build_engine)
    runpy.run_module("metal_engine.cli.engine_worker", run_name="__main__", alter_sys=True)

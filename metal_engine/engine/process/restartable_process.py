"""Starts and monitors the process of an engine, and decides whether a new process may replace it when it ends."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from metal_engine.engine.device_access import FULL_ACCESS, DeviceAccess
from metal_engine.engine.process import wire
from metal_engine.engine.process.engine_process import EngineProcess, ProcessEndedError
from metal_engine.engine.process.hang_monitor import HangMonitor
from metal_engine.engine.process.limits import BUSY_DELAY_SECONDS, RESTART_SECONDS, ProcessLimits
from metal_engine.engine.process.spawner import Spawner
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig

logger = logging.getLogger(__name__)


class RestartableProcess:
    """Latest process of an engine. A process that hangs is killed.

    One thread calls all methods except :meth:`stop` and :meth:`kill`.

    Args:
        spawner: starts the processes.
        args: settings of the engine.
        access: grants memory to the first process. Later processes have the same memory.

    Attributes:
        current: process that builds or runs the engine, or the last such process; None before the first process.
    """

    def __init__(self, spawner: Spawner, args: dict[str, Any], access: DeviceAccess) -> None:
        self.current: EngineProcess | None = None
        self._spawner = spawner
        self._args = args
        self._access = access
        self._limits: ProcessLimits = spawner.limits
        self._monitor = HangMonitor(self._end_hang, self._limits.step_seconds)
        self._spare_time = math.inf  # time at which the spare process is started
        self._load_seconds: float | None = None  # duration of the first load
        self._config: EngineConfig | None = None  # configuration of the first process
        self._restarts: list[float] = []
        self._num_fruitless = 0  # number of restarts since the last output
        self._is_stopping = False
        self._lock = threading.Lock()

    def build(self) -> wire.Ready:
        """Build the engine in a process of the spawner. Raises as :meth:`Spawner.take` and :meth:`EngineProcess.build`.

        If the process ends during the first load of a model that is loaded on demand, a second process tries again,
        because requests wait for the model.
        """
        try:
            return self._build()
        except ProcessEndedError as error:
            is_on_demand = self._spawner.is_shared and self._config is None
            if not is_on_demand or self._is_stopping or not self._limits.max_restarts:
                raise
            logger.error("%s; a new process tries once more", error)
        return self._build()

    def _build(self) -> wire.Ready:
        began = time.monotonic()
        process = self._spawner.take()
        with self._lock:
            self.current = process
            if self._is_stopping:
                process.kill()
        if self._load_seconds is not None:
            self._monitor.set_limit(self._limits.of_load(self._load_seconds), "it has been loading the model")
        order = wire.Build(self._args, self._config, self._access.memory_bytes)
        ready = process.build(order, self._access if self._config is None else FULL_ACCESS)
        if self._load_seconds is None:
            self._load_seconds = time.monotonic() - began
            self._config = ready.config
            self._monitor.start()
        assert self._config is not None
        seconds = self._limits.of_steps(self._config.step_seconds, self._config.warm_up_seconds)
        self._monitor.set_limit(seconds, "it has computed no step")
        if self._limits.max_restarts:
            self._spare_time = time.monotonic() + self._limits.spare_delay
        return ready

    def record_stats(self, before: SchedulerStats, now: SchedulerStats, *, has_requests: bool) -> None:
        """Record progress if the engine has planned a step since ``before``, or has no requests.

        Starts the spare process after its delay (:attr:`ProcessLimits.spare_delay`), unless the engine was stopped.

        Args:
            before: previous stats of the engine.
            now: current stats of the engine.
        """
        if now.num_plans != before.num_plans or not has_requests:
            self._monitor.progressed()
        delay = BUSY_DELAY_SECONDS if has_requests else 0.0
        if not self._is_stopping and time.monotonic() > self._spare_time + delay:
            self._spare_time = math.inf
            self._spawner.prepare_spare()

    def record_output(self) -> None:
        """Record that the engine has sent an output."""
        self._num_fruitless = 0

    def may_restart(self) -> bool:
        """Record a restart, and stop monitoring the old process. Return True if a new process may be started.

        Return False if there were too many restarts (:attr:`ProcessLimits.max_restarts`), or if the engine was stopped.
        """
        self._monitor.clear_limit()
        now = time.monotonic()
        self._restarts = [*(at for at in self._restarts if now - at < RESTART_SECONDS), now]
        self._num_fruitless += 1
        return not self._is_stopping and max(len(self._restarts), self._num_fruitless) <= self._limits.max_restarts

    @property
    def refusal(self) -> str:
        """Description of the exceeded limit on new processes, which is appended to the reason of the engine's end.

        Empty if the engine was stopped, or if no new process is allowed at all.
        """
        limit = self._limits.max_restarts
        if self._is_stopping or not limit:
            return ""
        limited = "in a row without output" if self._num_fruitless > limit else f"in {RESTART_SECONDS:g} s"
        return f"; more than {limit} new processes {limited} would be needed"

    def _end_hang(self, hang: str) -> None:
        """End the current process. Runs in the thread of the monitor."""
        if self.current is not None:
            self.current.end_hang(hang)

    def stop(self) -> None:
        """Ask the process to end after the step in flight. No new process is started from then on."""
        with self._lock:
            self._is_stopping = True
            if self.current is not None:
                self.current.send(wire.Shutdown())

    def kill(self) -> None:
        """Kill the process. Close the spawner unless engines share it."""
        self._monitor.close()
        if self.current is not None:
            self.current.kill()
        if not self._spawner.is_shared:
            self._spawner.close()

"""Starts and watches the processes of an engine: one that runs, and a spare process that replaces it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from metal_engine.engine.process import wire
from metal_engine.engine.process.engine_process import EngineProcess
from metal_engine.engine.process.hang_monitor import HangMonitor
from metal_engine.engine.process.limits import NUM_FIRST_PLANS, RESTART_SECONDS, ProcessLimits
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig

logger = logging.getLogger(__name__)


class EngineProcesses:
    """The current process of an engine, and its spare process. A process that hangs is killed.

    One thread calls all methods except :meth:`stop` and :meth:`kill`. The thread must live as long as the processes.

    Args:
        spawn: function that starts a process.
        limits: limits on the time and the number of processes.

    Attributes:
        current: process that builds or runs the engine; None before the first one.
    """

    def __init__(self, spawn: Callable[[], EngineProcess], limits: ProcessLimits) -> None:
        self.current: EngineProcess | None = None
        self._spawn = spawn
        self._limits = limits
        self._monitor = HangMonitor(self._end_hang, limits.step_seconds)
        self._spare: EngineProcess | None = None
        self._spare_time = math.inf  # time at which the spare process is started
        self._load_seconds: float | None = None  # duration of the first load
        self._config: EngineConfig | None = None  # configuration of the first process
        self._restarts: list[float] = []
        self._num_fruitless = 0  # number of restarts since the last output
        self._is_stopping = False
        self._lock = threading.Lock()

    def build(self) -> wire.Ready:
        """Build the engine in the spare process, or in a new process. Raises as :meth:`EngineProcess.build`."""
        began = time.monotonic()
        process, self._spare = self._spare, None
        if process is None or process.has_ended:
            process = self._spawn()
        with self._lock:
            self.current = process
            if self._is_stopping:
                process.kill()
        if self._load_seconds is not None:
            self._monitor.set_limit(self._limits.of_load(self._load_seconds), "it has been loading the model")
        ready = process.build(self._config)
        if self._load_seconds is None:
            self._load_seconds = time.monotonic() - began
            self._config = ready.config
            self._monitor.start()
        self._limit_steps(are_first=True)
        if self._limits.max_restarts:
            self._spare_time = time.monotonic() + self._limits.spare_delay
        return ready

    def _limit_steps(self, *, are_first: bool) -> None:
        assert self._config is not None
        seconds = self._limits.of_steps(self._config.step_seconds, are_first=are_first)
        self._monitor.set_limit(seconds, "it has computed no step")

    def follow(self, before: SchedulerStats, now: SchedulerStats, *, has_requests: bool) -> None:
        """Record the numbers of the engine. If it has requests, only a new plan is progress."""
        if now.num_plans != before.num_plans or not has_requests:
            self._monitor.progressed()
        if before.num_plans < NUM_FIRST_PLANS <= now.num_plans:
            self._limit_steps(are_first=False)
        if time.monotonic() > self._spare_time:
            self._start_spare()

    def _start_spare(self) -> None:
        self._spare_time = math.inf
        try:
            self._spare = self._spawn()
        except OSError as error:
            logger.warning("the engine has no spare process: %s", error)

    def has_output(self) -> None:
        """Record that the engine has computed something."""
        self._num_fruitless = 0

    def may_restart(self) -> bool:
        """Record a restart. Return False if there are too many."""
        self._monitor.clear_limit()
        now = time.monotonic()
        self._restarts = [*(at for at in self._restarts if now - at < RESTART_SECONDS), now]
        self._num_fruitless += 1
        return not self._is_stopping and max(len(self._restarts), self._num_fruitless) <= self._limits.max_restarts

    def _end_hang(self, hang: str) -> None:
        """End the current process. Runs in the thread of the monitor."""
        if self.current is not None:
            self.current.end_hang(hang)

    def stop(self) -> None:
        """End the engine after the step in flight. No new process is started after that."""
        with self._lock:
            self._is_stopping = True
            if self.current is not None:
                self.current.send(wire.Shutdown())

    def kill(self) -> None:
        """End all processes at once."""
        self._monitor.close()
        for process in (self.current, self._spare):
            if process is not None:
                process.kill()

"""Limits on the time and the number of an engine's processes."""

from __future__ import annotations

from dataclasses import dataclass

# Time within which the number of new processes is limited.
RESTART_SECONDS = 60.0
# The largest step was measured without a context, and alone on the device.
_STEP_FACTOR = 10.0
# A step compiles fewer kernels than the check of the model and its largest step at load, which compile most of them.
_WARM_UP_FACTOR = 2.0
_LOAD_FACTOR = 4.0
# How much longer an engine that has requests waits for its spare process.
BUSY_DELAY_SECONDS = 30.0


@dataclass(frozen=True)
class ProcessLimits:
    """Limits on the time and the number of an engine's processes. Times are in seconds.

    Attributes:
        max_restarts: maximum number of new processes within :data:`RESTART_SECONDS`, and of consecutive new processes
            without any output. Beyond it, the engine ends.
        stall_seconds: time after which a process that reads no message is killed.
        step_seconds: minimum time after which a process that computes no step is killed. The time is longer for models
            whose steps are slow, or whose kernels were compiled slowly at load.
        load_seconds: minimum time after which a new process that loads the model again is killed.
        spare_delay: time from the start of an engine to the start of its spare process, whose imports take a second of
            a core. While the engine has requests, the time is longer by :data:`BUSY_DELAY_SECONDS`.
    """

    max_restarts: int = 10
    stall_seconds: float = 30.0
    step_seconds: float = 60.0
    load_seconds: float = 600.0
    spare_delay: float = 5.0

    def of_steps(self, largest_seconds: float, warm_up_seconds: float) -> float:
        """Return the time after which a process that computes no step is killed.

        Args:
            largest_seconds: measured time of the largest step without a context.
            warm_up_seconds: time of the model's check and largest step at the first load.
        """
        return max(self.step_seconds, _STEP_FACTOR * largest_seconds, _WARM_UP_FACTOR * warm_up_seconds)

    def of_load(self, first_seconds: float) -> float:
        """Return the time after which a new process that loads the model again is killed.

        Args:
            first_seconds: time of an earlier load.
        """
        return max(self.load_seconds, _LOAD_FACTOR * first_seconds)

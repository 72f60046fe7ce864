"""Limits on the time and the number of an engine's processes."""

from __future__ import annotations

from dataclasses import dataclass

# Period in seconds within which the number of new processes is limited.
RESTART_SECONDS = 60.0
# Time limit of a step, relative to the measured time of the largest step. The measured step had no context, and ran
# alone on the device.
_STEP_FACTOR = 10.0
# Time limit of a step, relative to the time of the model's check and largest step at load, which compile most kernels.
_WARM_UP_FACTOR = 2.0
# Time limit of a later load, relative to the first load.
_LOAD_FACTOR = 4.0
# Additional delay in seconds until the spare process is started, while the engine has requests.
BUSY_DELAY_SECONDS = 30.0


@dataclass(frozen=True)
class ProcessLimits:
    """Limits on the time and the number of an engine's processes. Times are in seconds.

    Attributes:
        max_restarts: maximum number of new processes within :data:`RESTART_SECONDS`, and of consecutive new processes
            without any output. If more would be needed, the engine ends. 0: the engine ends with its first process.
        stall_seconds: time after which a process that reads no message is killed.
        step_seconds: minimum time limit for a step: a process that has requests is killed if it plans no step for
            longer. The limit is higher for models whose steps are slow, or whose kernels were compiled slowly at load.
        load_seconds: minimum time after which a new process that loads the model again is killed.
        spare_delay: time from the start of an engine to the start of its spare process, whose imports take a second of
            CPU time. While the engine has requests, the delay is longer by :data:`BUSY_DELAY_SECONDS`.
    """

    max_restarts: int = 10
    stall_seconds: float = 30.0
    step_seconds: float = 60.0
    load_seconds: float = 600.0
    spare_delay: float = 5.0

    def of_steps(self, largest_seconds: float, warm_up_seconds: float) -> float:
        """Return the time limit for a step in seconds, at least :attr:`step_seconds`.

        Args:
            largest_seconds: measured time of the largest step without a context.
            warm_up_seconds: time of the model's check and largest step at the first load.
        """
        return max(self.step_seconds, _STEP_FACTOR * largest_seconds, _WARM_UP_FACTOR * warm_up_seconds)

    def of_load(self, first_seconds: float) -> float:
        """Return the time in seconds after which a new process that loads the model again is killed.

        Args:
            first_seconds: duration of the first load in seconds.
        """
        return max(self.load_seconds, _LOAD_FACTOR * first_seconds)

"""Limits on the time and the number of an engine's processes."""

from __future__ import annotations

from dataclasses import dataclass

# Time within which the number of new processes is limited.
RESTART_SECONDS = 60.0
# Number of plans of a new process whose steps may compile kernels.
NUM_FIRST_PLANS = 32
# The largest step was measured without a context, and alone on the device.
_STEP_FACTOR = 10.0
_FIRST_STEPS_FACTOR = 10.0
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
        step_seconds: minimum time after which a process that computes no step is killed. The time is longer for the
            first steps, and for models with slow steps.
        load_seconds: minimum time after which a new process that loads the model again is killed.
        spare_delay: time from the start of an engine to the start of its spare process, whose imports take a second of
            a core. While the engine has requests, the time is longer by :data:`BUSY_DELAY_SECONDS`.
    """

    max_restarts: int = 10
    stall_seconds: float = 30.0
    step_seconds: float = 60.0
    load_seconds: float = 600.0
    spare_delay: float = 5.0

    def of_steps(self, largest_seconds: float, *, are_first: bool) -> float:
        """Return the time after which a process that computes no step is killed.

        Args:
            largest_seconds: measured time of the largest step without a context.
            are_first: True for the first steps of a process, which may compile kernels.
        """
        seconds = max(self.step_seconds, _STEP_FACTOR * largest_seconds)
        return seconds * _FIRST_STEPS_FACTOR if are_first else seconds

    def of_load(self, first_seconds: float) -> float:
        """Return the time after which a new process that loads the model again is killed.

        Args:
            first_seconds: time of an earlier load.
        """
        return max(self.load_seconds, _LOAD_FACTOR * first_seconds)

"""Spawns the processes of engines, and keeps a spare process that has imported its modules."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from metal_engine.engine.process import wire
from metal_engine.engine.process.engine_process import EngineProcess
from metal_engine.engine.process.limits import ProcessLimits
from metal_engine.settings.config import DeviceInfo

logger = logging.getLogger(__name__)


class Spawner:
    """Spawns processes of engines. A spare process has imported its modules and waits for its model. Thread-safe.

    On Linux, the system ends a process when the thread that has spawned it ends. The thread of the spawner therefore
    spawns all processes.

    Args:
        module: main module of the processes, which gets the descriptor of a socket as its argument.
        start: first message to each process.
        limits: limits on the time and the number of an engine's processes.
        is_shared: True if engines of several models use the spawner, which then ends with the server.
    """

    def __init__(
        self,
        module: str,
        start: wire.Start,
        limits: ProcessLimits = ProcessLimits(),  # noqa: B008  (it is frozen)
        *,
        is_shared: bool = False,
    ) -> None:
        self.limits = limits
        self.is_shared = is_shared
        self.spare: EngineProcess | None = None
        self._module = module
        self._start = start
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-spawner")

    def take(self) -> EngineProcess:
        """Return the spare process, or a new process. Raises OSError if the system cannot start a process."""
        return self._thread.submit(self._take).result()

    def prepare_spare(self) -> None:
        """Start a spare process without waiting for it. No effect if a spare process runs."""
        self._thread.submit(self._prepare)

    def device(self) -> DeviceInfo:
        """Start a process that reports its device, and return the device. The process becomes the spare process.

        Call it before any other process runs. Raises as :meth:`EngineProcess.device`.
        """
        process = self.take()
        device = process.device()
        self.spare = process
        return device

    def close(self) -> None:
        """Kill the spare process, and end the thread of the spawner. No further process can be started.

        On Linux, the system kills all processes of the spawner when its thread ends. Call this method after their end.
        """
        self._thread.shutdown()
        if self.spare is not None:
            self.spare.kill()

    # --- in the thread ---

    def _spawn(self) -> EngineProcess:
        return EngineProcess(self._module, self._start, self.limits.stall_seconds)

    def _take(self) -> EngineProcess:
        spare, self.spare = self.spare, None
        return self._spawn() if spare is None or spare.has_ended else spare

    def _prepare(self) -> None:
        if self.spare is None or self.spare.has_ended:
            try:
                self.spare = self._spawn()
            except OSError as error:
                logger.warning("the engine has no spare process: %s", error)

"""Interface between the clients of an engine and the engine, which runs in a thread or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from metal_engine.engine.engine_client import TokenEngine
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.engine.step_observer import FrameSink
from metal_engine.lora_adapter import Adapter
from metal_engine.request import RequestOutput
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig

OutputSink = Callable[[list[RequestOutput]], None]
EndSink = Callable[[str], None]


class EngineDeadError(RuntimeError):
    """Raised if the engine has ended, so that no request can be served."""


class AdapterTable(Protocol):
    """LoRA adapters of an engine by name. See :class:`metal_engine.lora.registry.AdapterRegistry`."""

    @property
    def adapters(self) -> list[Adapter]: ...

    def find(self, name: str | None) -> Adapter | None: ...

    def unload(self, name: str) -> bool: ...


class StartedEngine(Protocol):
    """Configuration, stats and metrics of a started engine, and the preparer of its requests.

    Attributes:
        adapters: LoRA adapters; None if the model was loaded without LoRA support.
        stats: current numbers of the scheduler.
        metrics: counters and histograms.
    """

    @property
    def config(self) -> EngineConfig: ...

    @property
    def preparer(self) -> RequestPreparer: ...

    @property
    def adapters(self) -> AdapterTable | None: ...

    @property
    def stats(self) -> SchedulerStats: ...

    @property
    def metrics(self) -> EngineMetrics: ...


class Transport(TokenEngine, Protocol):
    """Starts an engine, takes its requests, and passes on its outputs. Thread-safe, except :meth:`start`.

    Attributes:
        error: error that ended the engine; None while it runs or after a shutdown.
    """

    error: BaseException | None

    @property
    def is_restarting(self) -> bool:
        """True while requests wait for a new engine, because the previous engine has ended."""

    def start(self, on_outputs: OutputSink, on_end: EndSink = lambda message: None) -> StartedEngine:
        """Start the engine and wait until it is ready.

        Args:
            on_outputs: callback for the outputs of each step. Called in another thread. Must not block.
            on_end: callback that receives a message when the engine ends. No outputs follow.

        Raises:
            ModelLoadError: the model cannot be loaded or run, or the load was cancelled.
            ConfigError: the settings cannot work.
        """

    def watch(self, on_frame: FrameSink | None) -> None:
        """Set the callback for frames (:class:`Frame`) from the next step on. None turns frames off.

        The callback runs in another thread and must not block.
        """

    def load_adapter(self, name: str, path: str, within: Path, *, in_place: bool) -> Adapter:
        """Load a LoRA adapter, and wait for it. See :meth:`metal_engine.lora.registry.AdapterRegistry.load`.

        Also raises AdapterError without LoRA support, and EngineDeadError if the engine has ended.
        """

    def release_memory(self) -> None:
        """Free the KV cache of an idle engine until its next request. See :meth:`EngineCore.release_memory`."""

    def shutdown(self, timeout: float | None = 10.0) -> bool:
        """Stop after the step in flight. Return True if the engine has ended within ``timeout`` seconds.

        Blocks until the engine has ended or ``timeout`` has passed. None waits without a limit.
        """

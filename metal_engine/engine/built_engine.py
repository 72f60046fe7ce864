"""The parts of a loaded model that serve requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metal_engine.engine.core import EngineCore
from metal_engine.engine.metrics import EngineMetrics
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import EngineConfig


@dataclass(frozen=True)
class BuiltEngine:
    """Loaded model that serves requests.

    Attributes:
        core: step loop. Its steps run in the thread that built the engine.
        preparer: prepares requests for ``core`` in any thread.
        adapters: LoRA adapters whose weights the model holds; None if the model was loaded without LoRA support.
        tokenizer_path: folder or GGUF file of the tokenizer; None if the tokenizer was not read from a file.
    """

    core: EngineCore
    preparer: RequestPreparer
    adapters: AdapterRegistry | None = None
    tokenizer_path: Path | None = None

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    @property
    def stats(self) -> SchedulerStats:
        return self.core.stats

    @property
    def metrics(self) -> EngineMetrics:
        return self.core.metrics

    def close(self) -> None:
        """Close the preparer and the core.

        Call it in the thread that ran the steps. The engine cannot be used afterwards.
        """
        self.preparer.close()
        self.core.close()

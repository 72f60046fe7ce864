"""The parts of a loaded model that serve requests."""

from __future__ import annotations

from dataclasses import dataclass

from metal_engine.engine.core import EngineCore
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.lora.registry import AdapterRegistry


@dataclass(frozen=True)
class BuiltEngine:
    """Loaded model that serves requests.

    Attributes:
        core: step loop. Its steps run in the thread that built the engine.
        preparer: prepares requests for ``core`` in any thread.
        adapters: LoRA adapters whose weights the model holds; None if the model was loaded without LoRA support.
    """

    core: EngineCore
    preparer: RequestPreparer
    adapters: AdapterRegistry | None = None

    def close(self) -> None:
        """Close the preparer and the core.

        Call it in the thread that ran the steps. The engine cannot be used afterwards.
        """
        self.preparer.close()
        self.core.close()

"""metal-engine: an LLM inference engine for Apple Silicon.

Importing the package does not load MLX or a model. The first use of a name below imports its module.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metal_engine.llm import LLM
    from metal_engine.lora_adapter import LoRARequest
    from metal_engine.pooling_params import PoolingParams
    from metal_engine.request import RequestOutput
    from metal_engine.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

# Keep transformers from warning at import that PyTorch is missing: this package works without PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__all__ = [
    "LLM",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "metal_engine.llm",
    "LoRARequest": "metal_engine.lora_adapter",
    "PoolingParams": "metal_engine.pooling_params",
    "SamplingParams": "metal_engine.sampling_params",
    "StructuredOutputsParams": "metal_engine.sampling_params",
    "RequestOutput": "metal_engine.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

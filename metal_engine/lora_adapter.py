"""LoRA adapters as requests know them: by a name, which stands for low-rank additions to a model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter whose weights an engine holds, in a slot that is its own for as long as anything refers to this.

    Attributes:
        name: under which it is served.
        path: of its files, as it was given.
        slot: where its weights are; 1 or more.
        rank: of its products.
        fingerprint: of its name and its weights, in hex digits; what KV depends on besides the model.
        base_model_name: what it is said to be an adapter of; None: of the model that is served.
    """

    name: str
    path: str
    slot: int
    rank: int
    fingerprint: str
    base_model_name: str | None = None


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for prompts of :class:`metal_engine.LLM`, by its name. (Names and meanings are vLLM's.)

    Attributes:
        lora_name: of an adapter that is loaded, or that is to be loaded from ``lora_path``.
        lora_int_id: what vLLM tells adapters apart by; without effect here.
        lora_path: folder of its files.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True)
class AdapterTargets:
    """The layers of a model that adapters may add to, by the names of its modules.

    Attributes:
        shapes: numbers of inputs and outputs.
        refused: of other linear layers, why they may not be added to.
        interleaved: of those whose outputs are in llama.cpp's order, their numbers of heads. Output 2i + j of a head is
            what elsewhere is output j * n / 2 + i of its n.
        largest: magnitude that a weight may have, of the type that the model computes in.
    """

    shapes: Mapping[str, tuple[int, int]]
    refused: Mapping[str, str] = field(default_factory=dict)
    interleaved: Mapping[str, int] = field(default_factory=dict)
    largest: float = LARGEST_FLOAT32

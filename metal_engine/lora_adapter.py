"""LoRA adapters for requests: low-rank additions to a model's linear layers, selected by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA adapter whose weights the engine holds. Its slot stays reserved while there is a reference to this object.

    Attributes:
        name: name under which the adapter is served.
        path: path of its files, as given by the user.
        slot: slot that holds its weights, 1 or more. If the engine runs in another process, a key of the adapter
            instead (:class:`metal_engine.engine.process.remote_adapters.RemoteAdapters`).
        rank: LoRA rank.
        fingerprint: hash of the adapter's name and weights, in hex digits. The block hashes of its requests include it.
        base_model_name: declared base model of the adapter; None: the served model.
    """

    name: str
    path: str
    slot: int
    rank: int
    fingerprint: str
    base_model_name: str | None = None


@dataclass(frozen=True)
class LoRARequest:
    """LoRA adapter for prompts of :class:`metal_engine.LLM`, by name. The names and meanings of the fields are vLLM's.

    Attributes:
        lora_name: name of a loaded adapter, or name for the adapter to load from ``lora_path``.
        lora_int_id: id of the adapter in vLLM; ignored here.
        lora_path: folder of the adapter's files. May be empty if the adapter is loaded already.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True)
class AdapterTargets:
    """Layers of a model that LoRA adapters can change, by module name.

    Attributes:
        shapes: module name -> (number of inputs, number of outputs).
        refused: module name -> reason why adapters cannot change the layer, for linear layers that are not in
            ``shapes``.
        interleaved: module name -> number of heads, for layers whose outputs are in llama.cpp's order. Within a head of
            n outputs, output 2i + j (j is 0 or 1) is output j * n / 2 + i of the usual order. With n = 4, outputs
            0, 1, 2, 3 are the usual outputs 0, 2, 1, 3.
        largest: largest weight magnitude that the model's compute dtype can represent.
    """

    shapes: Mapping[str, tuple[int, int]]
    refused: Mapping[str, str] = field(default_factory=dict)
    interleaved: Mapping[str, int] = field(default_factory=dict)
    largest: float = LARGEST_FLOAT32

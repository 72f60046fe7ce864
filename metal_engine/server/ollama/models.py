"""Descriptions of the models for Ollama's clients."""

from __future__ import annotations

import hashlib
from typing import Any

from metal_engine.answers.tool_plan import plan_tools
from metal_engine.errors import ParameterError
from metal_engine.server.generation.model_provider import ModelProvider
from metal_engine.server.generation.preparation import LATEST, ServedModel
from metal_engine.server.ollama.protocol import ListedModel, ModelDetails, RunningModel, Shown
from metal_engine.server.ollama.requests import can_think

# Expiry time of a loaded model: it stays loaded unless another model needs its memory.
_NEVER = "9999-12-31T23:59:59Z"
# Details of a model that is not loaded.
_UNKNOWN = ModelDetails(family="", families=[], parameter_size="", quantization_level="")


def tagged(name: str) -> str:
    """Return a name as Ollama lists it: with the tag ``:latest`` if it has no tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def details(served: ServedModel) -> ModelDetails:
    info = served.engine.config.model
    return ModelDetails(
        family=info.model_type,
        families=[info.model_type],
        parameter_size=_size(info.num_params),
        quantization_level=_level(info.weight_bytes, info.num_params, info.dtype),
    )


def listed(models: ModelProvider, started_at: str) -> list[ListedModel]:
    """List every name of every model and LoRA adapter. For models that are not loaded, only the names are known.

    Args:
        started_at: start time of the server in Ollama's format, for the field ``modified_at``.
    """
    loaded = {name: served for served in models.loaded for name in served.all_names}
    return [_listed(name, loaded.get(name), started_at) for name in models.all_names]


def _listed(name: str, served: ServedModel | None, started_at: str) -> ListedModel:
    size = 0 if served is None else served.engine.config.model.weight_bytes
    return ListedModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=started_at,
        size=size,
        digest=hashlib.sha256(f"{name} {size}".encode()).hexdigest(),
        details=_UNKNOWN if served is None else details(served),
    )


def running(models: ModelProvider, started_at: str) -> list[RunningModel]:
    """List every name of the loaded models and of their LoRA adapters. ``started_at`` is as in :func:`listed`."""
    found = []
    for served in models.loaded:
        config = served.engine.config
        for name in served.all_names:
            model = _listed(name, served, started_at)
            found.append(
                RunningModel(
                    **model.model_dump(exclude={"modified_at"}),
                    expires_at=_NEVER,
                    size_vram=model.size if config.device.kind == "metal" else 0,
                    context_length=config.scheduler.max_model_len,
                )
            )
    return found


def shown(models: ModelProvider, name: str, started_at: str) -> Shown:
    """Return a model's details. Does not load the model. If it is not loaded, most details are empty.

    Raises:
        APIError: status 404, for an unknown name.
    """
    served = models.find_loaded(name)
    if served is None:
        return Shown(
            parameters="",
            template="",
            details=_UNKNOWN,
            model_info={},
            capabilities=["completion"],
            modified_at=started_at,
        )
    info, tokenizer = served.engine.config.model, served.engine.tokenizer
    kind = info.model_type
    facts: dict[str, Any] = {
        "general.architecture": kind,
        "general.parameter_count": info.num_params,
        f"{kind}.context_length": served.engine.config.scheduler.max_model_len,
        f"{kind}.block_count": info.num_layers,
        f"{kind}.attention.head_count": info.num_heads,
        f"{kind}.attention.key_length": info.head_dim,
        f"{kind}.vocab_size": info.vocab_size,
    }
    return Shown(
        parameters="\n".join(f"{name:<30} {value}" for name, value in info.default_sampling.items()),
        template=tokenizer.info["chat_template"] or "",
        details=details(served),
        model_info=facts,
        capabilities=_capabilities(served),
        modified_at=started_at,
    )


def _capabilities(served: ServedModel) -> list[str]:
    tokenizer = served.engine.tokenizer
    able = {
        "completion": True,
        "tools": bool(tokenizer.info["chat_template"]) and _takes_tools(served),
        "vision": served.engine.config.model.image_refusal is None,
        "thinking": can_think(served),
        "insert": tokenizer.infilling is not None,
        "embedding": served.engine.config.model.pooler.is_embedder,
    }
    return [name for name, is_able in able.items() if is_able]


def _takes_tools(served: ServedModel) -> bool:
    """Return True if the server accepts a chat with tools for this model."""
    try:
        plan_tools(
            [{"type": "function", "function": {"name": "any"}}],
            "auto",
            served.answer_format,
            template_takes_tools=served.engine.tokenizer.template_takes_tools,
            auto_tool_choice=served.auto_tool_choice,
        )
    except ParameterError:
        return False
    return True


def _size(num_params: int) -> str:
    """Format a number of parameters: ``134515008`` -> ``134.52M``."""
    for unit, divisor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if num_params >= divisor:
            return f"{num_params / divisor:.{1 if unit == 'B' else 2}f}{unit}"
    return str(num_params)


def _level(num_bytes: int, num_params: int, dtype: str) -> str:
    """Return Ollama's name of the weights' type: ``F32``, ``BF16`` or ``F16``, or e.g. ``Q4`` for quantized weights.

    The number after ``Q`` is the average number of bits of each weight, rounded down.
    """
    bits = 8 * num_bytes // max(num_params, 1)
    return f"Q{bits}" if 0 < bits < 16 else {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}.get(dtype, dtype)

"""Finds the linear layers of a model that LoRA adapters may change, by running the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from metal_engine.lora.layers import shape_of
from metal_engine.lora_adapter import AdapterTargets
from metal_engine.models.attention_kinds import attention_kinds
from metal_engine.models.paged_model import PagedModel


def adapter_targets(paged: PagedModel, interleaved: Mapping[str, int] | None = None) -> AdapterTargets:
    """Return the layers that adapters can change: linear layers in ``model.layers`` that receive all rows of a step.

    The result lists all other linear layers, experts and embeddings with the reason why they are refused. Builds the
    graph of a step of one token without evaluating it. Allocates the pool of ``paged``, and releases it at the end.

    Args:
        paged: the model.
        interleaved: see :attr:`metal_engine.checkpoints.loader.LoadedModel.interleaved`.

    Raises:
        UnsupportedModelError: the forward pass does not run over a paged cache.
    """
    modules = dict(paged.model.named_modules())
    candidates, refused = {}, {}
    within = {id(module) for layer in paged.model.layers for module in layer.modules()}
    grouped = {
        id(inner) for one in modules.values() if getattr(type(one), "runs_in_groups", False) for inner in one.modules()
    }
    for name, module in modules.items():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            refused[name] = "adapters of experts are not supported"
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            refused[name] = "adapters of embeddings are not supported"
        elif not isinstance(module, nn.Linear | nn.QuantizedLinear):
            continue
        elif id(module) not in within:
            refused[name] = "adapters of modules outside the model's layers, such as its head, are not supported"
        elif id(module) in grouped:
            refused[name] = "it runs apart for each group of requests, where adapters are not supported"
        else:
            candidates[name] = module
    with _record_calls(candidates) as called:
        attention_kinds(paged)
    for name in candidates.keys() - called:
        refused[name] = "the model does not call it with all packed rows of a step, or splits its output"
    shapes = {name: shape_of(module) for name, module in candidates.items() if name in called}
    heads = {name: (interleaved or {}).get(name.rpartition(".")[2]) for name in shapes}
    interleaved = {name: number for name, number in heads.items() if number is not None}
    return AdapterTargets(shapes, refused, interleaved, float(mx.finfo(paged.dtype).max))


@contextmanager
def _record_calls(modules: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Yield a set that collects the names of the modules that are called within a ``with`` block.

    A name is added only if its module maps the step's only row, [1, 1, width], to one array.

    Args:
        modules: modules by name.
    """
    called: set[str] = set()
    classes = {name: type(module) for name, module in modules.items()}
    for name, module in modules.items():
        module.__class__ = _recording_class(name, classes[name], called)
    try:
        yield called
    finally:
        for name, module in modules.items():
            module.__class__ = classes[name]


def _recording_class(name: str, cls: type[nn.Module], called: set[str]) -> type[nn.Module]:
    call: Callable[..., mx.array] = cls.__call__

    def recorded(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        output = call(self, *args, **kwargs)
        # The step has one row. An argument of another shape may be a selection of rows. Some layers split their output
        # into several arrays.
        if len(args) == 1 and not kwargs and args[0].shape[:-1] == (1, 1) and isinstance(output, mx.array):
            called.add(name)
        return output

    return type(cls.__name__, (cls,), {"__call__": recorded})

"""Which attention backend a setting means on this machine, and which one serves a model's layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from metal_engine.attention.backend import AttentionBackend, AttentionKind
from metal_engine.attention.metal.backend import THREADGROUPS_PER_CORE, MetalBackend
from metal_engine.attention.metal.variants import BLOCK_SIZES, UnsupportedAttentionError
from metal_engine.attention.mixed import MixedBackend
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.trial import KernelFailedError, try_kernel
from metal_engine.device.info import gpu_core_count, has_tensor_ops
from metal_engine.errors import ConfigError, one_line
from metal_engine.settings.config import AttentionLayers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenAttention:
    """What computes a model's attention, and what that means for its layers."""

    backend: AttentionBackend
    layers: AttentionLayers


@dataclass(frozen=True)
class BackendChoice:
    """What a setting means on this machine; a model's layers decide the rest.

    Attributes:
        metal: the kernel; None where it is not to be used.
        is_strict: a layer that the kernel does not do is an error.
    """

    metal: MetalBackend | None
    is_strict: bool = False

    def for_layers(self, kinds: Sequence[AttentionKind], block_size: int) -> ChosenAttention:
        """What computes each layer of a model, fixed from here on. Tries the kernel for each kind of layer.

        Args:
            kinds: of the model's layers, in order.

        Raises:
            UnsupportedAttentionError: the kernel is wanted by name and does not do, or does not build for, some layer.
        """
        portable = PortableBackend()
        if self.metal is None:
            return ChosenAttention(portable, AttentionLayers(portable=len(kinds)))
        not_covered: dict[AttentionKind, str] = {}  # and why
        unsupported: dict[AttentionKind, str] = {}
        for kind in dict.fromkeys(kinds):
            try:
                try_kernel(self.metal, kind, block_size)
            except UnsupportedAttentionError:
                if self.is_strict:
                    raise
                unsupported[kind] = str(kind)
                not_covered[kind] = _what(kind, block_size)
            except KernelFailedError as error:
                if self.metal.has_tensor_ops:
                    return self._without_tensor_ops(kind, error).for_layers(kinds, block_size)
                self._report(kind, block_size, error)
                not_covered[kind] = f"{kind.head_dims}, for which the kernel {error}"
        num_portable = sum(kind in not_covered for kind in kinds)
        if unsupported:
            logger.warning(
                "MLX's operations compute attention of %d of %d layers, which is slower: the metal kernel does not do "
                "block size %d with %s",
                sum(kind in unsupported for kind in kinds),
                len(kinds),
                block_size,
                "; ".join(unsupported.values()),
            )
        reasons = tuple(dict.fromkeys(not_covered.values()))
        layers = AttentionLayers(metal=len(kinds) - num_portable, portable=num_portable, not_covered=reasons)
        if not not_covered:
            return ChosenAttention(self.metal, layers)
        return ChosenAttention(MixedBackend(self.metal, portable, frozenset(not_covered)), layers)

    def _without_tensor_ops(self, kind: AttentionKind, error: KernelFailedError) -> BackendChoice:
        """The kernel as other GPUs have it, and a word about why."""
        assert self.metal is not None
        logger.warning(
            "the metal attention kernel %s, for layers with %s; trying without Metal's tensor operations, with which "
            "prefill would be faster. Please report this with the output of `metal-engine doctor MODEL`:\n%s",
            error,
            kind,
            error.report,
        )
        return replace(self, metal=self.metal.without_tensor_ops())

    def _report(self, kind: AttentionKind, block_size: int, error: KernelFailedError) -> None:
        """Log all of an error, once; raise it where nothing else may compute the layer."""
        logger.error(
            "the metal attention kernel %s, for layers with %s, block size %d; %s. Please report this with the output "
            "of `metal-engine doctor MODEL`:\n%s",
            error,
            kind,
            block_size,
            "choose --attention-backend auto or mlx" if self.is_strict else "MLX's operations compute them instead",
            error.report,
        )
        if self.is_strict:
            raise UnsupportedAttentionError(
                f"the metal attention kernel {error}, for layers with {kind} ({one_line(error.__cause__ or error)}). "
                "Choose --attention-backend auto or mlx."
            ) from error


def _what(kind: AttentionKind, block_size: int) -> str:
    """What the kernel does not do, in a few words."""
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size}"
    if kind.dtype != kind.spec.dtype:
        return f"{kind.dtype} queries over {kind.spec.dtype} keys".replace("mlx.core.", "")
    return kind.head_dims


def choose_backend(setting: str, block_size: int) -> BackendChoice:
    """``auto`` is the kernel where there is Metal, for the layers that it does, and MLX's operations for all others.
    ``metal`` is the kernel and nothing else.

    Raises:
        ConfigError: the kernel is wanted by name, and there is no Metal here, or it does not do such blocks.
    """
    has_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    if setting == "mlx" or (setting == "auto" and not has_metal):
        return BackendChoice(None)
    is_strict = setting == "metal"
    if not has_metal:
        raise ConfigError("--attention-backend", "metal needs Apple's Metal, and there is none here; use mlx")
    if is_strict and block_size not in BLOCK_SIZES:
        raise ConfigError(
            "--block-size",
            f"{block_size} does not go with the metal attention backend: choose one of "
            f"{', '.join(map(str, BLOCK_SIZES))}, or --attention-backend mlx",
        )
    num_cores = gpu_core_count()
    target_threadgroups = num_cores and THREADGROUPS_PER_CORE * num_cores
    metal = MetalBackend(target_threadgroups=target_threadgroups, tensor_ops=has_tensor_ops())
    return BackendChoice(metal, is_strict)

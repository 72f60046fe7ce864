"""Selects the attention backend for ``--attention-backend`` on this machine, and the code for each layer of a model."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from metal_engine.attention.backend import AttentionBackend, AttentionKind
from metal_engine.attention.choice_file import TunedChoice, TunedChoiceFile, describe_machine, name_of
from metal_engine.attention.index_selftest import IndexKind, try_index, unsupported_index
from metal_engine.attention.kernel_selftest import KernelFailedError, try_kernel
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.cuts import THREADGROUPS_PER_CORE
from metal_engine.attention.metal.variants import BLOCK_SIZES, UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.portable_fallback import FallbackBackend
from metal_engine.attention.tuning import Tuner
from metal_engine.device.cache_dir import cache_dir
from metal_engine.device.info import gpu_core_count, has_tensor_ops
from metal_engine.errors import ConfigError, one_line
from metal_engine.settings.config import AttentionLayers

logger = logging.getLogger(__name__)

# Longest time to compile and check the kernel with tensor operations, for a kind of layer.
_TENSOR_OPS_SECONDS = 30.0

# Returns the decision of rank 0. The name identifies the exchange between ranks.
FromRankZero = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]
# Returns the maximum of a number over all ranks. The string names the number.
MaxOverRanks = Callable[[str, int], int]


@dataclass(frozen=True)
class ChosenAttention:
    """The attention backend of a model, and the number of layers that the kernel and MLX's operations compute.

    Attributes:
        backend: backend for all layers.
        layers: numbers of layers that the kernel and MLX's operations compute, with reasons, for reports.
        metal: backend of the Metal kernel, or None if no layer uses the kernel.
        kinds: kinds of the model's layers, in order.
        not_covered: kinds of layers that MLX's operations compute -> reason.
    """

    backend: AttentionBackend
    layers: AttentionLayers
    metal: MetalBackend | None = None
    kinds: tuple[AttentionKind, ...] = ()
    not_covered: Mapping[AttentionKind, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        metal: MetalBackend,
        kinds: Sequence[AttentionKind],
        not_covered: Mapping[AttentionKind, str],
        **tuning: Any,
    ) -> ChosenAttention:
        """Return attention by the kernel, and by MLX's operations for the kinds in ``not_covered``.

        ``tuning`` has the fields of :class:`AttentionLayers` that describe tuning and tensor operations.
        """
        num_portable = sum(kind in not_covered for kind in kinds)
        reasons = tuple(dict.fromkeys(not_covered.values()))
        layers = AttentionLayers(metal=len(kinds) - num_portable, portable=num_portable, not_covered=reasons, **tuning)
        backend: AttentionBackend = metal
        if not_covered:
            backend = FallbackBackend(metal, PortableBackend(), frozenset(not_covered))
        return cls(backend, layers, metal, tuple(kinds), not_covered)


@dataclass(frozen=True)
class BackendChoice:
    """Backend that ``--attention-backend`` selects on this machine. :meth:`for_layers` applies it to a model's layers.

    Attributes:
        metal: backend of the Metal kernel; None if the kernel is not used.
        is_strict: True to raise an error for a layer that the kernel does not support (``metal``).
        tuner: chooses a :class:`Cut` of the kernel's work for each kind of layer; None for the default cut.
        tensor_ops: state of tensor operations with the reason; empty if the GPU lacks them.
        clock: function that returns seconds.
    """

    metal: MetalBackend | None
    is_strict: bool = False
    tuner: Tuner | None = None
    tensor_ops: str = ""
    clock: Callable[[], float] = time.monotonic

    def for_layers(self, kinds: Sequence[AttentionKind], block_size: int) -> ChosenAttention:
        """Select the kernel or MLX's operations for each layer of a model. Tries the kernel for each kind of layer.

        If the kernel with tensor operations fails or takes too long to compile, tries it again without them.

        Args:
            kinds: kinds of the model's layers, in order.
            block_size: tokens of a block.

        Raises:
            UnsupportedAttentionError: the setting is ``metal``, and a layer is unsupported or the kernel fails for it.
        """
        if self.metal is None:
            return ChosenAttention(PortableBackend(), AttentionLayers(portable=len(kinds)))
        not_covered: dict[AttentionKind, str] = {}  # kind -> reason
        unsupported: dict[AttentionKind, str] = {}
        for kind in dict.fromkeys(kinds):
            try:
                began = self.clock()
                try_kernel(self.metal, kind, block_size)
                if self.metal.has_tensor_ops and self.clock() - began > _TENSOR_OPS_SECONDS:
                    raise KernelFailedError(f"takes more than {_TENSOR_OPS_SECONDS:g} s to compile and check", "")
            except UnsupportedAttentionError:
                if self.is_strict:
                    raise
                unsupported[kind] = str(kind)
                not_covered[kind] = _unsupported_property(kind, block_size)
            except KernelFailedError as error:
                if self.metal.has_tensor_ops:
                    return self._without_tensor_ops(kind, error).for_layers(kinds, block_size)
                self._report(kind, block_size, error)
                not_covered[kind] = f"{kind.head_dims}, for which the kernel {error}"
        if unsupported:
            logger.warning(
                "MLX's operations compute attention of %d of %d layers, which is slower: the metal kernel does not "
                "support block size %d with %s",
                sum(kind in unsupported for kind in kinds),
                len(kinds),
                block_size,
                "; ".join(unsupported.values()),
            )
        return ChosenAttention.of(self.metal, kinds, not_covered, tensor_ops=self.tensor_ops)

    def for_index(
        self,
        chosen: ChosenAttention,
        index: IndexKind,
        block_size: int,
        max_over_ranks: MaxOverRanks = lambda what, number: number,
    ) -> ChosenAttention:
        """Decide if the kernels of the index are used, or MLX's operations instead. Tries the kernels.

        Args:
            chosen: result of :meth:`for_layers`.
            index: index of the model.
            block_size: tokens of a block.
            max_over_ranks: returns the maximum of a number over all ranks. All ranks use the kernels, or no rank.

        Returns:
            ``chosen`` itself if the kernels work on all ranks, or if ``chosen`` does not use them. Otherwise the same
            choice without the index kernels.
        """
        metal = chosen.metal
        if metal is None or metal.index_kernels is None:
            return chosen
        kinds = [kind for kind in dict.fromkeys(chosen.kinds) if kind not in chosen.not_covered]
        why = unsupported_index(metal, index, kinds, block_size)
        if why:
            logger.warning("MLX's operations select keys, which is slower: the metal kernels do not support %s", why)
        else:
            try:
                try_index(metal, index, kinds, block_size)
            except KernelFailedError as error:
                why = f"the kernel {error}"
                logger.error(
                    "a metal kernel of the model's index %s; MLX's operations select keys instead. Please report this "
                    "with the output of `metal-engine doctor MODEL`:\n%s",
                    *(error, error.report),
                )
        if not max_over_ranks("kernels of an index that fail", int(bool(why))):
            return chosen
        why = why or "the kernels do not work on another rank"
        return ChosenAttention.of(
            metal.without_index_kernels(),
            chosen.kinds,
            chosen.not_covered,
            tensor_ops=chosen.layers.tensor_ops,
            no_index_kernels=why,
        )

    def tuned(
        self,
        chosen: ChosenAttention,
        block_size: int,
        *,
        from_rank_zero: FromRankZero = lambda what, own: own(),
        max_over_ranks: MaxOverRanks = lambda what, number: number,
    ) -> ChosenAttention:
        """Return the attention backend with the fastest cut for each kind of layer. Return ``chosen`` without a tuner.

        A kind of layer may also change to MLX's operations, if they are much faster. If a choice fails its check on any
        rank, no choice is used.

        Args:
            chosen: result of :meth:`for_layers` or :meth:`for_index`.
            block_size: tokens of a block.
            from_rank_zero: returns the decision of rank 0, so that all ranks have the same choices.
            max_over_ranks: returns the maximum of a number over all ranks.
        """
        tuner, metal = self.tuner, chosen.metal
        if tuner is None or metal is None:
            return chosen
        kinds = [kind for kind, _ in Counter(chosen.kinds).most_common() if kind not in chosen.not_covered]

        def choose() -> dict[str, Any]:
            choices = tuner.choose(metal, kinds, block_size, may_use_mlx=not self.is_strict)
            return {name: choice.fields for name, choice in choices.items()}

        decided = from_rank_zero("choices of attention", choose)
        choices = {
            kind: TunedChoice.of(decided[name]) for kind in kinds if (name := name_of(kind, block_size)) in decided
        }
        choices = {kind: choice for kind, choice in choices.items() if not choice.is_default}
        cuts = {kind: choice.cut for kind, choice in choices.items() if choice.cut is not None}
        does_fail = not _all_work(metal.with_cuts(cuts), cuts, block_size)
        if max_over_ranks("choices of attention that fail", int(does_fail)):
            logger.warning("choices of attention are ignored; to measure again, remove %s", tuner.file.path)
            choices, cuts = {}, {}
        not_covered = dict(chosen.not_covered)
        for kind in choices.keys() - cuts.keys():
            not_covered[kind] = f"{kind.head_dims}, faster with MLX's operations"
        words = (f"{choice} for {kind}" for kind, choice in choices.items())
        return ChosenAttention.of(
            metal.with_cuts(cuts) if cuts else metal,
            chosen.kinds,
            not_covered,
            tuning="; ".join(words) or ("the default" if kinds else ""),
            tensor_ops=chosen.layers.tensor_ops,
            no_index_kernels=chosen.layers.no_index_kernels,
            tuned=tuple(sorted(f"{name_of(kind, block_size)}: {choice.cut!r}" for kind, choice in choices.items())),
        )

    def _without_tensor_ops(self, kind: AttentionKind, error: KernelFailedError) -> BackendChoice:
        """Return a copy of this choice without tensor operations, and log the error as a warning."""
        assert self.metal is not None
        logger.warning(
            "the metal attention kernel %s, for layers with %s; trying without Metal's tensor operations, with which "
            "prefill would be faster. Please report this with the output of `metal-engine doctor MODEL`:\n%s",
            error,
            kind,
            error.report,
        )
        return replace(
            self, metal=self.metal.without_tensor_ops(), tensor_ops=f"off: with them, the kernel {error} ({kind})"
        )

    def _report(self, kind: AttentionKind, block_size: int, error: KernelFailedError) -> None:
        """Log an error with all details. Raise UnsupportedAttentionError if no other backend may compute the layer."""
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


def _unsupported_property(kind: AttentionKind, block_size: int) -> str:
    """Return a short description of the property of ``kind`` that the kernel does not support."""
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size}"
    if kind.dtype != kind.spec.dtype:
        return f"{kind.dtype} queries over {kind.spec.dtype} keys".replace("mlx.core.", "")
    return kind.head_dims


def _all_work(metal: MetalBackend, kinds: Iterable[AttentionKind], block_size: int) -> bool:
    """Return True if ``metal`` passes :func:`try_kernel` for each kind of layer, with the cut of the kind.

    Log the first failure, and skip the other kinds.
    """
    for kind in kinds:
        try:
            try_kernel(metal, kind, block_size)
        except (KernelFailedError, UnsupportedAttentionError) as error:
            report = error.report if isinstance(error, KernelFailedError) else str(error)
            logger.warning(
                "all layers use the default cut of attention, because %s fails for layers with %s: %s",
                *(metal.cuts[kind], kind, report),
            )
            return False
    return True


def choose_backend(setting: str, block_size: int, tuning: str = "never") -> BackendChoice:
    """Return the backend choice for the settings ``--attention-backend`` and ``--attention-tuning``.

    ``auto`` uses the kernel for the layers that it supports if Metal is available, and MLX's operations for all other
    layers. ``metal`` uses only the kernel.

    Args:
        setting: value of --attention-backend.
        block_size: tokens of a block.
        tuning: value of --attention-tuning.

    Raises:
        ConfigError: the setting is ``metal``, and this machine lacks Metal or the kernel does not support the block
            size. Also raised if ``tuning`` is ``auto`` and there is no cache directory.
    """
    has_metal = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    if setting == "mlx" or (setting == "auto" and not has_metal):
        return BackendChoice(None)
    is_strict = setting == "metal"
    if not has_metal:
        raise ConfigError("--attention-backend", "metal requires Apple Metal, which this machine lacks; use mlx")
    if is_strict and block_size not in BLOCK_SIZES:
        raise ConfigError(
            "--block-size",
            f"{block_size} is not supported by the metal attention backend: choose one of "
            f"{', '.join(map(str, BLOCK_SIZES))}, or --attention-backend mlx",
        )
    num_cores = gpu_core_count()
    target_threadgroups = num_cores and THREADGROUPS_PER_CORE * num_cores
    metal = MetalBackend(target_threadgroups=target_threadgroups, tensor_ops=has_tensor_ops())
    tensor_ops = "on, checked at the start" if metal.has_tensor_ops else ""
    return BackendChoice(metal, is_strict, _make_tuner(num_cores) if tuning == "auto" else None, tensor_ops)


def _make_tuner(num_cores: int | None) -> Tuner:
    try:
        folder = cache_dir() / "attention"
    except FileNotFoundError as error:
        problem = f"auto stores its choices in the cache directory: {error}. Set METAL_ENGINE_CACHE, or choose never"
        raise ConfigError("--attention-tuning", problem) from error
    return Tuner(TunedChoiceFile(folder, describe_machine(num_cores)))

"""Finds the fastest cut of the kernel's work for each kind of layer, at the first start on a GPU.

A kind of layer has one choice for all steps, because a choice changes rounding: splits begin at other keys, or sums
have another order. With a choice per step, outputs would depend on other requests in the batch.

The fields of a cut are decided in the order of ``TRIED``, each with the best values of earlier fields. Runs of a
candidate and of the best cut alternate, because the GPU's clock rate rises during the measurement. A candidate is timed
only if its results are equal to those of MLX's operations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from metal_engine.attention.backend import AttentionBackend, AttentionKind
from metal_engine.attention.choice_file import TunedChoice, TunedChoiceFile, name_of
from metal_engine.attention.kernel_selftest import KernelFailedError, try_kernel
from metal_engine.attention.metal.backend import MetalBackend
from metal_engine.attention.metal.cuts import DEFAULT_CUT, TRIED, Cut
from metal_engine.attention.metal.variants import UnsupportedAttentionError
from metal_engine.attention.portable.backend import PortableBackend
from metal_engine.attention.sample_steps import attend_kind, forget_errors, random_queries, random_sinks
from metal_engine.kv_cache.pool import make_state
from metal_engine.kv_cache.rows import StepRows, step_rows
from metal_engine.kv_cache.state import KVState

logger = logging.getLogger(__name__)

TUNING_SECONDS = 10.0
# Steps as (tokens, context tokens) of each request: decodes, alone and together, and prompts.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 1023),),
    ((1, 16_383),),
    ((1, 1023),) * 16,
    ((1, 1023),) * 64,
    ((512, 0),),
    ((2048, 0),),
)
# Largest size of K and V; contexts beyond this size repeat blocks. The GPU's caches are smaller.
_KV_BYTES = 128 << 20
# Target duration of a run, which repeats a layer. A single layer is too short to measure.
_RUN_SECONDS, _MOST_LAYERS = 0.01, 16
_NUM_RUNS = 3
_LEAST_SECONDS = 1e-9  # used if the clock has not advanced
# Largest ratio of a candidate's time to the best time for which the candidate wins. Smaller gains may be noise.
WORTH_CHANGING = 0.97
# The same ratio for MLX's operations. Layers that use them prevent replay of decode steps, and their rounding depends
# on the batch.
WORTH_LEAVING_KERNEL = 0.5


@dataclass(frozen=True)
class _Step:
    """A step to time. ``num_layers`` is the number of layers in a run."""

    rows: StepRows
    q: mx.array
    num_layers: int = 1


class Tuner:
    """Chooses the attention of kinds of layers, by measuring or from the choices of an earlier start.

    Args:
        file: file of choices.
        clock: function that returns seconds.
        seconds: time limit for all models of this start.
    """

    def __init__(
        self, file: TunedChoiceFile, clock: Callable[[], float] = time.perf_counter, seconds: float = TUNING_SECONDS
    ) -> None:
        self.file = file
        self._clock = clock
        self._left = seconds

    def choose(
        self, metal: MetalBackend, kinds: Sequence[AttentionKind], block_size: int, *, may_use_mlx: bool
    ) -> dict[str, TunedChoice]:
        """Return name -> choice for each kind of layer, with the names of :func:`name_of`. Add new choices to the file.

        Measures only kinds that the file lacks. A kind that cannot be measured in the remaining time gets the default,
        and is measured at a later start.

        Args:
            metal: backend of the kernel.
            kinds: kinds of layers that the kernel computes, the most important first. The kinds that the file lacks
                share the remaining time equally.
            block_size: tokens of a block.
            may_use_mlx: True if MLX's operations may be chosen. If False, a kind for which the file has MLX's
                operations gets the default.
        """
        names = {kind: name_of(kind, block_size) for kind in kinds}
        kept = self.file.read()
        missing = [kind for kind in names if names[kind] not in kept]
        measured = {}
        if missing and self._left > 0:
            logger.info("measuring how attention is computed fastest here (%.0f s at most)", self._left)
            for index, kind in enumerate(missing):
                seconds = self._left / (len(missing) - index)
                of_kind = _OfKind(metal, kind, block_size, self._clock, seconds)
                choice = of_kind.choose(may_use_mlx=may_use_mlx)
                self._left -= of_kind.spent
                if choice is not None:
                    measured[names[kind]] = choice
            mx.clear_cache()
            kept |= self.file.add(measured)
        usable = {name: choice for name, choice in kept.items() if may_use_mlx or choice.cut is not None}
        return {name: usable.get(name, TunedChoice()) for name in names.values()}


class _OutOfTimeError(RuntimeError):
    """The time limit is reached."""


class _OfKind:
    """Measurements for one kind of layer.

    Args:
        seconds: time limit in seconds.

    Attributes:
        spent: seconds that the measurements have taken.
    """

    def __init__(
        self, metal: MetalBackend, kind: AttentionKind, block_size: int, clock: Callable[[], float], seconds: float
    ) -> None:
        self._metal = metal
        self._kind = kind
        self._block_size = block_size
        self._clock = clock
        self._most_seconds = seconds
        self._steps: list[_Step] = []
        self._state = make_state(kind.spec)
        self._sinks = random_sinks(kind)
        self._with_cut = cache(lambda cut: metal.with_cuts({kind: cut}))
        self._best = DEFAULT_CUT
        self.spent = 0.0
        self._began = 0.0  # start time of the current candidate
        self._longest = 0.0  # seconds of the slowest candidate

    def choose(self, *, may_use_mlx: bool) -> TunedChoice | None:
        """Return the best choice found within the time limit. Return None if the default cannot be measured."""
        speedup = 1.0
        if self._timed("the default", self._prepare) is None:
            return None
        mlx = self._timed("MLX's operations", self._compare, PortableBackend(), 1.0) if may_use_mlx else None
        for cut in self._candidates():
            if self.spent + self._longest > self._most_seconds:
                logger.info("tuning reached its time limit for layers with %s", self._kind)
                break
            ratio = self._timed(str(cut), self._try, cut)
            if ratio is not None and ratio < WORTH_CHANGING:
                self._best, speedup = cut, speedup / ratio
        if mlx is not None and mlx * speedup < WORTH_LEAVING_KERNEL:
            return TunedChoice(None, 1 / mlx)
        return TunedChoice(self._best, speedup)

    def _candidates(self) -> Iterator[Cut]:
        """Yield cuts that differ from the best cut in one field. Leave out cuts whose launches have been measured."""
        seen = {self._metal.work_of(self._kind, self._block_size, DEFAULT_CUT)}
        for name, values in TRIED.items():
            for value in values[1:]:
                cut = replace(self._best, **{name: value})  # type: ignore[arg-type]
                work = self._metal.work_of(self._kind, self._block_size, cut)
                if work not in seen:
                    seen.add(work)
                    yield cut

    def _timed(self, what: str, measure: Callable[..., float], *arguments: Any) -> float | None:
        """Run ``measure`` and return its ratio. Return None if the candidate fails or the time limit is reached.

        Logs the failure, and adds the time to ``spent``.
        """
        self._began = self._clock()
        try:
            ratio = measure(*arguments)
            logger.debug("%s takes %.2f of the time, for layers with %s", what, ratio, self._kind)
            return ratio
        except _OutOfTimeError:
            logger.info("tuning reached its time limit with %s for layers with %s", what, self._kind)
            return None
        except (KernelFailedError, UnsupportedAttentionError, RuntimeError, ValueError, MemoryError) as error:
            forget_errors()
            report = error.report if isinstance(error, KernelFailedError) else f"{type(error).__name__}: {error}"
            logger.warning("attention with %s is not used for layers with %s: %s", what, self._kind, report)
            return None
        finally:
            seconds = self._clock() - self._began
            self.spent += seconds
            self._longest = max(self._longest, seconds)

    def _prepare(self) -> float:
        """Create the steps to time, and K and V. Return 1, the ratio of the default.

        Times each step with the default cut to choose the number of layers in a run.
        """
        assert isinstance(self._state, KVState)
        bytes_per_block = self._state.spec.bytes_per_token * self._block_size
        most_blocks = max(1, _KV_BYTES // bytes_per_block)
        all_rows = [_rows(segments, self._block_size, most_blocks) for segments in STEPS]
        steps = [_Step(rows, random_queries(self._kind, rows.num_tokens)) for rows in all_rows]
        mx.eval([step.q for step in steps])
        num_blocks = max(int(step.rows.block_table.max()) for step in steps) + 1
        self._state.allocate(num_blocks, self._block_size)
        default = self._with_cut(DEFAULT_CUT)
        for step in steps:
            self._seconds(default, step)  # a first run compiles what is needed
            seconds = max(self._seconds(default, step), _LEAST_SECONDS)
            num_layers = max(1, min(_MOST_LAYERS, int(_RUN_SECONDS / seconds)))
            self._steps.append(replace(step, num_layers=num_layers))
        return 1.0

    def _try(self, cut: Cut) -> float:
        backend = self._with_cut(cut)
        try_kernel(backend, self._kind, self._block_size)
        return self._compare(backend, WORTH_CHANGING)

    def _compare(self, backend: AttentionBackend, most: float) -> float:
        """Return the ratio of a backend's time to the best cut's time.

        A result above ``most`` is only a lower bound, because the measurement may have stopped early. A result up to
        ``most`` is the larger ratio of two measurements.
        """
        ratio = self._ratio(backend, most)
        return ratio if ratio > most else max(ratio, self._ratio(backend, most))

    def _ratio(self, backend: AttentionBackend, most: float) -> float:
        """Return the mean ratio over all steps. Stop early if the mean must exceed ``most``."""
        best, total = self._with_cut(self._best), 0.0
        for step in self._steps:
            self._seconds(backend, step)
            pairs = [(self._seconds(backend, step), self._seconds(best, step)) for _ in range(_NUM_RUNS)]
            own, others = (max(min(seconds), _LEAST_SECONDS) for seconds in zip(*pairs, strict=True))
            total += own / others
            if total > most * len(self._steps):
                break
        return total / len(self._steps)

    def _seconds(self, backend: AttentionBackend, step: _Step) -> float:
        """Return the seconds of one run, with planning on the host. Each layer depends on the previous layer.

        Raises _OutOfTimeError if the time limit is reached before the run.
        """
        assert isinstance(self._state, KVState)
        start = self._clock()
        if self.spent + start - self._began > self._most_seconds:
            raise _OutOfTimeError
        q, attention = step.q, backend.for_step(step.rows)
        for _ in range(step.num_layers):
            q = q + attend_kind(attention, self._kind, q, self._state, self._sinks)[..., :1]
        mx.eval(q)
        return self._clock() - start


def _rows(segments: Sequence[tuple[int, int]], block_size: int, most_blocks: int) -> StepRows:
    """Return rows of requests with consecutive blocks, numbered modulo ``most_blocks``."""
    query_lens, context_lens = np.array(segments, np.int32).T
    num_blocks = -(-(query_lens + context_lens) // block_size)
    first = np.cumsum(num_blocks) - num_blocks
    block_table = (first[:, None] + np.arange(num_blocks.max())) % most_blocks
    return step_rows(block_table.astype(np.int32), context_lens, query_lens, block_size)

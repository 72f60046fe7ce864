"""A step under way, from its graph to its results."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import mlx.core as mx

from metal_engine.device.streams import synchronize
from metal_engine.kv_cache.pool import PoolSnapshot
from metal_engine.kv_transfer.runner_side import StepLoads, StepSaves
from metal_engine.runner.step_pooling import StepPooling
from metal_engine.runner.step_sampling import StepSampling
from metal_engine.step import DecodeForward, Drafting, ModelOutput


@dataclass(eq=False)
class PendingStep:
    """A step under way (:class:`metal_engine.step.StepHandle`).

    Attributes:
        finish: what makes the output of a step that has been waited for.
        sampling: what it does with its logits.
        pooling: what it does with its hidden states; None if no request is to be pooled.
        before: the KV cache's arrays as the step found them, until it is dispatched.
        loads: KV that comes from a store, until it is dispatched.
        saves: KV that goes to a store.
        drafting: what the draft model has done for it; None if nothing.
        decode_forward: see :class:`metal_engine.step.ModelOutput`.
        moves_states: whether it copies recurrent states, to slots or into another order.
        first_part: where it is to be dispatched in two parts, what the first one computes, until the dispatch.
        is_dispatched: whether it was given to the device, or could not be (``error``).
        root: what the device computes last, from the dispatch on.
        has_second_part: whether the second part is still to be dispatched.
        has_queued_successor: whether the next step was dispatched behind it.
        error: why it could not be dispatched.
        is_async: whether some of it was evaluated asynchronously.
        shared: the logits of a rank's step, until it is dispatched; None if there is one rank.
    """

    finish: Callable[[PendingStep], ModelOutput]
    sampled_req_ids: list[str]
    sampling: StepSampling
    pooling: StepPooling | None
    before: PoolSnapshot | None
    loads: StepLoads
    saves: StepSaves | None
    drafting: Drafting | None = None
    decode_forward: DecodeForward | None = None
    moves_states: bool = False
    first_part: mx.array | None = None
    is_dispatched: bool = False
    root: list[mx.array] | None = None
    has_second_part: bool = False
    has_queued_successor: bool = False
    error: Exception | None = None
    is_async: bool = False
    shared: mx.array | None = None

    @property
    def results(self) -> list[mx.array]:
        """What it computes for the host."""
        return self.sampling.arrays + (self.pooling.arrays if self.pooling is not None else [])

    @property
    def needs_exclusive_device(self) -> bool:
        """Whether the device may have no other step.

        KV is written or read beside it; the host makes masks; all that it computes is KV, so that it holds all of that
        to its end; it copies recurrent states, for which there is no room beside those of another step; or it failed.
        """
        has_saves = self.saves is not None and bool(self.saves.arrays)
        is_beside = has_saves or bool(self.loads) or self.sampling.has_masks
        return is_beside or not self.results or self.moves_states or self.error is not None

    def dispatch_second_part(self) -> None:
        """Give the device the second part, if it has the first alone. An error is kept for :meth:`result`."""
        if self.has_second_part and self.error is None:
            self.has_second_part = False
            try:
                mx.async_eval(self.root)
            except Exception as error:  # noqa: BLE001  (raised by result())
                self.error = error

    def wait(self) -> None:
        """Wait until the device is done with the step; raises what it raised.

        It has let go of all that it read then, too, if no other step is behind it.
        """
        if self.error is not None:
            raise self.error
        # NumPy alone would wait as well, but pass over an error of an operation and take what it left.
        try:
            mx.eval(self.root)
        except Exception:
            # Streams that met the same error would raise it in the step after this one.
            with suppress(Exception):
                synchronize()
            raise
        if not self.has_queued_successor:
            synchronize()

    def release(self) -> None:
        """Drop all arrays: each that was not computed holds those of the KV cache. The step is of no more use."""
        self.before = self.first_part = self.root = self.shared = self.saves = None
        self.sampling.release()
        if self.pooling is not None:
            self.pooling.release()

    def result(self) -> ModelOutput:
        """Wait for the step, dispatch the next one, and return the output of this one.

        Raises:
            KVCacheLostError: it failed, and the KV cache with it.
        """
        return self.finish(self)


def clear_traceback_frames(error: BaseException) -> None:
    """Drop the variables of functions that an error has left: arrays among them hold those of the KV cache."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__

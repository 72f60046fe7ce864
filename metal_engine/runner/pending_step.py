"""A step in flight, from its graph to its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import mlx.core as mx

from metal_engine.device.streams import synchronize
from metal_engine.kv_cache.pool import PoolSnapshot
from metal_engine.kv_transfer.runner_side import StepLoads, StepSaves
from metal_engine.runner.drafting import FollowedStep
from metal_engine.runner.features import Encoding
from metal_engine.runner.step_pooling import StepPooling
from metal_engine.runner.step_sampling import StepSampling
from metal_engine.step import DecodeForward, Drafting, ModelOutput


@dataclass(eq=False)
class PendingStep:
    """Step in flight (:class:`metal_engine.step.StepHandle`).

    Attributes:
        finish: callback that builds the `ModelOutput` after the step has completed.
        sampling: sampling pass of the step.
        pooling: pooling of the step's hidden states; None if no request is pooled.
        before: snapshot of the KV cache's arrays before the step; None after the dispatch.
        loads: KV that the step loads from a store; empty after the dispatch.
        saves: KV that the step saves to a store.
        drafting: result of the drafter; None if this step requested no drafts.
        decode_forward: see :class:`metal_engine.step.ModelOutput`.
        moves_states: True if the step copies recurrent states to slots or into another order.
        first_part: array that completes the first part of a dispatch in two parts; None after the dispatch.
        is_dispatched: True if the step was submitted to the device, or its dispatch failed (``error``).
        root: arrays whose evaluation executes the whole step, set at the dispatch.
        has_second_part: True if the second part has not been dispatched yet.
        has_queued_successor: True if the next step was queued behind this step.
        error: error of the dispatch.
        is_async: True if a part of the step was evaluated asynchronously.
        shared: logits that every rank evaluates at the dispatch; None afterwards, or if there is one rank.
        follow: callback that builds the drafter's work on the sampled tokens; None without a drafter, or once called.
        followed: the drafter's work in this step; None if the drafter has no arrays to evaluate with the step.
        encoding: encoding of the step's images; None without images to encode.
        encode_seconds: duration of the encoding, set by :meth:`wait`.
        next_encoding: encoding of the next step, which the device begins after this step; None if there is none.
    """

    finish: Callable[[PendingStep], ModelOutput]
    sampled_req_ids: list[str]
    sampling: StepSampling
    pooling: StepPooling | None
    before: PoolSnapshot | None = None
    loads: StepLoads = field(default_factory=StepLoads)
    saves: StepSaves | None = None
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
    follow: Callable[[mx.array | None], FollowedStep | None] | None = None
    followed: FollowedStep | None = None
    encoding: Encoding | None = None
    encode_seconds: float = 0.0
    next_encoding: Encoding | None = None

    def build_sampling(self, logits: mx.array, *, is_dispatched: bool) -> None:
        """Build the sampling pass on the step's logits (:meth:`StepSampling.build`), and the drafter's work on it."""
        self.sampling.build(logits, is_dispatched=is_dispatched)
        follow, self.follow = self.follow, None
        if follow is not None:
            self.followed = follow(self.sampling.tokens)

    @property
    def results(self) -> list[mx.array]:
        """Arrays that the step computes for the host."""
        return self.sampling.arrays + (self.pooling.arrays if self.pooling is not None else [])

    @property
    def needs_exclusive_device(self) -> bool:
        """True if no other step may be on the device at the same time. At least one of these conditions holds:

        - The step loads or saves KV.
        - The host computes grammar masks for the step.
        - The only output of the step is KV, so it holds the KV arrays until it completes.
        - The step copies recurrent states, and there is no memory for two such copies.
        - The step failed.
        """
        has_saves = self.saves is not None and bool(self.saves.arrays)
        is_beside = has_saves or bool(self.loads) or self.sampling.has_masks
        return is_beside or not self.results or self.moves_states or self.error is not None

    def dispatch_second_part(self) -> None:
        """Dispatch the second part if only the first part was dispatched. An error is raised by :meth:`result`."""
        if self.has_second_part and self.error is None:
            self.has_second_part = False
            try:
                mx.async_eval(self.root)
            except Exception as error:  # noqa: BLE001  (raised by result())
                self.error = error

    def wait(self) -> None:
        """Wait until the device has completed the step. Raise the step's error if it or its dispatch failed.

        Sets ``encode_seconds``, and starts the time of ``next_encoding``. Afterwards, the step has also released all
        arrays that it read, unless another step is queued behind it.
        """
        if self.error is not None:
            raise self.error
        # Conversion to NumPy would also wait, but would ignore the error of an operation and use invalid data.
        try:
            if self.encoding is not None:  # no additional delay: the step follows on the device
                self.encode_seconds = self.encoding.wait()
            mx.eval(self.root)
        except Exception:
            # Other streams may have stored the same error. They would raise it in the next step.
            with suppress(Exception):
                synchronize()
            raise
        if self.next_encoding is not None:
            self.next_encoding.begin()
        if not self.has_queued_successor:
            synchronize()
            if self.next_encoding is not None:  # synchronize() has waited for it, too
                with suppress(Exception):  # the next step raises its error
                    self.next_encoding.wait()

    def release(self) -> None:
        """Drop all arrays, because an unevaluated array refers to arrays of the KV cache. The step is then unusable."""
        self.before = self.first_part = self.root = self.shared = self.saves = self.follow = self.followed = None
        self.encoding = self.next_encoding = None
        self.sampling.release()
        if self.pooling is not None:
            self.pooling.release()

    def result(self) -> ModelOutput:
        """Wait for the step, dispatch the next step, and return the output of this step.

        Raises:
            Exception: the step failed.
            KVCacheLostError: the step failed and the KV cache is lost.
        """
        return self.finish(self)

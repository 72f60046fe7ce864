"""Runner of rank 0. The other ranks run every step that it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metal_engine.distributed.channel import FrameKind, Link
from metal_engine.distributed.rank_failure import RankFailureMonitor, StepTimeout
from metal_engine.distributed.wire import encode_ids, encode_plan
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.step import ModelOutput, RunnerLostError, SchedulerOutput

# Maximum wait in seconds for the reason of a failure: a collective may fail before the side channel detects the lost
# rank.
CAUSE_SECONDS = 1.0


class LeaderRunner:
    """Runner (:class:`metal_engine.step.Runner`) that makes the other ranks run the same steps.

    A plan is sent after its graph was built, so that a refused plan is not sent. The plan is sent before any part of
    the graph is evaluated, because the evaluation may wait for the other ranks.

    Args:
        runner: runner of this rank.
        links: links to the other ranks.
        monitor: handler of lost ranks.
        step_timeout: reports a loss if a wait for a step is too long. Closed with this runner.
        kill_left: kills the ranks that rank 0 has started and that do not exit on request.
    """

    def __init__(
        self,
        runner: ModelRunner,
        links: Sequence[Link],
        monitor: RankFailureMonitor,
        step_timeout: StepTimeout,
        kill_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._links = links
        self._monitor = monitor
        self._step_timeout = step_timeout
        self._kill_left = kill_left

    @property
    def replay_refusal(self) -> str | None:
        """See :class:`metal_engine.step.Runner`."""
        return self._runner.replay_refusal

    def on_rank_lost(self, callback: Callable[[RunnerLostError], None]) -> None:
        """See :meth:`metal_engine.step.Runner.on_rank_lost`."""
        self._monitor.add_callback(callback)

    def execute(self, plan: SchedulerOutput) -> LeaderStep:
        self._monitor.check()
        try:
            content = encode_plan(plan)
            with self._step_timeout:  # dispatching a step may wait for the previous step
                step = self._runner.execute(plan, on_built=lambda: self._start(content))
        except RunnerLostError:
            raise
        except Exception:
            # The engine preempts or ends the requests of this plan. The other ranks must drop them, and the requests
            # that this plan would have dropped.
            self._send(FrameKind.DROP, encode_ids([*plan.dropped_req_ids, *plan.num_scheduled_tokens]))
            self._runner.forget(plan.dropped_req_ids)  # execute() may have failed before it dropped them
            raise
        return LeaderStep(self, step)

    def dispatch_second_part(self) -> None:
        """See :class:`metal_engine.step.Runner`. With several ranks, steps are dispatched whole."""
        self._runner.dispatch_second_part()

    def release_cache(self) -> bool:
        """Return False: the other ranks would keep their caches."""
        return False

    def finish(self, step: PendingStep) -> ModelOutput:
        """Finish a step on every rank.

        Raises:
            RunnerLostError: the step failed on this rank or on another rank. The results of all ranks are unusable.
        """
        self._monitor.check()
        self._send(FrameKind.FINISH, encode_ids(step.sampling.late_req_ids))
        try:
            with self._step_timeout:
                output = step.result()
            self._step_timeout.progress += 1
            return output
        except Exception as error:
            lost = self._monitor.wait(CAUSE_SECONDS)
            if lost is None:
                self._monitor.lose(f"a step failed on rank 0 ({type(error).__name__}: {error})")
                lost = self._monitor.error
            assert lost is not None
            raise lost from error

    def _start(self, content: bytes) -> None:
        """Send the plan of a step whose graph this rank has built to the other ranks, which start the step."""
        self._send(FrameKind.PLAN, content)
        self._step_timeout.progress += 1

    def _send(self, kind: FrameKind, content: bytes = b"") -> None:
        for link in self._links:
            link.send(kind, content)

    def close(self) -> None:
        """End the other ranks, then close the runner of this rank.

        Leaves the runner open if a rank was lost, because a stream of the runner may never end.
        """
        self._step_timeout.close()
        if self._monitor.error is not None:
            return
        for link in self._links:
            link.close()
        try:
            self._send(FrameKind.QUIT)
        finally:
            self._runner.close()
            self._kill_left()


class LeaderStep:
    """Step in flight (:class:`metal_engine.step.StepHandle`)."""

    def __init__(self, leader: LeaderRunner, step: PendingStep) -> None:
        self._leader = leader
        self._step = step

    def result(self) -> ModelOutput:
        return self._leader.finish(self._step)

"""Rank 0's runner: every step that it starts is started by the others, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metal_engine.distributed.channel import Kind, Link
from metal_engine.distributed.rank_failure import RankFailureMonitor, StepTimeout
from metal_engine.distributed.wire import encode_ids, encode_plan
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.step import ModelOutput, RunnerLostError, SchedulerOutput

# A collective may fail before the side channel knows which rank has gone.
CAUSE_SECONDS = 1.0


class LeaderRunner:
    """A runner (:class:`metal_engine.step.Runner`) that has the other ranks run what it runs.

    A plan is sent when its graph is built, so none that is refused is sent, and before any of it is evaluated, which
    may wait for the other ranks.

    Args:
        kill_left: kills the ranks that rank 0 has started and that do not exit on request.
    """

    def __init__(
        self,
        runner: ModelRunner,
        links: Sequence[Link],
        watch: RankFailureMonitor,
        step_watch: StepTimeout,
        kill_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._links = links
        self._watch = watch
        self._step_timeout = step_watch
        self._kill_left = kill_left

    @property
    def replay_refusal(self) -> str | None:
        """See :class:`metal_engine.step.Runner`."""
        return self._runner.replay_refusal

    def on_rank_lost(self, tell: Callable[[RunnerLostError], None]) -> None:
        """See :class:`metal_engine.step.RankFailureSource`."""
        self._watch.tell(tell)

    def execute(self, plan: SchedulerOutput) -> LeaderStep:
        self._watch.check()
        try:
            content = encode_plan(plan)
            with self._step_timeout:  # a step may be waited for while the next one is given to the device
                step = self._runner.execute(plan, on_built=lambda: self._start(content))
        except RunnerLostError:
            raise
        except Exception:
            # The engine ends these requests; the others must not hold what this plan would have dropped, either.
            self._send(Kind.DROP, encode_ids([*plan.dropped_req_ids, *plan.num_scheduled_tokens]))
            self._runner.forget(plan.dropped_req_ids)  # unless it has
            raise
        return LeaderStep(self, step)

    def dispatch_second_part(self) -> None:
        """See :class:`metal_engine.step.Runner`. Every rank's steps are given whole."""
        self._runner.dispatch_second_part()

    def finish(self, step: PendingStep) -> ModelOutput:
        """Finish a step on every rank.

        Raises:
            RunnerLostError: it cannot be: what one rank computes without the others is worth nothing.
        """
        self._watch.check()
        self._send(Kind.FINISH, encode_ids(step.sampling.late_req_ids))
        try:
            with self._step_timeout:
                output = step.result()
            self._step_timeout.progress += 1
            return output
        except Exception as error:
            lost = self._watch.wait(CAUSE_SECONDS)
            if lost is None:
                self._watch.lose(f"a step failed on rank 0 ({type(error).__name__}: {error})")
                lost = self._watch.error
            assert lost is not None
            raise lost from error

    def _start(self, content: bytes) -> None:
        """Have the others start a step whose graph is built here."""
        self._send(Kind.PLAN, content)
        self._step_timeout.progress += 1

    def _send(self, kind: Kind, content: bytes = b"") -> None:
        for link in self._links:
            link.send(kind, content)

    def close(self) -> None:
        """End the other ranks, then the runner. After a loss neither is to be had: a stream may never end."""
        self._step_timeout.close()
        if self._watch.error is not None:
            return
        for link in self._links:
            link.close()
        try:
            self._send(Kind.QUIT)
        finally:
            self._runner.close()
            self._kill_left()


class LeaderStep:
    """A step under way (:class:`metal_engine.step.StepHandle`)."""

    def __init__(self, leader: LeaderRunner, step: PendingStep) -> None:
        self._leader = leader
        self._step = step

    def result(self) -> ModelOutput:
        return self._leader.finish(self._step)

"""Main loop of a rank other than rank 0: computes the rank's shard of the steps that rank 0 plans."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from metal_engine.distributed.channel import FrameKind, Link
from metal_engine.distributed.leader import CAUSE_SECONDS
from metal_engine.distributed.rank_failure import RankFailureMonitor
from metal_engine.distributed.wire import decode_ids, decode_plan
from metal_engine.errors import one_line
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.step import RunnerLostError


def run_as_follower(runner: ModelRunner, link: Link, monitor: RankFailureMonitor, rank: int) -> None:
    """Run the steps of rank 0 until rank 0 ends. Then close ``runner``.

    If this rank fails, it notifies rank 0, which ends all ranks.

    Raises:
        RunnerLostError: this rank has failed, or another rank was lost.
    """
    steps: deque[PendingStep] = deque()
    try:
        while run_frame(runner, steps, link, *link.receive()):
            pass
    except Exception as error:
        # The loss of another rank may be the cause. Rank 0 then reports that loss.
        if monitor.wait(CAUSE_SECONDS) is None:
            message = f"{type(error).__name__}: {one_line(error)}"
            report_failure(link, monitor, rank, message)
        assert monitor.error is not None
        raise monitor.error from error
    steps.clear()
    runner.close()


def run_frame(runner: ModelRunner, steps: deque[PendingStep], link: Link, kind: FrameKind, content: bytes) -> bool:
    """Process a frame. Return False if the frame ends the loop.

    Counts a started and a finished step in :attr:`Link.progress`. Raises the errors of the step, and RuntimeError if
    the frame cannot come between steps.

    Args:
        steps: steps in flight, oldest first, which this function changes.
    """

    def done() -> None:
        link.progress += 1

    match kind:
        case FrameKind.PLAN:
            steps.append(runner.execute(decode_plan(content), on_built=done))
        case FrameKind.FINISH:
            step = steps.popleft()
            step.sampling.set_late_requests(set(decode_ids(content)))
            step.result()
            done()
        case FrameKind.DROP:
            runner.forget(decode_ids(content))
        case FrameKind.QUIT:
            return False
        case _:
            raise RuntimeError(f"rank 0 sends {kind.name} between steps")
    return True


def report_failure(link: Link, monitor: RankFailureMonitor, rank: int, message: str) -> None:
    """Report to rank 0 that this rank has failed, with the reason. This process then ends after its grace period."""
    message = f"rank {rank} has failed ({message})"
    with suppress(RunnerLostError):  # if rank 0 is gone, too, the link reports that
        link.send(FrameKind.LOST, message.encode())
    monitor.lose(message)

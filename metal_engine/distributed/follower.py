"""Every rank but rank 0: it computes its share of what rank 0 plans, and asks for nothing."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from metal_engine.distributed.channel import Kind, Link
from metal_engine.distributed.leader import CAUSE_SECONDS
from metal_engine.distributed.rank_failure import RankFailureMonitor
from metal_engine.distributed.wire import decode_ids, decode_plan
from metal_engine.errors import one_line
from metal_engine.runner.model_runner import ModelRunner
from metal_engine.runner.pending_step import PendingStep
from metal_engine.step import RunnerLostError


def follow(runner: ModelRunner, link: Link, watch: RankFailureMonitor, rank: int) -> None:
    """Run the steps that rank 0 runs, until it ends. A rank that cannot go on tells rank 0, which ends all.

    Raises:
        RunnerLostError: this rank has failed, or another one has been lost.
    """
    steps: deque[PendingStep] = deque()
    try:
        while run_frame(runner, steps, link, *link.receive()):
            pass
    except Exception as error:
        # Where another rank has gone, rank 0 says so.
        if watch.wait(CAUSE_SECONDS) is None:
            message = f"{type(error).__name__}: {one_line(error)}"
            tell_failure(link, watch, rank, message)
        assert watch.error is not None
        raise watch.error from error
    steps.clear()
    runner.close()


def run_frame(runner: ModelRunner, steps: deque[PendingStep], link: Link, kind: Kind, content: bytes) -> bool:
    """Do what a frame says, and count it in what the link tells; False if that is the end."""

    def done() -> None:
        link.progress += 1

    match kind:
        case Kind.PLAN:
            steps.append(runner.execute(decode_plan(content), on_built=done))
        case Kind.FINISH:
            step = steps.popleft()
            step.sampling.set_late_requests(set(decode_ids(content)))
            step.result()
            done()
        case Kind.DROP:
            runner.forget(decode_ids(content))
        case Kind.QUIT:
            return False
        case _:
            raise RuntimeError(f"rank 0 sends {kind.name} between steps")
    return True


def tell_failure(link: Link, watch: RankFailureMonitor, rank: int, message: str) -> None:
    """Tell rank 0 why this rank ends."""
    message = f"rank {rank} has failed ({message})"
    with suppress(RunnerLostError):  # rank 0 may have gone, too, and is named
        link.send(Kind.LOST, message.encode())
    watch.lose(message)

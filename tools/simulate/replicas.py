"""One engine in simulated time: the real scheduler, and a model of step times."""

from __future__ import annotations

from metal_engine.request import RequestOutput
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.step import ModelOutput, SchedulerOutput
from tools.benchmarks.step_time_model import StepTimeModel
from tools.simulate.store import SimulatedTransfer

# Token that every step samples. Chats already differ in their prompts.
ANSWER_TOKEN = 7


class Replica:
    """Replica in simulated time. A step begins with :meth:`begin`, which returns its end, and ends with :meth:`end`.

    Args:
        scheduler: the project's own scheduler.
        model: model of step times.
        transfer: moves blocks between the replica and a store; None without a store.

    Attributes:
        num_rows: number of tokens computed so far, in prompts and answers.
    """

    def __init__(self, scheduler: Scheduler, model: StepTimeModel, transfer: SimulatedTransfer | None = None) -> None:
        self.scheduler = scheduler
        self.transfer = transfer
        self.num_rows = 0
        self._model = model
        self._plan: SchedulerOutput | None = None

    @property
    def is_stepping(self) -> bool:
        return self._plan is not None

    def begin(self, now: float) -> float | None:
        """Plan a step that begins at ``now``. Return the time of its end in seconds; None if no request can run now."""
        assert self._plan is None
        if self.transfer is not None:
            self.transfer.advance()
        plan = self.scheduler.schedule()
        if not plan.num_scheduled_tokens:
            return None
        self._plan = plan
        num_rows = sum(plan.num_scheduled_tokens.values())
        self.num_rows += num_rows
        return now + self._seconds(plan, num_rows)

    def end(self) -> list[RequestOutput]:
        """End the current step and update the scheduler with its tokens. Return the outputs of its requests."""
        assert self._plan is not None
        plan, self._plan = self._plan, None
        if self.transfer is not None and plan.kv_connector_metadata is not None:
            self.transfer.save([block_hash for block_hash, _ in plan.kv_connector_metadata.saves])
        return self.scheduler.update(plan, ModelOutput([ANSWER_TOKEN] * len(plan.sampled_req_ids)))

    def _seconds(self, plan: SchedulerOutput, num_rows: int) -> float:
        requests = self.scheduler.requests
        prefill_work = num_decodes = 0
        for request_id, rows in plan.num_scheduled_tokens.items():
            if rows == 1:
                num_decodes += 1
            else:
                context = requests[request_id].num_computed_tokens - rows
                prefill_work += rows * context + rows * (rows + 1) // 2
        return self._model.seconds(num_rows, prefill_work, num_decodes)

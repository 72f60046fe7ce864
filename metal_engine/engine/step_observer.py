"""Reports engine activity to live views: each step, and the changes that it makes to the block pool.

A :class:`StepObserver` exists only while there are live views. Without an observer, a step costs one additional test.
The engine's thread passes each plan to the observer, which emits a :class:`Frame` about ten times a second, fast enough
for a display. An observer never scans the whole pool at once. It derives from the plans which blocks may have changed,
and looks up only those blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metal_engine.request import Request, RequestStatus
from metal_engine.step import NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from metal_engine.scheduling.scheduler import Scheduler

# Seconds between two frames, and maximum number of step rows in a frame. Further steps are added to the last row.
FRAME_SECONDS = 0.1
MAX_ROWS = 8
# Maximum number of blocks read for one frame while a new observer reports the existing blocks. This takes 2 ms.
_BLOCKS_AT_ONCE = 1 << 16


@dataclass(slots=True)
class StepSegment:
    """One request's rows in a step.

    Attributes:
        key: number of the request in this observer.
        num_tokens: number of rows, including drafts.
        context_len: tokens of the request that were computed before the step.
        is_fresh: True if the request was admitted for this step, for the first time or after a preemption.
        samples: True if the step samples or pools for the request.
        num_drafts: number of drafts, which are the last rows.
        num_image_tokens: number of rows of image tokens.
    """

    key: int
    num_tokens: int
    context_len: int
    is_fresh: bool
    samples: bool
    num_drafts: int = 0
    num_image_tokens: int = 0


@dataclass(slots=True)
class StepRow:
    """Row of a frame: one step, or several consecutive steps that are shown with the segments of the first step.

    Attributes:
        step_id: id of the first step.
        idle: seconds between the end of the previous step and the start of this step.
        segments: rows of each request in the first step.
        num_steps: number of steps.
        seconds: total duration of the steps, each from its plan to the next plan.
    """

    step_id: int
    idle: float
    segments: list[StepSegment]
    num_steps: int = 1
    seconds: float = 0.0


@dataclass(slots=True)
class SeenRequest:
    """Request as reported to live views: its number in the observer, and its id in the engine."""

    key: int
    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class TableChange:
    """Change of a request's block table.

    Attributes:
        cleared: True if the old table was dropped before ``added`` was appended.
        added: ids of the appended blocks.
    """

    cleared: bool = False
    added: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Frame:
    """Changes since the previous frame.

    Attributes:
        forget: True if all earlier data about the pool is void. Tables and cached blocks are then sent again.
        rows: steps that have ended.
        requests: new requests.
        tables: changes of block tables by request key.
        cached: ids of blocks whose contents are now registered in the prefix cache.
        uncached: ids of blocks whose contents are no longer registered.
        preempted: keys of requests that lost their blocks and wait again.
        finished: keys of requests that have left the engine. These keys are not used again.
        drafts: numbers of proposed and accepted drafts of finished requests that had drafts, by request key.
        is_whole: True if the frames so far describe the complete current state of the pool.
    """

    forget: bool = False
    rows: list[StepRow] = field(default_factory=list)
    requests: list[SeenRequest] = field(default_factory=list)
    tables: dict[int, TableChange] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)
    uncached: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    is_whole: bool = True


FrameSink = Callable[[Frame], None]


@dataclass(slots=True)
class _Watched:
    """State of a running or preempted request, as reported so far.

    Attributes:
        key: number of the request in this observer.
        num_preemptions: preemptions reported so far.
        table: block ids reported so far; None if the request has no reported table.
        num_registered: leading blocks of the table whose registration in the prefix cache has been looked up.
    """

    key: int
    request: Request
    num_preemptions: int
    table: list[int] | None = None
    num_registered: int = 0


class StepObserver:
    """Observer of one scheduler. Runs in the engine's thread.

    Args:
        scheduler: scheduler whose plans are passed to :meth:`planned`.
        on_frame: callback for each frame. Must not block.
    """

    def __init__(self, scheduler: Scheduler, on_frame: FrameSink) -> None:
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._on_frame = on_frame
        self._num_keys = 0
        self._watched: dict[str, _Watched] = {}
        self._frame = Frame()
        self._nothing_new = Frame(is_whole=False)  # a frame without news: frames equal to it are not sent
        self._due = 0.0
        # Start time of the step in flight, and its token counts by request if it consists of decodes only.
        self._step_started: float | None = None
        self._last_end: float | None = None
        self._decodes: dict[str, int] | None = None
        # Blocks whose registration in the prefix cache has to be looked up for the next frame.
        self._to_look_up: list[int] = []
        self._num_plans = 0
        # Requests with drafts, each with the number of its last plan that had drafts. Rejected drafts can remove
        # blocks, so the tables of these requests are looked up.
        self._drafted = dict.fromkeys(scheduler.running, 0)
        self._begin()

    def _begin(self) -> None:
        """Start to report all running requests and all cached blocks again, spread over several frames."""
        self._num_forgets = self._blocks.num_forgets
        self._cursor = 0
        self._unreported = list(self._scheduler.running.values())
        for watched in self._watched.values():
            watched.table = None
        for request in self._unreported:
            self._seen(request)

    # --- the engine's side ----------------------------------------------------------------------------------

    def planned(self, plan: SchedulerOutput, now: float) -> None:
        """Record a plan that is about to run. An empty plan ends the previous step and starts no new step.

        Args:
            now: current time in seconds of ``time.monotonic``.
        """
        self._end_step(now)
        self._num_plans += 1
        for request_id in plan.scheduled_spec_decode_tokens:
            self._drafted[request_id] = self._num_plans
        for request_id in plan.dropped_req_ids:
            self._lost_blocks(request_id)
        for new in plan.new_requests:
            self._admitted(new)
        for request_id, block_ids in plan.new_block_ids.items():
            self._grew(request_id, block_ids)
        if now >= self._due:
            self._finish_frame(now)
        if plan.num_scheduled_tokens:
            self._begin_step(plan, now)

    def flush_frames(self) -> bool:
        """Send a pending frame while the engine is idle.

        Returns True if a further call is necessary to report the whole pool.
        """
        now = time.monotonic()
        self._end_step(now)
        self._finish_frame(now)
        return not self._is_whole

    @property
    def _is_whole(self) -> bool:
        return not self._unreported and self._cursor >= self._blocks.num_blocks

    # --- steps ----------------------------------------------------------------------------------------------

    def _begin_step(self, plan: SchedulerOutput, now: float) -> None:
        rows = self._frame.rows
        scheduled = plan.num_scheduled_tokens
        if rows and (len(rows) >= MAX_ROWS or (self._decodes == scheduled and not plan.new_requests)):
            rows[-1].num_steps += 1
        else:
            idle = 0.0 if self._last_end is None else now - self._last_end
            rows.append(StepRow(plan.step_id, idle, self._segments(plan)))
            is_decodes = not plan.new_requests and len(scheduled) == sum(scheduled.values())
            self._decodes = scheduled if is_decodes else None
        self._step_started = now

    def _segments(self, plan: SchedulerOutput) -> list[StepSegment]:
        fresh = {new.request_id for new in plan.new_requests}
        sampled = {*plan.sampled_req_ids, *plan.pooled_req_ids}
        requests, drafts = self._scheduler.requests, plan.scheduled_spec_decode_tokens

        def segment(request_id: str, num_tokens: int) -> StepSegment:
            stop, images = requests[request_id].num_computed_tokens, requests[request_id].images
            start = stop - num_tokens
            return StepSegment(
                self._watched[request_id].key,
                num_tokens,
                start,
                request_id in fresh,
                request_id in sampled,
                len(drafts.get(request_id, ())),
                0 if images is None else images.num_features_in(start, stop),
            )

        return [segment(request_id, n) for request_id, n in plan.num_scheduled_tokens.items()]

    def _end_step(self, now: float) -> None:
        if self._step_started is not None:
            self._frame.rows[-1].seconds += now - self._step_started
            self._step_started, self._last_end = None, now

    # --- the pool -------------------------------------------------------------------------------------------

    def _seen(self, request: Request) -> _Watched:
        watched = self._watched.get(request.request_id)
        if watched is None:
            watched = self._watched[request.request_id] = _Watched(self._num_keys, request, request.num_preemptions)
            self._num_keys += 1
            num_cached_tokens = max(request.num_cached_tokens, 0)
            seen = SeenRequest(watched.key, request.request_id, request.num_prompt_tokens, num_cached_tokens)
            self._frame.requests.append(seen)
        return watched

    def _admitted(self, new: NewRequestData) -> None:
        request = self._scheduler.requests.get(new.request_id)
        if request is not None:
            watched = self._seen(request)
            self._drop_table(watched)
            self._add(watched, new.block_ids)

    def _grew(self, request_id: str, block_ids: list[int]) -> None:
        watched = self._watched.get(request_id)
        if watched is None or watched.table is None:
            return  # the whole table will be reported later
        if request_id in self._drafted:
            self._to_look_up += block_ids  # _finish_frame() looks up the table itself
        else:
            self._add(watched, block_ids)

    def _add(self, watched: _Watched, block_ids: list[int]) -> None:
        if watched.table is None:
            watched.table = []
        watched.table += block_ids
        self._frame.tables.setdefault(watched.key, TableChange()).added += block_ids
        self._to_look_up += block_ids

    def _look_up(self, watched: _Watched, reported: list[int]) -> None:
        """Report the change of a block table since ``reported``, the table reported so far."""
        table = self._blocks.block_ids(watched.request.request_id)
        num_reported = len(reported)
        if table[:num_reported] == reported:
            if len(table) > num_reported:
                self._add(watched, table[num_reported:])
            return
        watched.table = table
        self._frame.tables[watched.key] = TableChange(cleared=True, added=list(table))
        self._to_look_up += table

    def _drop_table(self, watched: _Watched) -> None:
        if watched.table is not None:
            self._frame.tables[watched.key] = TableChange(cleared=True)
            # The scheduler may have registered these blocks in the meantime.
            self._to_look_up += watched.table[watched.num_registered :]
            watched.table = None
        watched.num_registered = 0

    def _lost_blocks(self, request_id: str) -> None:
        """Record that a request has lost its blocks, because it ended or was preempted."""
        watched = self._watched.get(request_id)
        if watched is None:
            return
        self._drop_table(watched)
        if watched.request.num_preemptions > watched.num_preemptions:
            watched.num_preemptions = watched.request.num_preemptions
            self._frame.preempted.append(watched.key)
        if request_id not in self._scheduler.requests:
            del self._watched[request_id]
            self._frame.finished.append(watched.key)
            if watched.request.num_draft_tokens[0]:
                self._frame.drafts[watched.key] = watched.request.num_draft_tokens

    # --- frames ---------------------------------------------------------------------------------------------

    def _finish_frame(self, now: float) -> None:
        """Look up the changes of the pool, and send the current frame if it reports a change."""
        if self._num_forgets != self._blocks.num_forgets:
            self._frame.tables.clear()
            self._frame.forget = True
            self._to_look_up.clear()
            self._begin()
        for request_id, watched in list(self._watched.items()):
            if watched.request.status is not RequestStatus.RUNNING:
                self._lost_blocks(request_id)
            elif watched.table is not None:
                if request_id in self._drafted:
                    self._look_up(watched, watched.table)
                num_registered = watched.request.num_registered_blocks
                self._to_look_up += watched.table[watched.num_registered : num_registered]
                watched.num_registered = num_registered
        # The result of a plan's drafts is recorded before the second plan after it.
        self._drafted = {r: plan for r, plan in self._drafted.items() if self._num_plans - plan < 2}
        if not self._is_whole:
            self._report_more()
        frame, to_look_up = self._frame, set(self._to_look_up)
        self._to_look_up = []
        frame.cached += sorted(block_id for block_id in to_look_up if self._blocks.is_known(block_id))
        frame.uncached += sorted(to_look_up.difference(frame.cached))
        frame.is_whole = self._is_whole
        self._due = now + FRAME_SECONDS
        if frame != self._nothing_new:
            self._frame, self._nothing_new = Frame(), Frame(is_whole=frame.is_whole)
            self._on_frame(frame)

    def _report_more(self) -> None:
        """Add to the frame the next block tables and cached blocks that existed before the observer started.

        Adds at most about ``_BLOCKS_AT_ONCE`` blocks of each kind.
        """
        num_reported = 0
        while self._unreported and num_reported < _BLOCKS_AT_ONCE:
            request = self._unreported.pop()
            watched = self._watched.get(request.request_id)
            if watched is not None and watched.table is None and request.status is RequestStatus.RUNNING:
                self._add(watched, self._blocks.block_ids(request.request_id))
                watched.num_registered = request.num_registered_blocks
                num_reported += len(watched.table or ())
        if not self._unreported:
            stop = self._cursor + _BLOCKS_AT_ONCE
            self._frame.cached += self._blocks.known_blocks(self._cursor, stop)
            self._cursor = stop

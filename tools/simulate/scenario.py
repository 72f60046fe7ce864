"""N replicas behind a router in simulated time: every request from its arrival to its end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.kv_transfer.settings import KVTransferConfig
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.transfer import KVTransfer
from metal_engine.request import Request, RequestOutput
from metal_engine.sampling_params import SamplingParams
from metal_engine.scheduling.prefix_cache import extend_block_hashes
from metal_engine.scheduling.scheduler import Scheduler
from metal_engine.scheduling.stats import SchedulerStats
from metal_engine.settings.config import CacheConfig, SchedulerConfig
from tools.benchmarks.step_time_model import StepTimeModel
from tools.simulate.replicas import Replica
from tools.simulate.routing import Ask, RouterConfig, is_overloaded, make_policy
from tools.simulate.store import SharedStore, SimulatedTransfer, StoreConfig
from tools.simulate.traffic import Chat

BLOCK_SIZE = 16
# Seconds after which a user repeats a request whose stream broke.
ASKS_AGAIN_AFTER = 5.0
# Order of simultaneous events: requests arrive before the next step is planned.
_COMES, _STEP_ENDS, _WAKES = range(3)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Loss of the first ``num_replicas`` replicas, which later return empty.

    Attributes:
        at: time of the loss in seconds.
        noticed_after: seconds until the router detects the loss. Until then, it sends requests to the lost replicas.
            Then, their requests without a token move to other replicas, and their other streams break.
        seconds: duration of the outage.
    """

    num_replicas: int
    at: float
    noticed_after: float = 15.0  # three failed health checks at intervals of five seconds
    seconds: float = 300.0


@dataclass(frozen=True, kw_only=True)
class SimulatedScenario:
    """Settings of a simulation, with times in seconds.

    Requests count if they arrive within ``period`` after ``warm_up``.
    """

    num_replicas: int
    policy: str
    warm_up: float
    period: float
    scheduler: SchedulerConfig
    pool_blocks: int
    router: RouterConfig = field(default_factory=RouterConfig)
    store: StoreConfig | None = None
    loss: Loss | None = None

    @property
    def end(self) -> float:
        """Time of the last possible arrival."""
        return self.warm_up + self.period


@dataclass(eq=False, slots=True)
class Served:
    """Request with its outcome. Times are in seconds. A negative time means that the event has not happened.

    Attributes:
        prompt: token ids. When the request has finished, ``prompt`` and ``block_hashes`` are emptied.
        asked_at: time of arrival.
        num_possible_tokens: prompt tokens that an unlimited cache shared by all replicas would have had.
        replica: current or last replica.
        outcome: "finished", or "broken" if its replica was lost after the first token; None while it runs.
        num_retries: number of times that the request was moved because its replica was lost.
    """

    request_id: str
    chat: Chat
    turn: int
    prompt: list[int]
    block_hashes: list[bytes]
    asked_at: float
    num_possible_tokens: int
    num_prompt_tokens: int = field(init=False)
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    replica: int = -1
    request: Request | None = None
    first_token_at: float = -1.0
    ended_at: float = -1.0
    outcome: str | None = None
    num_retries: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt)

    @property
    def num_answer_tokens(self) -> int:
        return self.chat.turns[self.turn].num_answer_tokens


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


class SimulatedFleet:
    """Simulation of one run of a scenario.

    Attributes:
        served: every request, in order of arrival.
        store: shared store; None without a store.
    """

    def __init__(self, scenario: SimulatedScenario, model: StepTimeModel, chats: Sequence[Chat]) -> None:
        self.scenario = scenario
        self.served: list[Served] = []
        self.store = None if scenario.store is None else SharedStore(scenario.store)
        self._model = model
        self._now = 0.0
        self._events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        count = scenario.num_replicas
        self._ever: list[Replica] = []  # includes lost replicas
        self.replicas: list[Replica | None] = [self._new_replica() for _ in range(count)]  # None: lost
        self._healthy = list(range(count))  # the router's view
        self._overloaded: set[int] = set()  # as of the router's last poll
        self._is_polling = False
        self._in_flight: list[dict[str, Served]] = [{} for _ in range(count)]
        self._policy = make_policy(scenario.policy, count, scenario.router, self._num_cached)
        self._known: set[bytes] = set()  # blocks of all prompts that have been sent to any replica
        for chat in chats:
            self._at(chat.at, _COMES, self._ask, chat, 0, [], [])
        if scenario.loss is not None:
            self._at(scenario.loss.at, _COMES, self._lose, scenario.loss)

    def run(self) -> list[Served]:
        """Run until every request has ended. Return the requests."""
        while self._events:
            self._now, _, _, happen, args = heapq.heappop(self._events)
            happen(*args)
        return self.served

    def _at(self, time: float, order: int, happen: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time, order, next(self._sequence), happen, args))

    def _new_replica(self) -> Replica:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=self.scenario.pool_blocks, enable_prefix_caching=True)
        connector = transfer = None
        if self.store is not None:
            config = KVTransferConfig(kv_connector="valkey")
            transfer = SimulatedTransfer(self.store, config, lambda: self._now)
            connector = KVConnectorScheduler(cast(KVTransfer, transfer), config, KVTransferStats())
        replica = Replica(Scheduler(self.scenario.scheduler, cache, connector), self._model, transfer)
        self._ever.append(replica)
        return replica

    def _num_cached(self, index: int, hashes: Sequence[bytes]) -> int:
        replica = self.replicas[index]
        return 0 if replica is None else len(replica.scheduler.blocks.find_cached(hashes, len(hashes)))

    # --- requests -------------------------------------------------------------------------------------------

    @property
    def num_preemptions(self) -> int:
        return sum(replica.scheduler.num_preemptions for replica in self._ever)

    def _ask(self, chat: Chat, turn: int, history: list[int], hashes: list[bytes]) -> None:
        """Send the message of a turn. If prompt and answer would exceed the context length, the chat ends instead."""
        prompt = chat.prompt(history, turn)
        answer = chat.turns[turn].num_answer_tokens
        if len(prompt) + answer > self.scenario.scheduler.max_model_len:
            return
        request = Request("", prompt, _params(answer), max_tokens=answer, block_hashes=list(hashes))
        hashes = extend_block_hashes(request, BLOCK_SIZE, "")
        possible = 0
        for block_hash in hashes[: (len(prompt) - 1) // BLOCK_SIZE]:
            if block_hash not in self._known:
                break
            possible += BLOCK_SIZE
        self._known.update(hashes)
        served = Served(str(len(self.served)), chat, turn, prompt, hashes, self._now, possible)
        self.served.append(served)
        self._send(served)

    def _send(self, served: Served) -> None:
        loads = [len(in_flight) for in_flight in self._in_flight]
        # If all replicas are overloaded, the least loaded replica gets the request.
        allowed = [one for one in self._healthy if one not in self._overloaded]
        allowed = allowed or [min(self._healthy, key=lambda one: loads[one])]
        index = self._policy.choose(Ask(served.chat.user, served.block_hashes), allowed, loads)
        assert index in allowed
        self._start_polling()
        served.replica = index
        self._in_flight[index][served.request_id] = served
        replica = self.replicas[index]
        if replica is None:
            return  # the loss has not been detected yet
        answer = served.num_answer_tokens
        served.request = Request(
            served.request_id, served.prompt, _params(answer), max_tokens=answer,
            block_hashes=list(served.block_hashes),
        )  # fmt: skip
        replica.scheduler.add_request(served.request)
        if not replica.is_stepping:
            self._at(self._now, _WAKES, self._begin, index, replica)

    def _end(self, served: Served, outcome: str) -> None:
        assert served.outcome is None, f"request {served.request_id} ends twice"
        served.outcome, served.ended_at = outcome, self._now
        del self._in_flight[served.replica][served.request_id]

    def _record_output(self, output: RequestOutput, served: Served) -> None:
        if served.first_token_at < 0:
            served.first_token_at = self._now
        if output.finish_reason is None:
            return
        self._end(served, "finished")
        assert served.request is not None
        history, hashes = served.request.token_ids, served.request.block_hashes
        self._known.update(hashes)
        served.num_cached_tokens = served.request.num_cached_tokens
        served.num_external_tokens = served.request.num_external_tokens
        chat, turn = served.chat, served.turn
        asks_at = self._now + chat.turns[turn].pause
        if turn + 1 < len(chat.turns) and asks_at < self.scenario.end:
            self._at(asks_at, _COMES, self._ask, chat, turn + 1, history, hashes)
        served.prompt, served.block_hashes, served.request = [], [], None  # large, and not needed any more

    # --- steps ----------------------------------------------------------------------------------------------

    def _begin(self, index: int, replica: Replica) -> None:
        if self.replicas[index] is not replica or replica.is_stepping or not replica.scheduler.has_requests:
            return
        end = replica.begin(self._now)
        if end is not None:
            self._at(end, _STEP_ENDS, self._end_step, index, replica)
            return
        assert replica.transfer is not None
        arrives_at = replica.transfer.next_change()
        assert arrives_at is not None and arrives_at > self._now, "requests wait for nothing"
        self._at(arrives_at, _WAKES, self._begin, index, replica)

    def _end_step(self, index: int, replica: Replica) -> None:
        if self.replicas[index] is not replica:
            return  # lost in the meantime
        in_flight = self._in_flight[index]
        for output in replica.end():
            self._record_output(output, in_flight[output.request_id])
        self._at(self._now, _WAKES, self._begin, index, replica)

    # --- what the router sees of the replicas ---------------------------------------------------------------

    def _start_polling(self) -> None:
        """Schedule the router's next poll at a multiple of its interval.

        Polling pauses while no request is in flight.
        """
        if not self._is_polling and self.scenario.router.guarded:
            self._is_polling = True
            interval = self.scenario.router.poll_interval
            self._at((self._now // interval + 1) * interval, _WAKES, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        for index, replica in enumerate(self.replicas):
            if replica is None:
                continue  # no response: keep the state of the last poll
            stats = SchedulerStats.of(replica.scheduler)
            usage = stats.num_used_blocks / stats.num_blocks
            if is_overloaded(stats.num_waiting, usage, self.scenario.router):
                self._overloaded.add(index)
            else:
                self._overloaded.discard(index)
        if any(self._in_flight):
            self._start_polling()

    # --- lost replicas --------------------------------------------------------------------------------------

    def _lose(self, loss: Loss) -> None:
        assert loss.num_replicas < self.scenario.num_replicas and loss.noticed_after <= loss.seconds
        for index in range(loss.num_replicas):
            self.replicas[index] = None
            self._at(self._now + loss.noticed_after, _COMES, self._notice_loss, index)
            self._at(self._now + loss.seconds, _COMES, self._bring_back, index)

    def _notice_loss(self, index: int) -> None:
        self._healthy.remove(index)
        for served in list(self._in_flight[index].values()):
            if served.first_token_at < 0:
                del self._in_flight[index][served.request_id]
                served.num_retries += 1
                self._send(served)
            else:
                self._end(served, "broken")
                chat, turn, prompt = served.chat, served.turn, served.prompt
                message = chat.turns[turn].num_message_tokens
                asks_at = self._now + ASKS_AGAIN_AFTER
                self._at(asks_at, _COMES, self._ask, chat, turn, prompt[:-message], served.block_hashes)

    def _bring_back(self, index: int) -> None:
        self.replicas[index] = self._new_replica()
        self._overloaded.discard(index)
        self._healthy = sorted([*self._healthy, index])

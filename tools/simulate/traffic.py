"""Chats of many users: their prompts and times.

The shape of a chat is an assumption, except where a source is named:

- Turns are geometric with a mean of 2.5. WildChat has over 2.5 million turns in 1 million conversations
  (arXiv 2405.01470, abstract).
- Messages and answers have log-normal lengths with means of about 100 and 207 tokens. The time between an answer and
  the user's next message is log-normal with a median of 45 s.
- Every chat begins with one of 64 system prompts of 200 to 2,000 tokens. The share of the k-th most frequent prompt is
  proportional to 1 / k.
- Users differ: the number of chats of a user per day is log-normal (sigma 1) with a mean of 2. Chats begin at random at
  a constant rate. A peak hour is simulated by a higher load.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

SECONDS_PER_DAY = 86_400
_CHAT_TOKENS = 1_000_000  # first token id for chats; smaller ids are for system prompts
_SYSTEM_TOKENS = 1_000


@dataclass(frozen=True, slots=True)
class Turn:
    """Message of a user: lengths of message and answer in tokens, and the seconds until the user's next message."""

    num_message_tokens: int
    num_answer_tokens: int
    pause: float


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversation of a user, which begins ``at`` seconds after the start of the simulation.

    ``system`` is the index of its system prompt, which has ``num_system_tokens`` tokens.
    """

    chat_id: int
    user: int
    at: float
    system: int
    num_system_tokens: int
    turns: tuple[Turn, ...]

    def prompt(self, history: list[int], turn: int) -> list[int]:
        """Return the prompt of a turn.

        ``history`` holds the prompt and the answer of the previous turn, or is empty.
        """
        before = history or [_SYSTEM_TOKENS + self.system] * self.num_system_tokens
        return before + [_CHAT_TOKENS + self.chat_id] * self.turns[turn].num_message_tokens


@dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """Amount and shape of the traffic, in seconds and tokens."""

    num_users: int
    chats_per_day: float = 2.0
    mean_turns: float = 2.5
    max_turns: int = 20
    message_median: float = 60.0
    message_sigma: float = 1.0
    answer_median: float = 150.0
    answer_sigma: float = 0.8
    pause_median: float = 45.0
    pause_sigma: float = 1.0
    num_systems: int = 64
    system_range: tuple[int, int] = (200, 2000)
    activity_sigma: float = 1.0
    max_message: int = 2000
    max_answer: int = 1024

    @property
    def chats_per_second(self) -> float:
        return self.num_users * self.chats_per_day / SECONDS_PER_DAY


def make_chats(config: TrafficConfig, seconds: float, seed: int) -> list[Chat]:
    """Return the chats that begin within ``seconds``, in the order of their beginnings."""
    rng = random.Random(seed)
    low, high = config.system_range
    systems = [round(low * (high / low) ** rng.random()) for _ in range(config.num_systems)]
    shares = list(itertools.accumulate(1 / (rank + 1) for rank in range(config.num_systems)))
    activity = list(itertools.accumulate(rng.lognormvariate(0, config.activity_sigma) for _ in range(config.num_users)))
    chats: list[Chat] = []
    at = rng.expovariate(config.chats_per_second)
    while at < seconds:
        user = rng.choices(range(config.num_users), cum_weights=activity)[0]
        system = rng.choices(range(config.num_systems), cum_weights=shares)[0]
        turns = tuple(_make_turn(config, rng) for _ in range(_draw_turns(config, rng)))
        chats.append(Chat(len(chats), user, at, system, systems[system], turns))
        at += rng.expovariate(config.chats_per_second)
    return chats


def _draw_turns(config: TrafficConfig, rng: random.Random) -> int:
    if config.mean_turns == 1:
        return 1
    goes_on = 1 - 1 / config.mean_turns
    return min(config.max_turns, 1 + int(math.log(1 - rng.random()) / math.log(goes_on)))


def _make_turn(config: TrafficConfig, rng: random.Random) -> Turn:
    message = rng.lognormvariate(math.log(config.message_median), config.message_sigma)
    answer = rng.lognormvariate(math.log(config.answer_median), config.answer_sigma)
    pause = rng.lognormvariate(math.log(config.pause_median), config.pause_sigma)
    return Turn(min(config.max_message, max(1, round(message))), min(config.max_answer, max(1, round(answer))), pause)

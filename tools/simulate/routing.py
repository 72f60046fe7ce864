"""Which replica a request goes to.

``cache_aware`` follows the gateway smg, as its documentation and its source (1.9) say; defaults are those of its
command. Loads are requests that were sent and have not ended: a router knows those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from tools.simulate.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Ask:
    """What a router sees of a request: who asks, and the prompt as the hashes of its full blocks."""

    user: int
    block_hashes: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Limits of ``cache_aware``.

    Attributes:
        cache_threshold: share of a prompt that must have gone to a replica before, for that one to be chosen.
        balance_abs: loads further apart than this, and ...
        balance_rel: ... by more than this factor: then the least loaded replica is chosen.
        max_tree_blocks: blocks remembered of each replica.
    """

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    max_tree_blocks: int = 2**26 // 64  # 2^26 characters, some four a token


class Policy(Protocol):
    """Chooses among the replicas that are ``healthy`` as far as the router knows; ``loads`` are by replica."""

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int: ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        self._next += 1
        return healthy[(self._next - 1) % len(healthy)]


class Session:
    """A user's requests go to one replica, the same as long as that is healthy; others' move only if theirs is not."""

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        return max(healthy, key=lambda replica: _weight(ask.user, replica))


def _weight(user: int, replica: int) -> bytes:
    # Not `hash`: of ints it is no hash, of others it differs between runs.
    return blake2b(f"{user}/{replica}".encode(), digest_size=8).digest()


class LeastLoaded:
    """The replica with the fewest requests; among equals, the one that was sent the fewest so far."""

    def __init__(self, num_replicas: int) -> None:
        self._num_sent = [0] * num_replicas

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        return self.note(self.least(healthy, loads))

    def least(self, healthy: Sequence[int], loads: Sequence[int]) -> int:
        return min(healthy, key=lambda replica: (loads[replica], self._num_sent[replica], replica))

    def note(self, replica: int) -> int:
        self._num_sent[replica] += 1
        return replica


class CacheAware:
    """The replica to which most of the prompt went before, while loads are even enough; else the least loaded one.

    Where that replica is not healthy, the first healthy one is chosen and nothing is noted: smg does so.
    """

    def __init__(self, num_replicas: int, config: RouterConfig) -> None:
        self.tree = PrefixTree(num_replicas, config.max_tree_blocks)
        self._config = config
        self._least_loaded = LeastLoaded(num_replicas)

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        if is_imbalanced([loads[replica] for replica in healthy], self._config):
            chosen = self._least_loaded.least(healthy, loads)
        else:
            length, last = self.tree.match(ask.block_hashes)
            if last is None or length <= self._config.cache_threshold * len(ask.block_hashes):
                chosen = self._least_loaded.least(healthy, loads)
            elif last in healthy:
                chosen = last
            else:
                return healthy[0]
        self.tree.insert(ask.block_hashes, chosen)
        return self._least_loaded.note(chosen)


class Exact:
    """The replica that has most of the prompt in its cache at this moment; among equals, the least loaded one.

    Args:
        num_cached: returns how many leading blocks a replica has; smg learns it from engines that announce theirs.
    """

    def __init__(
        self, num_replicas: int, config: RouterConfig, num_cached: Callable[[int, Sequence[bytes]], int]
    ) -> None:
        self._config = config
        self._num_cached = num_cached
        self._least_loaded = LeastLoaded(num_replicas)

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        if not is_imbalanced([loads[replica] for replica in healthy], self._config):
            cached = {replica: self._num_cached(replica, ask.block_hashes) for replica in healthy}
            most = max(cached.values())
            healthy = [replica for replica in healthy if cached[replica] == most]
        return self._least_loaded.choose(ask, healthy, loads)


def is_imbalanced(loads: Sequence[int], config: RouterConfig) -> bool:
    """Whether loads are so uneven that caches matter no more."""
    least, most = min(loads), max(loads)
    return most - least > config.balance_abs and most > config.balance_rel * least


POLICIES = ("cache_aware", "exact", "session", "least_loaded", "round_robin")


def make_policy(
    name: str, num_replicas: int, config: RouterConfig, num_cached: Callable[[int, Sequence[bytes]], int]
) -> Policy:
    """Returns the policy of that name, one of :data:`POLICIES`."""
    if name == "cache_aware":
        return CacheAware(num_replicas, config)
    if name == "exact":
        return Exact(num_replicas, config, num_cached)
    if name == "session":
        return Session()
    if name == "least_loaded":
        return LeastLoaded(num_replicas)
    assert name == "round_robin", name
    return RoundRobin()

"""Which replica a request goes to.

``cache_aware`` and the overload guard follow the gateway smg as far as the help of its command says (``smg launch
--help`` of 1.13); defaults are its own. What it does with workers that have just started or make no progress is left
out. Loads are requests that were sent and have not ended: a router knows those of its own.
"""

from __future__ import annotations

import math
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
    """Limits of ``cache_aware``, and of the overload guard, which holds for every policy.

    Attributes:
        cache_threshold: share of a prompt that must have gone to a replica before, for that one to be chosen.
        balance_abs: the least loaded replica is chosen instead if that one's load is above the mean by more than this
            many requests ...
        balance_rel: ... and above the mean by more than this factor.
        balance_capped: ``balance_abs`` is no more than two standard deviations of the mean load (or 4).
        max_tree_blocks: blocks remembered, of all replicas together.
        guarded: overloaded replicas are left out while there are others.
        overload_waiting: so many waiting requests make a replica overloaded ...
        overload_usage: ... and so does this share of its KV cache in use.
        poll_interval: seconds between two looks at both.
    """

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    balance_capped: bool = True
    max_tree_blocks: int = 2**26 // 64  # 2^26 characters, some four a token
    guarded: bool = True
    overload_waiting: int = 8
    overload_usage: float = 0.8
    poll_interval: float = 10.0


class Policy(Protocol):
    """Chooses among the replicas that are ``healthy`` as far as the router knows, and not left out by the guard.

    ``loads`` are by replica.
    """

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
    """The replica to which most of the prompt went before; the least loaded one if that has too much to do, or is lost.

    Of several with the same share of the prompt it is the one that was sent it last. smg's help does not say what
    happens to a prompt whose replica is lost; here it goes to the least loaded one, as if nothing were known of it.
    """

    def __init__(self, num_replicas: int, config: RouterConfig) -> None:
        self.tree = PrefixTree(num_replicas, config.max_tree_blocks)
        self._config = config
        self._least_loaded = LeastLoaded(num_replicas)

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        length, chosen = self.tree.match(ask.block_hashes)
        known = length > self._config.cache_threshold * len(ask.block_hashes)
        if chosen is None or not known or chosen not in healthy or spills(chosen, healthy, loads, self._config):
            chosen = self._least_loaded.least(healthy, loads)
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
        cached = {replica: self._num_cached(replica, ask.block_hashes) for replica in healthy}
        most = max(cached.values())
        matched = [replica for replica in healthy if cached[replica] == most]
        if spills(self._least_loaded.least(matched, loads), healthy, loads, self._config):
            matched = list(healthy)
        return self._least_loaded.choose(ask, matched, loads)


def spills(replica: int, healthy: Sequence[int], loads: Sequence[int], config: RouterConfig) -> bool:
    """Whether a replica has so much more to do than the healthy ones in the mean that caches matter no more."""
    mean = sum(loads[one] for one in healthy) / len(healthy)
    margin: float = config.balance_abs
    if config.balance_capped:
        # Requests that come and go at random: the variance of how many there are is their mean (Poisson).
        margin = min(margin, max(4.0, 2 * math.sqrt(mean)))
    return loads[replica] > mean + margin and loads[replica] > config.balance_rel * mean


def is_overloaded(num_waiting: int, usage: float, config: RouterConfig) -> bool:
    """Whether the guard leaves out a replica with so many waiting requests, and that share of its KV cache in use."""
    return config.guarded and (num_waiting >= config.overload_waiting or usage >= config.overload_usage)


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

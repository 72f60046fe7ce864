"""Routing policies: the choice of a replica for each request.

``cache_aware`` and the overload guard follow the gateway smg as described in its command's help (``smg launch --help``
of 1.13). Defaults are smg's own. Its treatment of workers that have just started or make no progress is not modelled.
The load of a replica is the number of requests that the router has sent to it and that have not ended.
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
    """Router's view of a request: the user, and the prompt as the hashes of its full blocks."""

    user: int
    block_hashes: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Limits of ``cache_aware`` and ``exact``, and of the overload guard, which applies to all policies.

    Attributes:
        cache_threshold: share of a prompt's blocks. ``cache_aware`` chooses a replica for its cache only if the replica
            got a larger share before.
        balance_abs: number of requests. If the load of the replica with the cached prefix exceeds both the mean load
            plus ``balance_abs``, and the mean load times ``balance_rel``, the least loaded replica is chosen instead.
        balance_rel: factor on the mean load, see ``balance_abs``.
        balance_capped: True to cap ``balance_abs`` at twice the square root of the mean load, but at no less than 4.
        max_tree_blocks: capacity of the prefix tree in blocks, for all replicas together.
        guarded: True to exclude overloaded replicas while other replicas are available.
        overload_waiting: number of waiting requests from which a replica is overloaded.
        overload_usage: used share of the KV cache from which a replica is overloaded.
        poll_interval: seconds between two polls of waiting requests and cache usage.
    """

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    balance_capped: bool = True
    max_tree_blocks: int = 2**26 // 64  # 2^26 characters, at about four per token
    guarded: bool = True
    overload_waiting: int = 8
    overload_usage: float = 0.8
    poll_interval: float = 10.0


class Policy(Protocol):
    """Routing policy. ``choose`` returns the index of a replica in ``healthy``.

    ``healthy`` has the indices of the replicas that the router considers healthy and that the guard does not exclude.
    ``loads`` has the load of every replica, by index.
    """

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int: ...


class RoundRobin:
    """Chooses the replicas in rotation."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        self._next += 1
        return healthy[(self._next - 1) % len(healthy)]


class Session:
    """Sends all requests of a user to one replica while it is healthy. Only users of lost replicas are moved."""

    def choose(self, ask: Ask, healthy: Sequence[int], loads: Sequence[int]) -> int:
        return max(healthy, key=lambda replica: _weight(ask.user, replica))


def _weight(user: int, replica: int) -> bytes:
    # `hash` is unsuitable: it is the identity for ints, and differs between runs for other types.
    return blake2b(f"{user}/{replica}".encode(), digest_size=8).digest()


class LeastLoaded:
    """Chooses the replica with the lowest load. Among equal loads, chooses the replica that got the fewest requests."""

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
    """Chooses the replica that got the longest prefix of the prompt before.

    If that prefix is too short, or that replica is overloaded or lost, chooses the least loaded replica.

    If several replicas got the same share of the prompt, the most recent one is chosen. smg's help does not describe
    the routing of prompts whose replica is lost. This class sends these prompts to the least loaded replica, like
    unknown prompts.
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
    """Chooses the replica whose cache has the longest prefix of the prompt now.

    If several replicas have the longest prefix, chooses the least loaded of them. If the load of that replica exceeds
    the limits ``balance_abs`` and ``balance_rel``, chooses the least loaded of all healthy replicas.

    Args:
        num_cached: returns the number of the prompt's leading blocks in a replica's cache. The gateway smg gets this
            number from engines that publish it.
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
    """Return True if ``replica`` is too loaded, compared with ``healthy``, to be chosen for its cached prefix.

    See ``balance_abs`` of :class:`RouterConfig`.
    """
    mean = sum(loads[one] for one in healthy) / len(healthy)
    margin: float = config.balance_abs
    if config.balance_capped:
        # Requests arrive and end at random, so the variance of their number equals its mean (Poisson).
        margin = min(margin, max(4.0, 2 * math.sqrt(mean)))
    return loads[replica] > mean + margin and loads[replica] > config.balance_rel * mean


def is_overloaded(num_waiting: int, usage: float, config: RouterConfig) -> bool:
    """Return True if the guard excludes a replica with this number of waiting requests and this cache usage."""
    return config.guarded and (num_waiting >= config.overload_waiting or usage >= config.overload_usage)


POLICIES = ("cache_aware", "exact", "session", "least_loaded", "round_robin")


def make_policy(
    name: str, num_replicas: int, config: RouterConfig, num_cached: Callable[[int, Sequence[bytes]], int]
) -> Policy:
    """Return the policy of a name in :data:`POLICIES`."""
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

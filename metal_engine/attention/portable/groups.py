"""Which requests of a step share a batched product of attention, and which of two streams computes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes that trade speed for memory. Elements are float32 elements of one temporary array."""

    scores: int  # elements of a tile of scores: rows * query heads * keys
    span: int  # elements of gathered K or V
    tile_rows: int  # rows of a query tile
    small_area: int = 16_384  # rows * keys up to which a request with several rows goes into a group
    group_slack: int = 2_048  # padding that is cheaper than one more group, in units of `_cost`
    group_waste: float = 0.125  # padding of a group relative to its real work
    # A decode reads keys in consecutive slots where they are, from so many keys on; None: never.
    run_keys: int | None = None
    lane_elements: int | None = None  # of K, gathered for decodes: from so many on two streams; None: never
    min_keys: int = 64  # a tile or span has at least so many keys, whatever the other limits say


# On a CPU a chain of elementwise ops runs several times faster while its arrays stay in the cache, and arrays
# of several MB may be fresh pages from the system every time. A GPU wants more work per launch.
CPU_LIMITS = Limits(scores=384 * 1024, span=1024 * 1024, tile_rows=64, run_keys=640, lane_elements=384 * 1024)
GPU_LIMITS = Limits(scores=16 << 20, span=8 << 20, tile_rows=256)


@dataclass(frozen=True)
class Dims:
    """What planning must know of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # the larger of K's and V's


@dataclass(frozen=True)
class RowSegment:
    """One request's rows in a step, and the absolute positions [key_start, key_end) that any of them sees."""

    request: int
    start: int
    num_rows: int
    key_start: int
    key_end: int

    @property
    def num_keys(self) -> int:
        return self.key_end - self.key_start

    @property
    def context_len(self) -> int:
        return self.key_end - self.num_rows


def _cost(num_rows: int, num_keys: int) -> int:
    """Cost of one request in a group: gathering a key takes about as long as scoring it for three rows."""
    return num_keys * (num_rows + 3)


def group_segments(segments: Iterable[RowSegment], dims: Dims, limits: Limits) -> list[list[RowSegment]]:
    """Groups of similar segments: padding them all to the largest rows and keys costs at most
    max(group_slack, group_waste * real work), and a group of short contexts needs only one span."""
    groups: list[list[RowSegment]] = []
    rows = keys = real = 0
    for segment in sorted(segments, key=lambda s: (-s.num_rows, -s.num_keys, s.request)):
        cost, size = _cost(segment.num_rows, segment.num_keys), len(groups[-1]) + 1 if groups else 0
        longest = max(keys, segment.num_keys)
        waste = size * _cost(rows, longest) - (real + cost)
        if (
            groups
            and waste <= max(limits.group_slack, limits.group_waste * (real + cost))
            and size * rows * dims.num_heads * longest <= limits.scores
            and size * dims.num_kv_heads * dims.head_dim * longest <= limits.span
        ):
            groups[-1].append(segment)
            keys, real = longest, real + cost
        else:
            groups.append([segment])
            rows, keys, real = segment.num_rows, segment.num_keys, cost
    for group in groups:
        group.sort(key=lambda s: s.start)  # packed order needs no permutation of the output
    return groups


def in_lanes(groups: list[list[RowSegment]], dims: Dims, limits: Limits) -> list[tuple[int, list[RowSegment]]]:
    """Groups with their lanes, 0 or 1: decodes are divided so that each lane has about as many keys to gather.

    A gather takes one core, whatever BLAS has. What has several rows stays on lane 0: its products take all cores.
    """
    # Keys of each decode, padding included; 0 in groups that are not decodes.
    keys = [
        max(segment.num_keys for segment in group) if all(segment.num_rows == 1 for segment in group) else 0
        for group in groups
    ]
    room = sum(len(group) * count for group, count in zip(groups, keys, strict=True)) / 2  # on lane 0
    if limits.lane_elements is None or 2 * room * dims.num_kv_heads * dims.head_dim < limits.lane_elements:
        return [(0, group) for group in groups]
    lanes = []
    for group, each in zip(groups, keys, strict=True):
        here = min(max(int(room / each + 0.5), 0), len(group)) if each else len(group)
        room -= here * each
        lanes += [(lane, part) for lane, part in enumerate((group[:here], group[here:])) if part]
    return lanes

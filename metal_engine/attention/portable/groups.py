"""Groups requests of a step into batched products of attention, and divides the groups between two streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes that trade speed for memory. Elements are float32 elements of one temporary array."""

    scores: int  # elements of a tile of scores: rows * query heads * keys
    span: int  # elements of gathered K or V
    tile_rows: int  # rows of a query tile
    small_area: int = 16_384  # largest rows * keys for which a request with several rows joins a group
    group_slack: int = 2_048  # padding that is cheaper than one more group, in units of `_cost`
    group_waste: float = 0.125  # allowed padding of a group, relative to its real work
    # Minimum keys of a decode that reads keys in consecutive slots without gathering them; None turns this off.
    run_keys: int | None = None
    lane_elements: int | None = None  # minimum elements of gathered K for two streams; None for one stream
    min_keys: int = 64  # minimum keys of a tile or span, regardless of the other limits


# On a CPU, a chain of elementwise operations is several times faster while its arrays fit in the cache, and arrays of
# several MB may be newly mapped pages every time. A GPU needs more work per launch.
CPU_LIMITS = Limits(scores=384 * 1024, span=1024 * 1024, tile_rows=64, run_keys=640, lane_elements=384 * 1024)
GPU_LIMITS = Limits(scores=16 << 20, span=8 << 20, tile_rows=256)


@dataclass(frozen=True)
class Dims:
    """Dimensions of a layer that planning needs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # maximum of K's and V's


@dataclass(frozen=True)
class RowSegment:
    """Rows of one request in a step, and the range of keys that they see.

    Attributes:
        request: index of the request.
        start: first packed row.
        num_rows: number of rows.
        key_start: absolute position of the first key that a row sees.
        key_end: absolute position after the last row, where the rows' keys end.
        is_bidirectional: True if the rows are an image and each of them sees the keys up to ``key_end``.
    """

    request: int
    start: int
    num_rows: int
    key_start: int
    key_end: int
    is_bidirectional: bool = False

    @property
    def num_keys(self) -> int:
        return self.key_end - self.key_start

    @property
    def context_len(self) -> int:
        return self.key_end - self.num_rows


def _cost(num_rows: int, num_keys: int) -> int:
    """Return the cost of one request in a group, in scores. Gathering a key takes as long as about three scores."""
    return num_keys * (num_rows + 3)


def group_segments(segments: Iterable[RowSegment], dims: Dims, limits: Limits) -> list[list[RowSegment]]:
    """Return groups of similar segments.

    All segments of a group are padded to the largest numbers of rows and keys in the group. Padding costs at most
    ``max(group_slack, group_waste * real work)``, in units of :func:`_cost`. The keys of a group with several segments
    fit one span.
    """
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
        group.sort(key=lambda s: s.start)  # the output is then in packed order without a permutation
    return groups


def in_lanes(groups: list[list[RowSegment]], dims: Dims, limits: Limits) -> list[tuple[int, list[RowSegment]]]:
    """Assign groups to two streams, called lanes 0 and 1. Return (lane, group) pairs, in which a group may be divided.

    Decodes are divided so that both lanes gather about the same number of keys, because a gather uses only one core.
    Groups whose requests have several rows stay on lane 0, because BLAS uses all cores for their products.
    """
    # Keys of each decode with padding; 0 for groups that are not decodes.
    keys = [
        max(segment.num_keys for segment in group) if all(segment.num_rows == 1 for segment in group) else 0
        for group in groups
    ]
    keys_left = sum(len(group) * count for group, count in zip(groups, keys, strict=True)) / 2  # keys left for lane 0
    if limits.lane_elements is None or 2 * keys_left * dims.num_kv_heads * dims.head_dim < limits.lane_elements:
        return [(0, group) for group in groups]
    lanes = []
    for group, each in zip(groups, keys, strict=True):
        here = min(max(int(keys_left / each + 0.5), 0), len(group)) if each else len(group)
        keys_left -= here * each
        lanes += [(lane, part) for lane, part in enumerate((group[:here], group[here:])) if part]
    return lanes

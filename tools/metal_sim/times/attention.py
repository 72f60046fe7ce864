"""Launches of one layer's attention: the engine's kernels, and MLX's with and without a gather of K and V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from metal_engine.attention.metal.cuts import THREADGROUPS_PER_CORE
from metal_engine.attention.metal.planning import plan_work_items
from metal_engine.attention.metal.variants import AttentionShape, variant_of
from metal_engine.kv_cache.rows import step_rows

from .facts import Chip, Model
from .kernels import Kernel
from .model import Launch, Threadgroup

BLOCK_SIZE = 16
STEEL_ROWS = 32  # query rows of a threadgroup of MLX's attention for prompts
Kernels = Mapping[str, Kernel]


@dataclass(frozen=True)
class Workload:
    """A step. Each request has ``query`` new tokens, and its last new token sees ``keys`` tokens."""

    name: str
    requests: int
    query: int
    keys: int


WORKLOADS = (
    Workload("decode 1 x 1k", 1, 1, 1024),
    Workload("decode 1 x 16k", 1, 1, 16384),
    Workload("decode 16 x 1k", 16, 1, 1024),
    Workload("decode 64 x 1k", 64, 1, 1024),
    Workload("prefill 512", 1, 512, 512),
    Workload("prefill 2,048", 1, 2048, 2048),
)


def _kv_bytes(work: Workload, model: Model) -> int:
    """Return the bytes of K and V that a layer has for the step's requests, in float16."""
    return work.requests * work.keys * model.kv_heads * model.head_dim * 4


def _row_bytes(work: Workload, model: Model) -> int:
    """Return the bytes of a layer's queries and outputs together, in float16."""
    return work.requests * work.query * model.heads * model.head_dim * 4


def ours(work: Workload, model: Model, chip: Chip, kernels: Kernels) -> list[Launch]:
    """Return the launches of the engine: the work items that the host would plan, and their merge."""
    group = model.heads // model.kv_heads
    shape = AttentionShape(mx.float16, model.head_dim, model.head_dim, model.heads, model.kv_heads, BLOCK_SIZE)
    variant = variant_of(shape)
    before = np.full(work.requests, work.keys - work.query, np.int32)
    table = np.zeros((work.requests, -(-work.keys // BLOCK_SIZE)), np.int32)
    items = plan_work_items(
        step_rows(table, before, np.full(work.requests, work.query, np.int32), BLOCK_SIZE),
        group=group,
        num_kv_heads=model.kv_heads,
        window=None,
        chunk=None,
        target_threadgroups=THREADGROUPS_PER_CORE * chip.cores,
        key_step=variant.bk,
        tile_rows=variant.tile_rows,
    )
    groups, read, staged = [], 0.0, 0.0
    kernel = kernels["direct"]
    for rows, keys in zip(items.table[:, 1].tolist(), (items.table[:, 4] - items.table[:, 3]).tolist(), strict=True):
        if is_direct := rows <= variant.strips * 8:
            kernel, loops = kernels["direct"], -(-keys // (kernels["direct"].keys * 8 // variant.parts))
        else:
            kernel, loops = kernels["staged"], -(-keys // kernels["staged"].keys)
        share = 1.0 if is_direct else -(-rows // 8) * 8 / variant.tile_rows  # computed share of a full tile's products
        groups += [Threadgroup(kernel.simds * (kernel.outside + loops * share * kernel.cycles), loops)] * model.kv_heads
        read += keys * model.kv_heads * model.head_dim * 4
        # Each fragment of 8 rows reads a stage from threadgroup memory, and the stage is written once.
        staged += 0 if is_direct else keys * model.kv_heads * model.head_dim * 4 * (-(-rows // 8) + 1)
    partial = items.num_partial_rows * model.kv_heads * model.head_dim * 4
    written = _row_bytes(work, model) + partial
    launches = [Launch(groups, kernel.simds, kernel.resident, _kv_bytes(work, model) + written, 0, read, staged)]
    return launches + [Launch(memory=partial + _row_bytes(work, model) / 2)] * items.is_split


def mlx(work: Workload, model: Model, chip: Chip, kernels: Kernels) -> list[Launch]:
    """Return the launches of MLX's attention over contiguous K and V, as MLX 0.32 chooses them."""
    group, rows, kv = model.heads // model.kv_heads, _row_bytes(work, model), _kv_bytes(work, model)
    if work.query > 8:
        kernel = kernels["steel"]
        tiles = [min(work.keys, work.keys - work.query + end) for end in range(STEEL_ROWS, work.query + 1, STEEL_ROWS)]
        stages = [-(-keys // kernel.keys) for keys in tiles for _ in range(model.heads * work.requests)]
        groups = [Threadgroup(kernel.simds * (kernel.outside + n * kernel.cycles), n) for n in stages]
        read = sum(tiles) * model.heads * work.requests * model.head_dim * 4
        staged = read * (STEEL_ROWS // 8 + 1)
        return [Launch(groups, kernel.simds, kernel.resident, kv + rows, 0, read, staged)]
    kernel, cache = kernels["sdpa_vector"], kv * group
    if (chip.kind in "sd" and work.keys >= 1024) or (group > 1 and work.keys >= 4096):
        blocks = _blocks(chip.kind, group, work.keys)
        loops = -(-work.keys // blocks)
        one = Threadgroup(group * (kernel.outside + loops * kernel.cycles), loops)
        resident = kernel.resident * kernel.simds // group
        partial = work.requests * model.heads * blocks * model.head_dim * 2
        first = Launch([one] * (model.kv_heads * work.requests * blocks), group, resident, kv + partial, 0, cache)
        return [first, Launch(memory=partial + rows / 2)]
    loops = -(-work.keys // kernel.simds)
    one = Threadgroup(kernel.simds * (kernel.outside + loops * kernel.cycles), loops)
    return [Launch([one] * (model.heads * work.requests), kernel.simds, kernel.resident, kv + rows, 0, cache)]


def _blocks(kind: str, group: int, keys: int) -> int:
    """Return the number of splits of a context in MLX's attention in two passes, for one query.

    Args:
        kind: see :attr:`tools.metal_sim.times.facts.Chip.kind`.
        group: number of query heads per KV head.
        keys: length of the context.
    """
    if kind == "s":
        steps = ((8192, 128), (32768, 256), (65536, 512))
        return 64 if keys <= 1024 or group <= 4 else next((n for most, n in steps if keys <= most), 1024)
    if kind == "d":
        if group <= 2 and keys > 8192:
            return 256
        return 128 if group < 6 or keys < 16384 else (512 if keys < 65536 else 1024)
    return 64 if group >= 4 else 32


def mlx_gathered(work: Workload, model: Model, chip: Chip, kernels: Kernels) -> list[Launch]:
    """Return the launches of MLX's attention over a paged cache: K and V are gathered into arrays first.

    Gathered arrays stay in the system level cache if they fit.
    """
    kv = _kv_bytes(work, model)
    stays = kv <= chip.last_level
    attention = mlx(work, model, chip, kernels)
    if stays:
        attention = [replace(attention[0], memory=attention[0].memory - kv, last_level=kv), *attention[1:]]
    gather = Launch(memory=kv / 2, last_level=kv / 2) if stays else Launch(memory=kv)
    return [gather, gather, *attention]

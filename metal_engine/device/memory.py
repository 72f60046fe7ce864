"""Memory that this process may still allocate, and limits of the freed memory that MLX keeps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from metal_engine.settings.config import MARGIN_BYTES, EngineConfig

# Files with the limit, the usage, and the size of file pages that the kernel reclaims if memory is short.
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

# Minimum and maximum size of freed buffers that MLX keeps on a CPU, in bytes: MLX's own default, and the need of the
# demo model's prefill of 512 tokens. glibc keeps larger buffers (allocator.py).
_CPU_CACHE_BYTES = 32 << 20, 64 << 20


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the available RAM in bytes: the machine's, or the RAM of a control group of this process if it has less.

    Systems without ``/proc`` (macOS) do not report the available RAM. There, the result is the total RAM.

    Args:
        root: folder with ``proc`` and ``sys``. Tests pass a folder with other values.
    """
    meminfo = root / "proc/meminfo"
    text = meminfo.read_text() if meminfo.exists() else ""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    machine = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine, *_cgroup_headrooms(root)]))


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yield the available memory within the limit of each control group of this process, up to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        # "0::/user.slice/..." (v2), or "4:memory:/docker/..." (v1)
        _, controllers, group = line.split(":", 2)
        if not controllers:
            names, mount = _CGROUP_V2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names, mount = _CGROUP_V1, root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = mount / group.lstrip("/")
        # A container may see its own group as the mount's root, while its path in /proc is outside. Folders that do not
        # exist are skipped on the way up.
        for level in (folder, *folder.parents):
            if level.is_relative_to(mount):
                yield from _headroom(level, *names)


def _headroom(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        statistics = (folder / "memory.stat").read_text()
    except (FileNotFoundError, PermissionError):
        return
    if limit != "max":
        match = re.search(rf"^{reclaimable_name} (\d+)$", statistics, re.MULTILINE)
        yield int(limit) - usage + (int(match[1]) if match else 0)


def limit_device_memory(config: EngineConfig) -> None:
    """Limit the freed buffers that MLX keeps to the memory that a step can use again.

    On Metal with ``--wire-memory``, also make MLX wire the memory of the engine. Both limits apply to the process.
    """
    import mlx.core as mx  # not at the top, because the BLAS must be loaded before MLX

    if config.device.kind != "metal":
        least, most = _CPU_CACHE_BYTES
        mx.set_cache_limit(min(max(config.step_bytes, least), most))
        return
    if config.wire_memory:
        mx.set_wired_limit(min(config.peak_bytes + MARGIN_BYTES, config.device.memory_bytes))
    mx.set_cache_limit(config.step_bytes + MARGIN_BYTES)

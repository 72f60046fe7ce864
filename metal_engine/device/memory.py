"""How much memory this process may still take, and how much a GPU keeps for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from metal_engine.settings.config import MARGIN_BYTES, EngineConfig

# Limit, usage, and the statistic of file pages that the kernel takes back when memory runs short.
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

# Bytes of freed buffers that MLX keeps on a CPU: MLX's own default, and the need of the demo model's prefill of 512
# tokens. glibc keeps larger buffers (allocator.py).
_CPU_CACHE_BYTES = 32 << 20, 64 << 20


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of RAM available: what the machine has left, or the container if that is less.

    Systems without ``/proc`` (macOS) do not say what is left in this way; there it is all the RAM.

    Args:
        root: where ``proc`` and ``sys`` are; tests bring their own.
    """
    meminfo = root / "proc/meminfo"
    text = meminfo.read_text() if meminfo.exists() else ""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    machine = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine, *_cgroup_headrooms(root)]))


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """For each control group this process is in, up to the root: what its limit leaves."""
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
        # A container may see its own group as the mount's root while /proc has its path outside: what does
        # not exist is passed over on the way up.
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


def limit_device_memory(config: EngineConfig, peak_bytes: int, step_bytes: int) -> None:
    """Limit the freed buffers that MLX keeps, and with ``--wire-memory`` on Metal the memory that MLX wires.

    MLX keeps as many freed buffers as a step can use again, and wires the memory of all engines. Both limits apply to
    the process.

    Args:
        config: of the engine that has been made last.
        peak_bytes: what all engines of the process hold at most.
        step_bytes: what the largest step of any takes.
    """
    import mlx.core as mx  # too early at the top: the BLAS is loaded first

    if config.device.kind != "metal":
        least, most = _CPU_CACHE_BYTES
        mx.set_cache_limit(min(max(step_bytes, least), most))
        return
    if config.wire_memory:
        mx.set_wired_limit(min(peak_bytes + MARGIN_BYTES, config.device.memory_bytes))
    mx.set_cache_limit(step_bytes + MARGIN_BYTES)

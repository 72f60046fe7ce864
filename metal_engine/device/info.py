"""Facts about the device that MLX computes on."""

from __future__ import annotations

import json
import logging
import platform
import re
import subprocess

from metal_engine.device.blas.load import BlasInfo
from metal_engine.device.memory import available_memory_bytes
from metal_engine.settings.config import DeviceInfo

logger = logging.getLogger(__name__)


def device_info(blas: BlasInfo | None = None) -> DeviceInfo:
    """Return the description of MLX's default device.

    Its ``memory_bytes`` is the GPU's recommended working set, or for a CPU the available RAM. Imports MLX, so
    ``load_optimized_blas`` must have been called before.

    Args:
        blas: result of ``load_optimized_blas``, named in the description of a CPU; None if unknown.
    """
    import mlx.core as mx

    if mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu):
        facts = mx.device_info(mx.gpu)
        name = str(facts["device_name"])
        return DeviceInfo(
            kind="metal",
            name=name,
            compute=f"{name} (Metal)",
            memory_bytes=int(facts["max_recommended_working_set_size"]),
        )
    facts = mx.device_info(mx.cpu)
    return DeviceInfo(
        kind="cpu",
        name=str(facts.get("device_name") or platform.processor() or platform.machine()),
        compute=blas.description if blas is not None else "MLX's CPU backend",
        memory_bytes=available_memory_bytes(),
    )


def computes_on_cpu() -> bool:
    """Return True if MLX's default device is a CPU. Imports MLX."""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


def is_virtual_gpu() -> bool:
    """Return True if the GPU is the paravirtual device of a macOS virtual machine. Imports MLX."""
    import mlx.core as mx

    return mx.metal.is_available() and "Paravirtual" in str(mx.device_info(mx.gpu).get("device_name", ""))


def gpu_core_count() -> int | None:
    """Return the number of cores of a Mac's GPU, which MLX does not report.

    If the number is unknown, log a warning and return None.
    """
    command = ["system_profiler", "-json", "SPDisplaysDataType"]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, timeout=20).stdout
        return max(int(gpu["sppci_cores"]) for gpu in json.loads(answer)["SPDisplaysDataType"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        logger.warning("the number of GPU cores is unknown (%s: %s)", type(error).__name__, error)
        return None


def macos_version() -> str:
    """Return the version of macOS, such as ``26.2``; empty on other systems.

    A Python that was built for an older macOS gets 16 instead of 26 from macOS. ``sysctl`` then returns the version.
    """
    version = platform.mac_ver()[0]
    if version.split(".")[0] != "16":
        return version
    command = ["/usr/sbin/sysctl", "-n", "kern.osproductversion"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the version of macOS is unknown (%s: %s)", type(error).__name__, error)
        return version


def has_tensor_ops() -> bool:
    """Return True if the GPU and macOS support Metal's tensor operations on matrix units, False if that is unknown.

    MLX has the same condition for its own kernels with tensor operations: macOS 26.2 or later, and GPU generation 17
    (M5) or later, or 18 for the smallest GPUs, whose architecture ends with "p". Imports MLX.
    """
    import mlx.core as mx

    if not mx.metal.is_available():
        return False
    # "applegpu_g17s"
    gpu = re.search(r"g(\d+)([a-z])$", str(mx.device_info(mx.gpu).get("architecture", "")))
    macos = re.match(r"(\d+)\.(\d+)", macos_version())
    if gpu is None or macos is None:
        return False
    return int(gpu[1]) >= (18 if gpu[2] == "p" else 17) and (int(macos[1]), int(macos[2])) >= (26, 2)

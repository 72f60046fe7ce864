"""Facts about the machine, and the checks of ``metal-engine doctor``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from metal_engine.doctor.examine import FAILED, Finding, examine
from metal_engine.doctor.plan import Plan
from metal_engine.doctor.section_process import Item

# Label -> command that prints the fact on macOS.
_MAC_FACTS = {
    "model of the Mac": ("sysctl", "-n", "hw.model"),
    "chip": ("sysctl", "-n", "machdep.cpu.brand_string"),
    "memory, bytes": ("sysctl", "-n", "hw.memsize"),
    "wired limit, MB (0: macOS decides)": ("sysctl", "-n", "iogpu.wired_limit_mb"),
    "build of macOS": ("sw_vers", "-buildVersion"),
}


def measure(plan: Plan, model: str) -> Iterator[Item]:
    """Yield facts. Raises RuntimeError if a check of the doctor fails. ``model`` is not used."""
    import mlx.core as mx

    from metal_engine.device.info import gpu_core_count, is_virtual_gpu

    findings: list[Finding] = []
    healthy = examine(findings.append, models=())
    yield from ((finding.label, f"{finding.status} {finding.text}".strip()) for finding in findings)
    yield "load of the machine", ", ".join(f"{load:.1f}" for load in os.getloadavg())
    if sys.platform == "darwin":
        for label, command in _MAC_FACTS.items():
            yield label, _output_of(command)
        yield "low power mode", _low_power_mode(_output_of(("pmset", "-g")))
    if mx.metal.is_available():
        yield "GPU", ", ".join(f"{name} {value}" for name, value in mx.device_info(mx.gpu).items())
        yield "GPU cores", str(gpu_core_count() or "unknown")
        if is_virtual_gpu():
            yield "virtual machine", "yes: times say nothing about a Mac, and larger errors are allowed"
    if not healthy:
        failed = "; ".join(f"{finding.label}: {finding.text}" for finding in findings if finding.status == FAILED)
        raise RuntimeError(f"checks failed: {failed}")


def _output_of(command: tuple[str, ...]) -> str:
    """Return the output of a command, or "unknown" with the error."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


def _low_power_mode(settings: str) -> str:
    """Return the value of ``lowpowermode`` in the output of ``pmset -g``."""
    words = settings.split()
    return words[words.index("lowpowermode") + 1] if "lowpowermode" in words[:-1] else "unknown"

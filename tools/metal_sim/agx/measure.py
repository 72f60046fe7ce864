"""Compiles kernels for Apple GPUs and gathers the results: the engine's variants, and MLX's kernels to compare with."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..emit import TENSOR_OPS_HEADER
from ..errors import CheckError, ToolchainError
from ..variants import Variant
from .controls import CONTROLS, Control
from .listing import Compiled
from .mesa import GENERATIONS, compile_together, compiled
from .packages import packages
from .spirv import spirv_of, unit_of

# A threadgroup of paged_attention.metal computes in one of two ways. Name of a way -> source line to replace, and a
# replacement that removes the other way.
WAYS = {
    "direct": ("} else if (STAGED_PARTS > 0) {", "} else if (false) {"),
    "staged": ("if (num_rows <= STRIPS * 8) {", "if (false) {"),
}
_BATCH = 12  # kernels of one process: starting the compiler takes as long as compiling two kernels
_TYPES = {"float16_t": "float16", "bfloat16_t": "bfloat16", "float": "float32"}


@dataclass
class Row:
    """A kernel variant and its machine code.

    Attributes:
        label: shape, such as "128, group 4, window".
        way: "direct" or "staged" if only this way of paged_attention was compiled; otherwise None.
        made: figures of the machine code, by generation of GPU (13: M1, 14: M2).
        error: the compiler's message if it refuses the variant; otherwise None.
    """

    kernel: str
    dtype: str
    label: str
    template: dict[str, str]
    threadgroup: tuple[int, int, int]
    needed_by: list[str] = field(default_factory=list)
    way: str | None = None
    made: dict[int, Compiled] = field(default_factory=dict)
    error: str | None = None

    @property
    def description(self) -> str:
        """Kernel, dtype and shape. The command's patterns are matched against this text."""
        return f"{self.kernel} {self.dtype} {self.label}" + (f", {self.way}" if self.way else "")

    @property
    def threads(self) -> int:
        """Number of threads in a threadgroup."""
        return math.prod(self.threadgroup)


@dataclass(frozen=True)
class Job:
    """A row to fill, and the function that makes the translation unit to compile for it."""

    row: Row
    unit: Callable[[], str]


def label_of(variant: Variant) -> str:
    """Return the shape of a variant: "128, group 4, window"."""
    t = variant.template
    if not variant.kernel.startswith("paged_attention"):
        return ", ".join(f"{name} {value}" for name, value in t.items() if name != "T")
    size = t["DK"] if t["DK"] == t["DV"] else f"{t['DK']}:{t['DV']}"
    if t["LATENT"] == "1":
        size = f"latent {t['DV']} + {int(t['DK']) - int(t['DV'])}"
    parts = [size, f"group {t['G']}"]
    if t["BLOCK_SIZE"] != "16":
        parts.append(f"blocks of {t['BLOCK_SIZE']}")
    if "BITS" in t:
        parts.append(f"int{t['BITS']}")
    parts += [name for name in ("window", "softcap", "sinks", "images") if t[f"HAS_{name.upper()}"] == "1"]
    return ", ".join([*parts, variant.cut] if variant.cut else parts)


def uses_tensor_ops(variant: Variant) -> bool:
    """Return True if only GPUs with matrix units can run a variant. M1 and M2 have no matrix units."""
    return TENSOR_OPS_HEADER in variant.text


def only_way(text: str, way: str) -> str:
    """Return the text of paged_attention in which all threadgroups compute in one way of :data:`WAYS`.

    Raises:
        ToolchainError: the text lacks the line to replace.
    """
    line, replacement = WAYS[way]
    if text.count(f"\n{line}") != 1:
        raise ToolchainError(f"paged_attention.metal has no line {line!r}: change WAYS in agx/measure.py")
    return text.replace(f"\n{line}", f"\n{replacement}")


def ways_of(variant: Variant) -> tuple[str, ...]:
    """Return the names of the ways in which a variant's threadgroups compute; empty for kernels with a single way."""
    if "STAGED_PARTS" not in variant.template:
        return ()
    return ("direct",) if variant.template["STAGED_PARTS"] == "0" else ("direct", "staged")


def job_of(variant: Variant, way: str | None = None) -> Job:
    """Return the job that compiles a variant, or one ``way`` of it."""
    dtype = variant.template.get("T", "")
    models = sorted(variant.needed_by, key=str.lower)
    row = Row(
        variant.kernel, _TYPES.get(dtype, dtype), label_of(variant), variant.template, variant.threadgroup, models, way
    )
    text = only_way(variant.text, way) if way else variant.text
    return Job(row, lambda: unit_of(text, variant.function, list(variant.template.values()), variant.threadgroup))


def _job_of_control(control: Control) -> Job:
    template = {str(i): value for i, value in enumerate(control.template)}
    return Job(Row("MLX", "float16", control.label, template, (control.threads, 1, 1)), lambda: control.unit)


def jobs_for(variants: Iterable[Variant], by_way: bool = False) -> list[Job]:
    """Return jobs for the variants that M1 and M2 run, sorted, with MLX's kernels first.

    Args:
        by_way: True to compile each way of paged_attention by itself, and none of the engine's other kernels.
    """
    kept = [v for v in variants if not uses_tensor_ops(v)]
    jobs = [job_of(v, way) for v in kept for way in (ways_of(v) if by_way else [None])]
    jobs.sort(key=lambda job: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", job.row.description)])
    return [*map(_job_of_control, CONTROLS), *jobs]


def measure(
    jobs: Sequence[Job],
    processes: int = 2,
    generations: Sequence[int] = GENERATIONS,
    say: Callable[[str], object] = lambda text: None,
) -> list[Row]:
    """Compile jobs and return their rows in the same order. Rows of refused kernels have an error.

    Args:
        processes: number of compilers that run at the same time.
        generations: generations of GPU to compile for.
        say: function that receives reports of progress.

    Raises:
        ToolchainError: the compiler is not available on this machine, or prints an unknown format.
    """
    found = packages()

    def translate(job: Job) -> Path | None:
        try:
            return spirv_of(job.unit(), job.row.description, found)
        except CheckError as error:
            job.row.error = str(error)
            return None

    def compile_batch(generation: int, batch: Sequence[tuple[Row, Path]]) -> None:
        compile_together([spirv for _, spirv in batch], generation, found)
        for row, spirv in batch:
            try:
                row.made[generation] = compiled(spirv, generation, found)
            except CheckError as error:
                row.error = str(error)

    def run(first: int) -> None:
        part = jobs[first : first + _BATCH]
        made = [(job.row, spirv) for job in part if (spirv := translate(job))]
        for generation in generations:
            compile_batch(generation, made)
        say(f"{min(first + _BATCH, len(jobs))} of {len(jobs)}")

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, range(0, len(jobs), _BATCH)))
    return [job.row for job in jobs]


def to_json(rows: Iterable[Row]) -> str:
    """Return all figures as JSON, including the figures of each loop."""
    found = []
    for row in rows:
        fields = dataclasses.asdict(row)
        for generation, made in row.made.items():
            fields["made"][generation]["loop_size"] = made.loop_size
        found.append(fields)
    return json.dumps(found, indent=1) + "\n"

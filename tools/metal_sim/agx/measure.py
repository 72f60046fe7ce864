"""Compiles the engine's kernel variants for Apple GPUs and gathers the results."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..emit import TENSOR_OPS_HEADER
from ..errors import CheckError, ToolchainError
from ..variants import Variant
from .listing import Compiled
from .mesa import GENERATIONS, compile_together, compiled
from .packages import packages
from .spirv import spirv_of, unit_of

# paged_attention.metal has two ways through a threadgroup. Each line opens one of them; false in its place removes it.
WAYS = {
    "direct": ("} else if (STAGED_PARTS > 0) {", "} else if (false) {"),
    "staged": ("if (num_rows <= STRIPS * 8) {", "if (false) {"),
}
_BATCH = 8  # kernels of one process: starting the compiler takes as long as compiling three
_TYPES = {"float16_t": "float16", "bfloat16_t": "bfloat16", "float": "float32"}


@dataclass
class Row:
    """A variant, and what became of it by generation of GPU. ``error``: the reason that there is no machine code."""

    kernel: str
    label: str
    dtype: str
    template: dict[str, str]
    threadgroup: tuple[int, int, int]
    needed_by: list[str]
    way: str | None = None
    made: dict[int, Compiled] = field(default_factory=dict)
    error: str | None = None

    def as_json(self) -> dict[str, object]:
        fields = dataclasses.asdict(self)
        for generation, made in self.made.items():
            fields["made"][generation]["loop_size"] = made.loop_size
        return fields


def label_of(variant: Variant) -> str:
    """The shape of a variant: "128, group 4, window"."""
    t = dict(variant.template)
    if not variant.kernel.startswith("paged_attention"):
        return ", ".join(f"{name} {value}" for name, value in t.items() if name not in ("T", "U"))
    size = t["DK"] if t["DK"] == t["DV"] else f"{t['DK']}:{t['DV']}"
    if t["LATENT"] == "1":
        size = f"latent {t['DV']} + {int(t['DK']) - int(t['DV'])}"
    parts = [size, f"group {t['G']}"]
    if t["BLOCK_SIZE"] != "16":
        parts.append(f"blocks of {t['BLOCK_SIZE']}")
    if "BITS" in t:
        parts.append(f"int{t['BITS']}")
    parts += [name for name in ("window", "softcap", "sinks") if t[f"HAS_{name.upper()}"] == "1"]
    return ", ".join(parts)


def dtype_of(variant: Variant) -> str:
    return _TYPES.get(variant.template.get("T", ""), variant.template.get("T", ""))


def uses_tensor_ops(variant: Variant) -> bool:
    """True for a variant that only GPUs with matrix units run: M1 and M2 have none."""
    return TENSOR_OPS_HEADER in variant.text


def ways_of(variant: Variant) -> tuple[str | None, ...]:
    """The ways through a variant, and None for the whole of it."""
    if "STAGED_PARTS" not in variant.template:
        return (None,)
    return (None, "direct") if variant.template["STAGED_PARTS"] == "0" else (None, "direct", "staged")


def only_way(text: str, way: str) -> str:
    """The text of paged_attention with one of its ways removed from the other's compilation."""
    line, replacement = WAYS[way]
    if text.count(f"\n{line}") != 1:
        raise ToolchainError(f"paged_attention.metal has changed: no line {line!r} opens a way: see agx/measure.py")
    return text.replace(f"\n{line}", f"\n{replacement}")


def measure(
    variants: Sequence[Variant], ways: Sequence[str | None] = (None,), jobs: int = 2,
    generations: Sequence[int] = GENERATIONS,
) -> list[Row]:  # fmt: skip
    """Compile the ``ways`` of variants, ``jobs`` processes at a time, and return their rows in order.

    Raises:
        ToolchainError: the compiler cannot be had here.
    """
    found = packages()
    rows = [(_row_of(v, way), v) for v in variants for way in ways if way in ways_of(v)]

    def translate(item: tuple[Row, Variant]) -> Path | None:
        row, variant = item
        text = only_way(variant.text, row.way) if row.way else variant.text
        try:
            unit = unit_of(text, variant.function, list(variant.template.values()), variant.threadgroup)
            return spirv_of(unit, variant.name, found)
        except CheckError as error:
            row.error = str(error)
            return None

    def compile_batch(batch: tuple[int, Sequence[tuple[Row, Path]]]) -> None:
        generation, items = batch
        compile_together([spirv for _, spirv in items], generation, found)
        for row, spirv in items:
            try:
                row.made[generation] = compiled(spirv, generation, found)
            except CheckError as error:
                row.error = str(error)

    with ThreadPoolExecutor(jobs) as pool:
        spirvs = pool.map(translate, rows)
        work = [(row, spirv) for (row, _), spirv in zip(rows, spirvs, strict=True) if spirv]
        batches = [(g, work[i : i + _BATCH]) for i in range(0, len(work), _BATCH) for g in generations]
        list(pool.map(compile_batch, batches))
    return [row for row, _ in rows]


def _row_of(variant: Variant, way: str | None) -> Row:
    return Row(
        variant.kernel,
        label_of(variant),
        dtype_of(variant),
        variant.template,
        variant.threadgroup,
        sorted(variant.needed_by, key=str.lower),
        way,
    )


def selected(variants: Iterable[Variant], patterns: Sequence[str]) -> list[Variant]:
    """The variants that M1 and M2 can run, in a fixed order; with patterns, those whose description has all of them."""
    kept = [v for v in variants if not uses_tensor_ops(v)]

    def description(v: Variant) -> str:
        return f"{v.kernel} {dtype_of(v)} {label_of(v)}"

    found = [v for v in kept if all(re.search(pattern, description(v)) for pattern in patterns)]
    return sorted(found, key=lambda v: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", description(v))])


def to_json(rows: Iterable[Row]) -> str:
    return json.dumps([row.as_json() for row in rows], indent=1) + "\n"

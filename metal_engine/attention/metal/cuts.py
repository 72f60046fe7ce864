"""Cuts of the kernel's work for one kind of layer, and the values that tuning tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# Threadgroups for each core of a GPU. Two run at a time, within the limits of threadgroup memory.
THREADGROUPS_PER_CORE = 8


@dataclass(frozen=True)
class Cut:
    """A division of the kernel's work for one kind of layer. Layers without tuning have the defaults.

    All steps of a kind of layer have one cut, because cuts round differently. The terms are defined in
    :mod:`metal_engine.attention.metal.variants`.

    Attributes:
        threadgroups_per_core: threadgroups for each core of the GPU into which a request is split.
        most_held: maximum number of key fragments that a SIMD group loads together.
        most_strips: maximum number of row fragments of a direct item. Items with more rows are staged, if the shape can
            be staged.
        staged_parts: minimum number of SIMD groups that share the columns of a staged item; 0 if no item is staged.
            With 2 instead of 1, a tile has half the rows.
        tensor_ops: True if the kernel may use the GPU's tensor operations.
    """

    threadgroups_per_core: int = THREADGROUPS_PER_CORE
    most_held: int = 2
    most_strips: int = 3
    staged_parts: int = 1
    tensor_ops: bool = True

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Cut:
        """Return the cut that has the ``fields``.

        Raises:
            ValueError: a field is missing or unknown, or has a value that tuning never tries.
        """
        if fields.keys() != TRIED.keys():
            raise ValueError(f"a cut has the fields {', '.join(TRIED)}, not {', '.join(fields)}")
        for name, value in fields.items():
            if not any(type(value) is type(tried) and value == tried for tried in TRIED[name]):
                raise ValueError(f"{name} is one of {TRIED[name]}, not {value!r}")
        return cls(**fields)

    def __str__(self) -> str:
        words = {
            "threadgroups_per_core": f"{self.threadgroups_per_core} threadgroups a core",
            "most_held": f"at most {self.most_held} key fragment{'s' if self.most_held > 1 else ''} held",
            "most_strips": f"at most {8 * self.most_strips} rows direct",
            "staged_parts": "tiles of half the rows" if self.staged_parts else "nothing staged",
            "tensor_ops": "no tensor operations",
        }
        default = asdict(DEFAULT_CUT)
        return ", ".join(words[name] for name, value in asdict(self).items() if value != default[name]) or "the default"


DEFAULT_CUT = Cut()

# Values to measure for each field of a cut, the default first. Fields are decided in this order. The first one needs no
# compilation.
TRIED: dict[str, tuple[int, ...]] = {
    "threadgroups_per_core": (THREADGROUPS_PER_CORE, 4, 16),
    "most_held": (2, 1),
    "tensor_ops": (True, False),
    "staged_parts": (1, 2, 0),
    "most_strips": (3, 2, 1),
}
assert TRIED.keys() == {field.name for field in fields(Cut)}


def tried_cuts() -> list[Cut]:
    """Return the cuts that differ from the default in one field, in the order in which tuning tries them."""
    return [replace(DEFAULT_CUT, **{name: value}) for name, values in TRIED.items() for value in values[1:]]  # type: ignore[arg-type]

"""Tables of compiled kernels: for a terminal, and docs/dev/kernel_registers.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from .measure import Row
from .packages import Packages

COLUMNS = (
    "shape", "registers", "spills in loops", "spills outside", "threads", "threadgroups", "instructions", "code",
    "largest loop", "threadgroup memory",
)  # fmt: skip
_HEADER = """# Registers that the kernels take on Apple GPUs

Use this page to look up a kernel variant's registers, spills and code size on M1 and M2.
`python -m tools.metal_sim agx --write` writes this page.
Mesa {mesa} compiled the kernels for G13 (M1) and G14 (M2), without such a GPU.
[kernels.md](kernels.md#registers-by-a-compiler-for-m1-and-m2) explains the method and its limits.

- *Registers*: 32-bit registers of a thread. There are 128.
- *Spills*: stores to and loads from the thread's stack because registers do not suffice, as `stores:loads`. A spill in
  a loop costs time for each key or row. A spill outside loops costs time once per threadgroup.
- *Threads*: threads that a core has registers for. *Threadgroups*: whole threadgroups in that many threads.
- *Code*, *largest loop*, *threadgroup memory*: bytes. The largest loop is the loop over keys or rows. Published
  measurements put M1's instruction cache at 12 kB.

Mesa has no products of matrices. A stand-in takes their place, so *instructions* and *code* are approximate. {same}
"""


def cells(row: Row, generation: int) -> list[str]:
    """Return the figures of a row, without its name."""
    made = row.made.get(generation)
    if not made:
        return ["does not compile", *([""] * (len(COLUMNS) - 2))]
    return [
        f"{made.registers}",
        f"{made.loop_stores}:{made.loop_fills}",
        f"{made.stores - made.loop_stores}:{made.fills - made.loop_fills}",
        f"{made.threads}",
        f"{made.threads // row.threads}",
        f"{made.instructions:,}",
        f"{made.code_size:,}",
        f"{made.loop_size:,}",
        f"{made.threadgroup_memory:,}",
    ]


def plain(rows: Iterable[Row], generation: int) -> str:
    """Return a table for a terminal."""
    lines = [["kernel, dtype, shape", *COLUMNS[1:]], *([row.description, *cells(row, generation)] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def page(rows: Sequence[Row], found: Packages) -> str:
    """Return the text of docs/dev/kernel_registers.md."""
    mesa = re.search(r"^mesa-opencl-icd_([\d.]+)", found.listing, re.M)
    differ = [row for row in rows if len({tuple(cells(row, g)) for g in row.made}) > 1]
    same = "M2's figures are the same as M1's." if not differ else "Rows where M2's figures differ are there twice."
    parts = [_HEADER.format(mesa=mesa[1] if mesa else "?", same=same)]
    for kernel, of_kernel in groupby(rows, key=lambda row: row.kernel):
        title = "MLX's kernels, to compare with" if kernel == "MLX" else f"`{kernel}`"
        lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)]]
        for row in of_kernel:
            for generation in row.made if row in differ else list(row.made)[:1] or [0]:
                shape = f"{row.dtype}: {row.label}" if row.dtype else row.label
                name = shape + (f", M{generation - 12}" if row in differ else "")
                lines.append([name, *cells(row, generation)])
        unique = dict.fromkeys("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"## {title}\n\n" + "\n".join(unique) + "\n")
    return "\n".join(parts)

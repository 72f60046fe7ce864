"""Parses the output of Mesa's compiler: statistics, and the disassembled machine code with its loops."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ToolchainError

_STATISTICS = re.compile(r"^CS shader: (\d+) instrs, .* (\d+) code size, (\d+) gprs, .* (\d+) threads, ", re.M)
_SPILLS = re.compile(r"(\d+):(\d+) spills:fills")
_SHARED = re.compile(r"^shared_size: (\d+)$", re.M)
_INSTRUCTION = re.compile(r"^ *([0-9a-f]+): ([0-9a-f]+) +(\S+) *(.*)$")
# Instructions that spill a register to the thread's stack, and that load it back (a fill).
_STORE, _FILL = "stack_store", "stack_load"


@dataclass(frozen=True)
class Instruction:
    """An instruction of the machine code. ``at`` and ``size`` are in bytes."""

    at: int
    size: int
    name: str
    operands: str


@dataclass(frozen=True)
class Loop:
    """The code between a backward branch and its target. ``depth`` is the number of loops around it."""

    start: int  # address in bytes
    size: int  # bytes
    depth: int
    instructions: int
    stores: int
    fills: int
    barriers: int


@dataclass(frozen=True)
class Compiled:
    """Figures of one kernel, compiled for one generation of GPUs.

    Attributes:
        registers: number of 32-bit registers that a thread uses, at most 128.
        threads: largest number of threads that a core keeps resident with these registers, at most 1,024.
        stores, fills: stores and loads of spilled registers in the whole code.
        loop_stores, loop_fills: stores and loads of spilled registers inside loops.
        threadgroup_memory: size of the threadgroup memory in bytes.
    """

    registers: int
    threads: int
    instructions: int
    code_size: int
    stores: int
    fills: int
    loop_stores: int
    loop_fills: int
    threadgroup_memory: int
    loops: tuple[Loop, ...]

    @property
    def loop_size(self) -> int:
        """Size of the largest loop in bytes. The largest loop iterates over keys or rows."""
        return max((loop.size for loop in self.loops), default=0)


def instructions(printed: str) -> list[Instruction]:
    """Return the machine code of a kernel, without the preamble, which runs once per launch."""
    found: list[Instruction] = []
    for line in printed.splitlines():
        if m := _INSTRUCTION.match(line):
            at = int(m[1], 16)
            if at == 0 and found:
                break
            found.append(Instruction(at, len(m[2]) // 2, m[3], m[4]))
    return found


def loops_of(code: list[Instruction]) -> tuple[Loop, ...]:
    """Return the loops in the order of their addresses, outer loops first.

    Raises:
        ToolchainError: a branch leads into the middle of an instruction.
    """
    ranges = []
    for i in code:
        offset = re.fullmatch(r"-(\d+)", i.operands.strip())
        if i.name.startswith("jmp") and offset:
            ranges.append((i.at - int(offset[1]), i.at + i.size))
    found = []
    for start, end in sorted(ranges, key=lambda r: (r[0], -r[1])):
        inside = [i for i in code if start <= i.at < end]
        if not inside or inside[0].at != start:
            raise ToolchainError(f"branch to {start:x}, the middle of an instruction")
        names = [i.name for i in inside]
        around = sum(1 for s, e in ranges if (s, e) != (start, end) and s <= start and end <= e)
        counts = (names.count(name) for name in (_STORE, _FILL, "barrier"))
        found.append(Loop(start, end - start, around, len(inside), *counts))
    return tuple(found)


def read(printed: str) -> Compiled:
    """Parse the compiler's output for one kernel.

    Raises:
        ToolchainError: the format differs from Mesa 26.1.
    """
    statistics, spills, shared = _STATISTICS.search(printed), _SPILLS.search(printed), _SHARED.search(printed)
    code = instructions(printed)
    if not (statistics and spills and code):
        raise ToolchainError("this Mesa prints its statistics in a way that agx/listing.py cannot read")
    names = [i.name for i in code]
    stores, fills = names.count(_STORE), names.count(_FILL)
    if (stores, fills) != (int(spills[1]), int(spills[2])):
        raise ToolchainError(f"{stores}:{fills} spills in the machine code, {spills[1]}:{spills[2]} in the statistics")
    loops = loops_of(code)
    in_loop = [i.name for i in code if any(loop.start <= i.at < loop.start + loop.size for loop in loops)]
    return Compiled(
        registers=-(-int(statistics[3]) // 2),  # the compiler counts 16-bit halves
        threads=int(statistics[4]),
        instructions=int(statistics[1]),
        code_size=int(statistics[2]),
        stores=stores,
        fills=fills,
        loop_stores=in_loop.count(_STORE),
        loop_fills=in_loop.count(_FILL),
        threadgroup_memory=int(shared[1]) if shared else 0,
        loops=loops,
    )

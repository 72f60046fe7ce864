"""Cycles of compiled kernels, from the machine code of Mesa's compiler for M1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..agx.listing import Instruction, instructions, loops_of, read
from ..agx.measure import jobs_for
from ..agx.mesa import printed
from ..agx.packages import packages
from ..agx.spirv import spirv_of
from ..errors import ToolchainError
from ..shapes import Attention
from ..variants import Recorder
from .facts import CYCLES, LLAMA_8B, PRODUCT_CYCLES, SUM_CYCLES, THREADGROUP_MEMORY

PRODUCTS = 2 * LLAMA_8B.head_dim // 8  # matrix products with K and V for a fragment of 8 keys
# Instructions that replace a simd_sum in the compiled code: 5 steps of 18 instructions, and a last shuffle.
_SUM_SHUFFLES, _SUM_INSTRUCTIONS = 21, 91


@dataclass(frozen=True)
class Kernel:
    """Figures of a compiled kernel.

    Attributes:
        simds: SIMD groups of a threadgroup.
        resident: threadgroups that a core has registers and threadgroup memory for.
        keys: keys that a SIMD group processes in an iteration of its main loop.
        cycles: issue cycles of one iteration of the main loop.
        outside: issue cycles of all other instructions.
    """

    simds: int
    resident: int
    keys: int
    cycles: float
    outside: float


def cycles_of(code: Sequence[Instruction]) -> float:
    """Return the issue cycles of instructions. The instructions that replace a simd_sum count as one simd_sum."""
    total = sum(CYCLES.get(i.name, 1) for i in code)
    sums = sum(i.name == "shuffle" for i in code) // _SUM_SHUFFLES if not _products(code) else 0
    return total - sums * (_SUM_INSTRUCTIONS + _SUM_SHUFFLES * (CYCLES["shuffle"] - 1) - SUM_CYCLES)


def _products(code: Sequence[Instruction]) -> int:
    """Return the number of matrix products in a loop over keys, rounded down to a multiple of PRODUCTS.

    In the compiled code, two multiply-adds replace one product.
    """
    return sum(i.name == "ffma" for i in code) // 2 // PRODUCTS * PRODUCTS


def kernel_of(text: str, threads: int) -> Kernel:
    """Return a kernel's figures from the compiler's output."""
    made, code = read(text), instructions(text)
    main = max(loops_of(code), key=lambda loop: loop.size)
    inside = [i for i in code if main.start <= i.at < main.start + main.size]
    outside = [i for i in code if not main.start <= i.at < main.start + main.size]
    products = _products(inside)
    return Kernel(
        simds=threads // 32,
        resident=max(1, min(made.threads // threads, THREADGROUP_MEMORY // max(1, made.threadgroup_memory))),
        keys=products // PRODUCTS * 8 or 1,
        cycles=cycles_of(inside) + products * (PRODUCT_CYCLES - 2),
        outside=cycles_of(outside),
    )


def compile_kernels() -> dict[str, Kernel]:
    """Compile the engine's two ways and MLX's two kernels for float16 and head_dim 128.

    Raises:
        CheckError: the compiler refuses a kernel.
        ToolchainError: the compiler is not available on this machine.
    """
    import mlx.core as mx

    recorder = Recorder()
    model = LLAMA_8B
    recorder.record(Attention(model.heads, model.kv_heads, model.head_dim, model.head_dim), {model.name}, mx.float16)
    wanted = {
        "paged_attention float16 128, group 4, direct": "direct",
        "paged_attention float16 128, group 4, staged": "staged",
        "MLX float16 sdpa_vector, head_dim 128": "sdpa_vector",
        "MLX float16 steel attention, head_dim 128": "steel",
    }
    found = {}
    for job in jobs_for(recorder.variants.values(), by_way=True):
        if name := wanted.get(job.row.description):
            spirv = spirv_of(job.unit(), job.row.description, packages())
            found[name] = kernel_of(printed(spirv, 13, packages()), job.row.threads)
    if missing := set(wanted.values()) - found.keys():
        raise ToolchainError(f"no such kernels: {', '.join(sorted(missing))}: change times/kernels.py")
    return found

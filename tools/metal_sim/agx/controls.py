"""MLX's own kernels, compiled from the installed wheel's headers as controls for the figures of the engine's kernels.

MLX's kernels are known to run well on Apple GPUs. If the compiler spilled registers in the loops of MLX's kernels, its
figures for the engine's kernels would mean little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ToolchainError
from ..source import preamble, with_includes
from .spirv import unit_of

_KERNELS = "mlx/backend/metal/kernels"
# Statements of MLX's headers that clang's C++ for OpenCL rejects, and equivalent statements.
_TWEAKS = (
    ("src += str_y;", "src = src + str_y;"),
    ("src += str_x;", "src = src + str_x;"),
    *((f"thread dtype_frag_t<{t}type>& {t}", f"thread metal::ms_ext<{t}type, kElemsPerFrag>& {t}") for t in "ABC"),
)


@dataclass(frozen=True)
class Control:
    """One of MLX's kernels, with template arguments and function constants as MLX launches it."""

    label: str
    header: str
    function: str
    template: tuple[str, ...]
    threads: int
    constants: dict[str, object] = field(default_factory=dict)
    generic: bool = False  # True for headers with methods that return references to members

    @property
    def unit(self) -> str:
        """Translation unit of the kernel. Raises ToolchainError if MLX's header lacks an expected statement."""
        text = with_includes(f"{_KERNELS}/{self.header}", behind=f"{_KERNELS}/utils.h")
        for old, new in _TWEAKS if self.generic else ():
            if old not in text:
                raise ToolchainError(
                    f"MLX's {self.header} has changed: there is no {old!r} for agx/controls.py to replace"
                )
            text = text.replace(old, new)
        include = ("#define METAL_SIM_GENERIC 1\n" if self.generic else "") + preamble()
        return unit_of(text, self.function, list(self.template), (self.threads, 1, 1), include, self.constants)


def _steel(head_dim: int, keys: int) -> Control:
    return Control(
        f"steel attention, head_dim {head_dim}",
        "steel/attn/kernels/steel_attention.h",
        "attention",
        ("half", "32", str(keys), str(head_dim), str(head_dim), "4", "1", "half", "float"),
        128,
        {"align_Q": True, "align_K": True, "do_causal": True},
        generic=True,
    )


def _vector(head_dim: int) -> Control:
    dims = str(head_dim), str(head_dim)
    return Control(f"sdpa_vector, head_dim {head_dim}", "sdpa_vector.h", "sdpa_vector", ("half", *dims), 1024)


_DELTA = Control(
    "gated_delta_seq, 128 x 128",
    "gated_delta_update.h",
    "gated_delta_seq",
    ("half", "128", "128", "16", "32", "16"),
    128,
)
CONTROLS = (_steel(64, 32), _steel(128, 16), _vector(64), _vector(128), _vector(256), _DELTA)

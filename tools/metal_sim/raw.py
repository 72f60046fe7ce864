"""Runs a kernel function from unchanged Metal source text, such as MLX's own headers."""

from __future__ import annotations

import numpy as np

from .build import build
from .check import check
from .errors import CheckError
from .launch import BufferSpec, LaunchCounts, LoadedKernel
from .source import translation_unit


class RawKernel:
    """Kernel by name, with its template arguments in Metal's spelling.

    Call it with one array per buffer, in order, or a Python or NumPy scalar for a ``constant T&``. Buffers that are not
    const are outputs and are filled in place, so their arrays must be C-contiguous. ``None`` means a buffer that a
    function constant removes. A call returns the counts of the launch, and raises :class:`MetalSimError` at the first
    fault.

    Args:
        file: name of the text in error messages; None for "NAME:source".
        own_files: see :func:`tools.metal_sim.check.check`.

    Raises:
        CheckError: the text is not legal Metal.
        ToolchainError: the text has no such kernel, or a tool of the simulator failed.
    """

    def __init__(
        self,
        text: str,
        name: str,
        template: list[str] | None = None,
        function_constants: dict[str, object] | None = None,
        file: str | None = None,
        own_files: bool = False,
    ):
        directive = f'#line 1 "{file or name + ":source"}"\n'
        unit, self.signature = translation_unit(directive + text, name, template, function_constants)
        check(unit, name, own_files=own_files)
        self._kernel = LoadedKernel(name, build(unit, name))

    def __call__(
        self,
        *arrays: np.ndarray | None,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        initialised: bool = False,
    ) -> LaunchCounts:
        parameters = self.signature.buffers
        if len(arrays) != len(parameters):
            names = ", ".join(p.name for p in parameters)
            raise CheckError(f"{self.signature.name} takes {len(parameters)} buffers ({names}), not {len(arrays)}")
        specs = []
        for p, a in zip(parameters, arrays, strict=True):
            array = np.zeros(0, np.uint8) if a is None else np.ascontiguousarray(a)
            if p.is_constant:
                specs.append(BufferSpec(p.name, array, "constant"))
            elif "const" in p.type.split():
                specs.append(BufferSpec(p.name, array, "input"))
            else:
                specs.append(BufferSpec(p.name, array, "output", initialised))
        return self._kernel.launch(specs, grid, threadgroup)

"""Replacement of ``mx.fast.metal_kernel`` with the same interface, which checks kernels and runs them on the CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .build import Built, build
from .check import check
from .errors import CheckError
from .launch import BufferSpec, LoadedKernel, check_sizes
from .signature import Parameter
from .source import translation_unit
from .toolchain import cache_dir, key_of, publish
from .trace import generated_source

# MLX passes inputs below this size in constant memory.
CONSTANT_ELEMENTS = 8
# NumPy has no bfloat16, so its bits are passed as uint16.
_BITS = {mx.bfloat16: mx.uint16}


def _to_numpy(array: mx.array) -> np.ndarray:
    bits = _BITS.get(array.dtype)
    return np.ascontiguousarray(np.array(array.view(bits) if bits else array))


def _from_numpy(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(dtype) if dtype in _BITS else mx.array(array)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def _numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return np.dtype("bool" if dtype == mx.bool_ else _name(_BITS.get(dtype, dtype)))


class SimulatedKernel:
    """Kernel that is compiled once per combination of dtypes, size classes and template arguments.

    The size class of an input says if the input is in constant or in device memory. A call runs the kernel and raises
    :class:`MetalSimError` at its first fault.
    """

    flushes_half = False

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        **options: Any,
    ):
        self.name = name
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.source, self.header = source, header
        self._constructor = {
            "name": name,
            "input_names": self.input_names,
            "output_names": self.output_names,
            "source": source,
            "header": header,
            # NumPy makes every input row contiguous, which either setting allows.
            "ensure_row_contiguous": ensure_row_contiguous,
            "atomic_outputs": atomic_outputs,
            **options,
        }
        self._compiled: dict[str, tuple[LoadedKernel, tuple[Parameter, ...]]] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        if len(arrays) != len(self.input_names):
            raise ValueError(f"{self.name} takes {len(self.input_names)} inputs, not {len(arrays)}")
        if not len(output_shapes) == len(output_dtypes) == len(self.output_names):
            raise ValueError(f"{self.name} has {len(self.output_names)} outputs")
        check_sizes(self.name, grid, threadgroup, 0)
        kernel, parameters = self.compile(arrays, output_dtypes, template or ())
        host = {n: _to_numpy(a) for n, a in zip(self.input_names, arrays, strict=True)}
        outputs = {}
        for n, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            if init_value is None:
                outputs[n] = np.empty(tuple(shape), _numpy_dtype(dtype))
            else:
                outputs[n] = _to_numpy(mx.full(tuple(shape), init_value, dtype))
        specs = [self._buffer(p, host, outputs, init_value is not None) for p in parameters]
        kernel.launch(specs, tuple(grid), tuple(threadgroup))
        return [_from_numpy(outputs[n], d) for n, d in zip(self.output_names, output_dtypes, strict=True)]

    def _buffer(
        self, p: Parameter, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], initialised: bool
    ) -> BufferSpec:
        if p.name in outputs:
            return BufferSpec(p.name, outputs[p.name], "output", initialised)
        if p.name in inputs:
            return BufferSpec(p.name, inputs[p.name], "constant" if p.is_constant else "input")
        base, _, what = p.name.rpartition("_")
        array = inputs[base]
        if what == "shape":
            value = np.array(array.shape, np.int32)
        elif what == "strides":
            value = np.array([s // array.itemsize for s in array.strides], np.int64)
        elif what == "ndim":
            value = np.array([array.ndim], np.int32)
        else:
            raise CheckError(f"{self.name}: MLX passes a parameter {p.name} that the simulator does not know")
        return BufferSpec(p.name, value, "constant")

    def compile(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> tuple[LoadedKernel, tuple[Parameter, ...]]:
        """Return the loaded kernel and the parameters of its buffers, in order.

        At first use, traces, checks and builds the kernel, and checks its source for inputs of other size classes.

        Raises:
            CheckError: the source is not legal Metal.
            ToolchainError: a tool of the simulator failed.
        """
        described = [_class_of(a.dtype, a.ndim, a.size) for a in inputs]
        request = self._request(described, output_dtypes, template)
        key = repr((request["inputs"], request["outputs"], request["template"]))
        if key not in self._compiled:
            for other in self._other_classes(described):
                self._check_class(self._request(other, output_dtypes, template))
            unit, name, parameters = self._unit_of(request)
            self._compiled[key] = (LoadedKernel(self.name, self._build(unit, name)), parameters)
        return self._compiled[key]

    def _check_class(self, request: dict[str, Any]) -> None:
        """Check the source for inputs of another size class, unless such a call was checked before.

        The size class of an array is whether it has at least ``CONSTANT_ELEMENTS`` elements. It depends on the batch,
        and only decides the address spaces of parameters. Calls whose template arguments differ only in numbers share
        one check.
        """
        dtypes = [value for _, value in request["template"] if isinstance(value, dict)]
        mark = cache_dir() / f"{key_of('class', request | {'template': dtypes})}.checked"
        if not mark.exists():
            self._unit_of(request)
            publish("", mark)

    def _build(self, unit: str, name: str) -> Built:
        return build(unit, name, flushes_half=True) if self.flushes_half else build(unit, name)

    def _other_classes(self, inputs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return the inputs with all arrays small, and with all arrays large, except if that equals ``inputs``.

        A comment ``metal_sim: never small: name, name`` in the kernel's text names inputs that always have at least 8
        elements, and are therefore always in device memory.
        """
        found = re.search(r"metal_sim: never small:([\w ,]*)", self.header + "\n" + self.source, re.M)
        large = {n.strip() for n in found[1].split(",")} if found else set()

        def resized(size: int) -> list[dict[str, Any]]:
            return [
                {**i, "shape": [CONSTANT_ELEMENTS if n in large else size, *i["shape"][1:]] if i["shape"] else []}
                for n, i in zip(self.input_names, inputs, strict=True)
            ]

        return [v for v in (resized(1), resized(CONSTANT_ELEMENTS)) if v != inputs]

    def _request(
        self, inputs: list[dict[str, Any]], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> dict[str, Any]:
        return {
            "constructor": self._constructor,
            "inputs": inputs,
            "outputs": [_name(d) for d in output_dtypes],
            "template": [(n, {"dtype": _name(v)} if isinstance(v, mx.Dtype) else v) for n, v in template],
        }

    def metal_source(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> tuple[str, str, list[str]]:
        """Return MLX's source for a call: the text after its preamble, the function's name, template arguments."""
        described = [_class_of(a.dtype, a.ndim, a.size) for a in inputs]
        return generated_source(self._request(described, output_dtypes, template))

    def _unit_of(self, request: dict[str, Any]) -> tuple[str, str, tuple[Parameter, ...]]:
        """Return the checked translation unit of the generated source, its function's name and buffer parameters."""
        text, name, arguments = generated_source(request)
        unit, signature = translation_unit(self._mark_lines(text), name, arguments)
        check(unit, self.name)
        return unit, name, signature.buffers

    def _mark_lines(self, text: str) -> str:
        """Return ``text`` with ``#line`` directives, so that errors have line numbers of the caller's strings."""
        signature_at = text.index("[[kernel]]")
        generated_at = text.rfind("template", 0, signature_at)
        if not text[:signature_at].rstrip().endswith(">") or generated_at < 0:
            generated_at = signature_at
        parts = [f'#line 1 "{self.name}:header"\n', text[:generated_at], f'\n#line 1 "{self.name}:generated"\n']
        body_at = text.find(self.source, signature_at) if self.source.strip() else -1
        if body_at < 0:
            return "".join([*parts, text[generated_at:]])
        end = body_at + len(self.source)
        return "".join(
            [
                *parts,
                text[generated_at:body_at],
                f'\n#line 1 "{self.name}:source"\n',
                self.source,
                f'\n#line 1 "{self.name}:generated"\n',
                text[end:],
            ]
        )


def _class_of(dtype: mx.Dtype, ndim: int, size: int) -> dict[str, Any]:
    """Return the description of a small array with the same dtype, number of dimensions and size class."""
    shape = [1] * ndim
    if ndim and size >= CONSTANT_ELEMENTS:
        shape[0] = CONSTANT_ELEMENTS
    return {"dtype": _name(dtype), "shape": shape}


class FlushingKernel(SimulatedKernel):
    """Kernel on a GPU whose half has no subnormal numbers: rounding to half makes them zero."""

    flushes_half = True


def metal_kernel(*args: Any, **kwargs: Any) -> SimulatedKernel:
    """Return a kernel with the interface of ``mx.fast.metal_kernel``."""
    return SimulatedKernel(*args, **kwargs)

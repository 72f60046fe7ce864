"""Turns Metal source into one translation unit of C++ for OpenCL. Line numbers are preserved.

Only constructs that C++ for OpenCL lacks are rewritten:

- a template kernel: its arguments become ``using`` and ``constexpr`` lines in a namespace around it;
- functional casts and constructors of vector types (``float4(...)`` is a macro in the headers; ``vec<T, 4>(...)``
  and ``static_cast<float4>(...)`` become calls of the same function here);
- ``thread`` after a parameter list (the compiler has no temporaries in an address space of their own);
- function constants, which get their values;
- types such as ``atomic_uint``, because OpenCL has global types of the same names;
- the ``[[kernel]]`` attribute. Other kernels of the text are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from .errors import ToolchainError
from .signature import ATTRIBUTES, Parameter, Signature, find_kernel, matching
from .toolchain import cache_dir, key_of

VECTOR = r"(?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat)[234]"
KERNEL_ATTRIBUTE = r"^\[\[kernel[^\]]*\]\]"
_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[ \t]*$', re.M)
# Versions of MLX whose generated source and headers were tested.
TRIED_MLX = ("0.32.4",)


@cache
def mlx_version() -> str:
    import importlib.metadata

    version = importlib.metadata.version("mlx")
    if version not in TRIED_MLX:
        raise ToolchainError(
            f"the Metal simulator was tried with MLX {', '.join(TRIED_MLX)}, and this is {version}: run its tests "
            "(pytest tests/tools/metal_sim), compare MLX's custom_kernel.cpp, and add the version to "
            "tools/metal_sim/source.py"
        )
    return version


def rewrite(text: str) -> str:
    """Return Metal text as text that clang accepts as C++ for OpenCL, line for line."""
    text = re.sub(r"(\)\s*)(const\s+)?thread(?=\s*[:{;])", lambda m: m[1] + (m[2] or ""), text)
    text = re.sub(rf"\bstatic_cast\s*<\s*({VECTOR})\s*>\s*(?=\()", r"::metal::ms_make<\1>", text)
    # OpenCL has global types of the same names.
    text = re.sub(r"(?<![\w:])atomic_(?=(?:u?int|float|ulong)\b)", "::metal::atomic_", text)
    return _rewrite_vec(text)


def _rewrite_vec(text: str) -> str:
    """Replace ``vec<T, N>(...)`` by ``ms_make<vec<T, N>>(...)``, also inside ``static_cast<vec<T, N>>(...)``."""
    out, last = [], 0
    for found in re.finditer(r"(?P<cast>\bstatic_cast\s*<\s*)?\b(?:metal::)?vec\s*<", text):
        if found.start() < last:
            continue
        end = matching(text, found.end() - 1)
        start = found.end("cast") if found["cast"] else found.start()
        name = text[start:end]
        rest = end
        if found["cast"]:
            closing = re.compile(r"\s*>\s*(?=\()").match(text, end)
            if not closing:
                continue
            rest = closing.end()
        elif not re.compile(r"\s*\(").match(text, end) or re.search(r"\boperator\s*$", text[: found.start()]):
            continue
        out += [text[last : found.start()], f"::metal::ms_make<{name}>"]
        last = rest
    return "".join([*out, text[last:]])


def mlx_include() -> Path:
    """Return the include directory of the installed wheel."""
    import mlx.core as mx

    return Path(mx.__file__).parent / "include"


@cache
def mlx_headers() -> Path:
    """Return an include directory with the rewritten kernel headers of the installed MLX. Writes it at first use.

    Raises:
        ToolchainError: the wheel has no Metal headers, or its version was not tested.
    """
    root = mlx_include()
    kernels = root / "mlx" / "backend" / "metal" / "kernels"
    if not (kernels / "utils.h").exists():
        raise ToolchainError(f"MLX {mlx_version()} ships no Metal headers in its wheel")
    out = cache_dir() / f"mlx-{key_of('headers', mlx_version())}"
    if not (out / "done").exists():
        for path in kernels.rglob("*.h"):
            target = out / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rewrite(path.read_text()))
        (out / "done").touch()
    return out


def with_includes(header: str, behind: str | None = None) -> str:
    """Return a header of MLX's wheel, with the headers of MLX that it includes in place of the include lines.

    ``behind``: header that precedes the text. The headers that it includes are left out.
    """
    seen: set[str] = set()

    def resolved(path: str) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = (mlx_include() / path).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda found: resolved(found[1]), text)

    if behind:
        resolved(behind)
    return resolved(header)


def preamble() -> str:
    """Return the text that MLX compiles in front of every custom kernel: its utils.h."""
    return '#include "mlx/backend/metal/kernels/utils.h"\n'


def _bind_function_constants(text: str, values: dict[str, object]) -> str:
    def bind(m: re.Match[str]) -> str:
        value = values.get(m["name"], 0)
        return f"constant {m['type']} {m['name']} = {_literal(value)};"

    return re.sub(
        r"\bconstant\s+(?P<type>\w+)\s+(?P<name>\w+)\s*\[\[\s*function_constant\(\w+\)\s*\]\]\s*;", bind, text
    )


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def id_expression(p: Parameter) -> str:
    """Return the expression for a thread attribute in ``ids``, the table of a thread's ids."""
    row = ATTRIBUTES[p.attribute or ""]
    base = p.type.replace("const", "").strip()
    width = int(base[-1]) if base[-1] in "23" else 1
    values = [f"ids[{3 * row + i}]" for i in range(width)]
    return f"{base}({', '.join(values)})" if width > 1 else f"({base}){values[0]}"


def _thunk(signature: Signature) -> str:
    """Return a function with a fixed signature for the runtime. It takes addresses and ids and calls the kernel."""
    arguments, number = [], 0
    for p in signature.parameters:
        if p.attribute:
            arguments.append(id_expression(p))
            continue
        if p.type.endswith("&"):
            arguments.append(f"*({p.type[:-1].strip()}*)a[{number}]")
        elif p.type.endswith("*"):
            arguments.append(f"({p.type})a[{number}]")
        else:
            raise ToolchainError(f"kernel parameter {p.name} is neither a buffer nor a thread attribute")
        number += 1
    return f'extern "C" void ms_entry(const ulong* a, const uint* ids) {{ {signature.name}({", ".join(arguments)}); }}'


def _simulated(signature: Signature, text: str) -> str:
    """Return the unchanged kernel and the function that the runtime calls."""
    return f"{re.sub(KERNEL_ATTRIBUTE, 'kernel', text, count=1)} {_thunk(signature)}"


def translation_unit(
    text: str,
    kernel: str,
    template_arguments: list[str] | None = None,
    function_constants: dict[str, object] | None = None,
    include: str | None = None,
    entry: Callable[[Signature, str], str] = _simulated,
) -> tuple[str, Signature]:
    """Return the C++ for OpenCL text of one kernel with its template arguments bound, and its signature.

    ``text`` contains everything the kernel needs after the preamble, and may contain ``#line`` directives. ``include``
    replaces the preamble. ``entry`` takes the kernel's signature and its text from ``[[kernel]]`` to the closing brace,
    and returns the text that is compiled instead.

    Raises:
        ToolchainError: the text has no such kernel, or the number of template arguments is wrong.
    """
    # MLX's explicit instantiation is not needed: its arguments are in template_arguments.
    text = re.sub(r"template\s*\[\[host_name\([^\n]*\n", "\n", text)
    text = _bind_function_constants(rewrite(text), function_constants or {})
    signature = find_kernel(text, kernel)
    given = template_arguments or []
    if len(given) != len(signature.template):
        raise ToolchainError(f"{kernel} takes {len(signature.template)} template arguments, not {len(given)}")
    binding = "".join(
        f"using {name} = {value}; "
        if kind in ("typename", "class")
        else f"constexpr constant {kind} {name} = {value}; "
        for (kind, name), value in zip(signature.template, given, strict=True)
    )
    # The template line is removed. The newlines stay, which preserves the numbers of later lines.
    newlines = "\n" * text[signature.start : signature.declaration].count("\n")
    body = entry(signature, text[signature.declaration : signature.end])
    # Other kernels of the text are never called. As plain functions, they could not have threadgroup variables and
    # templates, so they are dropped.
    before = _drop_kernels(text[: signature.start])
    after = _drop_kernels(text[signature.end :])
    preface = include if include is not None else preamble()
    unit = f"{preface}{before}{newlines}namespace ms_instance {{ {binding}{body} }}{after}\n"
    return unit, signature


def _drop_kernels(text: str) -> str:
    pattern = re.compile(r"(template\s*<[^{};]*?>\s*)?\[\[kernel[^\]]*\]\]\s+void\s+\w+\s*\(")
    out, last = [], 0
    while found := pattern.search(text, last):
        closing = matching(text, found.end() - 1)
        end = matching(text, text.index("{", closing))
        out += [text[last : found.start()], "\n" * text[found.start() : end].count("\n")]
        last = end
    return "".join([*out, text[last:]])

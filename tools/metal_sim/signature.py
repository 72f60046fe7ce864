"""Parses a kernel's signature in Metal source: template parameters, buffers, thread attributes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ToolchainError

# Attribute -> row of the id table that runtime/schedule.cpp fills for every thread.
ATTRIBUTES = {
    "thread_position_in_grid": 0,
    "thread_position_in_threadgroup": 1,
    "threadgroup_position_in_grid": 2,
    "threads_per_threadgroup": 3,
    "thread_index_in_threadgroup": 4,
    "thread_index_in_simdgroup": 5,
    "simdgroup_index_in_threadgroup": 6,
    "simdgroups_per_threadgroup": 7,
    "thread_index_in_quadgroup": 8,
    "quadgroup_index_in_threadgroup": 9,
    "quadgroups_per_threadgroup": 10,
    "threadgroups_per_grid": 11,
    "threads_per_grid": 12,
    "grid_size": 12,
    "dispatch_threads_per_threadgroup": 13,
    "threads_per_simdgroup": 14,
    "thread_execution_width": 14,
    "dispatch_simdgroups_per_threadgroup": 15,
    "dispatch_quadgroups_per_threadgroup": 16,
    "grid_origin": 17,  # always zero for MLX's dispatches
}


@dataclass(frozen=True)
class Parameter:
    """Parameter of a kernel function."""

    name: str
    type: str  # "const device float*", "uint3"
    attribute: str | None  # a thread attribute, or None for a buffer

    @property
    def is_buffer(self) -> bool:
        return self.attribute is None

    @property
    def is_constant(self) -> bool:
        return bool(re.search(r"\bconstant\b", self.type))


@dataclass(frozen=True)
class Signature:
    """Kernel function, and the positions of its parts in the text."""

    name: str
    template: tuple[tuple[str, str], ...]  # (kind, name): ("typename", "T"), ("int", "N")
    parameters: tuple[Parameter, ...]
    start: int  # position of the template line, or of [[kernel]]
    declaration: int  # position of [[kernel]]
    end: int  # just after the closing brace

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.is_buffer)


def matching(text: str, at: int) -> int:
    """Return the index just after the bracket that closes the bracket at index ``at``. Skips comments and strings.

    Raises:
        ToolchainError: no bracket closes it.
    """
    pairs = {"(": ")", "{": "}", "[": "]", "<": ">"}
    opening, closing = text[at], pairs[text[at]]
    depth = 0
    i = at
    while i < len(text):
        if text.startswith("//", i):
            i = text.find("\n", i)
            if i < 0:
                break
        elif text.startswith("/*", i):
            i = text.find("*/", i) + 1
        elif text[i] == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif text[i] == opening:
            depth += 1
        elif text[i] == closing:
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    raise ToolchainError(f"unbalanced {opening} in a kernel's source")


def split_arguments(text: str) -> list[str]:
    """Return the non-empty parts of a text between the commas that are outside all brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    parts.append(text[last:])
    return [p.strip() for p in parts if p.strip()]


def _parameter(text: str) -> Parameter:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
    attributes = re.findall(r"\[\[(.*?)\]\]", text, flags=re.S)
    plain = " ".join(re.sub(r"\[\[.*?\]\]", " ", text, flags=re.S).split())
    found = re.fullmatch(r"(.*?[\s*&])\s*([A-Za-z_]\w*)", plain)
    if not found:
        raise ToolchainError(f"cannot read the kernel parameter {text!r}")
    known = [a.strip() for group in attributes for a in group.split(",") if a.strip() in ATTRIBUTES]
    return Parameter(name=found[2], type=found[1].strip(), attribute=known[0] if known else None)


def find_kernel(text: str, name: str) -> Signature:
    """Return the signature of kernel ``name``. Raises ToolchainError if the text has no such kernel."""
    template_line = r"(template\s*<(?P<template>[^{};]*?)>\s*)?"
    pattern = template_line + rf"(?P<kernel>\[\[kernel[^\]]*\]\]|\bkernel\b)\s+void\s+{name}\s*\("
    found = re.search(pattern, text)
    if not found:
        raise ToolchainError(f"no kernel named {name} in the source")
    opening = found.end() - 1
    closing = matching(text, opening)
    parameters = tuple(_parameter(p) for p in split_arguments(text[opening + 1 : closing - 1]))
    brace = text.index("{", closing)
    template = []
    for part in split_arguments(found["template"] or ""):
        kind, parameter = part.split("=")[0].split()[:2]
        template.append((kind, parameter))
    return Signature(
        name=name,
        template=tuple(template),
        parameters=parameters,
        start=found.start(),
        declaration=found.start("kernel"),
        end=matching(text, brace),
    )

"""Finds undefined values that a kernel carries through a loop.

If only one branch sets an array, LLVM makes a phi of undef for each element. The register of the phi stays live through
the whole loop. On a GPU such registers make other registers spill. LLVM makes the phi before any backend runs, so any
clang shows it, and Apple's compiler very likely makes the same phi.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .build import language_flags
from .errors import CheckError
from .source import translation_unit
from .toolchain import cache_dir, key_of, publish, run_clang
from .variants import Variant

_FLAGS = ["-w", "-target", "spir64", "-O2", "-fno-vectorize", "-fno-slp-vectorize", "-fno-discard-value-names"]
_NAME = r'(?:"[^"]*"|[\w.$-]+)'
_LABEL = re.compile(rf"^({_NAME}):")
_PHI = re.compile(rf"^ +%({_NAME}) = phi .*?(\[ .*\])")
_INCOMING = re.compile(rf"\[ ([^\[\]]*?|<[^<>]*>), %({_NAME}) \]")
_TARGET = re.compile(rf"label %({_NAME})")


@dataclass(frozen=True)
class UndefPhi:
    """A phi of undef or poison at the head of a loop."""

    function: str
    name: str  # name of the LLVM value

    @property
    def variable(self) -> str:
        """The variable in the kernel's text, as far as clang kept its name."""
        return re.sub(r"\d*(\..*)?$", "", self.name.strip('"')) or "?"


def undef_phis(ir: str) -> list[UndefPhi]:
    """Return the undefined phis of a module in LLVM's text form."""
    found = []
    for function in re.finditer(r"^define .*?@([\w.$]+)\(.*?\{\n(.*?)^\}", ir, re.M | re.S):
        blocks = _blocks(function[2])
        for head in _loop_heads(blocks):
            for line in blocks[head]:
                phi = _PHI.match(line)
                if phi and any(value in ("undef", "poison") for value, _ in _INCOMING.findall(phi[2])):
                    found.append(UndefPhi(function[1], phi[1]))
    return found


def _blocks(body: str) -> dict[str, list[str]]:
    """Return the lines of each basic block by label. The first block is the entry."""
    blocks: dict[str, list[str]] = {}
    lines = blocks.setdefault("entry", [])
    for line in body.split("\n"):
        if label := _LABEL.match(line):
            lines = blocks.setdefault(label[1], [])
        else:
            lines.append(line)
    return blocks


def _loop_heads(blocks: dict[str, list[str]]) -> list[str]:
    """Return the targets of backward branches."""
    targets = {label: [t for line in lines for t in _TARGET.findall(line)] for label, lines in blocks.items()}
    heads: list[str] = []
    state: dict[str, int] = {}  # 1 if the block is on the current path, 2 if it is finished
    path = [(next(iter(blocks)), iter(targets[next(iter(blocks))]))]
    state[path[0][0]] = 1
    while path:
        label, rest = path[-1]
        following = next(rest, None)
        if following is None:
            state[label] = 2
            path.pop()
        elif following not in state:
            state[following] = 1
            path.append((following, iter(targets[following])))
        elif state[following] == 1 and following not in heads:
            heads.append(following)
    return heads


def undef_phis_of(unit: str, name: str) -> list[UndefPhi]:
    """Return the undefined phis of a translation unit, from the cache if possible.

    Raises:
        CheckError: the unit does not compile.
    """
    kept = cache_dir() / f"{key_of('undef', unit, Path(__file__).read_text())}.undef"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as tmp:
            source, ir = Path(tmp) / "kernel.clcpp", Path(tmp) / "kernel.ll"
            source.write_text(unit)
            done = run_clang([*language_flags(), *_FLAGS, "-emit-llvm", "-S", str(source), "-o", str(ir)])
            if done.returncode:
                raise CheckError(f"{name} does not compile:\n{done.stderr}")
            phis = undef_phis(ir.read_text())
        publish("".join(f"{phi.function} {phi.name}\n" for phi in phis), kept)
    return [UndefPhi(*line.split(" ", 1)) for line in kept.read_text().splitlines()]


def undef_in(variant: Variant) -> dict[str, int]:
    """Return the undefined variables that loops of a variant carry, with the number of phis of each variable.

    Raises:
        CheckError: the variant does not compile.
    """
    unit, _ = translation_unit(variant.text, variant.function, list(variant.template.values()))
    return dict(Counter(phi.variable for phi in undef_phis_of(unit, variant.name)))

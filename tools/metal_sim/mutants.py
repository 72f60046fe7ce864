"""Mutants: small changes to a kernel, or to the planning of its work, which the checks should detect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from metal_engine.device.metal_kernels import kernel_text
from tools.metal_sim import metal_kernel


@dataclass(frozen=True)
class Mutant:
    """One change of a text, which a check should detect."""

    kernel: str  # file of kernels/, without .metal
    old: str
    new: str
    which: int = 0  # index of the occurrence of ``old`` to replace
    equivalent: str = ""  # reason why the change cannot be detected

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.old!r} -> {self.new!r} (occurrence {self.which})"

    def apply(self, text: str) -> str:
        parts = text.split(self.old)
        assert len(parts) > self.which + 1, f"{self.name}: not in the kernel any more"
        head, tail = self.old.join(parts[: self.which + 1]), self.old.join(parts[self.which + 1 :])
        return head + self.new + tail


def factory_of(mutant: Mutant | None) -> Callable[..., Any]:
    """Return a factory of simulated kernels that contain the mutation. None: factory of the unchanged kernels."""

    def factory(**arguments: Any) -> Any:
        if mutant:
            text = kernel_text(f"{mutant.kernel}.metal")
            for part in ("header", "source"):
                if text in arguments.get(part, ""):
                    arguments[part] = arguments[part].replace(text, mutant.apply(text))
        return metal_kernel(**arguments)

    return factory


def run_mutants(mutants: tuple[Mutant, ...], caught: Callable[[Mutant | None], str | None]) -> int:
    """Run all mutants, or the mutants whose indices are on the command line, and print the results.

    Args:
        caught: function that runs the checks with a mutant and returns the error that caught it, or None.

    Returns:
        Exit status: 1 if a mutant was not caught, unless its change is known to be undetectable.
    """
    assert caught(None) is None, "the kernel itself fails"
    chosen = [int(a) for a in sys.argv[1:]] or range(len(mutants))
    missed = []
    for i in chosen:
        found = caught(mutants[i])
        if found is None and not mutants[i].equivalent:
            missed.append(i)
        verdict = f"equivalent: {mutants[i].equivalent}" if found is None and mutants[i].equivalent else found
        print(f"{i:3} {mutants[i].name}\n      {verdict or 'NOT CAUGHT'}", flush=True)
    print(f"{len(list(chosen))} mutants, {len(missed)} not caught {missed or ''}")
    return bool(missed)

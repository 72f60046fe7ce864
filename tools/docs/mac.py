"""Makes the table of docs/mac.md: the number of tokens whose KV fits beside a model, by the engine's own formula.

python -m tools.docs.mac
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import GIB, MARGIN_BYTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mac.md"
BEGIN, END = "<!-- memory: made by tools/docs/mac.py -->\n", "<!-- end -->"
MACS = (8, 16, 24, 32, 64, 128)
# Memory of a step in addition to weights and KV, in bytes, approximately for the models below. The engine measures this
# memory at its start.
STEP_BYTES = GIB
KIB = 1024


@dataclass(frozen=True)
class Model:
    """A model on the hub: billions of parameters, bits per weight, and bytes of KV per token in bfloat16."""

    name: str
    params: float
    bits: float
    kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        return int(self.params * 1e9 * self.bits / 8)


# Quantization to 4 bits takes 4.5 bits per weight: each group of 64 weights has a scale and a bias of 16 bits.
MODELS = (
    Model("Qwen3-0.6B, bfloat16", 0.60, 16, 112 * KIB),
    Model("Qwen3-4B, 4 bits", 4.02, 4.5, 144 * KIB),
    Model("Qwen3-8B, 4 bits", 8.19, 4.5, 144 * KIB),
    Model("Qwen3-14B, 4 bits", 14.77, 4.5, 160 * KIB),
    Model("gpt-oss-20b, as released", 20.9, 5.3, 48 * KIB),
    Model("Qwen3-30B-A3B, 4 bits", 30.5, 4.5, 96 * KIB),
    Model("Qwen3-32B, 4 bits", 32.8, 4.5, 256 * KIB),
    Model("Llama-3.3-70B, 4 bits", 70.6, 4.5, 320 * KIB),
    Model("gpt-oss-120b, as released", 116.8, 4.5, 72 * KIB),
)


def gpu_bytes(gib: int) -> int:
    """Return the bytes that the GPU may use on a Mac with ``gib`` GiB.

    macOS allows two thirds of the memory up to 32 GiB, and three quarters above.
    """
    return gib * GIB * 2 // 3 if gib <= 32 else gib * GIB * 3 // 4


def kv_tokens(model: Model, gib: int) -> int:
    """Return how many tokens the KV cache holds on a Mac with ``gib`` GiB.

    If the result is below 1, the model does not fit.
    """
    budget = int(gpu_bytes(gib) * EngineArgs(model="").gpu_memory_utilization)
    return (budget - model.weight_bytes - STEP_BYTES - MARGIN_BYTES) // model.kv_bytes


def table() -> str:
    """Return the table as Markdown."""
    rows = [f"| | weights | {' | '.join(f'{gib} GiB' for gib in MACS)} |", f"|{' --- |' * (len(MACS) + 2)}"]
    for model in MODELS:
        counts = [kv_tokens(model, gib) for gib in MACS]
        cells = [f"{count // 1000:,}k" if count >= 2000 else "-" for count in counts]
        rows.append(f"| {model.name} | {model.weight_bytes / GIB:.1f} GiB | {' | '.join(cells)} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Return the page with its table replaced by a new one."""
    before, found, rest = page.partition(BEGIN)
    assert found, f"{PAGE} has no place for the table"
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

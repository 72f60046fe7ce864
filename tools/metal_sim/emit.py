"""``python -m tools.metal_sim emit``: writes every kernel variant of the engine as Metal source, for Apple's compilers.

The output folder contains:

    mlx_preamble.h    text that MLX compiles in front of every kernel: its utils.h with the included headers
    NAME.metal        one variant: signature and instance as MLX writes them; NAME is MLX's name of the function
    NAME.mtlp-json    the variant's pipeline, for xcrun metal-tt
    manifest.json     description of each variant, the architectures that need it, and layers without a kernel

tools/metal_sim/compile_on_mac.py compiles them on a Mac. .github/metal-kernels.txt lists the names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from .errors import ToolchainError
from .shapes import Layer, layers_by_model
from .source import mlx_version, with_includes
from .variants import Recorder, Variant, record_variants

ROOT = Path(__file__).resolve().parents[2]
LISTING = ROOT / ".github" / "metal-kernels.txt"
PREAMBLE = "mlx_preamble.h"
# Marks kernels that need Metal 4 and a GPU with matrix units.
TENSOR_OPS_HEADER = "#include <MetalPerformancePrimitives/"
_UTILS = "mlx/backend/metal/kernels/utils.h"


def preamble_text() -> str:
    """Return MLX's utils.h from the installed wheel. The headers of MLX that it includes replace its include lines."""
    return f"// MLX {mlx_version()}: {_UTILS} and what it includes.\n#pragma once\n{with_includes(_UTILS)}"


def metal_text(variant: Variant) -> str:
    """Return the text of the variant's ``.metal`` file, for Apple's compilers."""
    models = ", ".join(sorted(variant.needed_by, key=str.lower))
    arguments = ", ".join(f"{name} = {value}" for name, value in variant.template.items())
    return (
        f"// {variant.kernel}: {arguments}\n// For {models}\n"
        f'// Written by python -m tools.metal_sim emit, MLX {mlx_version()}.\n#include "{PREAMBLE}"\n{variant.text}'
    )


def pipeline(variant: Variant) -> dict[str, object]:
    """Return MLX's pipeline of a variant as a script for metal-tt, without options."""
    return {"pipelines": {"compute_pipelines": [{"compute_function": variant.function}]}}


def manifest(recorder: Recorder) -> dict[str, object]:
    variants = sorted(recorder.variants.values(), key=lambda v: v.name)
    return {
        "mlx": mlx_version(),
        "preamble": PREAMBLE,
        "variants": [
            {
                "name": v.name,
                "function": v.function,
                "kernel": v.kernel,
                "template": v.template,
                "threads": v.threads,
                "tensor_ops": TENSOR_OPS_HEADER in v.text,
                "needed_by": sorted(v.needed_by, key=str.lower),
                **({"cut": v.cut} if v.cut else {}),
            }
            for v in variants
        ],
        "refused": [{"needed_by": models, "layer": layer, "why": why} for models, layer, why in recorder.refused],
    }


def listing_text(names: Iterable[str]) -> str:
    """Return the text of .github/metal-kernels.txt."""
    return (
        "# Every kernel variant that the macOS workflow builds, as `python -m tools.metal_sim emit --write-list`\n"
        "# writes them: NAME of NAME.metal.\n" + "".join(f"{name}\n" for name in sorted(names))
    )


def emit(folder: Path, layers: dict[str, list[Layer]] | None = None) -> Recorder:
    """Write all variants to ``folder``. Deletes files of variants that no longer exist.

    Raises:
        ToolchainError: the folder contains a file that emit did not write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    present = {path.name: path for path in folder.iterdir()}
    written = {name for name in present if re.search(r"\.(metal|mtlp-json)$", name)} | {PREAMBLE, "manifest.json"}
    if strangers := sorted(set(present) - written):
        raise ToolchainError(f"{folder} holds {strangers[0]}, which emit did not write: name another folder with --out")
    recorder = record_variants(layers or layers_by_model())
    texts = {PREAMBLE: preamble_text(), "manifest.json": json.dumps(manifest(recorder), indent=1) + "\n"}
    for variant in recorder.variants.values():
        texts[f"{variant.name}.metal"] = metal_text(variant)
        texts[f"{variant.name}.mtlp-json"] = json.dumps(pipeline(variant)) + "\n"
    for name in set(present) - set(texts):
        present[name].unlink()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return recorder


def write_listing(recorder: Recorder) -> None:
    LISTING.write_text(listing_text(v.name for v in recorder.variants.values()))

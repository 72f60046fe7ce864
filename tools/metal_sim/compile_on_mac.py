#!/usr/bin/env python3
"""Compiles the output of `python -m tools.metal_sim emit` with Apple's compilers, on a Mac but without a GPU.

    python3 tools/metal_sim/compile_on_mac.py build/metal --list .github/metal-kernels.txt [--tensor-ops]

Every variant is compiled by `xcrun metal`, and then by `xcrun metal-tt` for a GPU of each generation. metal-tt compiles
as the driver does when it makes a pipeline, so it rejects a kernel that needs more registers than the GPU has. Requires
only Xcode, and no package of this project.

Variants on Metal's tensor operations need the SDK of macOS 26.2. --tensor-ops compiles only these variants.

This script was written from Apple's documentation and has not run on a Mac yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

# The smallest GPU of each generation. Larger GPUs have the same registers per thread.
GPUS = {
    "applegpu_g13g": "M1",
    "applegpu_g14g": "M2",
    "applegpu_g15g": "M3",
    "applegpu_g16g": "M4",
    "applegpu_g17g": "M5",
}
# Generations that every supported Xcode knows. Newer GPUs that metal-tt rejects are skipped with a warning.
KNOWN_TO_ALL = ("applegpu_g13g", "applegpu_g14g", "applegpu_g15g")
# MLX's options at run time: its language version on macOS 15, and no fast math.
FLAGS = ["-std=metal3.2", "-fno-fast-math"]
# MLX's options on macOS 26, with tensor operations (26.2 or newer), and the GPUs with matrix units.
TENSOR_OPS_FLAGS = ["-std=metal4.0", "-mmacosx-version-min=26.2", "-fno-fast-math"]
TENSOR_OPS_GPUS = ("applegpu_g17g",)
_PROBE = "#include <metal_stdlib>\nkernel void probe(device float* out [[buffer(0)]]) { out[0] = 1.0f; }\n"
_PROBE_PIPELINE = {"pipelines": {"compute_pipelines": [{"compute_function": "probe"}]}}


@dataclass
class CompileResult:
    """Result for a variant: name and output of each compiler that failed."""

    name: str
    failures: list[tuple[str, str]] = field(default_factory=list)


def xcrun(*arguments: str | Path) -> str | None:
    """Run a tool of Xcode. Return its output if it failed, otherwise None."""
    done = subprocess.run(["xcrun", "-sdk", "macosx", *map(str, arguments)], capture_output=True, text=True)
    return (done.stdout + done.stderr).strip() or f"exit status {done.returncode}" if done.returncode else None


def compile_one(source: Path, pipeline: Path, gpus: list[str], out: Path, flags: list[str]) -> CompileResult:
    """Compile one file to a library, and compile the library for each GPU. Delete the outputs. Return the failures."""
    result = CompileResult(source.stem)
    air, library = out / f"{source.stem}.air", out / f"{source.stem}.metallib"
    said = xcrun("metal", *flags, "-c", source, "-o", air) or xcrun("metal", air, "-o", library)
    if said is not None:
        result.failures.append(("metal", said))
        return result
    for gpu in gpus:
        binary = out / f"{source.stem}.{gpu}.gpubin"
        said = xcrun("metal-tt", "-arch", gpu, "-o", binary, pipeline, library)
        if said is not None:
            result.failures.append((gpu, said))
        binary.unlink(missing_ok=True)
    air.unlink()
    library.unlink()
    return result


def known_gpus(out: Path) -> list[str]:
    """Return the GPUs in GPUS for which this Xcode compiles a trivial kernel.

    Exits if one of KNOWN_TO_ALL is missing.
    """
    source, pipeline = out / "probe.metal", out / "probe.mtlp-json"
    source.write_text(_PROBE)
    pipeline.write_text(json.dumps(_PROBE_PIPELINE))
    said = dict(compile_one(source, pipeline, list(GPUS), out, FLAGS).failures)
    if "metal" in said:
        sys.exit(f"xcrun metal does not compile a kernel of one line:\n{said['metal']}")
    for gpu in KNOWN_TO_ALL:
        if gpu in said:
            sys.exit(f"xcrun metal-tt does not compile a kernel of one line for {gpu}:\n{said[gpu]}")
    for gpu in said:
        print(f"::warning::this Xcode does not compile for {gpu} ({GPUS[gpu]}): nothing is built for it")
    return [gpu for gpu in GPUS if gpu not in said]


def names_to_build(folder: Path, listing: Path, tensor_ops: bool) -> list[str]:
    """Return the names of the variants in ``folder`` with tensor operations, or without them.

    Exits unless the folder's files, its manifest and ``listing`` name the same variants.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [variant["name"] for variant in manifest["variants"]]
    listed = [line for line in listing.read_text().splitlines() if line and not line.startswith("#")]
    files = [path.stem for path in folder.glob("*.metal")]
    for what, others in ((listing, listed), (f"the files of {folder}", files)):
        if differing := sorted(set(names) ^ set(others)):
            sys.exit(
                f"{what} and {folder}/manifest.json differ in {len(differing)} kernels, {differing[0]} for one: "
                "run python -m tools.metal_sim emit --write-list"
            )
    chosen = [variant["name"] for variant in manifest["variants"] if variant["tensor_ops"] == tensor_ops]
    if not chosen:
        sys.exit(f"{folder} names no kernels{' with tensor operations' if tensor_ops else ''}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what emit wrote")
    parser.add_argument("--list", type=Path, required=True, help="the kernels that must be there")
    parser.add_argument("--tensor-ops", action="store_true", help="compile the variants on tensor operations")
    options = parser.parse_args()
    names = names_to_build(options.folder, options.list, options.tensor_ops)
    flags = TENSOR_OPS_FLAGS if options.tensor_ops else FLAGS
    with tempfile.TemporaryDirectory() as tmp, ThreadPoolExecutor(os.cpu_count()) as pool:
        out = Path(tmp)
        gpus = known_gpus(out)
        if options.tensor_ops:
            gpus = [gpu for gpu in gpus if gpu in TENSOR_OPS_GPUS]
            if not gpus:
                sys.exit("this Xcode compiles for no GPU with matrix units: tensor operations need Xcode 26.2 or newer")
        print(f"{len(names)} kernels for {', '.join(f'{GPUS[gpu]} ({gpu})' for gpu in gpus)}")

        def build(name: str) -> CompileResult:
            source, pipeline = options.folder / f"{name}.metal", options.folder / f"{name}.mtlp-json"
            return compile_one(source, pipeline, gpus, out, flags)

        results = []
        for result in pool.map(build, names):
            results.append(result)
            print(
                f"{result.name}: {', '.join(f'fails for {who}' for who, _ in result.failures) or 'builds'}", flush=True
            )
    failed = [result for result in results if result.failures]
    for result in failed:
        for who, said in result.failures:
            print(f"::error::{result.name} fails for {who}\n{said}")
    print(f"{len(results) - len(failed)} of {len(results)} kernels build")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

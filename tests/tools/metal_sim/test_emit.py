"""Sources for Apple's compilers: every variant that docs/models.md's architectures need, as listed for the workflow."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import mlx.core as mx
import pytest
import yaml

from metal_engine.attention.metal.cuts import tried_cuts
from metal_engine.attention.metal.variants import AttentionShape, KernelVariant, variant_of
from tools.fixtures.architectures import SUPPORTED
from tools.metal_sim.check import check
from tools.metal_sim.emit import LISTING, PREAMBLE, emit
from tools.metal_sim.errors import CheckError, ToolchainError
from tools.metal_sim.shapes import Attention, Convolution, attention_layers, layers_by_model
from tools.metal_sim.source import rewrite, translation_unit
from tools.metal_sim.variants import DTYPES

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = ROOT / ".github" / "workflows" / "metal-kernels.yml"
BUILDER = ROOT / "tools" / "metal_sim" / "compile_on_mac.py"
SMALL = {"lfm2": [Attention(32, 8, 64, 64), Convolution(3, bias=False)]}


# Architectures that need every kernel: with latents, windows, an index, recurrent states and groups of 32.
SOME = ("llama", "gemma3", "deepseek_v32", "qwen3_next", "mamba2", "lfm2", "phi3")


@pytest.fixture(scope="module", params=[SOME, pytest.param(None, marks=pytest.mark.full)], ids=["some", "all"])
def emitted(request, tmp_path_factory):
    """Emit the kernel variants of architectures. Return the folder, the recorder of :func:`emit`, and the layers."""
    layers = layers_by_model()
    if request.param is not None:
        layers = {name: layers[name] for name in request.param}
    folder = tmp_path_factory.mktemp("metal")
    return folder, emit(folder, layers), layers


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def listed_names() -> list[str]:
    return [line for line in LISTING.read_text().splitlines() if not line.startswith("#")]


def test_the_workflow_lists_every_file_that_is_emitted(emitted) -> None:
    folder, _, layers = emitted
    names = [variant["name"] for variant in manifest_of(folder)["variants"]]
    assert names == sorted(path.stem for path in folder.glob("*.metal"))
    assert names == sorted(path.stem for path in folder.glob("*.mtlp-json"))
    if len(layers) > len(SOME):
        assert listed_names() == names, "run python -m tools.metal_sim emit --write-list"
    # Leave out the variants of tuning: `emit` writes them for the first of several layers with the same work.
    default = {variant["name"] for variant in manifest_of(folder)["variants"] if "cut" not in variant}
    assert len(default) >= 100
    assert default <= set(listed_names()), "run python -m tools.metal_sim emit --write-list"


def test_every_layer_of_every_architecture_has_variants_or_a_reason(emitted) -> None:
    _, recorder, emitted_layers = emitted
    needed_by = {model for variant in recorder.variants.values() for model in variant.needed_by}
    refused = {model for models, _, _ in recorder.refused for model in models}
    assert needed_by | refused == {model for model, layers in emitted_layers.items() if layers}
    for layer in {layer for layers in emitted_layers.values() for layer in layers if isinstance(layer, Attention)}:
        why = [text for _, text, _ in recorder.refused if text.startswith(f"{layer} ")]
        assert not why or len(why) >= len(DTYPES), f"{layer} is refused in some dtypes only"
    assert {variant.kernel for variant in recorder.variants.values()} == recorder.kernels
    quantized = [v.template for v in recorder.variants.values() if v.kernel == "paged_attention_quantized"]
    kept = {(t["BITS"], t["GROUP_SIZE"], int(t["DK"]) % 64 == int(t["DV"]) % 64 == 0) for t in quantized}
    assert kept == {(bits, *groups) for bits in "84" for groups in (("64", True), ("32", False))}
    assert len(recorder.kernels) >= 5


def test_cuts_that_tuning_tries_have_variants(emitted) -> None:
    """For each size of heads, in 16 bits. Other numbers of query heads, windows and the like give the same work."""
    _, recorder, emitted_layers = emitted
    names = {field.name.upper() for field in fields(KernelVariant)}
    recorded = [v for v in recorder.variants.values() if v.kernel == "paged_attention"]
    work = {(t["DK"], t["DV"], t["LATENT"], *(t[n] for n in sorted(names))) for t in (v.template for v in recorded)}
    layers = {layer for layers in emitted_layers.values() for layer in layers if isinstance(layer, Attention)}
    for layer in layers:
        dims = (layer.head_dim + layer.rope_dim, layer.v_head_dim)
        shape = AttentionShape(mx.float16, *dims, layer.num_heads, layer.num_kv_heads, 16, layer.is_latent)
        for cut in tried_cuts():
            template = dict(variant_of(shape, cut).template)
            values = (*dims, int(layer.is_latent), *(template[n] for n in sorted(names)))
            assert tuple(map(str, values)) in work, f"{layer}, {cut}"
    cuts = {v.cut for v in recorder.variants.values()}
    assert {"", "nothing staged", "tiles of half the rows", "at most 1 key fragment held"} <= cuts


def test_emitted_attention_shapes_match_the_models_table() -> None:
    layers = layers_by_model()
    assert set(layers) == set(SUPPORTED)
    page = (ROOT / "docs" / "models-table.md").read_text().split("## GGUF files")[0]
    for model_type, found in layers.items():
        (row,) = re.findall(rf"^\| `{re.escape(model_type)}` \|(.*)$", page, re.M)
        attention = [layer for layer in found if isinstance(layer, Attention)]
        assert ("none: recurrent state" in row) == (not attention), model_type
        for word, has in {
            "sliding window": any(layer.window for layer in attention),
            "softcap": any(layer.softcap for layer in attention),
            "sinks": any(layer.sinks for layer in attention),
            "latent (MLA": any(layer.is_latent for layer in attention),
            "K and V of different sizes": any(layer.head_dim != layer.v_head_dim for layer in attention),
        }.items():
            assert (word in row) == has, f"{model_type}: {word}"
        # 32 / 8 x 128; 16 / 16 x 192, V 128; 128 / 1 x (512 + 64)
        for heads, kv_heads, latent, rope, head_dim, v_head_dim in re.findall(
            r"(\d+) / (\d+) x (?:\((\d+) \+ (\d+)\)|(\d+)(?:, V (\d+))?)", row
        ):
            dims = (latent, latent, rope) if latent else (head_dim, v_head_dim or head_dim, 0)
            named = (int(heads), int(kv_heads), *map(int, dims))
            assert named in {(a.num_heads, a.num_kv_heads, a.head_dim, a.v_head_dim, a.rope_dim) for a in attention}, (
                row
            )


def test_a_row_of_shapes_is_read() -> None:
    first, second, third, fourth = attention_layers("32/8x64:48 8xlatent512+64 | full window+sinks")
    assert first == Attention(32, 8, 64, 48) and str(first) == "32/8x64:48"
    assert second == Attention(32, 8, 64, 48, window=True, sinks=True)
    assert third == Attention(8, 1, 512, 512, rope_dim=64) and third.is_latent
    assert str(fourth) == "8xlatent512+64+window+sinks"
    with pytest.raises(ValueError, match="no attention shape"):
        list(attention_layers("32x128"))


@pytest.mark.parametrize(
    "kernel",
    [
        *("gated_delta", "merge_splits", "paged_attention", "paged_attention_quantized", "paged_attention_tensor"),
        *("paged_attention_selected", "paged_attention_selected_quantized", "index_scores", "index_select"),
        "selected_latents",
        *("paged_attention_tensor_quantized", "short_convolution", "ssm_update"),
    ],
)
def test_an_emitted_file_is_whole_and_legal(emitted, kernel: str) -> None:
    """The simulator's check pass accepts the emitted file with its preamble and without other files of MLX."""
    folder, recorder, _ = emitted
    variant = next(v for v in sorted(recorder.variants.values(), key=lambda v: v.name) if v.kernel == kernel)
    preamble, text = (folder / PREAMBLE).read_text(), (folder / f"{variant.name}.metal").read_text()
    assert '#include "' not in preamble
    assert re.findall('#include "(.*)"', text) == [PREAMBLE]
    # The pipeline's function is the function that the file exports.
    pipeline = json.loads((folder / f"{variant.name}.mtlp-json").read_text())
    (function,) = re.findall(r'host_name\("(\w+)"\)', text)
    assert pipeline == {"pipelines": {"compute_pipelines": [{"compute_function": function}]}}

    def unit_of(preamble: str) -> str:
        include = '#pragma clang diagnostic ignored "-Weverything"\n' + rewrite(preamble).replace("#pragma once\n", "")
        body = text.replace(f'#include "{PREAMBLE}"\n', "")
        return translation_unit(body, function, list(variant.template.values()), include=include)[0]

    check(unit_of(preamble), variant.name, own_files=False)
    if kernel == "paged_attention":  # this preamble defines it
        with pytest.raises(CheckError):
            check(unit_of("#include <metal_math>\n"), variant.name, own_files=False)


def test_emitting_again_writes_equal_files_and_removes_old_sources(emitted_small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(emitted_small, tmp_path / "metal")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "older.metal").write_text("")
    emit(folder, SMALL)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "notes.txt").write_text("")
    with pytest.raises(ToolchainError, match=r"notes\.txt"):
        emit(folder, SMALL)


# The workflow's script for a Mac, with a fake xcrun that fails if FAIL matches its arguments.
XCRUN = """#!/bin/sh
echo "$@" >> "$XCRUN_LOG"
if [ -n "$FAIL" ] && echo "$@" | grep -Eq -e "$FAIL"; then
    echo "Compute function exceeds available temporary registers" >&2
    exit 1
fi
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


@pytest.fixture(scope="module")
def emitted_small(tmp_path_factory) -> Path:
    """Emit the kernel variants of SMALL. Return the folder."""
    folder = tmp_path_factory.mktemp("small")
    emit(folder, SMALL)
    return folder


@pytest.fixture
def metal(emitted_small: Path, tmp_path: Path) -> Path:
    """Return a copy of the emitted folder. The fake xcrun is beside it."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "xcrun").write_text(XCRUN)
    (bin_ / "xcrun").chmod(0o755)
    return shutil.copytree(emitted_small, tmp_path / "metal")


def run_builder(metal: Path, *options: str, fail: str = "", extra: str = "") -> tuple[int, str, list[str]]:
    """Run the workflow's script, with the names of SMALL's kernels and ``extra`` in its list."""
    log, listing = metal.with_name("log"), metal.with_name("list.txt")
    names = [variant["name"] for variant in manifest_of(metal)["variants"]]
    listing.write_text("# kernels\n" + "".join(f"{name}\n" for name in names) + extra)
    log.write_text("")
    done = subprocess.run(
        [sys.executable, "-I", str(BUILDER), str(metal), "--list", str(listing), *options],
        env={
            **os.environ,
            "PATH": f"{metal.with_name('bin')}:{os.environ['PATH']}",
            "XCRUN_LOG": str(log),
            "FAIL": fail,
        },
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


def test_the_mac_builds_every_file_for_every_gpu(metal: Path) -> None:
    code, output, calls = run_builder(metal)
    names = [variant["name"] for variant in manifest_of(metal)["variants"] if not variant["tensor_ops"]]
    assert code == 0 and f"{len(names)} of {len(names)} kernels build" in output
    assert len(names) >= 6
    for name in names:
        assert f"{name}: builds" in output
        (compiled,) = [call for call in calls if re.search(rf" -c \S*/{name}\.metal ", call)]
        assert compiled.startswith("-sdk macosx metal -std=metal3.2 -fno-fast-math ")
        of_gpus = [call for call in calls if f"{name}.mtlp-json" in call and "metal-tt" in call]
        assert len({re.search(r"-arch (\w+) ", call)[1] for call in of_gpus}) == 5


def test_tensor_op_kernels_are_built_only_for_gpus_with_matrix_units(metal: Path) -> None:
    code, output, calls = run_builder(metal, "--tensor-ops")
    variants = manifest_of(metal)["variants"]
    names = [variant["name"] for variant in variants if variant["tensor_ops"]]
    with_tensor_ops = ("paged_attention_tensor", "paged_attention_tensor_quantized")
    assert names == [variant["name"] for variant in variants if variant["kernel"] in with_tensor_ops]
    assert {variant["kernel"] for variant in variants} > set(with_tensor_ops)
    assert code == 0 and names and f"{len(names)} of {len(names)} kernels build" in output
    for name in names:
        (compiled,) = [call for call in calls if re.search(rf" -c \S*/{name}\.metal ", call)]
        assert compiled.startswith("-sdk macosx metal -std=metal4.0 -mmacosx-version-min=26.2 -fno-fast-math ")
        (of_gpu,) = [call for call in calls if f"{name}.mtlp-json" in call and "metal-tt" in call]
        assert "-arch applegpu_g17g " in of_gpu
    assert sum(" -c " in call for call in calls) == len(names) + 1  # one more call for the probe
    code, output, _ = run_builder(metal, "--tensor-ops", fail="-arch applegpu_g17g .*probe")
    assert code == 1 and "no GPU with matrix units" in output


def test_a_kernel_without_enough_registers_fails_the_build(metal: Path) -> None:
    code, output, _ = run_builder(metal, fail=r"-arch applegpu_g13g .*paged_attention__float16_t[^ ]*\.mtlp-json")
    assert code == 1
    failed = re.findall(r"^(\w+): fails for applegpu_g13g$", output, re.M)
    assert failed and all(name.startswith("paged_attention__float16_t") for name in failed)
    assert "exceeds available temporary registers" in output


def test_gpus_unknown_to_xcode_are_reported_and_skipped(metal: Path) -> None:
    code, output, calls = run_builder(metal, fail="-arch applegpu_g17g")
    assert code == 0 and "this Xcode does not compile for applegpu_g17g (M5)" in output
    assert sum("applegpu_g17g" in call for call in calls) == 1
    code, output, _ = run_builder(metal, fail="-arch applegpu_g14g .*probe")
    assert code == 1 and "for applegpu_g14g" in output


def test_files_that_the_list_does_not_name_fail_the_build(metal: Path) -> None:
    code, output, calls = run_builder(metal, extra="another_kernel\n")
    assert code == 1 and "another_kernel" in output and not calls
    (metal / "stray.metal").write_text("")
    code, output, calls = run_builder(metal)
    assert code == 1 and "stray" in output and not calls


def test_the_workflow_builds_the_emitted_sources() -> None:
    """tests/tools/test_workflows.py tests what holds for every workflow."""
    workflow = yaml.safe_load(WORKFLOW.read_text())
    # YAML 1.1 reads the key `on` as true.
    for event in ("push", "pull_request"):
        for path in workflow[True][event]["paths"]:
            assert list(ROOT.glob(path.removesuffix("/**"))), path
    commands = {name: [s.get("run", "") for s in job["steps"]] for name, job in workflow["jobs"].items()}
    assert ".venv/bin/python -m tools.metal_sim emit --out build/metal" in commands["emit"]
    builder = f"python3 {BUILDER.relative_to(ROOT)} build/metal --list {LISTING.relative_to(ROOT)}"
    assert commands["build"][-1] == builder
    assert commands["build-tensor-ops"][-1] == f"{builder} --tensor-ops"
    given, *others = (
        next(s["with"] for s in workflow["jobs"][job]["steps"] if "artifact" in s.get("uses", ""))
        for job in ("emit", "build", "build-tensor-ops")
    )
    assert all(given["name"] == taken["name"] and given["path"] == taken["path"] for taken in others)

"""``metal-engine doctor``: reports versions and devices and tests models, for bug reports.

Does not use the network. A check that raises is reported as a finding, and the other checks still run.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

from metal_engine import __version__
from metal_engine.errors import one_line

PACKAGES = (
    "mlx", "mlx-lm", "transformers", "tokenizers", "huggingface-hub", "gguf", "numpy", "fastapi",
    "uvicorn", "pydantic", "openai",
)  # fmt: skip
# Packages that serving does not need.
OPTIONAL = frozenset({"openai"})

OK, WARNING, FAILED = "ok", "WARN", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``status`` is ``OK``, ``WARNING`` or ``FAILED``; empty for facts that are not checked."""

    label: str
    text: str
    status: str = ""

    def __str__(self) -> str:
        return f"{self.label + ':':18}{self.status + ': ' if self.status else ''}{self.text}"


Check = Callable[[], Iterator[Finding]]


def examine(report: Callable[[Finding], None], models: Sequence[str] | None = None) -> bool:
    """Run all checks. Return True if no check failed.

    Args:
        report: callback that receives each finding at once.
        models: models to test in addition to the tiny model. None: the demo model, if it is downloaded.
    """
    checks: list[tuple[str, Check]] = [
        ("versions", _versions),
        ("compute", lambda: _compute(models or ("demo",))),
        ("folders", _folders),
        ("tiny model", _tiny_model),
        ("quantized KV", _quantized_kv),
    ]
    if models is None:
        checks.append(("model", _demo_model))
    else:
        checks += [("model", partial(_real_model, model)) for model in models]
    healthy = True
    for label, check in checks:
        try:
            for finding in check():
                healthy &= finding.status != FAILED
                report(replace(finding, text=_without_home(finding.text)))
        except Exception as error:  # noqa: BLE001 (this command must report every kind of failure)
            healthy = False
            text = _without_home(one_line(error, limit=600))
            report(Finding(label, f"{type(error).__name__}: {text}", FAILED))
    return healthy


def _versions() -> Iterator[Finding]:
    from metal_engine.device.info import macos_version

    system = f"macOS {macos_version()}" if sys.platform == "darwin" else platform.platform()
    yield Finding("system", f"{system}, {platform.machine()}, {os.cpu_count()} CPUs")
    yield Finding("python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield Finding("metal-engine", __version__)
    for package in PACKAGES:
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            if package not in OPTIONAL:
                yield Finding(package, "not installed", FAILED)


def _compute(models: Sequence[str]) -> Iterator[Finding]:
    from metal_engine.checkpoints.known_config import limit_command_buffers
    from metal_engine.device.blas.load import load_optimized_blas
    from metal_engine.device.command_buffers import limits_in_force
    from metal_engine.settings.args import EngineArgs

    limit_command_buffers([EngineArgs(model=model) for model in models])
    blas = load_optimized_blas()
    import mlx.core as mx

    from metal_engine.device.info import device_info

    device = device_info(blas)
    yield Finding("device", device.name)
    yield Finding("metal", "available" if mx.metal.is_available() else "not available; MLX computes on the CPU")
    if device.kind == "metal":
        yield Finding("command buffers", str(limits_in_force() or "MLX's own limits"))
    if device.kind == "cpu":
        yield Finding("blas", blas.description, OK if blas.optimized else WARNING)
        if blas.problem:
            yield Finding("blas problem", blas.problem, WARNING)
        yield from _kernels()
    yield Finding("memory", f"{device.memory_bytes / (1 << 30):.1f} GiB for weights and KV cache")


def _kernels() -> Iterator[Finding]:
    from metal_engine.device.compiled import keep_kernels_private
    from metal_engine.device.kernel_folder import use_private_kernel_folder
    from metal_engine.device.private_folder import NotPrivateError

    keep_kernels_private()
    if sys.platform == "linux":
        try:
            yield Finding("compiled kernels", str(use_private_kernel_folder()), OK)
        except NotPrivateError as error:
            yield Finding("compiled kernels", f"none: {error}", WARNING)


def _folders() -> Iterator[Finding]:
    from metal_engine.device.cache_dir import cache_dir

    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    yield Finding("cache", str(folder), OK if writable else FAILED)
    for variable in sorted(os.environ):
        if variable.startswith("METAL_ENGINE_") or variable in ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
            secret = "KEY" in variable or "TOKEN" in variable
            yield Finding(variable, "(set)" if secret else os.environ[variable])
    yield Finding("HF_TOKEN", "set" if os.environ.get("HF_TOKEN") else "not set")


def _without_home(text: str) -> str:
    """Return a text without the user's home folder, so that it can be published."""
    return text.replace(str(Path.home()), "~")


def _tiny_model() -> Iterator[Finding]:
    from metal_engine.doctor.tiny import check_tiny_model

    # A thread for each model, because closing an engine closes the MLX streams of its thread.
    with ThreadPoolExecutor(1) as thread:
        yield Finding("tiny model", thread.submit(check_tiny_model).result(), OK)


def _quantized_kv() -> Iterator[Finding]:
    from metal_engine.doctor.tiny import check_quantized_kv

    for kv_cache_dtype in ("int8", "int4"):
        with ThreadPoolExecutor(1) as thread:
            yield Finding("quantized KV", thread.submit(check_quantized_kv, kv_cache_dtype).result(), OK)


def _demo_model() -> Iterator[Finding]:
    from metal_engine.checkpoints.demo import GGUF_NAME
    from metal_engine.device.cache_dir import cache_dir

    if (cache_dir() / "demo" / GGUF_NAME).is_file():
        yield from _real_model("demo")
    else:
        yield Finding("demo model", "not tested: not downloaded yet (`metal-engine serve demo` downloads it)")


def _real_model(model: str) -> Iterator[Finding]:
    with ThreadPoolExecutor(1) as thread:
        yield from thread.submit(_try_model, model).result()


def _try_model(model: str) -> list[Finding]:
    from metal_engine.bench.offline import run_requests
    from metal_engine.doctor.features import features
    from metal_engine.loading.build import build_engine
    from metal_engine.settings.args import EngineArgs

    engine = build_engine(EngineArgs(model=model, num_gpu_blocks_override=64))
    prompt, tokenizer = "The capital of France is", engine.preparer.tokenizer
    try:
        (token_ids,) = run_requests(engine, [tokenizer.encode(prompt)], [6]).token_ids
    finally:
        engine.close()
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    config = engine.core.config
    info = config.model
    wrong = model == "demo" and "Paris" not in text
    runs = f"{info.model_type}, {info.dtype}, KV in {info.kv_dtype}, attention by {config.attention}"
    findings = [Finding(model, f"{runs}: {prompt!r} -> {text!r}", FAILED if wrong else OK)]
    findings += [Finding(name, state) for name, state in features(engine.core)]
    return findings

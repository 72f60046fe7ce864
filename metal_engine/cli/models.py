"""Commands about models on this machine: ``pull``, ``list``, ``show`` and ``rm``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metal_engine.cli.help import GroupedHelp
from metal_engine.cli.logs import set_up_logging
from metal_engine.cli.options import one_line_errors
from metal_engine.errors import ConfigError, ModelLoadError, UnsupportedModelError
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.fields import format_size

if TYPE_CHECKING:
    from metal_engine.checkpoints.details import CheckpointDetails
    from metal_engine.checkpoints.requirements import CheckpointRequirements
    from metal_engine.settings.config import DeviceInfo

_NAME_HELP = "`demo`, or a repository on the Hugging Face hub: REPO, REPO@REVISION, or REPO:Q4_K_M for a GGUF file."

_Name = Annotated[str, typer.Argument(metavar="MODEL", help=_NAME_HELP, show_default=False)]
_DownloadDir = Annotated[
    str | None,
    typer.Option(
        envvar="METAL_ENGINE_DOWNLOAD_DIR",
        metavar="DIR",
        help="Folder for downloaded repositories. Default: the hub's cache.",
        show_default=False,
    ),
]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class _Row:
    """A model as ``--json`` prints it. Sizes are in bytes, lengths in tokens.

    ``last_used`` is a local time such as ``2026-01-31T12:00:00+0100``. ``path`` is None for a model on the hub.
    """

    name: str
    path: str | None
    size: int
    architecture: str
    context_length: int | None
    quantization: str
    runs_here: bool
    problem: str | None
    last_used: str | None


def add_commands(app: typer.Typer) -> None:
    """Register the commands."""
    commands: dict[str, Callable[..., None]] = {"pull": _pull, "list": _list, "show": _show, "rm": _rm}
    for name, command in commands.items():
        app.command(name, cls=GroupedHelp)(command)


def _pull(
    model: _Name,
    download_dir: _DownloadDir = None,
    force: Annotated[bool, typer.Option("--force", help="Download the model even if it cannot run here.")] = False,
) -> None:
    """Download a model or a draft head for `serve`. An interrupted download is resumed."""
    set_up_logging("info")
    with one_line_errors():
        from metal_engine.checkpoints.model_names import DEMO_MODEL, is_local
        from metal_engine.checkpoints.path_settings import check_model_name

        if model != DEMO_MODEL and is_local(model):
            raise ConfigError(None, f"{model} is a path: `pull` takes a repository on the hub, `serve` takes both")
        check_model_name(model)
        device = _device()
        from metal_engine.checkpoints.draft_heads.sources import pull_only_head
        from metal_engine.checkpoints.find import fetch_model, find_model, hub_name
        from metal_engine.loading.load_checks import check_before_loading

        args = EngineArgs(model=model, download_dir=download_dir)
        if model != DEMO_MODEL and (head := pull_only_head(hub_name(args), download_dir)) is not None:
            print(f"the draft head {model} is here: {head}")
            return
        if force and model != DEMO_MODEL:
            path = fetch_model(hub_name(args), download_dir, lambda repo: None)
        else:

            def check(requirements: CheckpointRequirements) -> None:
                check_before_loading(args, requirements, device)

            path = find_model(args, device, check).path
        print(f"{model} is here: {path}")


def _list(download_dir: _DownloadDir = None, as_json: _JSON = False) -> None:
    """List the models on this machine: size, architecture, context, and whether they run here."""
    set_up_logging("error")
    with one_line_errors():
        device = _device()
        from metal_engine.checkpoints.cached_models import cached_models
        from metal_engine.checkpoints.details import cached_details

        rows = []
        for model in cached_models(download_dir):
            details = cached_details(model, EngineArgs(model=model.name, download_dir=download_dir), device)
            rows.append(_row(details, model.last_used))
        if as_json:
            print(json.dumps([asdict(row) for row in rows], indent=2))
            return
        heads = ("NAME", "SIZE", "ARCHITECTURE", "CONTEXT", "QUANTIZATION", "RUNS HERE", "LAST USED")
        print_columns([heads, *(_cells(row) for row in rows)])
        if not any(row.name == "demo" for row in rows):
            print("\n`metal-engine pull demo` downloads a small model to try (93 MB).")


def _show(model: _Name, download_dir: _DownloadDir = None, as_json: _JSON = False) -> None:
    """Show a model's details, also of a model on the hub, and how many tokens its KV cache would hold here."""
    set_up_logging("error")
    with one_line_errors():
        device = _device()
        from metal_engine.checkpoints.cached_models import find_cached
        from metal_engine.checkpoints.details import cached_details, remote_details
        from metal_engine.checkpoints.model_names import DEMO_MODEL, is_local

        cached = find_cached(model, download_dir)
        args = EngineArgs(model=cached.name if cached else model, download_dir=download_dir)
        if cached is None and model == DEMO_MODEL:
            raise ModelLoadError(f"{model} is not in the cache: `metal-engine pull {quote(model)}` downloads it")
        if cached is None and is_local(model):
            raise ConfigError(None, f"{model} is a path: `show` takes a repository, here or on the hub")
        details = cached_details(cached, args, device) if cached else remote_details(args, device)
        row = _row(details, cached.last_used if cached else None)
        values: dict[str, Any] = {**asdict(row), **_engine_values(details, args, device)}
        if as_json:
            print(json.dumps(values, indent=2))
            return
        for label, value in _labelled(values).items():
            print(f"{label + ':':15}{value}")


def _rm(
    model: _Name,
    download_dir: _DownloadDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the cache: a repository, REPO@REVISION, or REPO:QUANTIZATION."""
    set_up_logging("error")
    with one_line_errors():
        from metal_engine.checkpoints.cached_models import plan_removal

        removal = plan_removal(model, download_dir)
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("--yes", "is required if standard input is not a terminal")
            typer.confirm(f"Remove {removal.what} ({format_size(removal.size)})?", abort=True)
        removal.execute()
        print(f"removed {removal.what}: {format_size(removal.size)}")


def _device() -> DeviceInfo:
    """Load an optimized BLAS and then MLX, and return the device that MLX computes on."""
    from metal_engine.device.blas.load import load_optimized_blas
    from metal_engine.device.info import device_info

    return device_info(load_optimized_blas())


def _row(details: CheckpointDetails, last_used: float | None) -> _Row:
    return _Row(
        name=details.name,
        path=None if details.path is None else str(details.path),
        size=details.size,
        architecture=details.architecture,
        context_length=details.context_length,
        quantization=details.quantization,
        runs_here=details.problem is None,
        problem=details.problem,
        last_used=None if last_used is None else time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(last_used)),
    )


def _engine_values(details: CheckpointDetails, args: EngineArgs, device: DeviceInfo) -> dict[str, Any]:
    """Return the engine's values for a model: parameters, memory, and capacity of the KV cache in tokens.

    Unknown values are left out. If the engine would refuse the model, ``runs_here`` and ``problem`` say so.
    """
    from metal_engine.models.info import expected_model_info
    from metal_engine.settings.resolve import check_kv_cache

    if details.requirements is None:
        return {}
    found: dict[str, Any] = {
        "parameters": details.requirements.num_params,
        "weight_bytes": details.requirements.weight_bytes,
    }
    if details.head_bytes:
        found |= {"draft_head_bytes": details.head_bytes}
    if details.problem is not None:
        return found
    try:
        info = expected_model_info(details.name, details.requirements, args.kv_cache_dtype)
        if info is not None:
            found |= {"layers": info.num_layers, "context_length": info.max_position_embeddings}
            found |= {"kv_bytes_per_token": info.kv_bytes_per_token}
            found |= {"state_bytes_per_request": info.state_bytes_per_request}
            found |= {"kv_cache_tokens": check_kv_cache(args, info, device)}
    except (UnsupportedModelError, ConfigError) as error:
        found |= {"runs_here": False, "problem": str(error)}
    return found


# --- text output ---


def _labelled(values: dict[str, Any]) -> dict[str, str]:
    """Return the values that ``show`` prints, by label. Unknown values are left out."""
    shown = {
        "name": values["name"],
        "path": values["path"] or "on the hub; `metal-engine pull` downloads it",
        "size": format_size(values["size"]),
        "architecture": values["architecture"],
        "layers": values.get("layers"),
        "parameters": _grouped(values.get("parameters")),
        "quantization": values["quantization"],
        "context": _tokens(values["context_length"]),
        "in memory": format_size(values["weight_bytes"]) if "weight_bytes" in values else None,
        "draft head": format_size(values["draft_head_bytes"]) if "draft_head_bytes" in values else None,
        "KV of a token": format_size(values["kv_bytes_per_token"]) if "kv_bytes_per_token" in values else None,
        "state of a request": format_size(values["state_bytes_per_request"])
        if values.get("state_bytes_per_request")
        else None,
        "KV that fits": _tokens(values.get("kv_cache_tokens")),
        "runs here": "yes" if values["runs_here"] else f"no: {values['problem']}",
        "last used": _day(values["last_used"]),
    }
    return {label: str(value) for label, value in shown.items() if value}


def _cells(row: _Row) -> tuple[str, ...]:
    runs = "yes" if row.runs_here else f"no: {_brief(row.problem or '')}"
    context = _grouped(row.context_length)
    return (row.name, format_size(row.size), row.architecture, context, row.quantization, runs, _day(row.last_used))


def _brief(problem: str) -> str:
    """Shorten the description of a problem to at most 60 characters. Drops the solution, which follows a semicolon."""
    brief = problem.partition(";")[0].partition(": ")
    text = brief[2] if brief[2] and brief[0].startswith("not enough memory") else problem.partition(";")[0]
    return text if len(text) <= 60 else text[:57] + "..."


def _grouped(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _tokens(number: int | None) -> str:
    return "" if number is None else f"{number:,} tokens"


def _day(when: str | None) -> str:
    return "" if when is None else when[:10]


def print_columns(rows: list[tuple[str, ...]]) -> None:
    """Print rows of cells, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

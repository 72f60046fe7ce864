"""Block of rows that a server prints when it is ready: model, device, memory and address."""

from __future__ import annotations

from contextlib import suppress

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from metal_engine.model_pool.model_entry import LoadedEngine, ModelEntry
from metal_engine.model_pool.registry import ModelRegistry
from metal_engine.settings.config import EngineConfig, ModelInfo, RankInfo, SpeculativeConfig
from metal_engine.settings.fields import format_size
from metal_engine.text.default_sampling import default_sampling_text


def startup_rows(config: EngineConfig, url: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the banner's rows for a server with one model: label -> text, e.g. ``URL`` -> ``http://127.0.0.1:8000``.

    Args:
        url: URL of the server.
        names: names under which the model is served.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    named = ", ".join(names)
    states = f", recurrent states {format_size(config.state_bytes)}" if config.state_bytes else ""
    images = f", images {format_size(config.image_bytes)}" if config.image_bytes else ""
    adapters = f", adapters {format_size(model.adapter_bytes)}" if model.adapter_bytes else ""
    before_drafts = f", {scheduler.max_num_seqs} for their states before drafts" if scheduler.speculative else ""
    unquantized = config.num_tokens_unquantized
    more = (
        ""
        if unquantized is None
        else f" in {model.kv_dtype} ({cache.num_tokens - unquantized:,} more than unquantized)"
    )
    concurrency = cache.num_tokens / scheduler.max_model_len
    rows = {
        "model": model.name if names == (model.name,) else f"{model.name}, served as {named}",
        "architecture": f"{model.model_type}, {model.num_layers} layers, {_count(model.num_params)} parameters",
        "dtype": model.dtype,
        "device": f"{config.device.name}: {config.device.compute}",
        "ranks": _ranks(config.ranks),
        "attention": config.attention,
        "requests": config.requests,
        "tuning": config.attention_tuning,
        "memory": f"weights {format_size(config.weight_bytes)}{adapters}, KV cache {format_size(config.kv_bytes)}"
        f"{states}{images}, largest step {format_size(config.step_bytes)}; "
        f"MLX holds {format_size(config.peak_bytes)} at most",
        "KV cache": f"{cache.num_tokens:,} tokens{more} in {cache.num_blocks:,} blocks of {cache.block_size}; "
        f"{concurrency:.1f} requests of the maximum length at once",
        "states": f"{format_size(model.state_bytes_per_request)} a request; {cache.num_state_slots:,} slots: "
        f"{scheduler.max_num_seqs} for requests{before_drafts}, the others for checkpoints",
        "limits": f"{scheduler.max_model_len:,} tokens a request, {scheduler.max_num_seqs} requests at once, "
        f"{scheduler.max_num_batched_tokens:,} tokens a step",
        "images": _images(config),
        "sampling": _sampling(model),
        "speculation": "",
        "dispatch": config.dispatch,
        "commands": f"command buffers of {config.command_buffers}",
        "URL": url,
    }
    if (speculative := scheduler.speculative) is not None:
        rows["speculation"] = (
            f"{speculative.method}: up to {speculative.num_speculative_tokens} tokens a request and step, "
            f"{_source(speculative, config)}"
        )
    else:
        del rows["speculation"]
    if not model.own_caches_reason:
        del rows["requests"]
    if not rows["images"]:
        del rows["images"]
    if not model.can_generate:
        del rows["sampling"]
    if not config.dispatch:
        del rows["dispatch"]
    if not config.attention_tuning:
        del rows["tuning"]
    if config.command_buffers is None:
        del rows["commands"]
    if not config.ranks:
        del rows["ranks"]
    if not config.state_bytes:
        del rows["states"]
    if not config.kv_bytes:
        rows["KV cache"] = "none: its layers have recurrent states only"
    return rows


def registry_rows(registry: ModelRegistry, url: str) -> dict[str, str]:
    """Return the banner's rows for a server with several models, by label."""
    loaded = [_loaded(one, one.loaded_engine) for one in registry.entries if one.loaded_engine is not None]
    others = [one.name for one in registry.entries if one.loaded_engine is None]
    rows = {
        "loaded": ", ".join(loaded) or "none yet",
        "on demand": ", ".join(others),
        "memory": f"{format_size(registry.budget.memory_bytes)} for all models",
        "keep alive": f"{registry.keep_alive:g} s" if registry.keep_alive else "until another model needs the memory",
        "URL": url,
    }
    return {label: value for label, value in rows.items() if value}


def print_banner(rows: dict[str, str], console: Console | None = None) -> None:
    """Print a panel on a terminal, or one plain line for each row elsewhere. Ignores errors of writing.

    Args:
        rows: label -> text.
        console: place to print to; None for standard error.
    """
    with suppress(OSError):  # a full disk must not stop the server
        _print_rows(rows, console or Console(stderr=True))


def _print_rows(rows: dict[str, str], console: Console) -> None:
    if not console.is_terminal:
        for label, value in rows.items():
            console.print(f"{label + ':':14}{value}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    for label, value in rows.items():
        style = "bold green" if label == "URL" else None
        table.add_row(f"[dim]{label}[/]", value, style=style)
    console.print(Panel(table, title="metal-engine", title_align="left", expand=False))


def _loaded(entry: ModelEntry, loaded: LoadedEngine) -> str:
    """Describe a loaded model: its name, memory, type of keys and values, and sampling."""
    model = loaded.engine.config.model
    kv = f", KV cache in {model.kv_dtype}" if model.kv_bytes_per_token else ""
    sampling = f", {default_sampling_text(model.default_sampling)}" if model.can_generate else ""
    return f"{entry.name} ({format_size(entry.num_bytes)}{kv}{sampling})"


def _sampling(model: ModelInfo) -> str:
    """Return the sampling of requests that set no parameters, and its origin."""
    text = default_sampling_text(model.default_sampling)
    if model.default_sampling:
        return f"{text} by default, as the model recommends"
    return f"{text} by default. No generation_config.json is in use; set --generation-config to a folder with one"


def _images(config: EngineConfig) -> str:
    """Describe how many tokens an image takes. Return an empty text if the model takes no images."""
    if (vision := config.vision) is None:
        return ""
    whole = "; one step computes a whole image" if vision.bidirectional_layers else ""
    if vision.most_image_tokens == vision.num_features:
        return f"{vision.most_image_tokens:,} tokens each{whole}"
    limits = "--mm-processor-kwargs, --max-num-encoder-tokens"
    return f"{vision.most_image_tokens:,} tokens an image at most{whole}; larger images are reduced ({limits})"


def _ranks(ranks: tuple[RankInfo, ...]) -> str:
    """Describe the layers and the memory of each rank. The banner's other sizes are maxima over the ranks."""
    each = [
        f"{i} on {one.host}: {one.num_layers} layers, weights {format_size(one.weight_bytes)} "
        f"(at most {format_size(one.peak_bytes)} to read them)"
        for i, one in enumerate(ranks)
    ]
    return f"{len(ranks)}; {'; '.join(each)}"


def _source(speculative: SpeculativeConfig, config: EngineConfig) -> str:
    """Describe the source of drafts: a draft model or draft head with its size, or earlier tokens (n-grams).

    If a draft head is not used, the text says why.
    """
    if (draft := config.draft) is None:
        lengths = f"{speculative.prompt_lookup_min} to {speculative.prompt_lookup_max}"
        refusal = "" if config.head_refusal is None else f"; not used: {config.head_refusal}"
        return f"after {lengths} tokens that occurred before{refusal}"
    return (
        f"of {draft.name} ({_count(draft.num_params)} parameters, {draft.dtype}; "
        f"{format_size(draft.weight_bytes)} of the weights, {format_size(draft.kv_bytes_per_token)} of KV a token)"
    )


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"

"""Wires an engine: model, backend, runner, configuration. What the command line and :class:`LLM` share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from metal_engine.device.blas.load import BlasInfo, load_optimized_blas
from metal_engine.device.descriptors import keep_open_file_limit
from metal_engine.device.memory import limit_device_memory
from metal_engine.engine.core import EngineCore
from metal_engine.engine.tokenizer import Tokenizer
from metal_engine.errors import ConfigError, UnsupportedModelError
from metal_engine.kv_transfer.layout import BlockLayout
from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
from metal_engine.kv_transfer.settings import KVTransferConfig, kv_transfer_config
from metal_engine.kv_transfer.stats import KVTransferStats
from metal_engine.kv_transfer.stores.choice import check_place, open_store
from metal_engine.kv_transfer.transfer import KVTransfer
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.resolve import check_kv_cache, resolve_config
from metal_engine.settings.speculative import speculative_config

if TYPE_CHECKING:
    import mlx.core as mx

    from metal_engine.checkpoints.facts import CheckpointFacts
    from metal_engine.checkpoints.loader import LoadedModel
    from metal_engine.kv_transfer.runner_side import KVConnectorRunner
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.settings.config import DeviceInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")


def build_engine(args: EngineArgs) -> EngineCore:
    """Load a model and make an engine for it, in the thread that will step it.

    Raises:
        ModelLoadError: the model cannot be loaded or run.
        ConfigError: the settings cannot work.
    """
    chat_template = None if args.chat_template is None else read_chat_template(args.chat_template)
    transfer = kv_transfer_config(args)
    if transfer is not None:
        check_place(transfer)
    speculative_config(args)
    blas = load_optimized_blas()
    # MLX is imported below this line only: the BLAS has no effect once it is loaded.
    with keep_open_file_limit():
        import mlx_lm.utils  # noqa: F401

    from metal_engine.device.compiled import keep_kernels_private
    from metal_engine.device.streams import end_streams_of_thread

    keep_kernels_private()
    try:
        return _build(args, blas, chat_template, transfer)
    except BaseException:
        end_streams_of_thread()
        raise


def _build(
    args: EngineArgs, blas: BlasInfo, chat_template: str | None, transfer: KVTransferConfig | None
) -> EngineCore:
    import mlx.core as mx

    from metal_engine.attention.choice import choose_backend
    from metal_engine.attention.metal.variants import UnsupportedAttentionError
    from metal_engine.checkpoints import loader
    from metal_engine.device.info import device_info
    from metal_engine.models.attention_kinds import attention_kinds
    from metal_engine.models.check import check_paged_model
    from metal_engine.models.info import model_info
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.recurrence.metal import MetalRecurrence
    from metal_engine.runner.model_runner import ModelRunner
    from metal_engine.runner.step_memory import measure_step_bytes

    choice = choose_backend(args.attention_backend, args.block_size)
    device = device_info(blas)

    def check(facts: CheckpointFacts) -> None:
        check_before_loading(args, facts, device)
        mx.random.seed(args.seed)

    loaded = loader.load(args, device, check)
    logger.info("checking that %s runs right over a paged KV cache", loaded.name)
    try:
        recurrence = MetalRecurrence() if choice.metal is not None else None
        paged = PagedModel(loaded.model, recurrence, kv_cache_dtype=args.kv_cache_dtype)
        info = model_info(loaded, paged)
        kinds = _with_recurrence(paged, lambda: attention_kinds(paged))
        attention = choice.for_layers(kinds, args.block_size)
        backend = attention.backend
        # Blocks of another size ask for longer requests, and only matter where kernels are compiled for them.
        sizes = (info.vocab_size,) if choice.metal is None else (info.vocab_size, args.block_size)
        _with_recurrence(paged, lambda: check_paged_model(paged, backend, *sizes))
    except (UnsupportedModelError, UnsupportedAttentionError) as error:
        raise _cannot_run(args, loaded.config, error) from error
    config = resolve_config(
        args,
        info,
        device_info(blas),
        backend.name,
        lambda *size: measure_step_bytes(paged, backend, args.block_size, info.max_position_embeddings, *size),
        attention.layers,
    )
    limit_device_memory(config)
    if chat_template is not None:
        loaded.tokenizer.chat_template = chat_template
    scheduler_side, runner_side = None, None
    if transfer is not None:
        if not info.kv_bytes_per_token:
            raise ConfigError(
                transfer.flag, f"{info.name} keeps no KV, only states: there are no blocks to save to a store"
            )
        scheduler_side, runner_side, fingerprint = _connect_kv(transfer, args.block_size, loaded, paged)
        # Prefixes are hashed with the name under which they are stored, so that other processes find them.
        config = replace(config, cache=replace(config.cache, model_fingerprint=fingerprint))
    runner = ModelRunner(paged, backend, config.scheduler, config.cache, runner_side)
    tokenizer = Tokenizer(
        loaded.tokenizer, loaded.eos_token_ids, allow_special_tokens_in_content=args.allow_special_tokens_in_content
    )
    return EngineCore(config, runner, tokenizer, scheduler_side)


def _with_recurrence(paged: PagedModel, run: Callable[[], T]) -> T:
    """Run something over a model; once more without the kernels for recurrent layers if it does not run with them."""
    try:
        return run()
    except UnsupportedModelError as error:
        if not paged.has_recurrence_kernels:
            raise
        logger.warning("without the kernels for recurrent layers, with which it does not run: %s", error)
        paged.drop_recurrence_kernels()
        return run()


def check_before_loading(args: EngineArgs, facts: CheckpointFacts, device: DeviceInfo) -> int | None:
    """Refuses a model, or settings of its KV cache, for what its configuration and headers say. Loads MLX.

    Returns:
        Tokens for which the KV cache will have room at most; None where that cannot be told yet.

    Raises:
        UnsupportedModelError: its architecture cannot run here.
        ConfigError: the KV cache cannot be as the settings say.
    """
    from metal_engine.models.info import expected_model_info

    try:
        info = expected_model_info(args.model, facts, args.kv_cache_dtype)
    except UnsupportedModelError as error:
        raise _cannot_run(args, facts.config, error) from error
    return None if info is None else check_kv_cache(args, info, device)


def _cannot_run(args: EngineArgs, config: dict[str, Any], error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(f"{args.model} (architecture {config.get('model_type')}) cannot run here: {error}")


def _connect_kv(
    transfer: KVTransferConfig, block_size: int, loaded: LoadedModel, paged: PagedModel
) -> tuple[KVConnectorScheduler, KVConnectorRunner, str]:
    """Open the store and make both halves of the connector; with them comes the fingerprint of the KV."""
    from mlx.utils import tree_flatten

    from metal_engine.kv_transfer.fingerprint import kv_fingerprint
    from metal_engine.kv_transfer.runner_side import KVConnectorRunner, block_parts, state_parts

    specs = [state.spec for state in paged.pool.states]
    parts, of_states = block_parts(specs, block_size), state_parts(specs)
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(loaded.model.parameters()))
    fingerprint = kv_fingerprint(weights, loaded.config, block_size, [*parts, *of_states])
    layout = BlockLayout(parts, fingerprint)
    state_layout = BlockLayout(of_states, fingerprint) if of_states else None
    stats = KVTransferStats()
    larger = max((layout, state_layout or layout), key=lambda one: one.max_stored_bytes)
    mover = KVTransfer(open_store(transfer, larger), layout, transfer, stats, state_layout=state_layout)
    runner_side = KVConnectorRunner(mover, layout, state_layout)
    return KVConnectorScheduler(mover, transfer, stats), runner_side, fingerprint


def read_chat_template(given: str) -> str:
    """The chat template that ``--chat-template`` names: the content of a file, or the Jinja text itself.

    Raises:
        ConfigError: it is neither, or no valid Jinja.
    """
    import jinja2

    text = given
    if "{{" not in given and "{%" not in given:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ConfigError("--chat-template", f"cannot read --chat-template {given}: {reason}") from error
    try:
        # Extensions that templates of published models use.
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        if "generation" not in str(error):  # a tag of transformers' own
            raise ConfigError("--chat-template", f"is not valid Jinja: line {error.lineno}: {error.message}") from error
    return text

"""Builds an engine: loads the model, and creates its backend, runner and configuration.

Used by the command line and :class:`LLM`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from metal_engine.checkpoints.mlx_import import import_mlx
from metal_engine.device.command_buffers import limits_in_force
from metal_engine.device.memory import limit_device_memory
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.engine.device_access import FULL_ACCESS, DeviceAccess
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.errors import AdapterError, ConfigError, ModelLoadError
from metal_engine.kv_transfer.settings import KVTransferConfig, kv_transfer_config
from metal_engine.kv_transfer.stores.choice import check_place
from metal_engine.loading.drafts import load_drafts
from metal_engine.loading.image_encoder import add_image_input, with_largest_image
from metal_engine.loading.load_checks import LoadChecks
from metal_engine.loading.opened_model import open_model
from metal_engine.local_paths import local_path
from metal_engine.lora.files import open_adapter
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.lora_args import MODULES as LORA_MODULES
from metal_engine.settings.resolve import resolve_config
from metal_engine.settings.speculative import speculative_config
from metal_engine.text.chat_template import templates_of
from metal_engine.text.chat_template_file import check_templates, read_chat_template
from metal_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from metal_engine.attention.choice import BackendChoice
    from metal_engine.checkpoints.loader import LoadedModel
    from metal_engine.device.blas.load import BlasInfo
    from metal_engine.distributed.ranks import Ranks
    from metal_engine.kv_transfer.runner_side import KVConnectorRunner
    from metal_engine.kv_transfer.scheduler_side import KVConnectorScheduler
    from metal_engine.loading.drafts import Drafts
    from metal_engine.loading.opened_model import OpenedModel
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.settings.config import EngineConfig


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a build.

    Attributes:
        args: settings of the engine.
        access: access to the memory of the device.
        blas: BLAS that MLX has loaded.
        ranks: ranks of the engine.
        transfer: settings of the KV store; None without a store.
        earlier: configuration of the engine that this engine replaces, which had the same settings; None for a first
            engine.
    """

    args: EngineArgs
    access: DeviceAccess
    blas: BlasInfo
    ranks: Ranks
    transfer: KVTransferConfig | None
    earlier: EngineConfig | None


def build_engine(
    args: EngineArgs, access: DeviceAccess = FULL_ACCESS, *, earlier: EngineConfig | None = None
) -> BuiltEngine:
    """Load a model and build its engine. Call it in the thread that will run the engine's steps.

    Args:
        access: grants memory. If several models use the device, the settings must give the size of the KV cache.
        earlier: configuration of the engine that this engine replaces, which had the same settings; None for a first
            engine. The new engine has the same sizes, and checks that the earlier engine has passed are left out.

    Raises:
        ModelLoadError: the model cannot be loaded or run.
        ConfigError: the settings cannot work.
        SystemExit: this process is not rank 0. It has run its part of rank 0's steps until rank 0 ended.
    """
    chat_template = None if args.chat_template is None else read_chat_template(args.chat_template)
    transfer = kv_transfer_config(args)
    if transfer is not None:
        check_place(transfer)
    speculative_config(args)
    blas = import_mlx(args)

    from metal_engine.device.compiled import keep_kernels_private
    from metal_engine.device.streams import end_streams_of_thread
    from metal_engine.distributed.ranks import starting_ranks

    keep_kernels_private()
    try:
        with starting_ranks(args) as ranks:
            return _build(_Inputs(args, access, blas, ranks, transfer, earlier), chat_template)
    except BaseException:
        end_streams_of_thread()
        raise


def _build(inputs: _Inputs, chat_template: str | None) -> BuiltEngine:
    """Load a model and build its engine.

    Args:
        chat_template: chat template to use instead of the model's own; None for the model's own.
    """
    from metal_engine.attention.choice import choose_backend
    from metal_engine.checkpoints import loader

    args, ranks = inputs.args, inputs.ranks
    choice = choose_backend(args.attention_backend, args.block_size, args.attention_tuning)
    checks = LoadChecks(args, inputs.access, inputs.blas, ranks)
    loaded = loader.load(
        args,
        checks.device,
        checks.check,
        checks.claim,
        _check_chat_template if chat_template is None else lambda tokenizer: None,
        divide=ranks.load_shard if args.num_ranks > 1 else None,
        check_files=checks.check_files,
    )
    if chat_template is not None:
        loaded.tokenizer.chat_template = chat_template
    return _assemble(inputs, choice, loaded, checks)


def _assemble(inputs: _Inputs, choice: BackendChoice, loaded: LoadedModel, checks: LoadChecks) -> BuiltEngine:
    """Build the engine of a loaded model.

    Args:
        checks: checks that the model has passed, with its draft head and its configuration of image processing.
    """
    from metal_engine.device.info import device_info
    from metal_engine.runner.dispatch import choose_dispatch
    from metal_engine.runner.encode_memory import measure_encode_bytes
    from metal_engine.runner.model_runner import ModelRunner
    from metal_engine.runner.replay_check import check_replay

    args, access, blas, ranks, earlier = inputs.args, inputs.access, inputs.blas, inputs.ranks, inputs.earlier
    began = time.monotonic()
    opened = open_model(args, loaded, choice, ranks, is_checked=earlier is not None)
    info = add_image_input(args, loaded, opened, checks.vision, is_checked=earlier is not None)
    opened = replace(opened, info=info)
    paged = opened.paged
    adapters = _enable_adapters(args, paged, loaded.interleaved) if args.has_adapters else None
    drafts = load_drafts(args, loaded, opened, device_info(blas), choice, checks.head, checks.head_refusal)
    device = ranks.device(device_info(blas))
    config = earlier or resolve_config(
        args,
        replace(opened.info, adapter_bytes=0 if paged.adapters is None else paged.adapters.nbytes),
        access.without_memory_limit(device),
        opened.attention.backend.name,
        # The models run in sequence, so the largest step counts.
        lambda num_tokens, num_seqs: ranks.max_over_ranks(
            "bytes of the largest step",
            max(
                model.step_bytes(args.block_size, num_tokens, num_seqs, head, max_over_ranks=ranks.max_over_ranks)
                for model, head in [(opened, drafts.head), *((model, None) for model in drafts.models)]
            ),
        ),
        opened.attention.layers,
        drafts.info,
        lambda num_tokens: measure_encode_bytes(paged, num_tokens),
    )
    if earlier is None:
        config = replace(config, warm_up_seconds=time.monotonic() - began)
    # The image encoder may fail in this process after it worked in an earlier process, or the reverse.
    refusal = config.model.image_refusal or opened.info.image_refusal
    config = with_largest_image(replace(config, model=replace(config.model, image_refusal=refusal)))
    config = replace(config, head_refusal=drafts.refusal)
    access.claim(config.peak_bytes)
    command_buffers = limits_in_force() if device.kind == "metal" else None
    config = replace(
        config, device=access.with_model_memory(device), command_buffers=command_buffers, ranks=ranks.rank_infos
    )
    limit_device_memory(config)
    scheduler_side, runner_side = None, None
    if inputs.transfer is not None:
        config, scheduler_side, runner_side = _connect_kv(inputs.transfer, config, loaded, opened, drafts)
    try:
        runner = ModelRunner(
            paged,
            opened.attention.backend,
            config.scheduler,
            config.cache,
            runner_side,
            drafts.drafter(config),
            broadcast=ranks.broadcast,
        )
        if runner.replay is not None:
            check_replay(paged, opened.attention.backend, runner.replay, config.scheduler, config.cache)
        if config.scheduler.async_scheduling:
            config = replace(config, dispatch=choose_dispatch(runner, config))
        ranks.run_as_follower(runner)
        try:
            tokenizer = Tokenizer(
                loaded.tokenizer,
                loaded.eos_token_ids,
                allow_special_tokens_in_content=args.allow_special_tokens_in_content,
            )
        except RecursionError as error:
            raise ModelLoadError(
                f"the control tokens of {loaded.name} are too long or too many to search for"
            ) from error
        core = EngineCore(config, ranks.lead(runner) or runner, scheduler_side)
        return BuiltEngine(core, RequestPreparer(config, tokenizer), adapters, loaded.tokenizer_path)
    except BaseException:
        if runner_side is not None:
            runner_side.close()
        raise


def _connect_kv(
    transfer: KVTransferConfig, config: EngineConfig, loaded: LoadedModel, opened: OpenedModel, drafts: Drafts
) -> tuple[EngineConfig, KVConnectorScheduler, KVConnectorRunner]:
    """Connect an engine to its KV store.

    Returns:
        The configuration with the fingerprint and the KV role, the scheduler's side of the connection, and the runner's
        side.
    """
    from metal_engine.kv_transfer.connect import connect_kv

    paged, model_config = opened.paged, loaded.config
    specs, weights = [state.spec for state in paged.pool.states], loaded.model.parameters() | drafts.weights_of_kv
    if paged.images is not None:  # KV of image tokens depend on the encoder and on the processing of images
        weights |= {"image_encoder": paged.images.encoder.parameters()}
        model_config = model_config | {"image_processing": opened.info.vision}
    scheduler_side, runner_side, fingerprint = connect_kv(
        transfer, config.cache.block_size, loaded.name, weights, model_config, specs, opened.attention.layers.tuned
    )
    # Prefix hashes use the fingerprint of the KV store, so that other processes find the prefixes.
    cache = replace(config.cache, model_fingerprint=fingerprint)
    return replace(config, cache=cache, kv_role=transfer.kv_role), scheduler_side, runner_side


def _check_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ModelLoadError if the tokenizer's chat template cannot be used."""
    try:
        check_templates(templates_of(tokenizer))
    except ValueError as error:
        raise ModelLoadError(f"{error}: name another with --chat-template") from error


def _enable_adapters(args: EngineArgs, paged: PagedModel, interleaved: dict[str, int]) -> AdapterRegistry:
    """Prepare a model for LoRA adapters: allocate the slots of all adapters, and load ``--lora-modules``.

    Raises:
        ConfigError: an adapter cannot be read, or does not fit the model.
    """
    from metal_engine.models.lora_targets import adapter_targets

    targets = adapter_targets(paged, interleaved)
    try:
        files = [open_adapter(local_path(module.path), targets) for module in args.adapters]
        if not args.enable_lora:  # no other adapters can be loaded later
            used = {name for file in files for name in file.modules}
            targets = replace(targets, shapes={n: shape for n, shape in targets.shapes.items() if n in used})
        max_loras, max_rank = args.num_slots(), args.largest_rank([file.rank for file in files])
        layers = paged.enable_lora(targets.shapes, max_loras, max_rank)
        adapters = AdapterRegistry(targets, max_loras, max_rank, layers.set_weights)
        for module in args.adapters:
            adapters.load(module.name, module.path, lambda call: call(), base_model_name=module.base_model_name)
    except AdapterError as error:
        raise ConfigError(LORA_MODULES, f"{LORA_MODULES}: {error}") from error
    return adapters

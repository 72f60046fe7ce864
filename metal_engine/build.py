"""Builds an engine from model, backend, runner and configuration. Used by the command line and :class:`LLM`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from metal_engine.checkpoints.mlx_import import import_mlx
from metal_engine.device.command_buffers import limits_in_force
from metal_engine.device.limits_trial import trying_limits
from metal_engine.device.memory import limit_device_memory
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.core import EngineCore
from metal_engine.engine.device_access import WHOLE_DEVICE, DeviceAccess
from metal_engine.engine.preparer import RequestPreparer
from metal_engine.errors import AdapterError, ConfigError, ModelLoadError, UnsupportedModelError
from metal_engine.kv_transfer.settings import KVTransferConfig, kv_transfer_config
from metal_engine.kv_transfer.stores.choice import check_place
from metal_engine.lora.files import open_adapter
from metal_engine.lora.registry import AdapterRegistry
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.lora_args import MODULES as LORA_MODULES
from metal_engine.settings.resolve import check_kv_cache, expected_sizes, resolve_config
from metal_engine.settings.speculative import check_draft_model, check_draft_vocabulary, speculative_config
from metal_engine.text.chat_template import templates_of
from metal_engine.text.chat_template_file import check_templates, read_chat_template
from metal_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from metal_engine.attention.choice import BackendChoice, ChosenAttention
    from metal_engine.checkpoints.loader import Divide, LoadedModel
    from metal_engine.checkpoints.requirements import CheckpointRequirements
    from metal_engine.device.blas.load import BlasInfo
    from metal_engine.distributed.ranks import Ranks
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.runner.draft_model import DraftModel
    from metal_engine.settings.config import DeviceInfo, EngineConfig, ModelInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")


def build_engine(
    args: EngineArgs, access: DeviceAccess = WHOLE_DEVICE, *, earlier: EngineConfig | None = None
) -> BuiltEngine:
    """Load a model and build its engine. Call it in the thread that will run the engine's steps.

    Args:
        access: this model's access to the device. If several models use the device, the settings must give the size of
            the KV cache.
        earlier: configuration of an engine with the same settings, which this engine replaces. Sizes are taken from it,
            and checks that this engine has passed are left out.

    Raises:
        ModelLoadError: the model cannot be loaded or run.
        ConfigError: the settings cannot work.
        SystemExit: this process is not rank 0. It has run the steps of rank 0, which has ended.
    """
    chat_template = None if args.chat_template is None else read_chat_template(args.chat_template)
    transfer = kv_transfer_config(args)
    if transfer is not None:
        check_place(transfer)
    speculative_config(args)
    blas = import_mlx(args)

    from metal_engine.device.compiled import keep_kernels_private
    from metal_engine.device.streams import drain_streams, end_streams_of_thread
    from metal_engine.distributed.ranks import starting_ranks

    keep_kernels_private()
    try:
        with starting_ranks(args) as ranks:
            return _build(args, access, blas, chat_template, transfer, ranks, earlier)
    except BaseException:
        if access is WHOLE_DEVICE:
            end_streams_of_thread()
        else:  # this thread will serve other models
            drain_streams()
        raise


def _build(
    args: EngineArgs,
    access: DeviceAccess,
    blas: BlasInfo,
    chat_template: str | None,
    transfer: KVTransferConfig | None,
    ranks: Ranks,
    earlier: EngineConfig | None,
) -> BuiltEngine:
    import mlx.core as mx

    from metal_engine.attention.choice import choose_backend
    from metal_engine.checkpoints import loader
    from metal_engine.checkpoints.requirements import check_memory
    from metal_engine.device.info import device_info
    from metal_engine.models.paged_model import release_weights

    with access.hold_device():
        choice = choose_backend(args.attention_backend, args.block_size, args.attention_tuning)
    before = ranks.device(access.unlimited(device_info(blas)))

    def check(facts: CheckpointRequirements) -> None:
        with access.hold_device():
            check_before_loading(args, facts, before, ranks.divide)
            kv_bytes = 0 if access is WHOLE_DEVICE else _expected_bytes(args, facts, before)[0]
            mx.random.seed(args.seed)
        access.check_fits(facts.weight_bytes + kv_bytes)

    def claim(facts: CheckpointRequirements) -> None:
        if access is WHOLE_DEVICE:
            return
        _claim_for_loading(access, args, facts, before)
        check_memory(facts, args, device_info(blas))  # after other models have been unloaded

    divide = ranks.load_shard if args.num_ranks > 1 else None
    check_tokenizer = _check_chat_template if chat_template is None else lambda tokenizer: None
    loaded = loader.load(args, before, check, claim, check_tokenizer, divide=divide, look=ranks.same_files)
    if chat_template is not None:
        loaded.tokenizer.chat_template = chat_template
    try:
        return _assemble(args, access, blas, choice, loaded, transfer, ranks, earlier)
    except BaseException:
        if access is not WHOLE_DEVICE:  # the process will serve other models
            release_weights(loaded.model)
        raise


def _assemble(
    args: EngineArgs,
    access: DeviceAccess,
    blas: BlasInfo,
    choice: BackendChoice,
    loaded: LoadedModel,
    transfer: KVTransferConfig | None,
    ranks: Ranks,
    earlier: EngineConfig | None,
) -> BuiltEngine:
    """Build the engine of a loaded model."""
    from metal_engine.device.info import device_info
    from metal_engine.runner.dispatch import choose_dispatch
    from metal_engine.runner.model_runner import ModelRunner
    from metal_engine.runner.replay_check import check_replay

    opened = _open(args, loaded, choice, ranks, access, is_checked=earlier is not None)
    paged = opened.paged
    with access.hold_device():
        adapters = _enable_adapters(args, paged, loaded.interleaved) if args.has_adapters else None
    draft = _load_draft(args, loaded, device_info(blas), choice, access)
    models = [opened] if draft is None else [opened, draft]
    device = ranks.device(device_info(blas))
    with access.hold_device():
        config = earlier or resolve_config(
            args,
            replace(opened.info, adapter_bytes=0 if paged.adapters is None else paged.adapters.nbytes),
            access.unlimited(device),
            opened.attention.backend.name,
            # The models run in sequence, so the largest step counts.
            lambda num_tokens, num_seqs: ranks.largest(
                "bytes of the largest step",
                max(model.step_bytes(args.block_size, num_tokens, num_seqs, agree=ranks.largest) for model in models),
            ),
            opened.attention.layers,
            None if draft is None else draft.info,
        )
    access.claim(config.peak_bytes)
    command_buffers = limits_in_force() if device.kind == "metal" else None
    config = replace(config, device=access.limited(device), command_buffers=command_buffers, ranks=ranks.facts)
    limit_device_memory(config, *access.record_step_bytes(config))
    scheduler_side, runner_side = None, None
    if transfer is not None:
        from metal_engine.kv_transfer.connect import connect_kv

        specs, weights = [state.spec for state in paged.pool.states], loaded.model.parameters()
        scheduler_side, runner_side, fingerprint = connect_kv(
            transfer, args.block_size, loaded.name, weights, loaded.config, specs, opened.attention.layers.tuned
        )
        # Prefix hashes use the fingerprint of the KV store, so that other processes find the prefixes.
        cache = replace(config.cache, model_fingerprint=fingerprint)
        config = replace(config, cache=cache, kv_role=transfer.kv_role)
    with access.hold_device():
        outlives_model = access is not WHOLE_DEVICE  # a process with a single model ends with it
        draft_model = None if draft is None else _draft_model(draft, config)
        runner = ModelRunner(
            paged,
            opened.attention.backend,
            config.scheduler,
            config.cache,
            runner_side,
            draft_model,
            outlives_model=outlives_model,
            broadcast=ranks.broadcast,
        )
        if runner.replay is not None:
            check_replay(paged, opened.attention.backend, runner.replay, config.scheduler, config.cache)
        if config.scheduler.async_scheduling:
            config = replace(config, dispatch=choose_dispatch(runner, config))
    ranks.follow(runner)
    try:
        tokenizer = Tokenizer(
            loaded.tokenizer, loaded.eos_token_ids, allow_special_tokens_in_content=args.allow_special_tokens_in_content
        )
    except RecursionError as error:
        raise ModelLoadError(f"the control tokens of {loaded.name} are too long or too many to search for") from error
    core = EngineCore(config, ranks.lead(runner) or runner, scheduler_side)
    return BuiltEngine(core, RequestPreparer(config, tokenizer), adapters, loaded.tokenizer_path)


def _check_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ModelLoadError if the tokenizer's chat template cannot be used."""
    try:
        check_templates(templates_of(tokenizer))
    except ValueError as error:
        raise ModelLoadError(f"{error}: name another with --chat-template") from error


def _enable_adapters(args: EngineArgs, paged: PagedModel, interleaved: dict[str, int]) -> AdapterRegistry:
    """Prepare a model for LoRA adapters, reserve memory for the maximum number, and load ``--lora-modules``.

    Raises:
        ConfigError: an adapter cannot be read, or does not fit the model.
    """
    from metal_engine.models.lora_targets import adapter_targets

    targets = adapter_targets(paged, interleaved)
    try:
        files = [open_adapter(Path(module.path).expanduser(), targets) for module in args.adapters]
        if not args.enable_lora:  # no other adapters can be loaded later
            used = {name for file in files for name in file.modules}
            targets = replace(targets, shapes={n: shape for n, shape in targets.shapes.items() if n in used})
        max_loras, max_rank = args.num_slots(), args.largest_rank([file.rank for file in files])
        layers = paged.adapt(targets.shapes, max_loras, max_rank)
        adapters = AdapterRegistry(targets, max_loras, max_rank, layers.set_weights)
        for module in args.adapters:
            adapters.load(module.name, module.path, lambda call: call(), base_model_name=module.base_model_name)
    except AdapterError as error:
        raise ConfigError(LORA_MODULES, f"{LORA_MODULES}: {error}") from error
    return adapters


def _expected_bytes(args: EngineArgs, facts: CheckpointRequirements, device: DeviceInfo) -> tuple[int, int | None]:
    """Estimate the memory that a model needs besides its weights, before the weights are read.

    Returns:
        Bytes of the KV cache, as far as the settings and the configuration determine them. Estimated bytes of the
        largest step, or None if it cannot be estimated yet.
    """
    from metal_engine.models.info import expected_model_info
    from metal_engine.runner.step_estimate import estimate_step_bytes

    info = expected_model_info(args.model, facts, args.kv_cache_dtype)
    if info is None:
        return 0 if args.num_gpu_blocks_override is not None else args.kv_cache_memory_bytes or 0, None
    kv_bytes, *largest_step = expected_sizes(args, info, device)
    return kv_bytes, estimate_step_bytes(info, device, args.block_size, kv_bytes, *largest_step)


def _claim_for_loading(
    access: DeviceAccess, args: EngineArgs, facts: CheckpointRequirements, device: DeviceInfo
) -> None:
    """Reserve the memory for reading the weights and measuring a step. The final memory is reserved after that."""
    with access.hold_device():
        kv_bytes, step_bytes = _expected_bytes(args, facts, device)
    access.claim(facts.weight_bytes + kv_bytes, facts.weight_bytes + facts.reading_bytes, step_bytes)


@dataclass(frozen=True)
class _OpenedModel:
    """Model that has been verified to work with a paged KV cache, with its attention backend."""

    paged: PagedModel
    info: ModelInfo
    attention: ChosenAttention

    def step_bytes(self, block_size: int, num_tokens: int, num_seqs: int, *, agree: Callable[[str, int], int]) -> int:
        """Run a step and return its memory besides weights and KV cache, in bytes."""
        from metal_engine.runner.step_memory import measure_step_bytes

        longest = self.info.max_position_embeddings
        with trying_limits():
            return measure_step_bytes(
                self.paged, self.attention.backend, block_size, longest, num_tokens, num_seqs, agree=agree
            )


def _open(
    args: EngineArgs,
    loaded: LoadedModel,
    choice: BackendChoice,
    ranks: Ranks,
    access: DeviceAccess,
    *,
    is_checked: bool = False,
) -> _OpenedModel:
    """Convert a loaded model to a paged KV cache, and check that it computes correctly.

    Args:
        is_checked: True if an earlier process has checked the model. The check is then left out, unless it decides
            whether kernels for recurrent layers are used.
    """
    from metal_engine.attention.metal.variants import UnsupportedAttentionError
    from metal_engine.models.attention_kinds import attention_kinds
    from metal_engine.models.check import check_paged_model
    from metal_engine.models.info import model_info
    from metal_engine.models.paged_model import PagedModel
    from metal_engine.recurrence.metal import MetalRecurrence

    try:
        with access.hold_device():
            recurrence = MetalRecurrence() if choice.metal is not None else None
            paged = PagedModel(loaded.model, recurrence, kv_cache_dtype=args.kv_cache_dtype)
            info = ranks.sync_model_info(model_info(loaded, paged))
            kinds = _with_recurrence(paged, ranks, lambda: attention_kinds(paged))
            attention = choice.for_layers(kinds, args.block_size)
        attention = choice.tuned(
            attention, args.block_size, decide=ranks.decided, agree=ranks.largest, hold_device=access.hold_device
        )
        # Larger blocks need longer test requests. Only compiled kernels depend on the block size.
        sizes = (info.vocab_size,) if choice.metal is None else (info.vocab_size, args.block_size)
        if not is_checked or paged.has_recurrence_kernels:
            logger.info("checking that %s computes correctly with a paged KV cache", loaded.name)
            with access.hold_device():
                _with_recurrence(
                    paged, ranks, lambda: check_paged_model(paged, attention.backend, *sizes, agree=ranks.largest)
                )
    except (UnsupportedModelError, UnsupportedAttentionError) as error:
        raise _cannot_run(args, loaded.config, error) from error
    return _OpenedModel(paged, info, attention)


def _load_draft(
    args: EngineArgs, target: LoadedModel, device: DeviceInfo, choice: BackendChoice, access: DeviceAccess
) -> _OpenedModel | None:
    """Load the draft model of ``--speculative-config``, if it names one.

    Raises:
        ModelLoadError: the draft model cannot be loaded or run.
        ConfigError: the draft model does not fit the model.
    """
    from metal_engine.checkpoints import loader
    from metal_engine.distributed.ranks import Ranks
    from metal_engine.models.info import expected_model_info

    config = speculative_config(args)
    if config is None or config.model is None:
        return None
    draft_args = replace(args, model=config.model, revision=config.revision, tokenizer=None, speculative_config=None)

    def check(facts: CheckpointRequirements) -> None:
        info = expected_model_info(draft_args.model, facts, args.kv_cache_dtype)
        if info is not None:
            check_draft_model(info)

    def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
        vocabularies = tokenizer.get_vocab(), target.tokenizer.get_vocab()
        check_draft_vocabulary(draft_args.model, vocabularies[0], target.name, vocabularies[1])

    try:
        loaded = loader.load(draft_args, device, check, check_tokenizer=check_tokenizer)
        opened = _open(draft_args, loaded, choice, Ranks(), access)
    except ModelLoadError as error:
        raise ModelLoadError(f"the draft model (--speculative-config): {error}") from error
    except ConfigError as error:
        if "--speculative-config" in str(error):
            raise
        raise ConfigError(error.flag, f"the draft model (--speculative-config): {error}") from error
    check_draft_model(opened.info)
    return opened


def _draft_model(opened: _OpenedModel, config: EngineConfig) -> DraftModel:
    from metal_engine.runner.draft_model import DraftModel

    return DraftModel(
        opened.paged,
        opened.attention.backend,
        config.scheduler,
        config.cache,
        vocab_size=config.model.vocab_size,
        max_positions=opened.info.max_position_embeddings,
    )


def _with_recurrence(paged: PagedModel, ranks: Ranks, run: Callable[[], T]) -> T:
    """Call ``run``. If the model does not run with the kernels for recurrent layers, drop them and call it again."""
    try:
        return run()
    except UnsupportedModelError as error:
        if not paged.has_recurrence_kernels:
            raise
        logger.warning(
            "not using the kernels for recurrent layers, because the model does not run with them: %s", error
        )
        ranks.barrier("no kernels for recurrent layers")
        paged.drop_recurrence_kernels()
        return run()


def check_before_loading(
    args: EngineArgs, facts: CheckpointRequirements, device: DeviceInfo, divide: Divide | None = None
) -> int | None:
    """Check a model and the settings of its KV cache by its configuration and file headers. Loads MLX.

    Args:
        divide: reduces a model to this rank's shard, if there are several ranks.

    Returns:
        Upper limit on the tokens that the KV cache can hold; None if it cannot be determined yet.

    Raises:
        UnsupportedModelError: the model's architecture is not supported.
        ConfigError: the KV cache cannot have the requested settings.
    """
    from metal_engine.models.info import expected_model_info

    try:
        info = expected_model_info(args.model, facts, args.kv_cache_dtype, divide)
    except UnsupportedModelError as error:
        raise _cannot_run(args, facts.config, error) from error
    return None if info is None else check_kv_cache(args, info, device)


def _cannot_run(args: EngineArgs, config: dict[str, Any], error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(f"{args.model} (architecture {config.get('model_type')}) cannot run here: {error}")

"""Loads the draft model or the draft head of ``--speculative-config``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metal_engine.errors import ConfigError, ModelLoadError, one_line
from metal_engine.loading.opened_model import open_model
from metal_engine.settings.fields import format_size
from metal_engine.settings.resolve import check_kv_cache
from metal_engine.settings.speculative import FLAG as SPECULATIVE
from metal_engine.settings.speculative import check_draft_model, check_draft_vocabulary, speculative_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from metal_engine.attention.choice import BackendChoice
    from metal_engine.checkpoints.loader import LoadedModel
    from metal_engine.checkpoints.metadata import StoredTensor
    from metal_engine.checkpoints.requirements import CheckpointRequirements
    from metal_engine.loading.opened_model import OpenedModel
    from metal_engine.models.draft_head import PagedDraftHead
    from metal_engine.runner.drafting import Drafter
    from metal_engine.settings.args import EngineArgs
    from metal_engine.settings.config import DeviceInfo, EngineConfig, ModelInfo, SpeculativeConfig

logger = logging.getLogger(__name__)

# Methods of ``--speculative-config`` whose ``model`` is a draft head.
_HEAD_METHODS = ("mtp", "auto")


@dataclass(frozen=True)
class Drafts:
    """Draft model or draft head of an engine. If there is neither, only ``refusal`` may be set.

    Attributes:
        info: facts about the draft model or the draft head. Its weights and KV take memory in addition to the model's.
        make: creates the drafter for a configuration.
        models: the draft model, if there is one. It runs in steps of its own, whose memory is measured separately.
        head: draft head, which runs in the steps of its model.
        weights_of_kv: weights of the draft head, by name. They determine a part of the KV in the model's pool.
        refusal: reason why the method ``auto`` does not use the draft head; None if there is no such reason.
    """

    info: ModelInfo | None = None
    make: Callable[[EngineConfig], Drafter] | None = None
    models: tuple[OpenedModel, ...] = ()
    head: PagedDraftHead | None = None
    weights_of_kv: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None

    def drafter(self, config: EngineConfig) -> Drafter | None:
        """Return the drafter for a configuration; None without a draft model or a draft head."""
        return None if self.make is None else self.make(config)


def find_head(args: EngineArgs) -> Path | None:
    """Return the file or folder of the draft head that ``model`` of ``--speculative-config`` names.

    Downloads missing files.

    Returns:
        The path; None if ``--speculative-config`` names no draft head.

    Raises:
        ModelLoadError: the head cannot be found or downloaded.
        ConfigError: ``--speculative-config`` is invalid.
    """
    from metal_engine.checkpoints.draft_heads.sources import find_sidecar

    config = speculative_config(args)
    if config is None or config.model is None or config.method not in _HEAD_METHODS:
        return None
    with _naming_the_head():
        return find_sidecar(config.model, config.revision, args.download_dir)


def check_head(args: EngineArgs, place: Path) -> None:
    """Check that a file or folder has a draft head, if ``--speculative-config`` has the method ``mtp``.

    Call it before the model's weights are read.

    Args:
        place: file or folder of the head.

    Raises:
        ModelLoadError: there is no draft head, or its files are invalid.
    """
    from metal_engine.checkpoints.draft_heads.names import has_head, no_head_error

    config = speculative_config(args)
    if config is None or config.method != "mtp":
        return
    with _naming_the_head():
        if not has_head(place):
            raise no_head_error(place)


def admit_head(
    args: EngineArgs, folder: Path, head: Path | None, requirements: CheckpointRequirements, device: DeviceInfo
) -> str | None:
    """Check by the headers of a draft head's files whether its weights fit beside the model's.

    Call it before the model's weights are read.

    Args:
        folder: directory or GGUF file of the model.
        head: file or folder of the draft head (:func:`find_head`); None for a head among the model's files.
        requirements: requirements of the model, which fits on its own.

    Returns:
        With the method ``auto``, the reason not to use the head, if it does not fit or its files are invalid. None in
        all other cases.

    Raises:
        ModelLoadError: the method is ``mtp``, and the head does not fit or its files are invalid.
    """
    from metal_engine.checkpoints.draft_heads.names import head_files
    from metal_engine.checkpoints.metadata import OWN_WEIGHTS, stored_tensors

    config = speculative_config(args)
    if config is None or config.method not in _HEAD_METHODS:
        return None
    try:
        with _naming_the_head():
            files = head_files(folder if head is None else head)
            # The requirements of the model include all weights in its own files.
            if head is not None or not all(fnmatch(file.name, OWN_WEIGHTS) for file in files):
                _check_memory(args, list(stored_tensors(files)), requirements, device)
    except ModelLoadError as error:
        if config.method == "mtp":
            raise
        return str(error)
    return None


def _check_memory(
    args: EngineArgs, tensors: list[StoredTensor], requirements: CheckpointRequirements, device: DeviceInfo
) -> None:
    from metal_engine.checkpoints.requirements import head_bytes, memory_for_model
    from metal_engine.models.info import expected_model_info

    num_bytes = head_bytes(tensors, requirements, device)
    if not num_bytes:
        return
    available = memory_for_model(args, device) - requirements.weight_bytes
    its_weights = f"its weights take {format_size(num_bytes)}"
    if num_bytes > available:
        raise ModelLoadError(
            f"{its_weights}, and {format_size(available)} remain beside the model's; remove {SPECULATIVE}, or use a "
            "smaller head or model"
        )
    info = expected_model_info(args.model, requirements, args.kv_cache_dtype)
    if info is None:
        return
    try:
        check_kv_cache(args, replace(info, weight_bytes=info.weight_bytes + num_bytes), device)
    except ConfigError as error:
        raise ModelLoadError(
            f"{its_weights}, which leaves too little memory: {error}, or remove {SPECULATIVE}"
        ) from error


def load_drafts(
    args: EngineArgs,
    target: LoadedModel,
    opened: OpenedModel,
    device: DeviceInfo,
    choice: BackendChoice,
    head: Path | None = None,
    refusal: str | None = None,
) -> Drafts:
    """Load the draft model or the draft head that ``--speculative-config`` names, if any.

    If the method is ``auto`` and the head cannot be used, the reason is logged and becomes ``refusal`` of the result.

    Args:
        target: model that gets the drafts.
        opened: the same model over a paged KV cache, which is not allocated. A draft head adds a state to its pool.
        head: file or folder of the draft head (:func:`find_head`); None for a head among the model's files.
        refusal: result of :func:`admit_head`.

    Raises:
        ModelLoadError: the draft model, or with the method ``mtp`` the draft head, cannot be loaded or run.
        ConfigError: the draft model or the draft head does not fit the model.
    """
    config = speculative_config(args)
    if config is None or config.method == "ngram":
        return Drafts()
    if config.method == "draft_model":
        return _load_draft_model(config, args, target, device, choice)
    place = target.path if head is None else head
    name = config.model or f"the draft head of {target.name}"
    if config.method == "mtp":
        return _load_head(name, place, target, opened, device)
    from metal_engine.checkpoints.draft_heads.names import has_head

    if refusal is None:
        try:
            if has_head(place):
                return _load_head(name, place, target, opened, device)
            logger.info("%s has no draft head: drafts by prompt lookup only", target.name)
            return Drafts()
        except ModelLoadError as error:
            refusal = str(error)
    logger.warning("drafts by prompt lookup only: %s", refusal)
    return Drafts(refusal=refusal)


@contextmanager
def _naming_the_head() -> Iterator[None]:
    """Convert all exceptions in the context, except ConfigError, to a ModelLoadError that names the draft head."""
    try:
        yield
    except ConfigError:
        raise
    except ModelLoadError as error:
        raise ModelLoadError(f"the draft head (--speculative-config): {error}") from error
    except Exception as error:
        logger.debug("the draft head cannot be used", exc_info=True)
        problem = f"its files are not a valid draft head ({type(error).__name__}: {one_line(error)})"
        raise ModelLoadError(f"the draft head (--speculative-config): {problem}") from error


def _load_draft_model(
    config: SpeculativeConfig, args: EngineArgs, target: LoadedModel, device: DeviceInfo, choice: BackendChoice
) -> Drafts:
    """Load a draft model.

    Raises:
        ModelLoadError: the draft model cannot be loaded or run.
        ConfigError: the draft model does not fit the model.
    """
    from metal_engine.checkpoints import loader
    from metal_engine.distributed.ranks import SingleRank
    from metal_engine.models.info import expected_model_info

    assert config.model is not None
    draft_args = replace(args, model=config.model, revision=config.revision, tokenizer=None, speculative_config=None)

    def check(requirements: CheckpointRequirements) -> None:
        info = expected_model_info(draft_args.model, requirements, args.kv_cache_dtype)
        if info is not None:
            check_draft_model(info)

    def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
        vocabularies = tokenizer.get_vocab(), target.tokenizer.get_vocab()
        check_draft_vocabulary(draft_args.model, vocabularies[0], target.name, vocabularies[1])

    try:
        loaded = loader.load(draft_args, device, check, check_tokenizer=check_tokenizer)
        draft = open_model(draft_args, loaded, choice, SingleRank())
    except ModelLoadError as error:
        raise ModelLoadError(f"the draft model (--speculative-config): {error}") from error
    except ConfigError as error:
        if "--speculative-config" in str(error):
            raise
        raise ConfigError(error.flag, f"the draft model (--speculative-config): {error}") from error
    check_draft_model(draft.info)

    def make(config: EngineConfig) -> Drafter:
        from metal_engine.runner.draft_model import DraftModel

        return DraftModel(
            draft.paged,
            draft.attention.backend,
            config.scheduler,
            config.cache,
            vocab_size=config.model.vocab_size,
            max_positions=draft.info.max_position_embeddings,
        )

    return Drafts(draft.info, make, (draft,))


def _load_head(name: str, place: Path, target: LoadedModel, opened: OpenedModel, device: DeviceInfo) -> Drafts:
    """Load a draft head.

    Args:
        name: name of the head in messages.
        place: file or folder with the head.

    Raises:
        ModelLoadError: there is no draft head, its files are invalid, or it does not fit the model.
    """
    from mlx.utils import tree_flatten
    from mlx_lm.utils import get_total_parameters

    from metal_engine.checkpoints.draft_heads.weights import read_head
    from metal_engine.models.draft_head import PagedDraftHead, load_head

    paged = opened.paged
    with _naming_the_head():
        weights = read_head(place, target.model)
        head = load_head(target.model, weights, paged.dtype, dequantize=device.kind == "cpu")
        paged_head = PagedDraftHead(head, paged)
    weights_of_head: Any = tree_flatten(head.parameters())
    info = replace(
        opened.info,
        name=name,
        num_layers=1,
        num_params=get_total_parameters(head),
        weight_bytes=sum(array.nbytes for _, array in weights_of_head),
        kv_bytes_per_token=paged_head.pool.bytes_per_token,
        unquantized_kv_bytes_per_token=paged_head.pool.unquantized_bytes_per_token,
        state_bytes_per_request=0,
    )

    def make(config: EngineConfig) -> Drafter:
        from metal_engine.runner.head_drafter import HeadDrafter

        return HeadDrafter(paged_head, paged.pool, opened.attention.backend, config.cache)

    return Drafts(info, make, head=paged_head, weights_of_kv={"draft_head": head.parameters()})

"""Checks a model by its configuration and file headers, and claims its memory, before its weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from metal_engine.checkpoints.image_encoders import feature_bytes, image_refusal
from metal_engine.engine.device_access import FULL_ACCESS, DeviceAccess
from metal_engine.errors import UnsupportedModelError
from metal_engine.loading.drafts import admit_head, check_head, find_head
from metal_engine.loading.image_encoder import find_vision, warn_of_refusal
from metal_engine.loading.opened_model import cannot_run
from metal_engine.settings.config import TEXT_ONLY
from metal_engine.settings.resolve import check_kv_cache, expected_sizes

if TYPE_CHECKING:
    from metal_engine.checkpoints.loader import Divide
    from metal_engine.checkpoints.requirements import CheckpointRequirements
    from metal_engine.device.blas.load import BlasInfo
    from metal_engine.distributed.ranks import Ranks
    from metal_engine.settings.args import EngineArgs
    from metal_engine.settings.config import DeviceInfo, VisionConfig


class LoadChecks:
    """Checks and memory claims of one load.

    :func:`metal_engine.checkpoints.loader.load` calls :meth:`check` before a download. After the download, it calls
    :meth:`check_files`, :meth:`check` and :meth:`claim`, in this order.

    Attributes:
        device: device on which the model will run, with practically unlimited memory if there are several models.
        head: file or folder of the draft head; None if the head is among the model's files, or there is no head.
        head_refusal: reason to ignore the draft head; None if there is no such reason. Set by :meth:`claim`.
        vision: configuration of image processing, or the reason to refuse images. Set by :meth:`claim`.
    """

    def __init__(self, args: EngineArgs, access: DeviceAccess, blas: BlasInfo, ranks: Ranks) -> None:
        from metal_engine.device.info import device_info

        self._args = args
        self._access = access
        self._blas = blas
        self._ranks = ranks
        self._place = Path()
        self.device = ranks.device(access.without_memory_limit(device_info(blas)))
        self.head = find_head(args)
        self.head_refusal: str | None = None
        self.vision: VisionConfig | str = TEXT_ONLY

    def check(self, requirements: CheckpointRequirements) -> None:
        """Check that the model can run on the device. Seeds MLX's random numbers with ``--seed``.

        Raises:
            ModelLoadError: the model's architecture is not supported, or the model is too large.
            ConfigError: the KV cache cannot have the requested settings.
        """
        import mlx.core as mx

        check_before_loading(self._args, requirements, self.device, self._ranks.divide)
        kv_bytes = 0
        if self._access is not FULL_ACCESS:
            kv_bytes, _ = _expected_bytes(
                self._args, requirements, self.device, image_refusal(requirements.config, self._args)
            )
        mx.random.seed(self._args.seed)
        self._access.check_fits(requirements.weight_bytes + kv_bytes)

    def check_files(self, place: Path) -> None:
        """Raise an error if the files differ between ranks, or lack the draft head that the method ``mtp`` needs.

        Args:
            place: directory or GGUF file of the model. Kept for :meth:`claim`.
        """
        self._place = place
        self._ranks.same_files(place)
        check_head(self._args, self.head or place)

    def claim(self, requirements: CheckpointRequirements) -> None:
        """Decide whether the model gets its draft head and its image encoder, and claim the memory for the load.

        With several models, this may block until other models are unloaded.

        Raises:
            ModelLoadError: the model or its draft head does not fit, or the load was cancelled.
            ConfigError: settings of image input conflict.
        """
        from metal_engine.checkpoints.requirements import check_memory
        from metal_engine.device.info import device_info

        self.head_refusal = admit_head(self._args, self._place, self.head, requirements, self.device)
        self.vision = find_vision(self._args, self._place, requirements, self.device)
        if isinstance(self.vision, str):
            warn_of_refusal(self._args.model, self.vision)
        if self._access is FULL_ACCESS:
            return
        _claim_for_loading(self._access, self._args, requirements, self.device, self.vision)
        check_memory(requirements, self._args, device_info(self._blas))  # after other models have been unloaded


def _expected_bytes(
    args: EngineArgs, requirements: CheckpointRequirements, device: DeviceInfo, refusal: str | None
) -> tuple[int, int | None]:
    """Estimate the memory that a model needs besides its weights, before the weights are read.

    Args:
        refusal: reason to refuse images; None to include their memory.

    Returns:
        Two sizes in bytes. The first is the KV cache and the cache of image features, as far as the settings and the
        configuration determine them. The second is an estimate for the largest step and for encoding the largest image,
        or None if an estimate is not possible yet.
    """
    import mlx.core as mx

    from metal_engine.loading.encode_estimate import estimate_encode_bytes
    from metal_engine.loading.step_estimate import estimate_step_bytes
    from metal_engine.models.info import expected_model_info

    info = expected_model_info(args.model, requirements, args.kv_cache_dtype)
    if info is None:
        return 0 if args.num_gpu_blocks_override is not None else args.kv_cache_memory_bytes or 0, None
    if refusal is None:
        number_bytes = getattr(mx, requirements.dtype).size
        info = replace(
            info, image_refusal=None, feature_bytes=feature_bytes(requirements.config, info.hidden_size, number_bytes)
        )
    sizes = expected_sizes(args, info, device)
    step_bytes = estimate_step_bytes(info, device, args.block_size, sizes.kv_bytes, sizes.num_tokens, sizes.num_rows)
    if sizes.encoder_tokens:
        step_bytes += estimate_encode_bytes(requirements.config, device, sizes.encoder_tokens)
    return sizes.kv_bytes + sizes.kept_image_bytes, step_bytes


def _claim_for_loading(
    access: DeviceAccess,
    args: EngineArgs,
    requirements: CheckpointRequirements,
    device: DeviceInfo,
    vision: VisionConfig | str,
) -> None:
    """Reserve the memory for reading the weights and measuring a step. The build later reserves the final memory."""
    refusal = vision if isinstance(vision, str) else None
    kv_bytes, step_bytes = _expected_bytes(args, requirements, device, refusal)
    access.claim(
        requirements.weight_bytes + kv_bytes, requirements.weight_bytes + requirements.reading_bytes, step_bytes
    )


def check_before_loading(
    args: EngineArgs, requirements: CheckpointRequirements, device: DeviceInfo, divide: Divide | None = None
) -> int | None:
    """Check a model and the settings of its KV cache by its configuration and file headers. Loads MLX.

    Args:
        divide: reduces a model to this rank's shard; None with one rank.

    Returns:
        Upper limit on the tokens that the KV cache can hold; None if it cannot be determined yet.

    Raises:
        UnsupportedModelError: the model's architecture is not supported.
        ConfigError: the KV cache cannot have the requested settings.
    """
    from metal_engine.models.info import expected_model_info

    try:
        if (
            divide is not None
            and (whole := expected_model_info(args.model, requirements)) is not None
            and whole.own_caches_reason
        ):
            check_kv_cache(args, whole, device)  # raises an error that names the flag: such a model cannot be divided
        info = expected_model_info(args.model, requirements, args.kv_cache_dtype, divide)
    except UnsupportedModelError as error:
        raise cannot_run(args.model, requirements.config, error) from error
    return None if info is None else check_kv_cache(args, info, device)

"""Loads a model by its name: an mlx-lm model with its tokenizer and its default settings.

A name is ``demo``, a ``.gguf`` file, a local directory (with MLX or Hugging Face safetensors), or a repository on the
Hugging Face hub.
"""

from __future__ import annotations

import glob
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model
from transformers import PreTrainedTokenizerFast

from metal_engine.checkpoints import metadata
from metal_engine.checkpoints.demo import DEFAULT_SAMPLING
from metal_engine.checkpoints.dequantized import dequantize
from metal_engine.checkpoints.file_checks import check_small_files
from metal_engine.checkpoints.find import FoundModel, check_architecture, find_model
from metal_engine.checkpoints.gguf.config import gguf_config, interleaved_modules
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import load_gguf_model
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids, load_gguf_tokenizer
from metal_engine.checkpoints.headless import EmbeddingWeights
from metal_engine.checkpoints.hub.repository import fetch_tokenizer
from metal_engine.checkpoints.model_names import DEMO_MODEL, is_gguf, is_local
from metal_engine.checkpoints.path_settings import generation_config_folder, local_tokenizer
from metal_engine.checkpoints.pooling_config import check_causal, find_reranker, gguf_pooler, read_pooler
from metal_engine.checkpoints.requirements import (
    Check,
    CheckpointRequirements,
    check_memory,
    gguf_requirements,
    safetensors_requirements,
)
from metal_engine.checkpoints.tokenizer import load_tokenizer
from metal_engine.errors import ConfigError, ModelLoadError, is_rust_panic, one_line
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo, PoolerConfig, RerankerConfig
from metal_engine.settings.fields import format_size

logger = logging.getLogger(__name__)

# Sample text for a first use of the tokenizer: some tokenizers load without an error and panic when they are used.
_TRIED_TEXT = "A text, 2 lines:\né"
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with its tokenizer.

    Attributes:
        model: an mlx-lm model, not yet wrapped for paging.
        config: configuration of the checkpoint, in mlx-lm's form.
        tokenizer: a fast ``transformers`` tokenizer.
        tokenizer_path: folder or GGUF file of the tokenizer.
        eos_token_ids: all token ids that end generation.
        name: name of the model.
        default_sampling: default sampling parameters by name, for requests without them.
        pooler: pooling of the hidden states.
        reranker: template and tokens for scoring documents; None if the model is not a reranker.
        can_generate: True if the checkpoint has an LM head, of its own or tied to the embeddings.
        interleaved: name of a module within its block -> number of heads, e.g. ``{"q_proj": 32, "k_proj": 8}``, for
            modules whose outputs are in llama.cpp's order (:func:`gguf_config`). Empty for other checkpoints.
        path: the model's directory or GGUF file.
    """

    model: nn.Module
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    tokenizer_path: Path
    eos_token_ids: frozenset[int]
    name: str
    default_sampling: dict[str, float] = field(default_factory=dict)
    pooler: PoolerConfig = field(default_factory=PoolerConfig)
    reranker: RerankerConfig | None = None
    can_generate: bool = True
    interleaved: dict[str, int] = field(default_factory=dict)
    path: Path = Path()


# Reduces a model whose weights have not been read yet to one rank's shard, and evaluates the shard.
Divide = Callable[[nn.Module], None]
CheckTokenizer = Callable[[PreTrainedTokenizerFast], None]


def load(
    args: EngineArgs,
    device: DeviceInfo,
    check: Check = lambda requirements: None,
    claim: Check = lambda requirements: None,
    check_tokenizer: CheckTokenizer = lambda tokenizer: None,
    divide: Divide | None = None,
    check_files: Callable[[Path], None] = lambda path: None,
) -> LoadedModel:
    """Load the model that ``args.model`` names.

    Files may come from an untrusted source, so any exception of the libraries that read them becomes a one-line error.

    On a CPU, quantized products and half precision run at a fraction of the speed of float32. All weights are therefore
    dequantized there, and converted to float32 unless ``--dtype`` is given. On Metal, weights keep their type unless
    ``--dtype`` is given.

    Args:
        args: settings of the engine.
        device: device on which the model will run.
        check: raises an error if the configuration or the files' headers show that the model cannot run. Called
            before the weights are downloaded, and again before they are read.
        claim: reserves memory for the model. Called after ``check``, before the weights are read.
        check_tokenizer: raises an error for an unsuitable tokenizer. Called before the weights are read.
        divide: reduces the model to one rank's shard and evaluates the shard's weights. Called while all weights are
            lazy.
        check_files: called with the model's directory or GGUF file before any part of it is loaded.

    Raises:
        ModelLoadError: the model cannot be found, read or run. The message gives the reason.
        ConfigError: a setting does not suit the model.
    """
    try:
        loaded = _load(args, device, check, claim, check_tokenizer, divide, check_files)
        _try_tokenizer(loaded.tokenizer)
        return loaded
    except (ModelLoadError, ConfigError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        logger.debug("loading %s", args.model, exc_info=True)
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise ModelLoadError(f"cannot load {args.model}: its files are not a valid model ({problem})") from error


def _try_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Use a tokenizer once. If the tokenizers library panics, the panic is raised, so that the load fails."""
    try:
        tokenizer.encode(_TRIED_TEXT)
    except Exception as error:  # noqa: BLE001  (a vocabulary without tokens for this text is not a panic)
        logger.info("the tokenizer has no tokens for some of %r: %s", _TRIED_TEXT, one_line(error))


def _load(
    args: EngineArgs,
    device: DeviceInfo,
    check: Check,
    claim: Check,
    check_tokenizer: CheckTokenizer,
    divide: Divide | None,
    check_files: Callable[[Path], None],
) -> LoadedModel:
    dtype = DTYPES.get(args.dtype, mx.float32 if device.kind == "cpu" else None)
    if args.revision is not None and (args.model == DEMO_MODEL or is_local(args.model)):
        logger.warning("--revision %s has no effect: %s is not from the hub", args.revision, args.model)
    found = find_model(args, device, check)
    check_files(found.path)
    began = time.monotonic()

    def admit(requirements: CheckpointRequirements) -> None:
        check(requirements)
        claim(requirements)

    load_files = _load_gguf if is_gguf(found.path) else _load_directory
    loaded, requirements = load_files(found, args, dtype, device, admit, check_tokenizer, divide)
    loaded = replace(loaded, path=found.path)
    logger.info("loaded the weights: %s in %.1f s", format_size(requirements.weight_bytes), time.monotonic() - began)
    return loaded


def _load_gguf(
    found: FoundModel,
    args: EngineArgs,
    dtype: mx.Dtype | None,
    device: DeviceInfo,
    check: Check,
    check_tokenizer: CheckTokenizer,
    divide: Divide | None,
) -> tuple[LoadedModel, CheckpointRequirements]:
    header = read_gguf_header(found.path)
    pooler = gguf_pooler(header)
    requirements = gguf_requirements(header, gguf_config(header), args, device)
    check_memory(requirements, args, device)
    check(requirements)
    source = _tokenizer_path(args, found)
    if source == found.path:
        tokenizer = load_gguf_tokenizer(header)
    else:
        tokenizer = load_tokenizer(source, trust_remote_code=args.trust_remote_code)
    check_tokenizer(tokenizer)
    _announce(found, requirements)
    weight_dtype = dtype or DTYPES[requirements.dtype]
    model, config = load_gguf_model(header, weight_dtype, dequantize=device.kind == "cpu", divide=divide)
    own_generation_config: dict[str, Any] | None = DEFAULT_SAMPLING if args.model == DEMO_MODEL else None
    sampling = metadata.default_sampling(_generation_config(args, own_generation_config))
    eos_token_ids = frozenset(gguf_eos_token_ids(header))
    interleaved = interleaved_modules(config)
    fields = (model, config, tokenizer, source, eos_token_ids, found.name, sampling, pooler)
    return LoadedModel(*fields, interleaved=interleaved), requirements


def _load_directory(
    found: FoundModel,
    args: EngineArgs,
    dtype: mx.Dtype | None,
    device: DeviceInfo,
    check: Check,
    check_tokenizer: CheckTokenizer,
    divide: Divide | None,
) -> tuple[LoadedModel, CheckpointRequirements]:
    path = found.path
    check_small_files(path)
    config = metadata.read_config(path)
    check_causal(config, args.model)
    pooler = read_pooler(path, config)
    files = metadata.weight_files(path)
    tensors = list(metadata.stored_tensors(files))
    requirements = safetensors_requirements(config, tensors, args, device)
    check_memory(requirements, args, device)
    check_architecture(config, args)
    check(requirements)
    own_generation_config = metadata.read_generation_config(path)
    sampling = metadata.default_sampling(_generation_config(args, own_generation_config))
    # The tokenizer loads much faster than the weights, so its errors are reported first.
    source = _tokenizer_path(args, found)
    tokenizer = load_tokenizer(source, trust_remote_code=args.trust_remote_code)
    check_tokenizer(tokenizer)
    eos_token_ids = metadata.eos_token_ids(config, own_generation_config)
    weights = EmbeddingWeights.of(tensors, config) if pooler.is_embedder else EmbeddingWeights()
    _announce(found, requirements)
    model, config = _load_mlx_lm_model(path, config, args, weights)
    if device.kind == "cpu" and config.get("quantization"):
        model = dequantize(model)
    if dtype is not None:
        _cast(model, dtype)
    if divide is not None:
        divide(model)
    read_weights(model)
    reranker = find_reranker(path, config, args.model, tokenizer)
    can_generate = not weights.lacks_head
    fields = (model, config, tokenizer, source, eos_token_ids, found.name, sampling, pooler)
    return LoadedModel(*fields, reranker, can_generate), requirements


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Convert the weights of a model. In half precision, keep the weights that mlx-lm or MLX needs in float32."""
    may_cast = getattr(model, "cast_predicate", lambda name: True)  # False for biases of routers, for example

    def converted(name: str, array: mx.array) -> mx.array:
        keeps_type = dtype != mx.float32 and (not may_cast(name) or name.endswith(".global_scale"))
        return array if keeps_type or not mx.issubdtype(array.dtype, mx.floating) else array.astype(dtype)

    model.update(tree_map_with_path(converted, model.parameters()))


def read_weights(model: nn.Module) -> None:
    """Read the weights of a model, or of a draft head.

    Stacked matrices of experts are evaluated first, one by one. A matrix may be stacked from many stored tensors, which
    stay in memory until it is complete. Evaluating everything together would keep the tensors of several layers.
    """
    arrays = [array for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))]
    for array in arrays:
        if array.ndim > 2:
            mx.eval(array)
    mx.eval(arrays)


def _announce(found: FoundModel, requirements: CheckpointRequirements) -> None:
    logger.info("loading the weights of %s: %s in memory", found.name, format_size(requirements.weight_bytes))


def _load_mlx_lm_model(
    path: Path, config: dict[str, Any], args: EngineArgs, weights: EmbeddingWeights
) -> tuple[nn.Module, dict[str, Any]]:
    """Create mlx-lm's model and configuration. Weights are not in memory yet.

    Raises:
        ModelLoadError: mlx-lm cannot load the files. The message gives the reason.
    """
    model_type = config["model_type"]
    changes = weights.config
    if "llm_config" in config:  # the model's arguments are read from ``text_config``
        changes = (changes or {}) | {"text_config": config["text_config"]}
    try:
        trust, classes = args.trust_remote_code, weights.model_classes
        with _searchable(path) as folder:
            return load_model(
                folder, lazy=True, model_config=changes, get_model_classes=classes, trust_remote_code=trust
            )
    except KeyError as error:
        raise ModelLoadError(f"{args.model}: {model_type} needs {error}, which config.json lacks") from error
    except Exception as error:
        raise ModelLoadError(
            f"{args.model}: its files do not fit {model_type} as mlx-lm implements it{_quantization(config)}: "
            f"{one_line(error)}"
        ) from error


@contextmanager
def _searchable(path: Path) -> Iterator[Path]:
    """Yield a path of a folder without ``[``, ``*`` and ``?``. mlx-lm takes the folder's path for a pattern of names.

    The path is ``path`` itself, or else a temporary link to it.
    """
    if glob.escape(str(path)) == str(path):
        yield path
        return
    with TemporaryDirectory() as temporary:
        link = Path(temporary) / "model"
        link.symlink_to(path.absolute())
        yield link


def _quantization(config: dict[str, Any]) -> str:
    """Return the part of an error message that names the checkpoint's quantization method; "" without a method."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    return (
        "" if method is None else f" (it is quantized with {method}: choose a version for MLX, or unquantized weights)"
    )


def _generation_config(args: EngineArgs, own: dict[str, Any] | None) -> dict[str, Any]:
    """Return the generation config that ``--generation-config`` selects.

    Args:
        own: generation config of the checkpoint, which ``auto`` selects; None without one. ``vllm`` selects an empty
            config, and a folder selects the config in the folder.
    """
    folder = generation_config_folder(args.generation_config)
    if folder is not None:
        return metadata.read_generation_config(folder)
    return own or {} if args.generation_config == "auto" else {}


def _tokenizer_path(args: EngineArgs, found: FoundModel) -> Path:
    """Return the folder or the GGUF file of the tokenizer: the model's, or the folder that ``--tokenizer`` names.

    If ``--tokenizer`` names a repository, its tokenizer is downloaded unless the cache has it.
    """
    if not args.tokenizer:
        return found.path
    folder = local_tokenizer(args.tokenizer) or fetch_tokenizer(args.tokenizer, args.download_dir)
    check_small_files(folder)
    return folder

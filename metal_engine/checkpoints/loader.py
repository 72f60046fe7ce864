"""Loads what a name stands for: an mlx-lm model, its tokenizer and the facts about both.

A model is named by ``demo``, a ``.gguf`` file, a local directory (MLX or Hugging Face safetensors), or a
repository on the Hugging Face hub.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes, dequantize_model, load_model
from transformers import PreTrainedTokenizerFast

from metal_engine.checkpoints import checkpoint
from metal_engine.checkpoints.demo import fetch_demo_model
from metal_engine.checkpoints.files import check_small_files
from metal_engine.checkpoints.gguf.header import read_gguf_header
from metal_engine.checkpoints.gguf.model import default_dtype, load_gguf_model
from metal_engine.checkpoints.gguf.tokenizer import gguf_eos_token_ids, load_gguf_tokenizer
from metal_engine.checkpoints.gguf.weights import loaded_bytes
from metal_engine.checkpoints.hub import TOKENIZER_PATTERNS, fetch_from_hub
from metal_engine.checkpoints.tokenizer import load_tokenizer
from metal_engine.errors import ConfigError, ModelLoadError, UnsupportedModelError, one_line
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.config import DeviceInfo

logger = logging.getLogger(__name__)

DEMO_MODEL = "demo"
# What a panic in `tokenizers` becomes in Python: no Exception, and of a type that cannot be imported.
_RUST_PANIC = "PanicException"
# Some tokenizers are made without complaint and panic when they are used.
_TRIED_TEXT = "A text, 2 lines:\né"
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with its tokenizer.

    Attributes:
        model: an mlx-lm model; not yet wrapped for paging.
        config: the checkpoint's configuration, as mlx-lm reads it.
        tokenizer: a fast ``transformers`` tokenizer.
        eos_token_ids: all ids that end generation.
        name: what to call it.
        default_sampling: parameters for requests that give none, by name.
    """

    model: nn.Module
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    name: str
    default_sampling: dict[str, float] = field(default_factory=dict)


def load(args: EngineArgs, device: DeviceInfo) -> LoadedModel:
    """Load the model that ``args.model`` names.

    Whatever the libraries that read its files raise becomes one line: anyone may have written the files.

    On a CPU everything becomes float32 and quantized weights are dequantized: half precision and quantized
    products run there at a fraction of the speed. On Metal weights stay as they are unless ``--dtype`` says
    otherwise.

    Raises:
        ModelLoadError: it cannot be found, read or run; the message says why.
        ConfigError: a setting does not fit it.
    """
    try:
        loaded = _load(args, device)
        _try_tokenizer(loaded.tokenizer)
        return loaded
    except (ModelLoadError, ConfigError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _RUST_PANIC:
            raise
        logger.debug("loading %s", args.model, exc_info=True)
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise ModelLoadError(f"cannot load {args.model}: its files are not as those of a model ({problem})") from error


def _try_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Uses a tokenizer once: one that panics then is refused now."""
    try:
        tokenizer.encode(_TRIED_TEXT)
    except Exception as error:  # noqa: BLE001  (not every vocabulary has all of this text, and that is no panic)
        logger.info("the tokenizer has no tokens for some of %r: %s", _TRIED_TEXT, one_line(error))


def _load(args: EngineArgs, device: DeviceInfo) -> LoadedModel:
    on_cpu = device.kind == "cpu"
    dtype = _DTYPES.get(args.dtype, mx.float32 if on_cpu else None)
    if args.revision is not None and (args.model == DEMO_MODEL or Path(args.model).expanduser().exists()):
        logger.warning("--revision %s has no effect: %s is not from the hub", args.revision, args.model)
    if args.model == DEMO_MODEL:
        return _load_gguf(fetch_demo_model(), args, dtype, device, name=DEMO_MODEL)
    path = Path(args.model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"no such file: {path}")
        return _load_gguf(path, args, dtype, device, name=path.stem)
    if not path.is_dir():
        if path.exists() or args.model.startswith((".", "/", "~")):
            raise ModelLoadError(f"{args.model} is neither a directory nor a .gguf file")
        path = fetch_from_hub(args.model, args.revision, args.download_dir)
    return _load_directory(path, args, dtype, device)


def _load_gguf(path: Path, args: EngineArgs, dtype: mx.Dtype | None, device: DeviceInfo, *, name: str) -> LoadedModel:
    header = read_gguf_header(path)
    on_cpu = device.kind == "cpu"
    dtype = dtype or default_dtype(header)
    needed = sum(loaded_bytes(tensor, dtype, dequantize=on_cpu) for tensor in header.tensors.values())
    _check_memory(args, device, needed)
    model, config = load_gguf_model(path, dtype, dequantize=on_cpu)
    tokenizer = _other_tokenizer(args) if args.tokenizer else load_gguf_tokenizer(path)
    sampling = checkpoint.default_sampling(_generation_config(args, None))
    return LoadedModel(model, config, tokenizer, frozenset(gguf_eos_token_ids(header)), name, sampling)


def _load_directory(path: Path, args: EngineArgs, dtype: mx.Dtype | None, device: DeviceInfo) -> LoadedModel:
    check_small_files(path)
    config = checkpoint.read_config(path)
    files = checkpoint.weight_files(path)
    on_cpu = device.kind == "cpu"
    float_bytes = dtype.size if on_cpu and dtype else None
    tensors = list(checkpoint.stored_tensors(files))
    checkpoint.check_num_layers(config, len(tensors))
    _check_memory(args, device, checkpoint.weight_bytes(tensors, config, float_bytes))
    own_generation_config = checkpoint.read_generation_config(path)
    sampling = checkpoint.default_sampling(_generation_config(args, own_generation_config))
    # Before the weights: the tokenizer loads in a moment, and it may be what is wrong.
    tokenizer = (
        _other_tokenizer(args) if args.tokenizer else load_tokenizer(path, trust_remote_code=args.trust_remote_code)
    )
    eos_token_ids = checkpoint.eos_token_ids(config, own_generation_config)
    model, config = _load_mlx_lm_model(path, config, args)
    if on_cpu and config.get("quantization"):
        model = dequantize_model(model)
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    return LoadedModel(model, config, tokenizer, eos_token_ids, args.model, sampling)


def _load_mlx_lm_model(path: Path, config: dict[str, Any], args: EngineArgs) -> tuple[nn.Module, dict[str, Any]]:
    """Makes mlx-lm's model and configuration, with its errors explained. Weights are not in memory yet."""
    model_type, model_file = config["model_type"], config.get("model_file")
    if model_file is not None and not args.trust_remote_code:
        raise ModelLoadError(
            f"{args.model} brings code of its own ({model_file}): --trust-remote-code runs it, if you trust it"
        )
    try:
        if model_file is None:
            _get_classes(config)
    except (ValueError, SystemExit) as error:  # mlx-lm's olmo ends the process where its package is missing
        raise UnsupportedModelError(
            f"{args.model}: mlx-lm has no architecture {model_type!r}, or a package that it needs is missing"
        ) from error
    try:
        return load_model(path, lazy=True, trust_remote_code=args.trust_remote_code)
    except KeyError as error:
        raise ModelLoadError(f"{args.model}: {model_type} needs {error}, which config.json lacks") from error
    except Exception as error:
        raise ModelLoadError(
            f"{args.model}: its files do not fit {model_type} as mlx-lm has it{_quantization(config)}: "
            f"{one_line(error)}"
        ) from error


def _quantization(config: dict[str, Any]) -> str:
    """Says how a checkpoint is quantized, where mlx-lm may not know how."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    return "" if method is None else f" (it is quantized with {method}: choose one for MLX, or plain weights)"


def _check_memory(args: EngineArgs, device: DeviceInfo, needed: int) -> None:
    """Refuse weights of so many bytes that cannot fit, before they are loaded.

    Raises:
        ModelLoadError: the weights alone take more than the process may use.
    """
    on_cpu = device.kind == "cpu"
    available = int(device.memory_bytes * (1.0 if on_cpu else args.gpu_memory_utilization))
    if needed > available:
        advice = (
            "take a smaller model, or --dtype bfloat16 for half the size (slow on a CPU; not for models with experts)"
            if on_cpu
            else "take a smaller or a quantized model, or raise --gpu-memory-utilization"
        )
        raise ModelLoadError(
            f"not enough memory for {args.model}: its weights take {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB "
            f"are available; {advice}"
        )


def _generation_config(args: EngineArgs, own: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what ``--generation-config`` names: the checkpoint's own, nothing, or another folder's."""
    if args.generation_config == "auto":
        return own or {}
    if args.generation_config == "vllm":
        return {}
    folder = Path(args.generation_config).expanduser()
    if not (folder / "generation_config.json").is_file():
        raise ModelLoadError(f"{folder} has no generation_config.json (--generation-config)")
    return checkpoint.read_generation_config(folder)


def _other_tokenizer(args: EngineArgs) -> PreTrainedTokenizerFast:
    """The tokenizer that ``--tokenizer`` names: a directory, or a repository on the hub."""
    assert args.tokenizer is not None
    folder = Path(args.tokenizer).expanduser()
    if not folder.is_dir():
        if folder.exists() or args.tokenizer.startswith((".", "/", "~")):
            raise ModelLoadError(f"{args.tokenizer} is not a directory (--tokenizer)")
        folder = fetch_from_hub(args.tokenizer, None, args.download_dir, TOKENIZER_PATTERNS)
    check_small_files(folder)
    return load_tokenizer(folder, trust_remote_code=args.trust_remote_code)

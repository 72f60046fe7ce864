"""Checks settings before MLX and transformers are imported: imports take seconds, and errors must appear at once."""

from __future__ import annotations

from metal_engine.checkpoints.path_settings import (
    check_model_name,
    existing_folder,
    generation_config_folder,
    local_tokenizer,
)
from metal_engine.errors import AdapterError, ConfigError
from metal_engine.kv_transfer.settings import kv_transfer_config
from metal_engine.kv_transfer.stores.choice import check_place
from metal_engine.local_paths import local_path
from metal_engine.lora.files import check_adapter_folder
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.lora_args import MODULES as LORA_MODULES
from metal_engine.settings.server_args import ServerArgs
from metal_engine.settings.speculative import speculative_config
from metal_engine.text.chat_template_file import read_chat_template


def check_engine_args(args: EngineArgs) -> None:
    """Check the engine settings that can be checked without loading the model.

    Raises:
        ConfigError: a setting is invalid or conflicts with another one.
        ModelLoadError: the model, the tokenizer or the generation config does not exist, or the model is invalid.
    """
    _check_paths(args)
    speculative_config(args)
    transfer = kv_transfer_config(args)
    if transfer is not None:
        check_place(transfer)
    if args.chat_template is not None:
        read_chat_template(args.chat_template)


def check_lora_dir(args: EngineArgs, server_args: ServerArgs) -> None:
    """Check ``--lora-dir``. Raises ConfigError if it is invalid or conflicts with other settings."""
    if server_args.lora_dir is None:
        return
    args.refuse_with_ranks("--lora-dir", server_args.lora_dir)
    existing_folder("--lora-dir", server_args.lora_dir)
    if not args.has_adapters:
        raise ConfigError("--lora-dir", "needs --enable-lora")


def _check_paths(args: EngineArgs) -> None:
    """Check the model's name and every path in the settings that must exist.

    Raises:
        ModelLoadError: a path does not exist, or the model's name, configuration or GGUF header is invalid.
        ConfigError: an adapter's folder does not exist.
    """
    if args.model:  # empty for the models of a folder
        check_model_name(args.model)
    local_tokenizer(args.tokenizer)
    generation_config_folder(args.generation_config)
    for module in args.adapters:
        try:
            check_adapter_folder(local_path(module.path))
        except (AdapterError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(LORA_MODULES, f"{LORA_MODULES}: {error}") from error

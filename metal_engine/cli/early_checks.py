"""Checks of settings before MLX and transformers are imported, which takes seconds, so that errors appear at once."""

from __future__ import annotations

from metal_engine.checkpoints.named_paths import check_paths, existing_folder
from metal_engine.errors import ConfigError
from metal_engine.kv_transfer.settings import kv_transfer_config
from metal_engine.kv_transfer.stores.choice import check_place
from metal_engine.settings.args import EngineArgs, ServerArgs
from metal_engine.settings.speculative import speculative_config
from metal_engine.text.chat_template_file import read_chat_template


def check_engine_args(args: EngineArgs) -> None:
    """Check the engine settings that can be checked without loading the model.

    Raises:
        ConfigError: a setting is invalid or conflicts with another one.
        ModelLoadError: the model, the tokenizer or the generation config does not exist.
    """
    check_paths(args)
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

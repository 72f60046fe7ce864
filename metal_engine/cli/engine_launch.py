"""Launches engines in processes of their own, for the server."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from metal_engine.checkpoints.tokenizer import load_tokenizer
from metal_engine.engine.device_access import FULL_ACCESS, DeviceAccess
from metal_engine.engine.process.spawner import Spawner
from metal_engine.engine.process.supervisor import EngineSupervisor
from metal_engine.engine.process.wire import Ready, Start
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.server_args import ServerArgs
from metal_engine.text.chat_template_file import read_chat_template
from metal_engine.text.tokenizer import Tokenizer

# Main module of the process of an engine.
MODULE = "metal_engine.cli.engine_worker"


def launch_engine(args: EngineArgs, server_args: ServerArgs) -> EngineSupervisor:
    """Launch the process of an engine, without waiting for it.

    The process loads the model while the caller imports the server. The caller does not load MLX.
    """
    engine = engine_of(args, spawner_of([args], server_args))
    engine.launch()
    return engine


def spawner_of(models: Iterable[EngineArgs], server_args: ServerArgs, *, is_shared: bool = False) -> Spawner:
    """Return a spawner that starts engine processes for these models.

    Args:
        is_shared: True if engines of several models use the spawner. The server then closes the spawner when it
            ends. Otherwise, the engine closes the spawner.
    """
    start = Start([msgspec.to_builtins(args) for args in models], server_args.log_level, server_args.log_format)
    return Spawner(MODULE, start, is_shared=is_shared)


def engine_of(args: EngineArgs, spawner: Spawner, access: DeviceAccess = FULL_ACCESS) -> EngineSupervisor:
    """Return the supervisor of an engine in a separate process. Does not start the process."""
    return EngineSupervisor(spawner, msgspec.to_builtins(args), partial(_tokenizer_of, args), access)


def _tokenizer_of(args: EngineArgs, ready: Ready) -> Tokenizer:
    """Load the tokenizer of the model that the engine's process has loaded.

    Args:
        ready: message of the process, with the path of the tokenizer's files.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
        ConfigError: ``--chat-template`` cannot be used.
    """
    assert ready.tokenizer_path is not None
    tokenizer = load_tokenizer(Path(ready.tokenizer_path), trust_remote_code=args.trust_remote_code)
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(args.chat_template)
    return Tokenizer(
        tokenizer, frozenset(ready.eos_token_ids), allow_special_tokens_in_content=args.allow_special_tokens_in_content
    )

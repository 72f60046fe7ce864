"""Main module of the process of an engine: ``python -m metal_engine.cli.engine_worker DESCRIPTOR``."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path

import msgspec

from metal_engine.checkpoints.mlx_import import import_mlx
from metal_engine.checkpoints.tokenizer import load_tokenizer
from metal_engine.cli.logs import set_up_logging
from metal_engine.device.allocator import give_back_freed_memory, keep_freed_memory
from metal_engine.device.info import device_info
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.device_access import WHOLE_DEVICE, DeviceAccess
from metal_engine.engine.process.child import BuildFunction, PrepareFunction, serve_engine
from metal_engine.engine.process.spawner import Spawner
from metal_engine.engine.process.supervisor import EngineSupervisor
from metal_engine.engine.process.wire import Build, Ready, Start
from metal_engine.settings.args import EngineArgs, ServerArgs
from metal_engine.settings.config import DeviceInfo
from metal_engine.text.chat_template_file import read_chat_template
from metal_engine.text.tokenizer import Tokenizer

# Main module of the process of an engine.
MODULE = "metal_engine.cli.engine_worker"
_QOS_CLASS_USER_INITIATED = 0x19
# Modules that import most of the modules for building an engine and for its first steps. They take no device memory.
_MODULES = (
    "build",
    "checkpoints.loader",
    "models.check",
    "models.lora_targets",
    "runner.dispatch",
    "runner.replay_check",
    "runner.start_check",
    "runner.step_memory",
    "runner.step_sampling",
)


def launch_engine(args: EngineArgs, server_args: ServerArgs) -> EngineSupervisor:
    """Launch the process of an engine. It loads the model while the caller imports the server, without MLX."""
    engine = engine_of(args, spawner_of([args], server_args))
    engine.launch()
    return engine


def spawner_of(models: Iterable[EngineArgs], server_args: ServerArgs, *, is_shared: bool = False) -> Spawner:
    """Return the spawner of the processes of these models' engines. From now on, this process does not load MLX."""
    keep_mlx_out()
    start = Start([msgspec.to_builtins(args) for args in models], server_args.log_level, server_args.log_format)
    return Spawner(MODULE, start, is_shared=is_shared)


def engine_of(args: EngineArgs, spawner: Spawner, access: DeviceAccess = WHOLE_DEVICE) -> EngineSupervisor:
    """Return an engine in a process of its own, which has not been started."""
    return EngineSupervisor(spawner, msgspec.to_builtins(args), partial(_tokenizer_of, args), access)


def keep_mlx_out() -> None:
    """Make the parsers of mlx-lm importable without MLX, by skipping the ``__init__`` of the package."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    sys.modules.setdefault("mlx_lm", importlib.util.module_from_spec(spec))


def _tokenizer_of(args: EngineArgs, ready: Ready) -> Tokenizer:
    """Return the tokenizer of the model that the process has loaded. Raises ModelLoadError."""
    assert ready.tokenizer_path is not None
    tokenizer = load_tokenizer(Path(ready.tokenizer_path), trust_remote_code=args.trust_remote_code)
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(args.chat_template)
    return Tokenizer(
        tokenizer, frozenset(ready.eos_token_ids), allow_special_tokens_in_content=args.allow_special_tokens_in_content
    )


def _set_up(start: Start) -> tuple[PrepareFunction, BuildFunction]:
    set_up_logging(start.log_level, start.log_format)
    models = msgspec.convert(start.models, list[EngineArgs])

    def prepare() -> DeviceInfo:
        blas = import_mlx(*models)
        for name in _MODULES:
            importlib.import_module(f"metal_engine.{name}")
        give_back_freed_memory()  # a spare process waits for long
        return device_info(blas)

    def build(order: Build, access: DeviceAccess) -> BuiltEngine:
        if sys.platform == "darwin":  # for the engine's thread, which runs this function
            ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_USER_INITIATED, 0)
        from metal_engine.build import build_engine

        args = msgspec.convert(order.args, EngineArgs)
        config = order.config
        if config is not None:
            args = _without_lost_adapters(args)
        if config is not None and args.num_ranks > 1:  # all ranks check the model again, and plan for the same cache
            args = replace(args, num_gpu_blocks_override=config.cache.num_blocks, kv_cache_memory_bytes=None)
            config = None
        return build_engine(args, access, earlier=config)

    return prepare, build


def _without_lost_adapters(args: EngineArgs) -> EngineArgs:
    """Drop the adapters of ``--lora-modules`` whose folders are gone. Only their requests fail."""
    found = [Path(module.path).expanduser().is_dir() for module in args.adapters]
    return replace(args, lora_modules=tuple(compress(args.lora_modules, found)), max_loras=args.num_slots() or None)


if __name__ == "__main__":
    keep_freed_memory()  # before the first thread
    serve_engine(int(sys.argv[1]), _set_up)

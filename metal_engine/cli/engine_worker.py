"""Main module of the process of an engine. Its standard input is the socket to the server."""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

import msgspec

from metal_engine.device.allocator import give_back_freed_memory, keep_freed_memory
from metal_engine.lazy_packages import make_packages_lazy
from metal_engine.local_paths import local_path
from metal_engine.python_process import channel_to_parent
from metal_engine.settings.args import EngineArgs

if TYPE_CHECKING:
    from metal_engine.engine.built_engine import BuiltEngine
    from metal_engine.engine.device_access import DeviceAccess
    from metal_engine.engine.process.child import BuildFunction, PrepareFunction
    from metal_engine.engine.process.wire import Build, Start
    from metal_engine.settings.config import DeviceInfo

_QOS_CLASS_USER_INITIATED = 0x19
# Modules that import most of the modules for building an engine and for its first steps. They take no device memory.
_MODULES = (
    "loading.build",
    "checkpoints.loader",
    "models.check",
    "models.lora_targets",
    "runner.dispatch",
    "runner.replay_check",
    "runner.start_check",
    "runner.step_memory",
    "runner.step_sampling",
)


def _set_up(start: Start) -> tuple[PrepareFunction, BuildFunction]:
    from metal_engine.cli.logs import set_up_logging

    set_up_logging(start.log_level, start.log_format)
    models = msgspec.convert(start.models, list[EngineArgs])

    def prepare() -> DeviceInfo:
        from metal_engine.checkpoints.mlx_import import import_mlx
        from metal_engine.device.info import device_info

        blas = import_mlx(*models)
        for name in _MODULES:
            importlib.import_module(f"metal_engine.{name}")
        give_back_freed_memory()  # a spare process may wait for a long time
        return device_info(blas)

    def build(order: Build, access: DeviceAccess) -> BuiltEngine:
        if sys.platform == "darwin":  # this function runs in the engine's thread, whose priority is set here
            ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_USER_INITIATED, 0)
        from metal_engine.loading.build import build_engine

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
    """Return ``args`` without the adapters whose folders are gone. Only requests for these adapters then fail."""
    found = [local_path(module.path).is_dir() for module in args.adapters]
    return replace(args, lora_modules=tuple(compress(args.lora_modules, found)), max_loras=args.num_slots() or None)


if __name__ == "__main__":
    keep_freed_memory()  # before the first thread
    make_packages_lazy()

    from metal_engine.engine.process.child import serve_engine

    serve_engine(channel_to_parent(), _set_up)

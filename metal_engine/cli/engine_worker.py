"""Main module of the process of an engine: ``python -m metal_engine.cli.engine_worker DESCRIPTOR``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from metal_engine.cli.logs import set_up_logging
from metal_engine.device.allocator import keep_freed_memory
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.process.child import serve_engine
from metal_engine.engine.process.engine_process import EngineProcess, tokenizer_of
from metal_engine.engine.process.wire import Start
from metal_engine.settings.args import EngineArgs, ServerArgs


def engine_process(args: EngineArgs, server_args: ServerArgs) -> EngineProcess:
    """Launch the process of an engine. It loads the model while the caller imports the server."""
    start = Start(msgspec.to_builtins(args), server_args.log_level, server_args.log_format)
    engine = EngineProcess("metal_engine.cli.engine_worker", start, lambda ready: tokenizer_of(args, ready))
    engine.launch()
    return engine


def _set_up(start: Start) -> Callable[[], BuiltEngine]:
    set_up_logging(start.log_level, start.log_format)
    keep_freed_memory()
    args = msgspec.convert(start.args, EngineArgs)

    def build() -> BuiltEngine:
        from metal_engine.build import build_engine

        return build_engine(args)

    return build


if __name__ == "__main__":
    serve_engine(int(sys.argv[1]), _set_up)

"""Main module of the process of an engine: ``python -m metal_engine.cli.engine_worker DESCRIPTOR``."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from metal_engine.checkpoints.tokenizer import load_tokenizer
from metal_engine.cli.logs import set_up_logging
from metal_engine.device.allocator import keep_freed_memory
from metal_engine.engine.built_engine import BuiltEngine
from metal_engine.engine.process.child import serve_engine
from metal_engine.engine.process.supervisor import EngineSupervisor
from metal_engine.engine.process.wire import Ready, Start
from metal_engine.settings.args import EngineArgs, ServerArgs
from metal_engine.text.chat_template_file import read_chat_template
from metal_engine.text.tokenizer import Tokenizer

_QOS_CLASS_USER_INITIATED = 0x19


def launch_engine(args: EngineArgs, server_args: ServerArgs) -> EngineSupervisor:
    """Launch the process of an engine. It loads the model while the caller imports the server, without MLX."""
    keep_mlx_out()
    start = Start(msgspec.to_builtins(args), server_args.log_level, server_args.log_format)
    engine = EngineSupervisor("metal_engine.cli.engine_worker", start, partial(_tokenizer_of, args))
    engine.launch()
    return engine


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


def _set_up(start: Start) -> Callable[[], BuiltEngine]:
    set_up_logging(start.log_level, start.log_format)
    keep_freed_memory()
    args = msgspec.convert(start.args, EngineArgs)

    def build() -> BuiltEngine:
        if sys.platform == "darwin":  # for the engine's thread, which runs this function
            ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_USER_INITIATED, 0)
        from metal_engine.build import build_engine

        return build_engine(args)

    return build


if __name__ == "__main__":
    serve_engine(int(sys.argv[1]), _set_up)

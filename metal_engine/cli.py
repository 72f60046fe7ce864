"""The ``metal-engine`` command: the only place that wires server, engine and MLX together."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from metal_engine.config import ConfigError, EngineArgs

app = typer.Typer(
    name="metal-engine",
    help="LLM inference on Apple Silicon: one packed forward pass per step over a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Argument(help="`demo`, a Hugging Face repository, a local model directory, or a .gguf file."),
]
TokenizerOption = Annotated[str | None, typer.Option(help="Tokenizer, if not the model's own.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")]
DownloadDir = Annotated[
    str | None, typer.Option(help="Where repositories are kept. Default: the hub's cache.")
]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that the model's repository brings.")]
GenerationConfigOption = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="Sampling defaults: auto (the model's own), vllm (none of them), or a folder with such a file.",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Seed = Annotated[int, typer.Option(help="Seed of what is not seeded per request.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest request, prompt and output, in tokens. Default: the model's own.")
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Requests running at once.")]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Tokens per step. Default: 2,048 on Metal, about a second's work on a CPU.")
]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV cache block.")]
NumBlocks = Annotated[int | None, typer.Option(help="KV cache blocks, instead of a size in bytes.")]
KVCacheMemory = Annotated[int | None, typer.Option(help="KV cache size in bytes.")]
MemoryUtilization = Annotated[
    float,
    typer.Option(help="Share of the device's memory to use for weights, KV cache and activations (Metal)."),
]
AttentionBackendOption = Annotated[str, typer.Option("--attention-backend", help="auto, mlx or metal.")]
PrefixCaching = Annotated[bool, typer.Option(help="Compute prefixes that requests share once.")]
MaxNumPartialPrefills = Annotated[int, typer.Option(help="Prompts that may be in progress at once.")]
MaxLongPartialPrefills = Annotated[int, typer.Option(help="Long ones among them.")]
LongPrefillTokenThreshold = Annotated[
    int, typer.Option(help="More tokens than this to go: a long prompt. 0: the token budget of a step.")
]
PageAligned = Annotated[bool, typer.Option(help="End chunks of prompts on block boundaries.")]
SchedulingPolicy = Annotated[str, typer.Option(help="fcfs, or priority (of the request, lower first).")]
MaxAttentionWork = Annotated[
    int | None,
    typer.Option(help="(query row, visible key) pairs of a step. Default: about a second's attention."),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Errors that are the user's to mend end the command with one line, not a traceback."""
    from metal_engine.models.errors import ModelLoadError

    try:
        yield
    except (ConfigError, ModelLoadError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _set_up_logging(level: str) -> None:
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level must be debug, info, warning or error, got {level!r}")
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="[%H:%M:%S]")
        logging.basicConfig(level="WARNING", format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("metal_engine").setLevel(level.upper())


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in the API.")] = None,
    tokenizer: TokenizerOption = None,
    revision: Revision = None,
    download_dir: DownloadDir = None,
    trust_remote_code: TrustRemoteCode = False,
    generation_config: GenerationConfigOption = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    block_size: BlockSize = 16,
    num_gpu_blocks_override: NumBlocks = None,
    kv_cache_memory_bytes: KVCacheMemory = None,
    gpu_memory_utilization: MemoryUtilization = 0.9,
    attention_backend: AttentionBackendOption = "auto",
    enable_prefix_caching: PrefixCaching = True,
    max_num_partial_prefills: MaxNumPartialPrefills = 4,
    max_long_partial_prefills: MaxLongPartialPrefills = 1,
    long_prefill_token_threshold: LongPrefillTokenThreshold = 0,
    page_aligned_scheduling: PageAligned = False,
    scheduling_policy: SchedulingPolicy = "fcfs",
    max_attention_work: MaxAttentionWork = None,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    settings = dict(locals())
    with _one_line_errors():
        _set_up_logging(log_level)
        args = _engine_args(settings)
        from metal_engine.build import build_engine
        from metal_engine.engine.async_engine import AsyncEngine
        from metal_engine.server.app import create_app, run_server

        engine = AsyncEngine(lambda: build_engine(args))
        engine.start()
        try:
            run_server(create_app(engine, served_model_name=served_model_name or model), host=host, port=port)
        finally:
            engine.shutdown()


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 0.95,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    tokenizer: TokenizerOption = None,
    revision: Revision = None,
    download_dir: DownloadDir = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemory = None,
    attention_backend: AttentionBackendOption = "auto",
    log_level: LogLevel = "warning",
) -> None:
    """Talk to a model in the terminal. An empty line, Ctrl-D or /exit ends; /reset starts over."""
    settings = dict(locals())
    with _one_line_errors():
        _set_up_logging(log_level)
        args = _engine_args(settings)
        from metal_engine.llm import LLM
        from metal_engine.request import SamplingParams

        params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
        llm = LLM.from_args(args)
        try:
            _chat_loop(llm, params, system, _read_line)
        finally:
            llm.close()


def _engine_args(settings: dict[str, Any]) -> EngineArgs:
    """The engine's part of a command's settings."""
    fields = EngineArgs.__dataclass_fields__
    return EngineArgs(**{name: value for name, value in settings.items() if name in fields})


def _read_line() -> str | None:
    """A line from the user; None when there are no more."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _chat_loop(llm: Any, params: Any, system: str | None, read_line: Callable[[], str | None]) -> None:
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    while (line := read_line()) is not None and line.strip() not in ("", "/exit"):
        if line.strip() == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for output in llm.stream(llm.tokenizer.apply_chat_template(messages), params):
                answer += output.text
                print(output.text, end="", flush=True)
        except KeyboardInterrupt:
            pass  # ends this answer, not the conversation
        except ValueError as error:
            print(f"[{error}; /reset starts over]", end="")
            messages.pop()
            print()
            continue
        print()
        messages.append({"role": "assistant", "content": answer})


def main() -> None:
    """Entry point of the ``metal-engine`` command."""
    app()

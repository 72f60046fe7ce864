"""The ``metal-engine`` command: combines server, engine and MLX."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metal_engine import __version__
from metal_engine.bench.args import BenchLatencyArgs, BenchServeArgs, BenchThroughputArgs
from metal_engine.cli import models as model_commands
from metal_engine.cli.help import CommandsHelp, GroupedHelp
from metal_engine.cli.launch import launch
from metal_engine.cli.logs import set_up_logging
from metal_engine.cli.options import MODEL_HELP, NO_MODEL, command
from metal_engine.cli.ps import ps
from metal_engine.device.allocator import keep_freed_memory
from metal_engine.distributed.launch import is_follower, launched_rank
from metal_engine.errors import ConfigError
from metal_engine.lazy_packages import make_packages_lazy
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.chat_args import ChatArgs
from metal_engine.settings.multi_model import RegistryArgs
from metal_engine.settings.served_names import problem_of_name
from metal_engine.settings.server_args import ServerArgs

if TYPE_CHECKING:
    from metal_engine.engine.transport import Transport

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="metal-engine",
    cls=CommandsHelp,
    help="LLM inference on Apple Silicon: one packed forward pass per step over a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    cls=CommandsHelp,
    help="Run benchmarks of a server over HTTP, or of the engine alone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


@command(app, {"Engine": EngineArgs, "Server": ServerArgs, "Several models": RegistryArgs}, several=True)
def serve(args: EngineArgs, server_args: ServerArgs, registry_args: RegistryArgs, models: tuple[str, ...]) -> None:
    """Serve a model, or several, over an OpenAI-compatible API."""
    set_up_logging(server_args.log_level, server_args.log_format)
    keep_freed_memory()  # before imports that start threads
    if len(models) > 1 or registry_args.is_wanted:
        status = _serve_several(models, args, server_args, registry_args)
    elif models and is_follower(args):
        from metal_engine.rank_worker import run_as_follower

        status = run_as_follower(args)
    elif models:
        status = _serve_one(args, server_args)
    else:
        raise ConfigError(None, NO_MODEL)
    if status:
        raise typer.Exit(status)


def _serve_several(
    models: tuple[str, ...], args: EngineArgs, server_args: ServerArgs, registry_args: RegistryArgs
) -> int:
    from metal_engine.cli.models_dir import find_several
    from metal_engine.server.listen import listen

    found = find_several(models, args, server_args, registry_args)
    with listen(server_args) as listener:  # before the import below, which takes seconds
        from metal_engine.cli.serve_multi_model import serve_several

        return serve_several(models, found, args, server_args, registry_args, listener)


def _serve_one(args: EngineArgs, server_args: ServerArgs) -> int:
    from metal_engine.cli.early_checks import check_engine_args, check_lora_dir
    from metal_engine.server.listen import listen

    check_lora_dir(args, server_args)
    names = server_args.served_model_name or (args.model,)
    if not server_args.served_model_name and (problem := problem_of_name(args.model)):
        raise ConfigError("MODEL", f"{problem} with --served-model-name")
    # Errors about settings, paths and the port appear before the imports below, which take seconds.
    with _naming_the_model(args), listen(server_args) as listener:
        check_engine_args(args)
        transport = _transport(args, server_args)

        from metal_engine.cli.banner import print_banner, startup_rows
        from metal_engine.engine.async_engine import AsyncEngine
        from metal_engine.server.run import quit_on_signals, run_server

        engine = AsyncEngine(transport)
        with quit_on_signals():
            engine.start()
            # If the engine runs in this process, this import loads MLX. The engine must have set up its BLAS before.
            from metal_engine.checkpoints.answer_formats import find_answer_format

            answer_format = find_answer_format(
                engine.tokenizer.hf_tokenizer,
                server_args.tool_call_parser,
                server_args.reasoning_parser,
                model_type=engine.config.model.model_type,
            )
        return run_server(
            engine,
            server_args,
            names,
            listener,
            on_ready=lambda url: print_banner(startup_rows(engine.config, url, names)),
            answer_format=answer_format,
        )


def _transport(args: EngineArgs, server_args: ServerArgs) -> Transport:
    """Return the engine of a server with one model, in a thread or in a process of its own.

    If a launcher has started several ranks, the engine runs in a thread. A launcher starts each rank only once, so this
    server could not replace rank 0's process.
    """
    is_launched = args.num_ranks > 1 and launched_rank() is not None
    if server_args.engine_process and not is_launched:
        from metal_engine.cli.engine_launch import launch_engine

        return launch_engine(args, server_args)
    if is_launched:
        logger.info(
            "the launcher must restart all %d ranks if one ends: this server does not replace them", args.num_ranks
        )
    from metal_engine.engine.engine_thread import EngineThread
    from metal_engine.loading.build import build_engine

    return EngineThread(lambda: build_engine(args))


@contextmanager
def _naming_the_model(args: EngineArgs) -> Iterator[None]:
    """Extend the message of an error about ``--port`` inside the context, if the model is not on this machine.

    The message then also says that the model is missing, so that the user sees both problems together.
    """
    try:
        yield
    except ConfigError as error:
        from metal_engine.checkpoints.hub.repository import cached_repos
        from metal_engine.checkpoints.model_names import missing_here

        missing = missing_here(args.model, cached_repos(args.download_dir)) if error.flag == "--port" else ""
        if not missing:
            raise
        raise ConfigError(error.flag, f"{error}; besides, {missing}") from error


@command(app, {"Chat": ChatArgs, "Engine": EngineArgs}, default_model="")
def _chat(chat_args: ChatArgs, args: EngineArgs) -> None:
    """Chat with a model in the terminal, on a running server or else in this process. /help lists commands."""
    set_up_logging(chat_args.log_level)
    from metal_engine.cli.chat import chat

    if not chat(chat_args, args):
        raise typer.Exit(1)


@command(bench, {"Benchmark": BenchServeArgs}, takes_model=False)
def _serve(args: BenchServeArgs) -> None:
    """Benchmark a server with OpenAI's API: throughput and latencies as clients see them.

    Status 1 if a request failed.
    """
    set_up_logging("warning")
    from metal_engine.bench.serve import bench_serve

    if bench_serve(args).num_failed:
        raise typer.Exit(1)


@command(bench, {"Benchmark": BenchThroughputArgs, "Engine": EngineArgs})
def _throughput(args: BenchThroughputArgs, engine_args: EngineArgs) -> None:
    """Benchmark the throughput of the engine alone, in tokens per second, with all requests at once."""
    set_up_logging("warning")
    from metal_engine.cli.early_checks import check_engine_args

    check_engine_args(engine_args)
    from metal_engine.bench.offline import bench_throughput

    bench_throughput(engine_args, args)


@command(bench, {"Benchmark": BenchLatencyArgs, "Engine": EngineArgs})
def _latency(args: BenchLatencyArgs, engine_args: EngineArgs) -> None:
    """Benchmark the latency of the engine alone for a batch of requests."""
    set_up_logging("warning")
    from metal_engine.cli.early_checks import check_engine_args

    check_engine_args(engine_args)
    from metal_engine.bench.offline import bench_latency

    bench_latency(engine_args, args)


model_commands.add_commands(app)


@app.command(cls=GroupedHelp)
def doctor(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help=f"Models to test: {MODEL_HELP}", show_default=False)
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Measure for up to ten minutes a model, and write mac-report.md and .json.")
    ] = False,
) -> None:
    """Report versions, device and memory, and test models, for bug reports. Status 1 if a check fails."""
    set_up_logging("warning")
    if full:
        from metal_engine.doctor.full import choose_plan, fetch_models, run_full

        names = models or ["demo"]
        fetch_models(names)
        if not run_full(names, choose_plan(), Path(), lambda line: print(line, flush=True)):
            raise typer.Exit(1)
        return
    from metal_engine.doctor.examine import examine

    healthy = examine(lambda finding: print(finding, flush=True), models)
    print("\nNothing is wrong." if healthy else "\nSomething is wrong: see the lines that say FAIL.")
    if not healthy:
        raise typer.Exit(1)


app.command(cls=GroupedHelp)(launch)
app.command(cls=GroupedHelp)(ps)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"metal-engine {__version__}")
        raise typer.Exit


@app.callback()
def _metal_engine(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """LLM inference on Apple Silicon: one packed forward pass per step over a paged KV cache."""


def _open_standard_streams() -> None:
    """Open each standard stream that was closed when this process started, on the null device.

    Otherwise, the next sockets and files would get the streams' descriptors, and code could not write to the streams.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the stream's number: the lowest that is free
            os.set_inheritable(descriptor, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def main() -> None:
    """Entry point of the ``metal-engine`` command."""
    _open_standard_streams()
    make_packages_lazy()
    app()

"""Typer commands whose options are generated from dataclasses of settings."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from metal_engine.cli.help import grouped_help, print_help_all
from metal_engine.errors import ConfigError, ModelLoadError
from metal_engine.settings.fields import Listing, Setting, flag, make_args, settings_of
from metal_engine.settings.sources import CONSTANTS, read_settings

MODEL_HELP = "`demo`, a Hugging Face repository, a local model directory, or a .gguf file."
NO_MODEL = "give a MODEL: `demo`, a repository, a directory, or a .gguf file"
_MODEL = Setting("model", "str", help=MODEL_HELP)
_MODELS = Setting("model", "list", help=MODEL_HELP)
_CONFIG_HELP = (
    "YAML file of settings: names of flags without --, and settings that have no flag (docs/cli.md). The environment "
    "and the command line take precedence over it."
)

# Settings of all commands, because several commands may share a config file or an environment.
_known: list[Setting] = []

Command = Callable[..., None]


def command(
    app: typer.Typer,
    groups: dict[str, type],
    *,
    takes_model: bool = True,
    default_model: str | None = None,
    several: bool = False,
) -> Callable[[Command], Command]:
    """Return a decorator that registers a function as a command.

    The function is called with an instance of each group's dataclass, in the groups' order. Its docstring is the help
    text, and its name without leading underscores is the command's name.

    Args:
        groups: map from a heading in ``--help`` to a dataclass of settings. Settings with their own heading are shown
            below that heading.
        takes_model: True if the command has a model, as an argument or from a file or the environment.
        default_model: default value of the model; None if it is required.
        several: True for any number of models. The function gets a tuple of all models as an additional, last argument.
            The settings contain the first model, or an empty string without models.
    """
    options = settings_of(*groups.values())
    settings = [*([_MODELS if several else _MODEL] if takes_model else []), *options]
    _known.extend(settings)

    def register(function: Command) -> Command:
        def run(config: Path | None = None, help_all: bool = False, **given: Any) -> None:
            with one_line_errors():
                values = read_settings(settings, given, os.environ, config, known=_known)
                if several:
                    models = values.get("model") or ()
                    values["model"] = models[0] if models else ""
                    function(*(make_args(cls, values) for cls in groups.values()), models)
                    return
                if takes_model and values.get("model") is None:
                    if default_model is None:
                        raise ConfigError(None, NO_MODEL)
                    values["model"] = default_model
                function(*(make_args(cls, values) for cls in groups.values()))

        parameters = []
        if takes_model:
            model = typer.Argument(help=MODEL_HELP, show_default=False)
            parameters.append(_parameter("model", (list[str] if several else str) | None, model))
        config_option = typer.Option("--config", help=_CONFIG_HELP, metavar="FILE", show_default=False)
        parameters.append(_parameter("config", Path | None, config_option))
        only_in_help_all = [one.name for one in options if one.listing is Listing.HELP_ALL]
        if only_in_help_all:
            parameters.append(_help_all_option(sum(one.has_flag for one in options)))
        for heading, cls in groups.items():
            parameters += [_option(one, heading) for one in settings_of(cls)]
        parameters += [_removed_option(name) for name in CONSTANTS]
        # Typer reads the parameters from these attributes.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__ = function.__doc__
        app.command(function.__name__.lstrip("_"), cls=grouped_help(only_in_help_all))(run)
        return function

    return register


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])


def _help_all_option(num_flags: int) -> inspect.Parameter:
    info = typer.Option(
        "--help-all",
        help=f"Show all {num_flags} flags and exit.",
        callback=print_help_all,
        is_eager=True,
        show_default=False,
    )
    return inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info]
    )


def _removed_option(name: str) -> inspect.Parameter:
    """Return a hidden option for a former setting that is now a constant.

    If the option is given, :func:`read_settings` raises a ConfigError that says so.
    """
    return _parameter(name, str | None, typer.Option(flag(name), hidden=True))


def _option(one: Setting, heading: str) -> inspect.Parameter:
    # Values stay strings here, so that the same parser reads values from all sources.
    kind: Any = {"bool": bool, "list": list[str]}.get(one.kind, str)
    names = (f"{one.flag}/--no-{one.flag[2:]}",) if one.kind == "bool" else (one.flag,)
    info = typer.Option(
        *names,
        help=help_text(one),
        metavar=one.metavar or None,
        show_default=False,
        rich_help_panel=one.group or heading,
        hidden=not one.has_flag,
    )
    return _parameter(one.name, kind | None, info)


def help_text(one: Setting) -> str:
    """Return a setting's help text, with its default. A default of None is left out: the text explains it."""
    shown = default_text(one)
    return f"{one.help} Default: {shown}." if shown else one.help


def default_text(one: Setting) -> str:
    """Format the default for the help, e.g. ``on`` or ``64MiB``. Return an empty text for None and empty defaults."""
    if one.default is None:
        return ""
    match one.kind:
        case "bool":
            return "on" if one.default else "off"
        case "size":
            return _size(one.default)
        case "list":
            return ", ".join(one.default)
        case _:
            return f"{one.default:g}" if isinstance(one.default, float) else str(one.default)


def _size(num_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return f"{num_bytes >> 10}KiB"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Within this context, an error that the user can fix ends the command with one line instead of a traceback.

    Prints the message of a ConfigError or ModelLoadError, and raises typer.Exit with status 1. Ctrl-C ends the process
    at once, with status 130.
    """
    try:
        yield
    except (ConfigError, ModelLoadError) as error:
        # Names of tensors in a model's files may contain control characters for terminals.
        line = " ".join(str(error).split())
        message = escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line))
        Console(stderr=True).print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        # Not a regular exit, because the engine's thread may be inside MLX.
        sys.stderr.flush()
        os._exit(130)

"""``--help`` of all commands: one box for each group of options. A long option is on the line above its description.

If a command has many options, ``--help`` omits some of them, and ``--help-all`` prints all.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Collection
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from metal_engine.cli.list_flags import with_flags_repeated

# Maximum width of lines. Longer lines are hard to read, even on a wider terminal.
_MAX_WIDTH = 110
# Column of the descriptions. A longer option is on the line above its description.
_COLUMN = 34
_OTHERS = "Options"
# Key in a context's `meta` that is set while --help-all prints.
_SHOWS_ALL = "metal_engine.help_all"


class _Boxes:
    """Mixin that shows options in boxes with their headings (``rich_help_panel``).

    Typer's own help also prints types, such as ``<bool>``.
    """

    help: str | None
    # Names of options that --help does not list.
    only_in_help_all: Collection[str] = ()
    collect_usage_pieces: Any
    get_params: Any

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, as wide as the terminal, but at most _MAX_WIDTH columns. Writes nothing to ``formatter``."""
        console = Console(highlight=False)
        width = min(console.width, _MAX_WIDTH)
        usage = " ".join(self.collect_usage_pieces(ctx))
        console.print(Text(f"\n Usage: {ctx.command_path} {usage}\n", style="bold"))
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            console.print(Text(textwrap.indent(textwrap.fill(paragraph, width - 2), " ") + "\n"))
        for heading, options in self._groups(ctx).items():
            body = Text("\n").join(_entry(names, help, width - 4) for names, help in options)
            console.print(Panel(body, title=heading, title_align="left", border_style="dim", width=width))

    def _groups(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Return a map from each heading to its options in order of declaration.

        An option is a pair of its names with its value, and its description, e.g. ("--port N", "Port of the server.").
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        omitted = () if ctx.meta.get(_SHOWS_ALL) else self.only_in_help_all
        for one in self.get_params(ctx):
            if getattr(one, "hidden", False) or one.name in omitted:
                continue
            if one.param_type_name == "argument":
                heading, names = "Arguments", one.metavar or (one.name or "").upper()
            else:
                heading = getattr(one, "rich_help_panel", None) or _OTHERS
                names = " / ".join([", ".join(one.opts), *one.secondary_opts])
                if one.metavar:
                    names += f" {one.metavar}"
            groups.setdefault(heading, []).append((names, getattr(one, "help", None) or ""))
        return groups


class GroupedHelp(_Boxes, TyperCommand):
    """Command whose help shows options in boxes. A flag that can be repeated also takes several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options: list[Any] = [one for one in self.get_params(ctx) if one.param_type_name == "option"]
        lists = {name for one in options if one.multiple for name in one.opts}
        switches = {name for one in options if one.is_flag for name in (*one.opts, *one.secondary_opts)}
        num_arguments = len(self.get_params(ctx)) - len(options)
        return super().parse_args(ctx, with_flags_repeated(args, lists, switches, num_arguments))


def grouped_help(only_in_help_all: Collection[str]) -> type[GroupedHelp]:
    """Return a command class whose ``--help`` omits some options.

    Args:
        only_in_help_all: names of the omitted options.
    """
    return type("GroupedHelp", (GroupedHelp,), {"only_in_help_all": frozenset(only_in_help_all)})


def print_help_all(ctx: typer.Context, wanted: bool) -> None:
    """If ``wanted``, print the help with all options and raise typer.Exit. A callback for ``--help-all``."""
    if wanted:
        ctx.meta[_SHOWS_ALL] = True
        ctx.get_help()
        raise typer.Exit


class CommandsHelp(_Boxes, TyperGroup):
    """Group of commands whose help shows options and commands in boxes."""

    def _groups(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        texts = [(name, inspect.cleandoc(one.help or "").split("\n\n")[0]) for name, one in found if one is not None]
        return {**super()._groups(ctx), "Commands": [(name, " ".join(text.split())) for name, text in texts]}


def _entry(names: str, help: str, width: int) -> Text:
    """Format an option and its description, which begins at a fixed column."""
    indent = " " * _COLUMN
    filled = textwrap.fill(help, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    rest = filled[len(names) :] if len(names) < _COLUMN - 1 else f"\n{filled}"
    text = Text(names + rest)
    text.stylize("bold cyan", 0, len(names))
    return text

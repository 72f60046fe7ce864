"""Writes the tables of flags in docs/cli.md from the settings themselves: ``python -m tools.docs.cli``."""

from __future__ import annotations

from pathlib import Path

from metal_engine.bench.args import BenchLatencyArgs, BenchServeArgs, BenchThroughputArgs
from metal_engine.cli.options import default_text, help_text
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.chat_args import ChatArgs
from metal_engine.settings.fields import Listing, Setting, settings_of
from metal_engine.settings.multi_model import RegistryArgs
from metal_engine.settings.server_args import ServerArgs
from metal_engine.settings.sources import OTHER_VARIABLES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def table(cls: type, same_as: type | None = None, command: str = "") -> str:
    """Return a dataclass's settings as Markdown, below their headings if they have any.

    Settings with the same name and help in the dataclass ``same_as`` share one row, which refers to ``command``. The
    introduction of the page explains the notation: bold flags, defaults in parentheses, and settings without a flag.
    """
    rows = ["| flag | |", "| --- | --- |"]
    known = [] if same_as is None else [(_names(one), help_text(one)) for one in settings_of(same_as)]
    shared = [one for one in settings_of(cls) if (_names(one), help_text(one)) in known]
    groups: dict[str, list[Setting]] = {}
    for one in settings_of(cls):
        if one not in shared:
            groups.setdefault(one.group, []).append(one)
    rows += [f"| {', '.join(f'`{one.flag}`' for one in shared)} | As for `{command}`. |"] if shared else []
    for heading, settings in groups.items():
        rows += [f"| **{heading}** | |"] if heading else []
        rows += [f"| {_marked(one, cls)} | {one.help.replace('|', chr(92) + '|')} |" for one in settings]
    return "\n".join(rows)


def _names(one: Setting) -> str:
    if not one.has_flag:
        return f"`{one.key}: {one.metavar or 'BOOL'}`"
    if one.kind == "bool":
        return f"`{one.flag}`, `--no-{one.flag[2:]}`"
    return f"`{one.flag} {one.metavar}`"


def _marked(one: Setting, cls: type) -> str:
    """Return a setting's names, with its default in parentheses.

    The names are in bold if ``--help`` lists the setting and omits other settings of ``cls``.
    """
    is_bold = one.listing is Listing.HELP and any(other.listing is Listing.HELP_ALL for other in settings_of(cls))
    names = f"**{_names(one)}**" if is_bold else _names(one)
    default = default_text(one)
    return f"{names} ({default})" if default else names


def tables() -> dict[str, str]:
    """Return the text of each generated part of the page, by the name in the part's markers."""
    others = ["| variable | |", "| --- | --- |"]
    others += [f"| `{name}` | {text} |" for name, text in OTHER_VARIABLES.items()]
    return {
        "server": table(ServerArgs),
        "several models": table(RegistryArgs),
        "engine": table(EngineArgs),
        "chat": table(ChatArgs),
        "bench serve": table(BenchServeArgs),
        "bench throughput": table(BenchThroughputArgs, BenchServeArgs, "bench serve"),
        "bench latency": table(BenchLatencyArgs, BenchServeArgs, "bench serve"),
        "variables": "\n".join(others),
    }


def with_tables(page: str) -> str:
    """Return the page with its generated parts replaced by new ones."""
    for name, text in tables().items():
        begin = f"<!-- {name}: made by tools/docs/cli.py -->\n"
        before, found, rest = page.partition(begin)
        assert found, f"{PAGE} has no place for {name}"
        _, end, after = rest.partition("<!-- end -->")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

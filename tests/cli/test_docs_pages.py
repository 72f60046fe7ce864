"""Tests the pages for readers: flags exist, files parse, and tables match their sources."""

from __future__ import annotations

import json
import plistlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
import yaml

from metal_engine.cli.main import app
from metal_engine.settings.server_args import ServerArgs
from tools.clients.groups import CLIENTS, TRIES
from tools.docs import benchmarks, mac

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Their flags are those of the tools that measure and check.
OTHER_FLAGS = {"benchmark-notes.md", "kernels.md", "kernel_bytes.md", "tools-and-tests.md"}
PAGES = [page for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))) if page.name not in OTHER_FLAGS]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text: str, kind: str) -> list[str]:
    return [block for found, block in FENCE.findall(text) if found == kind]


def known_flags() -> set[str]:
    """Return every option of every command, with its `--no-` form. Removed flags are hidden options."""

    def of(command: click.Command) -> Iterator[str]:
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                yield from (*parameter.opts, *parameter.secondary_opts)
        for inner in getattr(command, "commands", {}).values():
            yield from of(inner)

    return {*of(typer.main.get_command(app)), "--help"}


def named_flags(text: str) -> set[str]:
    """Return the flags of our commands that a page mentions: in commands, and in code spans that begin with a flag.

    In a table whose second column is headed `metal-engine`, the first column has other programs' flags.
    """
    found: set[str] = set()
    for block in blocks(text, "console") + blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            found.update(FLAG.findall(line.partition("metal-engine ")[2].partition(" #")[0]))
    is_theirs = False
    for line in FENCE.sub("", text).splitlines():
        cells = line.split("|")
        is_theirs = line.startswith("|") and (is_theirs or (len(cells) > 2 and cells[2].strip() == "metal-engine"))
        for span in re.findall(r"`([^`]+)`", "|".join(cells[2:]) if is_theirs else line):
            if span.startswith(("--", "metal-engine ")):
                found.update(FLAG.findall(span))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    # The section about differences at the end of docs/api.md has flags of other programs.
    assert named_flags(page.read_text(encoding="utf-8").partition("\n## What differs")[0]) - known_flags() == set()


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_commands_can_be_pasted(page: Path) -> None:
    """The zsh of macOS passes ``# text`` after a command to the command."""
    comments = [
        line for block in blocks(page.read_text(), "sh") for line in block.splitlines() if re.search("(^| )#", line)
    ]
    assert not comments


def test_wrong_flags_are_noticed() -> None:
    page = (
        "Lower `--max-model-length`, as `uv --quiet` does.\n"
        "```sh\nmetal-engine serve demo --prot 1 \\\n  --hots x  # not --this\naider --model m\n```\n"
        "| Other | metal-engine | |\n| --- | --- | --- |\n| `--theirs` | `--ours N` | see `--more` |\n"
    )
    assert named_flags(page) == {"--max-model-length", "--prot", "--hots", "--ours", "--more"}


def test_flags_listed_as_the_same_in_the_migration_page_exist() -> None:
    """In rows with `the same`, the other server's flags must exist here."""
    flags: set[str] = set()
    for line in text_of("coming-from.md").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[2] == "the same":
            flags.update(FLAG.findall(cells[1]))
    assert len(flags) > 20
    assert flags - known_flags() == set()


def test_configuration_parses() -> None:
    """Other tools' files in docs/connect.md."""
    text = text_of("connect.md")
    (codex,) = (tomllib.loads(block) for block in blocks(text, "toml"))
    assert codex["model_providers"][codex["model_provider"]]["wire_api"] == "responses"
    (opencode,) = (json.loads(block) for block in blocks(text, "json"))
    provider, _, model = opencode["model"].partition("/")
    assert model in opencode["provider"][provider]["models"]
    for block in blocks(text, "yaml"):
        assert yaml.safe_load(block)
    for block in blocks(text, "python"):
        compile(block, "connect.md", "exec")


def test_every_client_that_is_tried_is_on_the_page() -> None:
    text = text_of("connect.md")
    assert set(CLIENTS) <= {heading.lower() for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)}
    for client in CLIENTS.values():
        assert (TRIES / client.script).is_file()
        assert f"| {client.name} | {client.package} " in text, "run `python -m tools.clients.run --write`"


def test_the_launch_agent() -> None:
    """A property list with existing flags. It gives a server enough time to stop."""
    (block,) = blocks(text_of("mac.md"), "xml")
    agent = plistlib.loads(block.encode())
    assert agent["Label"] == "org.metal-engine.server" and f"{agent['Label']}.plist" in text_of("mac.md")
    program, command, model, *flags = agent["ProgramArguments"]
    assert program.endswith("/metal-engine") and (command, model) == ("serve", "mlx-community/Qwen3-8B-4bit")
    assert {flag for flag in flags if flag.startswith("--")} <= known_flags()
    assert agent["ExitTimeOut"] > ServerArgs().shutdown_timeout


def test_memory_of_macs() -> None:
    page = text_of("mac.md")
    assert mac.with_table(page) == page, "run `python -m tools.docs.mac`"
    # 16 GiB, 8 billion weights at 4.5 bits, 144 KiB a token, by hand: (0.9 * 2/3 * 16 - 4.29 - 1 - 0.25) GiB
    (model,) = (model for model in mac.MODELS if model.name.startswith("Qwen3-8B"))
    assert abs(mac.kv_tokens(model, 16) - 4.06 * 2**30 / (144 * 2**10)) < 100


def test_the_page_for_deciding() -> None:
    """Its figures are the notebook's, and its chart can be drawn from them."""
    page, notes = text_of("benchmarks.md"), text_of("dev/benchmark-notes.md")
    assert benchmarks.with_table(page, notes) == page, "run `python -m tools.docs.benchmarks`"
    servers, figures = benchmarks.chosen(notes)
    assert servers[0] == "metal-engine" and len(servers) == 4
    assert len(figures) == 8
    assert figures[0][1].values[0] == "55.2" and figures[0][1].ratio == "1.36"


def test_figures_of_the_readme() -> None:
    """Every figure of its table beside other servers, and of the reasons above it, is in the notebook."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    notes = re.sub(r"\s+", " ", text_of("dev/benchmark-notes.md"))
    table = readme[readme.index("## Beside other servers") :].partition("\n\nThe goal")[0]
    reasons = readme[readme.index("## Why use it") : readme.index("**Models are checked")]
    figures = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?= MiB| tokens/s|\*\*|[ .](?:\||\n))", table + reasons)
    assert len(figures) > 24
    assert set(figures) - set(re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\w)", notes)) == set()


def test_the_chart(tmp_path: Path) -> None:
    benchmarks.draw(text_of("dev/benchmark-notes.md"), tmp_path / "chart.png")
    drawn = (tmp_path / "chart.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 20_000
    assert benchmarks.CHART.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("folder", [DOCS, DOCS / "dev"], ids=["for users", "for developers"])
def test_every_page_is_in_the_index_of_its_folder(folder: Path) -> None:
    index = (folder / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[([\w.-]+\.md)\]\(\1\): ", index, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")

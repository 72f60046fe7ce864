"""Tests several values after one flag."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from metal_engine.cli.list_flags import with_flags_repeated
from metal_engine.cli.options import command
from metal_engine.settings.args import EngineArgs
from metal_engine.settings.server_args import ServerArgs

NAME, ORIGINS = "--served-model-name", "--allowed-origins"


@pytest.mark.parametrize(("given", "expected"), [
    (f"demo {NAME} a b", f"demo {NAME} a {NAME} b"),
    (f"demo {NAME} a b --port 1 c", f"demo {NAME} a {NAME} b --port 1 c"),
    (f"demo {NAME}=a b {ORIGINS} x y", f"demo {NAME}=a {NAME} b {ORIGINS} x {ORIGINS} y"),
    (f"demo --port 1 {NAME} a {NAME} b", f"demo --port 1 {NAME} a {NAME} b"),
    (f"demo {NAME} a --no-cache b", f"demo {NAME} a --no-cache b"),  # a switch takes no value
    (f"{NAME} a demo", f"{NAME} a demo"),  # the last word is the model
    (f"{NAME} a demo b", f"{NAME} a demo b"),  # ambiguous
    (f"demo {NAME} a -- b", f"demo {NAME} a -- b"),
    (f"demo {NAME}", f"demo {NAME}"),
])  # fmt: skip
def test_flags_are_repeated(given: str, expected: str) -> None:
    assert with_flags_repeated(given.split(), {NAME, ORIGINS}, {"--no-cache"}, 1) == expected.split()


@pytest.fixture
def seen() -> tuple[typer.Typer, list[Any]]:
    """Command like `serve` that only records its arguments."""
    app, seen = typer.Typer(), []

    @command(app, {"Engine": EngineArgs, "Server": ServerArgs})
    def serve(args: EngineArgs, server_args: ServerArgs) -> None:
        """Serves nothing."""
        seen.append((args.model, server_args.served_model_name))

    return app, seen


def test_a_command_accepts_several_values_after_one_list_flag(seen: tuple[typer.Typer, list[Any]]) -> None:
    app, given = seen
    for line in ("demo {} a *", "{} a demo {} *", "demo --no-enable-prefix-caching {} a * --port 5"):
        assert CliRunner().invoke(app, line.format(NAME, NAME).split()).exit_code == 0
    assert given == [("demo", ("a", "*"))] * 3
    for line in ("demo b {} a", "{} a demo b", "demo --port 5 b"):
        result = CliRunner().invoke(app, line.format(NAME).split())
        assert result.exit_code == 2 and "unexpected extra argument" in result.stderr
    assert len(given) == 3

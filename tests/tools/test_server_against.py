"""Comparison of the servers of two commits: which files run, whose time counts, and the resulting table."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from metal_engine.bench.tokens import load_prompt_tokenizer
from tests.support.checkpoint_files import write_checkpoint, write_tokenizer
from tools.benchmarks import server_against
from tools.compare.peers import OURS, running


def test_unpack_extracts_all_files_of_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("METAL_ENGINE_CACHE", str(tmp_path))
    name, folder = server_against.unpack("HEAD")
    tree = subprocess.run(["git", "ls-tree", "--name-only", "HEAD"], cwd=server_against.ROOT, capture_output=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(tree.stdout.decode().split())
    assert server_against.unpack(name) == (name, folder)
    with pytest.raises(SystemExit, match="git does not know 'no-such-commit'"):
        server_against.unpack("no-such-commit")


def test_the_table_has_medians_and_ratios() -> None:
    def start(speed: float) -> dict[str, server_against.Figures]:
        figures = dict.fromkeys((*server_against.FIGURES, "thread_s", "cpu_s"), speed)
        return dict.fromkeys(server_against.LOADS, figures)

    table = server_against.report({"here": [start(30), start(10), start(12)], "abc": [start(8), start(9)]}, "abc")
    row = "| decode: 16 at once, 20 in, 64 out | output_throughput | 12.0 (10.0 to 30.0) | 8.5 (8.0 to 9.0) | 1.41 |"
    assert row in table.splitlines()


def test_a_server_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough steps for several ticks of the clock of CPU time, which are 10 ms.
    monkeypatch.setattr(server_against, "LOADS", {"decode": (4, 5, 64), "prompts": (8, 40, 64)})
    model = write_checkpoint(tmp_path / "model")
    write_tokenizer(model)
    with running(OURS, model, same_blas=True, extra=["--max-num-batched-tokens", "256"]) as server:
        figures = server_against.measure(server, str(model), load_prompt_tokenizer(str(model)), seed=1)
    assert set(figures) == set(server_against.LOADS)
    assert all(one["output_throughput"] > 0 and one["cpu_s"] >= one["thread_s"] > 0 for one in figures.values())

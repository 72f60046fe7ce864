"""Processes that form a group of ranks on the loopback interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.rank_cases import RankCase
from tools.fixtures.ports import free_port

ROOT = Path(__file__).parents[2]


def write_hosts(path: Path, num_ranks: int) -> Path:
    """Write the hostfile of a ring, in the format that mlx.launch passes to each rank."""
    path.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(num_ranks)]))
    return path


def start_ranks(command: Sequence[str], hostfile: Path, num_ranks: int, **options: Any) -> list[subprocess.Popen[str]]:
    """Start a command on each rank."""
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
            text=True,
            **options,
        )
        for rank in range(num_ranks)
    ]


def run_on_ranks(cases: Sequence[RankCase], folder: Path, num_ranks: int = 2) -> list[Any]:
    """Run cases on ``num_ranks`` ranks (:mod:`tests.support.rank_program`) and return their results."""
    out = folder / "results.json"
    told = json.dumps([asdict(case) for case in cases])
    command = ["-m", "tests.support.rank_program", told, str(out), str(num_ranks)]
    ranks = start_ranks(command, write_hosts(folder / "hosts.json", num_ranks), num_ranks, stderr=subprocess.PIPE)
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(said)
    return json.loads(out.read_text())

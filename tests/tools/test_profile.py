"""`tools/benchmarks/profile_decode_step.py` wraps parts of the engine by name. All the names must exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.checkpoint_files import write_checkpoint, write_tokenizer

ROOT = Path(__file__).parents[2]


def test_each_part_of_a_step_took_time(tmp_path: Path) -> None:
    write_tokenizer(write_checkpoint(tmp_path, config={"vocab_size": 49152}))
    command = [sys.executable, "-m", "tools.benchmarks.profile_decode_step", "--model", str(tmp_path)]
    command += ["--requests", "2", "--steps", "6"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in run.stdout.splitlines() if line[:1] == "|"
    ]
    microseconds = {row[0]: [float(cell.replace(",", "")) for cell in row[1:3]] for row in rows[2:]}
    assert len(microseconds) > 10
    for part, (one_by_one, one_ahead) in microseconds.items():
        assert one_ahead > 0, part
        assert one_by_one > 0 or part == "dispatch", part

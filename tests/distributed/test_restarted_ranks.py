"""Ranks of an engine's process: if one is lost, new ranks continue the answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.checkpoint_files import write_checkpoint
from tests.support.ranked_server import RankedServer, is_alive
from tests.support.serving import wait_until


def text_of(lines: Iterable[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.full), 1])
def test_answers_survive_a_lost_rank(tmp_path: Path, lost: int) -> None:
    model = write_checkpoint(tmp_path / "m")
    flags = ["--served-model-name", "m", "--max-num-seqs", "8"]
    with RankedServer(model, *flags) as server:
        whole = text_of(server.stream(100).iter_lines())
        lines = server.stream(100).iter_lines()
        received = [next(lines) for _ in range(6)]
        os.kill(server.ranks[lost], signal.SIGKILL)
        assert text_of([*received, *lines]) == whole
        ranks = server.find_ranks()
        assert len(ranks) == 2 and not set(ranks) & set(server.ranks)
        server.process.kill()
        wait_until(lambda: not any(map(is_alive, [*ranks, *server.ranks[1:]])), "the ends of the ranks")

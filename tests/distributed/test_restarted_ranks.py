"""Ranks of an engine's process: if one is lost, new ranks continue the answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from tests.loading.test_image_encoder import write_vision_checkpoint
from tests.support.image_files import data_url, encoded, picture
from tests.support.ranked_server import RankedServer, is_alive
from tests.support.serving import wait_until
from tests.support.vision import QWEN3_5


def text_of(lines: Iterable[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.full), 1])
def test_answers_survive_a_lost_rank(tmp_path: Path, lost: int) -> None:
    """Ranks share the text model of a checkpoint with an image encoder, and refuse images before they read weights."""
    model = tmp_path / "m"
    write_vision_checkpoint(model, QWEN3_5)
    flags = ["--served-model-name", "m", "--max-num-seqs", "8"]
    with RankedServer(model, *flags) as server:
        said, refusal = server.said(), "several ranks take text only"
        assert said.index(f"refuses images: {refusal}") < said.index("loaded the weights")
        part = {"type": "image_url", "image_url": {"url": data_url(encoded(picture()))}}
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400 and f"images are not supported: {refusal}" in answer.text
        whole = text_of(server.stream(30).iter_lines())
        lines = server.stream(30).iter_lines()
        received = [next(lines) for _ in range(6)]
        os.kill(server.ranks[lost], signal.SIGKILL)
        assert text_of([*received, *lines]) == whole
        ranks = server.find_ranks()
        assert len(ranks) == 2 and not set(ranks) & set(server.ranks)
        server.process.kill()
        wait_until(lambda: not any(map(is_alive, [*ranks, *server.ranks[1:]])), "the ends of the ranks")

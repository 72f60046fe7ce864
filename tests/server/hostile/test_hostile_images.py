"""Each hostile image gets a 400. Other clients keep their outputs, and the server's memory does not grow."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.server.hostile.cases import Case
from tests.server.hostile.mixed_load import Job, Load, hostile_client, jobs
from tests.server.hostile.sending import check_answer, exchange
from tests.support.image_files import data_url, encoded, hostile_files, picture
from tests.support.probed_server import ProbedServer, probed_server
from tests.test_images_end_to_end import write_seeing_checkpoint

CHAT = "/v1/chat/completions"
FLAGS = (
    *("--served-model-name", "tiny", "--max-model-len", "640", "--max-num-batched-tokens", "128"),
    *("--max-num-seqs", "64", "--block-size", "8", "--num-gpu-blocks-override", "400", "--log-level", "warning"),
)
KINDS = {"plain", "stream", "n, streamed", "a chat", "a schema"}
# Growth of the idle server's resident memory between two rounds. An image of a round takes up to 256 MiB when decoded.
MAX_GROWTH = 32 << 20
# CPU time in seconds that the event loop may work between two ticks, and that a thread may keep Python's lock.
MAX_SECONDS = 0.025


def huge_gif() -> bytes:
    """Return a GIF file of 33 bytes whose header declares 60,000 x 60,000 pixels."""
    side = struct.pack("<HH", 60_000, 60_000)
    frame = b"," + bytes(4) + side + b"\0" + b"\x02\x02D\x01\0"
    return b"GIF89a" + side + bytes(3) + frame + b";"


def message(*urls: str) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": "what?"}]}]


def image_case(name: str, url: str) -> Case:
    body = json.dumps({"model": "tiny", "messages": message(url), "max_tokens": 4}).encode()
    return Case(f"an image: {name}", "POST", CHAT, lambda: body, 400)


def hostile_cases() -> list[Case]:
    urls = {name: data_url(data) for name, (data, _) in hostile_files().items()}
    urls["huge GIF"] = data_url(huge_gif(), "image/gif")
    urls["wrong base64"] = "data:image/png;base64,iVBOR!!!"
    urls["not base64"] = "data:image/svg+xml,<svg/>"
    urls["SVG of another type"] = data_url(hostile_files()["SVG"][0])
    urls["HTML of a wrong type"] = data_url(b"<html><body onload=alert(1)></html>", "image/jpeg")
    urls["local file"] = "file:///etc/passwd"
    urls["metadata service"] = "http://169.254.169.254/latest/meta-data/"
    return [image_case(name, url) for name, url in urls.items()]


def image_jobs() -> list[Job]:
    """Return greedy requests with images. One declares another media type than its file has."""
    url, wide = data_url(encoded(picture(64, 48, 1))), data_url(encoded(picture(300, 40, 2), "JPEG"), "image/webp")
    common = {"model": "tiny", "max_tokens": 24, "temperature": 0}
    return [
        Job("an image", CHAT, {**common, "messages": message(url)}),
        Job("two images, streamed", CHAT, {**common, "messages": message(wide, url), "stream": True}),
    ]


def send(server: ProbedServer, case: Case) -> int:
    answer = exchange(server.port, case, case.body())
    check_answer(case, answer)
    return answer.status


def idle_memory(server: ProbedServer) -> int:
    server.wait_until_idle()
    server.reset(trim=True)
    return server.resident


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbedServer]:
    pytest.importorskip("mlx_vlm")
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing_checkpoint(folder)
    with probed_server(folder, tmp_path_factory.mktemp("log"), *FLAGS) as server:
        yield server


@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.full)])
def test_hostile_images_do_not_affect_other_clients(server: ProbedServer, seconds: float) -> None:
    others = [job for job in jobs(1, seed=20261127) if job.kind in KINDS]
    load = Load(server.url, [*others, *image_jobs()])
    asyncio.run(load.ask_alone())
    cases = hostile_cases()
    for _ in range(2):  # fill the caches
        for case in cases:
            send(server, case)
    before = idle_memory(server)
    with hostile_client(partial(send, server), cases, num_least=len(cases)):
        asyncio.run(load.run(8, seconds))
    assert not load.wrong, (len(load.wrong), load.wrong[:3])
    assert set(load.told) == {job.kind for job in load.jobs}
    assert idle_memory(server) - before < MAX_GROWTH
    assert server.health()["status"] == "ok" and server.health()["failed_steps"] == 0


def large_case(seed: int) -> Case:
    noise = np.random.default_rng(seed).integers(0, 256, (1500, 2000, 3), dtype=np.uint8)
    url = data_url(encoded(Image.fromarray(noise), compress_level=1))
    body = json.dumps({"model": "tiny", "messages": message(url), "max_tokens": 2}).encode()
    assert len(body) > 11 << 20
    return Case("a large image", "POST", CHAT, lambda: body, 200)


def test_large_images_leave_the_event_loop_free(server: ProbedServer) -> None:
    """Base64, hashing and decoding happen in other threads and processes, and copies do not keep Python's lock."""
    measured: list[dict[str, float]] = []
    for seed in range(4):  # a garbage collection may fall into one of them
        case = large_case(seed)
        server.reset(trim=False)
        send(server, case)
        measured.append(server.read())
        if all(min(one[name] for one in measured) < MAX_SECONDS for name in ("loop", "lock")):
            return
    raise AssertionError(measured)

"""Images are decoded in processes with bounds, and remembered."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from metal_engine.errors import OverloadedError
from metal_engine.forks.channel import framed, receive
from metal_engine.images import PromptImages
from metal_engine.media import decoder as decoder_module
from metal_engine.media import process
from metal_engine.media.decoder import ImageDecoder, ImageError
from metal_engine.media.families.find import find_family
from metal_engine.media.processing import ImageProcessing
from metal_engine.media.store import ImageStore
from metal_engine.settings.config import VisionConfig
from tests.support.image_files import encoded, hostile_files, picture, png
from tests.support.seeing import shared_decoder

IMAGE = 7
VISION = VisionConfig(
    family="qwen3_vl",
    image_token_id=IMAGE,
    processor={"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1 << 20}},
    patch_size=4,
    merge_size=2,
    max_image_tokens=64,
)
_UNIT = 1 if sys.platform == "darwin" else 1024


@pytest.fixture(scope="module")
def processing() -> Iterator[ImageProcessing]:
    made = ImageProcessing(VISION, lambda text: [])
    yield made
    made.close()


def load(processing: ImageProcessing, *files: bytes, **options: object) -> list[tuple[int, ...]]:
    given = {"wants_inputs": True, "max_tokens": 1000, **options}
    return [one.grid for one in processing.decode(files, ["high"] * len(files), **given)]  # type: ignore[arg-type]


def test_known_files_are_not_decoded_again(processing: ImageProcessing, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (encoded(picture(64, 48, seed)) for seed in (1, 2))
    decoded: list[int] = []
    decode = ImageDecoder.decode

    def counted(self: ImageDecoder, files: list[bytes], *args: object, **options: object) -> object:
        decoded.append(len(files))
        return decode(self, files, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageDecoder, "decode", counted)
    assert load(processing, a, b, a) == [(1, 12, 16)] * 3
    assert load(processing, a) == load(processing, b) == [(1, 12, 16)]
    assert decoded == [2]
    assert processing.decode([a], ["low"], wants_inputs=False, max_tokens=0)[0].inputs is None
    assert decoded == [2, 1]


def test_detail_and_limits_bound_the_tokens(processing: ImageProcessing) -> None:
    large = encoded(picture(400, 300, 3))
    ((_, height, width),) = load(processing, large)
    assert height * width // 4 <= 64
    assert find_family(VISION, 16).grid(400, 300) == (1, 6, 8)


def test_images_beyond_the_context_are_not_decoded(processing: ImageProcessing) -> None:
    file = encoded(picture(64, 48, 4))
    (image,) = processing.decode([file], ["high"], wants_inputs=True, max_tokens=47)
    assert image.inputs is None
    (image,) = processing.decode([file], ["high"], wants_inputs=True, max_tokens=48)
    assert image.inputs is not None


@pytest.mark.parametrize("name", hostile_files())
def test_hostile_files_are_named(processing: ImageProcessing, name: str) -> None:
    data, problem = hostile_files()[name]
    good = encoded(picture(64, 48, 5))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError, match=problem) as caught:
        load(processing, good, good, data)
    assert caught.value.index == 2
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * _UNIT < 16 << 20


def run_forked(data: bytes) -> tuple[list[bytes], int]:
    """Process a file in a fork. Return its answers and its exit status."""
    ours, theirs = socket.socketpair()
    families = {"high": find_family(VISION, 64)}
    families["high"].inputs(picture())
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            process.serve_images(theirs, families)
        finally:
            os._exit(0)
    theirs.close()
    answers = []
    with ours:
        asked = {"details": ["high"], "wants_inputs": True, "max_tokens": 1000}
        ours.sendall(framed(json.dumps(asked).encode()) + framed(data))
        try:
            while True:
                answers.append(receive(ours))
        except (EOFError, OSError):
            pass
    return answers, os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("limit", ["IMAGE_CPU_SECONDS", "REQUEST_CPU_SECONDS"])
def test_a_process_that_takes_too_long_is_ended(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = png(8000, 8000, bits=8, channels=3)
    monkeypatch.setattr(process, limit, 0.05)
    answers, status = run_forked(file)
    assert len(answers) == 1 and os.WTERMSIG(status) == signal.SIGPROF


def test_a_process_that_grows_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    file = png(8000, 8000, bits=8, channels=3)
    answers, status = run_forked(file)
    assert len(answers) == 4 and status == 0
    monkeypatch.setattr(process, "MAX_GROWTH", 64 << 20)
    for _ in range(5):  # on a busy machine, the thread may not run before the end
        answers, status = run_forked(file)
        if status:
            break
    assert len(answers) == 1 and os.WEXITSTATUS(status) == 1


def test_the_end_of_a_process_is_an_error_of_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending:
        def connect(self) -> socket.socket:
            ours, theirs = socket.socketpair()

            def answer() -> None:
                with theirs:
                    for _ in range(3):
                        receive(theirs)
                    theirs.sendall(framed(json.dumps({"grid": [1, 2, 2], "num_tokens": 1}).encode()))

            threading.Thread(target=answer).start()
            return ours

    monkeypatch.setattr(decoder_module, "ForkingProcess", lambda *_: Ending())
    with pytest.raises(ImageError, match="limits on time and memory") as caught:
        ImageDecoder(VISION).decode([b"a", b"b"], ["high"] * 2, wants_inputs=True, max_tokens=100)
    assert caught.value.index == 1


def test_the_inputs_in_use_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = shared_decoder()
    before = decoder.num_live_bytes
    file = encoded(picture(64, 48, 7))
    images = decoder.decode([file], ["high"], wants_inputs=True, max_tokens=1000)
    assert decoder.num_live_bytes == before + 192 * 96 * 4 + 12
    monkeypatch.setattr(decoder_module, "MAX_LIVE_BYTES", before)
    with pytest.raises(OverloadedError, match="MiB of memory"):
        decoder.decode([file], ["high"], wants_inputs=True, max_tokens=1000)
    del images
    gc.collect()
    assert decoder.num_live_bytes == before
    decoder.decode([file], ["high"], wants_inputs=True, max_tokens=1000)


def test_the_store_is_bounded() -> None:
    store = ImageStore(max_input_bytes=1000)
    arrays = {name: {"a": np.zeros(100, np.float32)} for name in "abc"}
    for name in "aabc":
        store.add(name.encode(), (1,), arrays[name])
    assert store.num_bytes == 800
    assert (store.inputs(b"a"), store.grid(b"a")) == (None, (1,))
    assert store.inputs(b"b") is arrays["b"]
    store.add(b"a", (1,), arrays["a"])
    assert store.inputs(b"c") is None and store.inputs(b"b") is not None


def test_images_are_inserted_where_the_template_has_them(processing: ImageProcessing) -> None:
    files = [encoded(picture(*size, 6)) for size in ((64, 48), (32, 32))]
    images = processing.decode(files, ["high"] * 2, wants_inputs=True, max_tokens=1000)
    ids, inserted = processing.insert([1, IMAGE, 2, 3, IMAGE, 4], images)
    assert ids == [1, *[IMAGE] * 48, 2, 3, *[IMAGE] * 16, 4]
    assert isinstance(inserted, PromptImages)
    inserted.check(len(ids))
    first, second = inserted.images
    assert (first.start, first.stop, second.start, second.stop) == (1, 49, 51, 67)
    assert first.inputs["pixel_values"].shape == (192, 96) and first.inputs["image_grid_thw"].tolist() == [[1, 12, 16]]
    assert first.content_hash != second.content_hash
    assert inserted.axes is not None
    axes = inserted.axes
    # 1 | 6 rows of 8 from 1 on | 2, 3 at 9, 10 | 4 rows of 4 from 11 on | 4 at 15
    assert axes.prompt[:, [0, 1, 2, 9, 48, 49, 50, 51, 66, 67]].tolist() == [
        [0, 1, 1, 1, 1, 9, 10, 11, 11, 15],
        [0, 1, 1, 2, 6, 9, 10, 11, 14, 15],
        [0, 1, 2, 1, 8, 9, 10, 11, 14, 15],
    ]
    assert axes.delta == 16 - 68

"""Images are decoded in processes with bounds, and remembered."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from metal_engine.cancellation import Cancelled, caller_disconnected
from metal_engine.errors import OverloadedError
from metal_engine.forks.channel import framed, receive
from metal_engine.media import decoder_client, decoder_process
from metal_engine.media.decoder_client import ImageDecoder, ImageError
from metal_engine.media.families.find import find_family
from metal_engine.media.image_preparer import ImagePreparer
from metal_engine.media.store import ImageStore, LoadedImage
from metal_engine.prompt_images import PromptImages
from metal_engine.settings.config import VisionConfig
from tests.support import image_serving
from tests.support.image_files import encoded, hostile_files, picture, png
from tests.support.image_serving import shared_decoder
from tests.support.serving import wait_until

IMAGE = 7
VISION = replace(image_serving.VISION, image_token_id=IMAGE)
_UNIT = 1 if sys.platform == "darwin" else 1024
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


@pytest.fixture(scope="module")
def preparer() -> Iterator[ImagePreparer]:
    made = ImagePreparer(VISION, lambda text: [])
    yield made
    made.close()


def load(preparer: ImagePreparer, *files: bytes, **options: object) -> list[tuple[int, ...]]:
    given = {"max_tokens": 1000, **options}
    return [one.grid for one in preparer.decode(files, ["high"] * len(files), **given)]  # type: ignore[arg-type]


def test_known_files_are_not_decoded_again(preparer: ImagePreparer, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (encoded(picture(64, 48, seed)) for seed in (1, 2))
    decoded: list[int] = []
    decode = ImageDecoder.decode

    def counted(self: ImageDecoder, files: list[bytes], *args: object, **options: object) -> object:
        decoded.append(len(files))
        return decode(self, files, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageDecoder, "decode", counted)
    assert load(preparer, a, b, a) == [(1, 12, 16)] * 3
    assert load(preparer, a) == load(preparer, b) == [(1, 12, 16)]
    assert decoded == [2]
    assert preparer.decode([a], ["low"], max_tokens=0)[0].inputs is None
    assert decoded == [2, 1]
    new = encoded(picture(64, 48, 4))
    for max_tokens in (47, 48):  # an image beyond the context is not decoded
        (image,) = preparer.decode([new], ["high"], max_tokens=max_tokens)
        assert (image.inputs is None) == (max_tokens == 47)


def test_detail_and_limits_bound_the_tokens(preparer: ImagePreparer) -> None:
    ((_, height, width),) = load(preparer, encoded(picture(400, 300, 3)))
    assert height * width // 4 <= 64
    assert find_family(VISION, 16).grid(400, 300) == (1, 6, 8)


@pytest.mark.parametrize("name", ["bomb", "truncated JPEG", "SVG"])
def test_hostile_files_are_named(preparer: ImagePreparer, name: str) -> None:
    data, problem = hostile_files()[name]
    good = encoded(picture(64, 48, 5))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError, match=problem) as caught:
        load(preparer, good, good, data)
    assert caught.value.index == 2
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * _UNIT < 16 << 20


def run_forked(data: bytes, seconds: float = 30.0, vision: VisionConfig = VISION) -> tuple[list[bytes], int]:
    """Process a file in a fork. Return its answers and its exit status."""
    ours, theirs = socket.socketpair()
    families = {"high": find_family(vision, 64)}
    families["high"].inputs(picture())
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            if sys.platform == "linux":  # large blocks that this process freed have raised the threshold
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)
            decoder_process.serve_images(theirs, families)
        finally:
            os._exit(0)
    theirs.close()
    answers = []
    with ours:
        for max_tokens in (0, 64):
            asked = {"detail": "high", "max_tokens": max_tokens, "seconds": seconds}
            ours.sendall(framed(json.dumps(asked).encode()) + framed(data))
        ours.shutdown(socket.SHUT_WR)
        try:
            while True:
                answers.append(receive(ours))
        except (EOFError, OSError):
            pass
    return answers, os.waitpid(pid, 0)[1]


@pytest.mark.own_process  # memory that earlier tests freed would be reused, or kept
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_large_webp_files_are_decoded_within_the_memory(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the largest image in a quarter of the memory."""
    monkeypatch.setattr(decoder_process, "MAX_GROWTH", decoder_process.MAX_GROWTH // 4)
    answers, status = run_forked(encoded(Image.new(mode, (4096, 4096)), "WEBP", method=0))
    assert len(answers) == 6 and status == 0


LFM2 = {"encoder_patch_size": 4, "min_image_tokens": 4, "max_image_tokens": 16, "tile_size": 32}


@pytest.mark.parametrize("vision", [
    VISION,
    replace(VISION, family="mistral3", processor={"size": {"longest_edge": 64}}),
    VisionConfig(family="lfm2_vl", image_token_id=IMAGE, processor=LFM2),
], ids=lambda vision: vision.family)  # fmt: skip
def test_images_that_are_too_narrow_for_the_model_are_refused(vision: VisionConfig) -> None:
    answers, _ = run_forked(encoded(picture(2000, 10)), vision=vision)
    problem = "has 2000 x 10 pixels: it is too narrow for the model's image processor"
    assert [json.loads(answer)["error"] for answer in answers] == [problem] * 2


def test_any_error_of_an_image_processor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_process, "_work", Mock(side_effect=KeyError("pixels")))
    answers, status = run_forked(encoded(picture()))
    problem = "is refused by the model's image processor: KeyError('pixels')"
    assert [json.loads(answer)["error"] for answer in answers] == [problem] * 2 and status == 0


@pytest.mark.parametrize("limit", ["image", "request"])
def test_a_decoder_process_over_the_cpu_limit_is_ended(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = png(8000, 8000, bits=8, channels=3)
    if limit == "image":
        monkeypatch.setattr(decoder_process, "IMAGE_CPU_SECONDS", 0.05)
    answers, status = run_forked(file, 0.05 if limit == "request" else 30.0)
    assert len(answers) == 1 and os.WTERMSIG(status) == signal.SIGPROF


@pytest.mark.own_process
def test_a_process_that_grows_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    file = png(8000, 8000, bits=8, channels=3)
    answers, status = run_forked(file)
    assert len(answers) == 6 and status == 0
    monkeypatch.setattr(decoder_process, "MAX_GROWTH", 64 << 20)
    for _ in range(5):  # on a busy machine, the thread may not run before the end
        answers, status = run_forked(file)
        if status:
            break
    assert len(answers) == 1 and os.WEXITSTATUS(status) == 1


class FakeForks:
    """Forks that answer for images of one token. Each file has a name and a CPU time, as in ``a 2.5``.

    Attributes:
        decoded: names of the decoded files, in order.
        started: is released when a file begins to be decoded.
        goes_on: is acquired before a file is decoded.
    """

    def __init__(self) -> None:
        self.decoded: list[str] = []
        self.started, self.goes_on = threading.Semaphore(0), threading.Semaphore(0)
        self.num_forks = 0

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.num_forks += 1
        threading.Thread(target=self._serve, args=[theirs], daemon=True).start()
        return ours

    def _serve(self, channel: socket.socket) -> None:
        with channel, contextlib.suppress(EOFError, OSError):
            while True:
                asked, (name, seconds) = json.loads(receive(channel)), receive(channel).decode().split()
                self.started.release()
                self.goes_on.acquire()
                if name == "crash" or asked["seconds"] < float(seconds):
                    return
                self.decoded.append(name)
                answer = {"grid": [1, 2, 2], "num_tokens": 1, "seconds": float(seconds)}
                answer |= {"arrays": [], "hash": name.encode().hex()}
                channel.sendall(framed(json.dumps(answer).encode()))


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> FakeForks:
    fake = FakeForks()
    monkeypatch.setattr(decoder_client, "ForkingProcess", lambda *_: fake)
    return fake


def decode(decoder: ImageDecoder, *files: str) -> list[decoder_client.DecodedImage]:
    return decoder.decode([file.encode() for file in files], ["high"] * len(files), max_tokens=100)


def test_the_error_for_a_dead_decoder_process_names_the_image(forks: FakeForks) -> None:
    for files in (("a 1", "crash 1"), ("a 16", "b 15")):  # the second request exceeds 30 s
        forks.goes_on.release(2)
        with pytest.raises(ImageError, match="limits on time and memory") as caught:
            decode(ImageDecoder(VISION), *files)
        assert caught.value.index == 1


def test_the_least_served_request_is_next(forks: FakeForks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with many slow files has a turn. Requests that have used less time precede it."""
    monkeypatch.setattr(decoder_client, "_MAX_DECODING", 1)
    decoder = ImageDecoder(VISION)

    with ThreadPoolExecutor(3) as clients:
        slow = clients.submit(decode, decoder, "slow1 5", "slow2 5", "slow3 5")
        forks.started.acquire()
        medium = clients.submit(decode, decoder, "medium1 2", "medium2 2")
        wait_until(lambda: len(decoder._turns._waiting) == 1, "a request waits")
        small = clients.submit(decode, decoder, "small 1")
        wait_until(lambda: len(decoder._turns._waiting) == 2, "a request waits")
        forks.goes_on.release(20)
        for request in (slow, medium, small):
            request.result(60)
    assert forks.decoded == ["slow1", "medium1", "small", "medium2", "slow2", "slow3"]
    assert forks.num_forks == 5  # a fork ends with the turn of its request


def test_new_requests_do_not_delay_a_large_request_forever(forks: FakeForks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small request arrives in each turn, so that some always wait."""
    monkeypatch.setattr(decoder_client, "_MAX_DECODING", 1)
    decoder = ImageDecoder(VISION)
    with ThreadPoolExecutor(8) as clients:
        requests = [clients.submit(decode, decoder, "slow1 5", "slow2 5", "slow3 5")]
        for turn in range(6):
            forks.started.acquire()
            num_waiting = len(requests) - sum(name.startswith("small") for name in forks.decoded) - 1
            wait_until(lambda count=num_waiting: len(decoder._turns._waiting) == count, "the others wait")
            requests.append(clients.submit(decode, decoder, f"small{turn} 1"))
            wait_until(lambda count=num_waiting + 1: len(decoder._turns._waiting) == count, "a request waits")
            forks.goes_on.release()
        forks.goes_on.release(20)
        for request in requests:
            request.result(60)
    assert forks.decoded[:6] == ["slow1", "small0", "slow2", "small1", "small2", "slow3"]


def test_a_cancelled_request_leaves_the_decoding_queue(forks: FakeForks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_client, "_MAX_DECODING", 1)
    decoder, left = ImageDecoder(VISION), threading.Event()

    def cancelled() -> None:
        caller_disconnected.set(left)
        decode(decoder, "b 1")

    with ThreadPoolExecutor(3) as clients:
        first = clients.submit(decode, decoder, "a 1")
        forks.started.acquire()
        second = clients.submit(cancelled)
        wait_until(lambda: len(decoder._turns._waiting) == 1, "a request waits")
        third = clients.submit(decode, decoder, "c 1")
        left.set()
        with pytest.raises(Cancelled):
            second.result(60)
        forks.goes_on.release(2)
        first.result(60), third.result(60)
    assert forks.decoded == ["a", "c"]


def test_the_inputs_in_use_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = shared_decoder()
    gc.collect()  # images of other tests
    before = decoder.num_live_bytes
    file = encoded(picture(64, 48, 7))
    images = decoder.decode([file], ["high"], max_tokens=1000)
    assert decoder.num_live_bytes == before + 192 * 96 + 2 * 96 * 4 + 12
    monkeypatch.setattr(decoder_client, "MAX_LIVE_BYTES", before)
    with pytest.raises(OverloadedError, match="MiB of memory"):
        decoder.decode([file], ["high"], max_tokens=1000)
    del images
    gc.collect()
    assert decoder.num_live_bytes == before
    decoder.decode([file], ["high"], max_tokens=1000)


def test_the_store_is_bounded() -> None:
    store = ImageStore(max_input_bytes=1000)

    def image(name: str) -> LoadedImage:
        return LoadedImage(name.encode(), (1,), {"a": np.zeros(100, np.float32)})

    images = {name: image(name) for name in "abc"}
    for name in "aabc":
        store.add(name.encode(), images[name])
    assert store.num_bytes == 800
    found = store.find(b"a")
    assert found is not None and (found.inputs, found.grid) == (None, (1,))
    assert store.find(b"b").inputs is images["b"].inputs  # type: ignore[union-attr]
    store.add(b"a", images["a"])
    assert store.find(b"c").inputs is None and store.find(b"b").inputs is not None  # type: ignore[union-attr]
    assert store.add(b"other file", image("b")).inputs is images["b"].inputs and store.num_bytes == 800


def test_equal_images_count_once(preparer: ImagePreparer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files and details with the same result are the same image. Each image counts once towards the limit."""
    original = picture(64, 48, 12)
    files = [encoded(original), encoded(original, compress_level=0), encoded(original, "WEBP", lossless=True)]
    monkeypatch.setattr(decoder_client, "MAX_INPUT_BYTES", 192 * 96 + 2 * 96 * 4 + 12)
    for _ in range(2):
        found = preparer.decode([*files, files[0]] * 8, ["high", "low", "high", "low"] * 8, max_tokens=10_000)
        assert len({image.content_hash for image in found}) == 1 and len({id(image.inputs) for image in found}) == 1
    with pytest.raises(ImageError, match="MiB of pixels") as caught:
        load(preparer, files[0], encoded(picture(64, 48, 13)))
    assert caught.value.index == 1
    reduced = encoded(picture(400, 300, 14))
    other = ImagePreparer(replace(VISION, max_image_tokens=None), lambda text: [])
    try:
        monkeypatch.undo()
        low, high = other.decode([reduced] * 2, ["low", "high"], max_tokens=10_000)
        assert low.grid != high.grid and low.content_hash != high.content_hash
    finally:
        other.close()


def test_images_are_inserted_where_the_template_has_them(preparer: ImagePreparer) -> None:
    files = [encoded(picture(*size, 6)) for size in ((64, 48), (32, 32))]
    ids, inserted = preparer.insert([1, IMAGE, 2, 3, IMAGE, 4], preparer.decode(files, ["high"] * 2, max_tokens=1000))
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

"""Images of prompts survive the way to the engine's process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from metal_engine.engine.process import wire
from metal_engine.engine.process.channel import MAX_MESSAGE_BYTES
from metal_engine.engine.process.packed_images import packed_inputs, unpacked_inputs
from metal_engine.engine.process.packed_requests import packed_request, unpacked_request
from metal_engine.engine.process.remote import EngineCalls
from metal_engine.engine.process.remote_images import RemoteImages
from metal_engine.media.limits import MAX_INPUT_BYTES
from metal_engine.prompt_images import AxesPositions, PromptImage, PromptImages
from metal_engine.request import PreparedRequest
from metal_engine.sampling_params import SamplingParams
from metal_engine.token_rules import NO_RULES
from tests.support.engine_child import pid_of, started
from tests.support.serving import wait_until
from tests.support.vision import golden, tiny_vision, vision_prompt


def submitted(images: PromptImages | None) -> Any:
    prepared = PreparedRequest([1] * 9, SamplingParams(), 4, NO_RULES, images=images)
    keys = {b"\x00\xffhash": 5, b"b": 7}
    return wire.decode_to_engine(wire.encode(packed_request("r", prepared, 0, None, None, 0, None, keys)))


def sent_inputs(images: PromptImages) -> dict[int, Any]:
    """Return the inputs of two images as the process receives them."""
    messages = [wire.encode(packed_inputs(key, one.inputs)) for key, one in zip((5, 7), images.images, strict=True)]
    received: list[Any] = [wire.decode_to_engine(message) for message in messages]
    return {message.key: unpacked_inputs(message) for message in received}


def some_images() -> PromptImages:
    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    inputs = {"pixel_values": pixels[:, ::2], "grid": np.array([[1, 2]], np.int64), "mask": np.array(True)}
    first = PromptImage(np.array([1, 2, 4], np.int32), b"\x00\xffhash", inputs)
    second = PromptImage(
        np.array([6], np.int32), b"b", {"pixel_values": np.zeros(1, np.uint8)}, bidirectional_layers="every layer"
    )
    axes = AxesPositions(np.arange(27, dtype=np.int32).reshape(3, 9)[:, ::-1], -3)
    return PromptImages((first, second), axes)


def test_round_trip() -> None:
    images = some_images()
    found = unpacked_request(submitted(images), None, None, sent_inputs(images)).images
    assert found.axes.delta == -3 and (found.axes.prompt == images.axes.prompt).all()
    for ours, theirs in zip(images.images, found.images, strict=True):
        assert theirs.positions.tolist() == ours.positions.tolist() and theirs.positions.dtype == np.int32
        assert (theirs.content_hash, theirs.bidirectional_layers) == (ours.content_hash, ours.bidirectional_layers)
        assert theirs.inputs.keys() == ours.inputs.keys()
        for name, array in ours.inputs.items():
            assert theirs.inputs[name].dtype == array.dtype and theirs.inputs[name].tolist() == array.tolist(), name


def test_prompts_without_images_or_axes() -> None:
    assert unpacked_request(submitted(None), None, None, {}).images is None
    images = some_images()
    found = unpacked_request(submitted(PromptImages(images.images)), None, None, sent_inputs(images)).images
    assert found is not None and found.axes is None


@pytest.mark.parametrize("field", ["dtype", "shape", "data"])
def test_a_broken_array_is_an_error_of_the_wire(field: str) -> None:
    message = packed_inputs(5, some_images().images[0].inputs)
    array = message.inputs["pixel_values"]
    setattr(array, field, {"dtype": "no type", "shape": [5, 7], "data": b"abc"}[field])
    with pytest.raises(wire.WireError):
        unpacked_inputs(message)


def test_the_next_turn_sends_only_images_that_the_process_no_longer_has() -> None:
    """There is room for the inputs of one image. Each turn ends before the next begins."""
    sent: list[Any] = []
    images = some_images().images
    room = max(sum(array.nbytes for array in image.inputs.values()) for image in images)
    remote = RemoteImages(EngineCalls(sent.append, threading.RLock()), max_recent_bytes=room)
    keys = []
    for turn in (images, images[:1], images[:1], images[1:]):
        remote.inputs_of(PromptImages(turn))
        keys.append([message.key for message in sent])
        sent.clear()
    assert keys == [[0, 1], [2], [], [3]]


def test_requests_share_the_inputs_of_equal_images_until_the_last_has_ended() -> None:
    """Each message has one image, so that many images of a request do not exceed the size of a message."""
    assert MAX_INPUT_BYTES < MAX_MESSAGE_BYTES
    sent: list[Any] = []
    calls = EngineCalls(sent.append, threading.RLock())
    remote, images = RemoteImages(calls, max_recent_bytes=0), some_images()
    held = [remote.inputs_of(images) for _ in range(3)]
    assert [message.key for message in sent] == [0, 1] and [one.key for one in held[2]] == [0, 1]
    assert [message.key for message in remote.messages()] == [0, 1]
    sent.clear()
    for _ in range(3):
        calls.release()
        assert not sent
        held.pop()
    calls.release()
    (released,) = sent
    assert sorted(released.images) == [0, 1] and not list(remote.messages())
    assert [one.key for one in remote.inputs_of(images)] == [2, 3]


def test_image_requests_resume_after_the_engine_process_dies() -> None:
    """Its process is killed in the middle of the output. The next process encodes the images again."""
    tiny = tiny_vision("qwen3_vl")
    prompt = vision_prompt(tiny, (3, (2, 2, 2), 2, (6, 4, 3), 11))
    engine = started("seeing", name="qwen3_vl", max_restarts=1)
    encode_seconds: list[float] = []

    async def run() -> list[int]:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        prepared = await asyncio.to_thread(engine.preparer.prepare, prompt.token_ids, params, images=prompt.images)
        tokens: list[int] = []
        async for output in engine.generate("r", prepared):
            assert output.error is None, output.error
            if not tokens:
                encode_seconds.append(engine.metrics.image_encode_seconds)
                os.kill(pid_of(engine), signal.SIGKILL)
            tokens += output.token_ids
        return tokens

    try:
        assert asyncio.run(run()) == golden(tiny, prompt, 40).token_ids
        assert engine.metrics.num_resumed_requests == 1 and engine.stats.images_encoded >= 2
        wait_until(lambda: engine.metrics.image_encode_seconds > encode_seconds[0], "the time of both processes")
    finally:
        engine.shutdown()

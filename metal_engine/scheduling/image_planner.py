"""Plans the computation of image features: the images that each step encodes, and the features that the runner keeps.

A plan names the images to encode and the features to drop, so all ranks agree. An image is encoded as a whole before
the first of its tokens is computed, even if a chunk ends within it. A chunk must not end within an image whose tokens
attend to each other (:func:`last_cut`, :func:`next_cut`). The features of an image stay while a running request claims
the image. Features of unclaimed images are dropped for other images, the least recently used first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable

from metal_engine.prompt_images import PromptImage, PromptImages
from metal_engine.request import Request
from metal_engine.settings.config import SchedulerConfig
from metal_engine.step import ImageToEncode, SchedulerOutput


class ImagePlanner:
    """Image features that the runner keeps for the running requests.

    A claim keeps the features of an image for a request. A request claims its images in order, only as far as the next
    step may compute their tokens. It releases an image once plans cover all tokens of the image. A request that must
    wait until features fit has no claims at all.

    Args:
        config: limits on encoded and kept features.
        unit: unit of chunk sizes in tokens (:func:`metal_engine.scheduling.token_allotment.chunk_unit`).

    Attributes:
        num_encoded: number of images that plans have encoded.
        num_hits: number of images that were claimed while their features were kept.
    """

    def __init__(self, config: SchedulerConfig, unit: int) -> None:
        self._max_encoded = config.max_num_encoder_tokens
        self._capacity = config.image_cache_tokens
        self._max_step_tokens = config.max_num_batched_tokens
        self._unit = unit
        self._left = self._max_encoded  # number of features that the step being planned may still encode
        self._kept: dict[bytes, int] = {}  # content hash -> number of features that the runner has or will have
        self._num_kept = 0
        self._num_users: dict[bytes, int] = {}  # number of claims on each kept image that is claimed
        self._unused: OrderedDict[bytes, None] = OrderedDict()  # kept images without claims, least recently used first
        # Range (first, end) of the images that a running request has claimed, by request id.
        self._claimed: dict[str, tuple[int, int]] = {}
        self._to_encode: dict[bytes, PromptImage] = {}
        self._to_drop: list[bytes] = []
        self.num_encoded = 0
        self.num_hits = 0

    @property
    def num_kept_tokens(self) -> int:
        """Number of image tokens whose features are kept."""
        return self._num_kept

    def begin_step(self) -> None:
        self._left = self._max_encoded

    # --- limits of a chunk ----------------------------------------------------------------------------------

    def can_start(self, request: Request, num_computed: int, *, whole: bool = False) -> bool:
        """Return True if the image features for the smallest next chunk of a request fit into the step being planned.

        Claims no images.

        Args:
            num_computed: number of the request's computed tokens.
            whole: True to check the features for all remaining tokens of the request, not only for its next chunk.
        """
        if request.images is None:
            return True
        stop = request.num_tokens if whole else next_cut(request.images, num_computed, self._unit)
        first, end = _between(request.images, num_computed, stop)
        return self._fits(request.images.images[first:end], whole=whole)

    def max_chunk_tokens(self, request: Request, num_computed: int) -> int:
        """Claim the images in the next chunk of a running request. Return how many tokens the chunk may have.

        The chunk ends before the first image whose features do not fit into this step. Every claimed image without
        features is encoded in this step, even if the chunk turns out shorter and does not reach the image.

        Returns ``request.num_tokens``, which limits nothing, if the features of all images that a step could reach fit.
        Returns 0, and releases all images of the request, if the features for the smallest possible chunk do not fit.
        """
        if request.images is None:
            return request.num_tokens
        next_stop = next_cut(request.images, num_computed, self._unit)
        first, next_end = _between(request.images, num_computed, next_stop)
        if not self._claim(request.request_id, request.images, first, next_end):
            self.release(request)  # two requests that each hold an image and need another would wait forever
            return 0
        _, end = _between(request.images, num_computed, num_computed + self._max_step_tokens)
        for index in range(next_end, end):
            if not self._claim(request.request_id, request.images, index, index + 1):
                num_tokens = request.images.images[index].start - num_computed
                stop = num_computed + num_tokens - num_tokens % self._unit
                return max(next_stop, last_cut(request.images, num_computed, stop, self._unit)) - num_computed
        return request.num_tokens

    def _fits(self, images: Iterable[PromptImage], *, whole: bool = False) -> bool:
        """Return True if this step can encode all of ``images`` whose features are not kept.

        The step must not encode more than ``max_num_encoder_tokens`` tokens, and the runner must be able to keep the
        features. Without ``whole``, the first images of a step may exceed the first limit, because even the smallest
        possible chunk may contain several images.
        """
        sizes = {image.content_hash: image.num_features for image in images}
        num_missing = sum(size for key, size in sizes.items() if key not in self._kept)
        if not num_missing:
            return True
        if num_missing > self._left and (whole or self._left < self._max_encoded):
            return False
        num_claimed = sum(size for key, size in self._kept.items() if key not in self._unused or key in sizes)
        return num_claimed + num_missing <= self._capacity

    # --- claims ---------------------------------------------------------------------------------------------

    def _claim(self, request_id: str, images: PromptImages, first: int, end: int) -> bool:
        """Claim the images ``first`` to ``end`` - 1. Return False, without a new claim, if they do not fit."""
        held_first, held_end = self._claimed.get(request_id, (first, first))
        new = images.images[held_end:end]
        if not new:
            return True
        if not self._fits(new):
            return False
        for image in new:
            key = image.content_hash
            self.num_hits += key in self._kept
            self._unused.pop(key, None)
            self._num_users[key] = self._num_users.get(key, 0) + 1
        for image in new:
            if image.content_hash not in self._kept:
                self._encode(image)
        self._claimed[request_id] = held_first, end
        return True

    def _encode(self, image: PromptImage) -> None:
        while self._num_kept + image.num_features > self._capacity:
            key, _ = self._unused.popitem(last=False)
            self._drop(key)
        self._kept[image.content_hash] = image.num_features
        self._num_kept += image.num_features
        self._left = max(0, self._left - image.num_features)
        self._to_encode[image.content_hash] = image
        self.num_encoded += 1

    def _drop(self, key: bytes) -> None:
        self._num_kept -= self._kept.pop(key)
        if self._to_encode.pop(key, None) is None:
            self._to_drop.append(key)
        else:
            self.num_encoded -= 1

    def computed(self, request: Request) -> None:
        """Release a request's images if the plans so far compute all their tokens."""
        if request.images is None or request.request_id not in self._claimed:
            return
        images = request.images.images
        first, end = self._claimed.pop(request.request_id)
        while first < end and images[first].stop <= request.num_computed_tokens:
            self._release_one(images[first].content_hash)
            first += 1
        if first < end:
            self._claimed[request.request_id] = first, end

    def release(self, request: Request) -> None:
        """Release all images of a request."""
        if request.images is not None:
            first, end = self._claimed.pop(request.request_id, (0, 0))
            for image in request.images.images[first:end]:
                self._release_one(image.content_hash)

    def _release_one(self, key: bytes) -> None:
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key]
            self._unused[key] = None

    # --- plans ----------------------------------------------------------------------------------------------

    def plan(self, plan: SchedulerOutput) -> None:
        """Write the images to encode, and the features to drop, into a plan that will be executed."""
        plan.images_to_encode = [
            ImageToEncode(key, image.num_features, image.inputs) for key, image in self._to_encode.items()
        ]
        plan.images_to_drop, self._to_drop = self._to_drop, []
        self._to_encode = {}

    def refused(self, plan: SchedulerOutput) -> None:
        """Repeat the drops of a refused plan in the next plan: the runner may have raised before it dropped them."""
        self._to_drop += plan.images_to_drop

    def forget(self) -> None:
        """Drop all features and claims. After a failed step, the runner's features may be incomplete."""
        self._to_drop += [key for key in self._kept if key not in self._to_encode]
        for content in (self._kept, self._num_users, self._unused, self._claimed, self._to_encode):
            content.clear()
        self._num_kept = 0

    def check_integrity(self, running: dict[str, Request]) -> None:
        """Assert the invariants that hold between steps; for tests and debugging."""
        num_users: dict[bytes, int] = {}
        for request_id, (first, end) in self._claimed.items():
            images = running[request_id].images
            assert images is not None and 0 <= first < end <= len(images.images)
            assert images.images[first].stop > running[request_id].num_computed_tokens
            for image in images.images[first:end]:
                num_users[image.content_hash] = num_users.get(image.content_hash, 0) + 1
        assert num_users == self._num_users
        assert self._unused.keys() == self._kept.keys() - num_users.keys()
        assert num_users.keys() <= self._kept.keys()
        assert self._num_kept == sum(self._kept.values()) <= self._capacity
        assert self._to_encode.keys() <= self._kept.keys()


def _between(images: PromptImages, start: int, stop: int) -> tuple[int, int]:
    """Return the index range (first, end) of the images with tokens at positions from ``start`` to ``stop`` - 1."""
    first = bisect_right(images.images, start, key=lambda image: image.stop)
    return first, max(first, bisect_left(images.images, stop, key=lambda image: image.start))


def last_cut(images: PromptImages | None, start: int, stop: int, unit: int) -> int:
    """Return the last position up to ``stop`` where a chunk may end. Return ``start`` if a chunk must end later.

    Args:
        images: images of the prompt, or None.
        start: first position of the chunk, a multiple of ``unit``.
        stop: desired end of the chunk: a multiple of ``unit``, or the end of the prompt.
        unit: unit of chunk sizes in tokens.
    """
    while stop > start and (image := _cut_by(images, stop)) is not None:
        stop = image.start - image.start % unit
    return max(start, stop)


def next_cut(images: PromptImages | None, start: int, unit: int) -> int:
    """Return the first position after ``start`` where a chunk may end. The prompt may end before this position.

    Args:
        images: images of the prompt, or None.
        start: first position of the chunk, a multiple of ``unit``.
        unit: unit of chunk sizes in tokens.
    """
    stop = start + unit
    while (image := _cut_by(images, stop)) is not None:
        stop = -(-image.stop // unit) * unit
    return stop


def _cut_by(images: PromptImages | None, position: int) -> PromptImage | None:
    """Return the bidirectional image that a cut at ``position`` would divide; None if the cut divides no such image."""
    if images is None or not images.bidirectional_layers:
        return None
    index = bisect_right(images.images, position, key=lambda image: image.stop)
    return images.images[index] if index < len(images.images) and images.images[index].start < position else None


def largest_step(images: PromptImages, unit: int) -> int:
    """Return the length in tokens of the longest part of a prompt that no chunk may cut; at least ``unit``."""
    largest = unit
    for image in images.images if images.bidirectional_layers else ():
        start = last_cut(images, 0, image.start - image.start % unit, unit)
        largest = max(largest, next_cut(images, start, unit) - start)
    return largest

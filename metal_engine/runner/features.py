"""Computes the features of images that plans name, and keeps them until a plan drops them."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np

from metal_engine.models.multimodal.encoder import ImageFeatures
from metal_engine.models.multimodal.merging import StepImages
from metal_engine.models.paged_model import PagedModel
from metal_engine.runner.image_rows import ImageRows
from metal_engine.step import SchedulerOutput


class Encoding:
    """Encoding of a step's images, and its duration. The device encodes before it computes the step.

    Args:
        arrays: features of the images, which are being evaluated.
        began: start of the evaluation in seconds of ``time.monotonic``.
    """

    def __init__(self, arrays: list[mx.array], began: float) -> None:
        self._arrays = arrays
        self._began = began
        self._seconds: float | None = None

    def begin(self) -> None:
        """Restart the measurement. Call this when the previous step has ended: the device encodes after that step."""
        self._began = time.monotonic()

    def wait(self) -> float:
        """Wait for the features. Return the duration of the encoding in seconds.

        The duration ends when the first call returns. Later calls return the same number.
        """
        mx.eval(self._arrays)
        if self._seconds is None:
            self._seconds = time.monotonic() - self._began
        return self._seconds


class FeatureCache:
    """Features of images by content hash.

    The plans name the images to encode and the features to drop (``scheduling/image_planner.py``).
    """

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self._features: dict[bytes, ImageFeatures] = {}

    def update(self, plan: SchedulerOutput) -> Encoding | None:
        """Drop the features and encode the images that a plan names. The device encodes while the host builds the step.

        Returns:
            The encoding in flight; None if the plan encodes no image.

        Raises:
            ValueError: the model has no encoder, or the encoder returns another number of features than planned.
        """
        for content_hash in plan.images_to_drop:
            self._features.pop(content_hash, None)
        arrays, began = [], time.monotonic()
        for image in plan.images_to_encode:
            if self._model.images is None:
                raise ValueError("bad plan: the model has no image encoder")
            features = self._model.images.encoder.encode(image.inputs, image.num_features)
            if any(len(array) != image.num_features for array in features.arrays):
                raise ValueError(f"an image has {len(features.embeddings)} features, not {image.num_features}")
            mx.async_eval(features.arrays)
            arrays += features.arrays
            self._features[image.content_hash] = features
        return Encoding(arrays, began) if arrays else None

    def of_step(self, images: ImageRows | None) -> StepImages | None:
        """Return the features of a step's rows; None if no row has features.

        Raises:
            ValueError: the cache has not kept the features of a row.
        """
        if images is None:
            return None
        parts = []
        for content_hash, first, end in images.sources:
            features = self._features.get(content_hash)
            if features is None:
                raise ValueError("bad plan: it computes tokens of an image whose features are not kept")
            parts.append((features, first, end))
        embeddings = mx.concatenate([features.embeddings[first:end] for features, first, end in parts])
        by_layer = [
            mx.concatenate([features.by_layer[layer][first:end] for features, first, end in parts])
            for layer in range(len(parts[0][0].by_layer))
        ]
        return StepImages(mx.array(images.rows), embeddings, tuple(by_layer))

    def kept_of_step(self, images: ImageRows | None) -> StepImages | None:
        """Return the features of a step's rows, without the rows of images whose features are not kept.

        The result is None if all rows are left out.
        """
        if images is None or all(source[0] in self._features for source in images.sources):
            return self.of_step(images)
        ends = np.cumsum([end - first for _, first, end in images.sources])
        kept = [
            (rows, source)
            for rows, source in zip(np.split(images.rows, ends[:-1]), images.sources, strict=True)
            if source[0] in self._features
        ]
        if not kept:
            return None
        return self.of_step(ImageRows(np.concatenate([rows for rows, _ in kept]), tuple(source for _, source in kept)))

    def clear(self) -> None:
        """Drop all features."""
        self._features.clear()

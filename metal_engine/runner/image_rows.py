"""Images and rotary positions of the requests in the runner's table, and their rows in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from metal_engine.kv_cache.rows import ImageSpans, StepRows
from metal_engine.prompt_images import AxesPositions, BidirectionalLayers, PromptImages


@dataclass(frozen=True)
class ImageRows:
    """Rows of a step whose embeddings are features of images.

    Attributes:
        rows: [V] int32, packed rows.
        sources: content hash of an image and the range (first, end) of its features, in the order of ``rows``.
    """

    rows: np.ndarray
    sources: tuple[tuple[bytes, int, int], ...]


class ImageTable:
    """Images of the requests in the runner's table, by the index of the request in that table.

    Args:
        size: number of indices.
    """

    def __init__(self, size: int) -> None:
        self._images: dict[int, PromptImages] = {}
        self._axes: dict[int, AxesPositions] = {}
        # By index: offset of the rotary positions after the prompt, length of a prompt with axes, and position after
        # the last image. Requests past these positions need no work in Python.
        self._deltas, self._axes_stops, self._image_stops = (np.zeros(size, np.int32) for _ in range(3))

    def add(self, index: int, images: PromptImages | None) -> None:
        """Add the images of a request."""
        if images is None:
            return
        self._images[index] = images
        self._image_stops[index] = images.images[-1].stop
        if images.axes is not None:
            self._axes[index] = images.axes
            self._deltas[index], self._axes_stops[index] = images.axes.delta, images.axes.prompt.shape[1]

    def remove(self, index: int) -> None:
        """Remove the images of a request, if there are any."""
        if self._images.pop(index, None) is not None:
            self._axes.pop(index, None)
            self._deltas[index] = self._axes_stops[index] = self._image_stops[index] = 0

    def __bool__(self) -> bool:
        return bool(self._images)

    def rotary_positions(self, indices: np.ndarray, rows: StepRows) -> np.ndarray | None:
        """Return rotary positions for the rows of a step, [N] int32, or [3, N] if the axes of some row differ.

        Return None if no request of the table has positions on axes. The rotary positions then equal
        ``rows.positions``.

        Args:
            indices: [B], index of each request of the step.
        """
        if not self._axes:
            return None
        positions = rows.positions + self._deltas[indices][rows.request_of_row]
        within = np.flatnonzero(rows.context_lens < self._axes_stops[indices])
        if not len(within):
            return positions
        axes = np.repeat(positions[None], 3, axis=0)
        for request in within.tolist():
            own = self._axes[int(indices[request])].at(int(rows.context_lens[request]), int(rows.seq_lens[request]))
            axes[:, rows.cu_seqlens_q[request] : rows.cu_seqlens_q[request + 1]] = own
        return axes if (axes[1:] != axes[0]).any() else axes[0]

    def add_to_rows(self, indices: np.ndarray, rows: StepRows) -> StepRows:
        """Return the rows of a step with their rotary positions and the spans of images.

        Args:
            indices: [B], index of each request of the step.
        """
        positions = self.rotary_positions(indices, rows)
        return replace(rows, rotary_positions=positions, image_spans=self.spans(indices, rows))

    def spans(self, indices: np.ndarray, rows: StepRows) -> ImageSpans | None:
        """Return the spans of rows that attend to later rows of their image; None if there are none.

        Args:
            indices: [B], index of each request of the step.

        Raises:
            ValueError: the step has only a part of an image whose tokens attend to each other.
        """
        found = []
        bidirectional_layers: BidirectionalLayers = ""
        for request in np.flatnonzero(rows.context_lens < self._image_stops[indices]).tolist():
            images = self._images[int(indices[request])]
            if not images.bidirectional_layers:
                continue
            start, stop = int(rows.context_lens[request]), int(rows.seq_lens[request])
            offset = int(rows.cu_seqlens_q[request]) - start
            for image in images.images:
                if image.start < stop and image.stop > start:
                    if image.start < start or image.stop > stop:
                        raise ValueError("bad plan: it cuts an image whose tokens attend to each other")
                    found.append((image.start + offset, image.stop + offset))
                    bidirectional_layers = image.bidirectional_layers
        return ImageSpans(np.array(found, np.int32), bidirectional_layers) if found else None

    def rows(self, indices: np.ndarray, rows: StepRows, ahead: int = 0) -> ImageRows | None:
        """Return the rows of a step with features of images; None if there are none.

        Args:
            indices: [B], index of each request of the step.
            ahead: distance in tokens from a row to the token whose feature is returned. 0 is the row's own token, and 1
                is the token after it.
        """
        found, sources = [], []
        for request in np.flatnonzero(rows.context_lens + ahead < self._image_stops[indices]).tolist():
            start, stop = int(rows.context_lens[request]) + ahead, int(rows.seq_lens[request]) + ahead
            for image in self._images[int(indices[request])].images:
                first, end = image.features_in(start, stop)
                if first < end:
                    found.append(image.positions[first:end] + (rows.cu_seqlens_q[request] - start))
                    sources.append((image.content_hash, first, end))
        return ImageRows(np.concatenate(found).astype(np.int32), tuple(sources)) if found else None

"""Images of requests for one model: from their files to the placeholders in the prompt."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from metal_engine.errors import PromptError
from metal_engine.media.decoder_client import ImageDecoder, ImageError, check_size
from metal_engine.media.families.base import Grid, ImageProcessorFamily
from metal_engine.media.families.find import find_family
from metal_engine.media.limits import MAX_IMAGES, MAX_TOTAL_BYTES
from metal_engine.media.newlines import NewlineJoiner
from metal_engine.media.sources import Detail, ImageSource, SourceError
from metal_engine.media.store import ImageStore, LoadedImage, size_of
from metal_engine.prompt_images import AxesPositions, PromptImage, PromptImages
from metal_engine.settings.config import VisionConfig

# Time limit for the start of each download of a request's images, in seconds since the first. The last download may end
# later.
_DOWNLOAD_SECONDS = 30.0


class ImagePreparer:
    """Loads images and inserts them into prompts. Thread-safe.

    Args:
        vision: configuration of the model.
        encode: encodes a text within a prompt to token ids.
    """

    def __init__(self, vision: VisionConfig, encode: Callable[[str], list[int]]) -> None:
        self._family: ImageProcessorFamily = find_family(vision, vision.max_image_tokens)
        self._image_token_id = vision.image_token_id
        own = vision.placeholder_token_id
        self._placeholder_id = vision.image_token_id if own is None else own
        self._bidirectional_layers = vision.bidirectional_layers
        self._encode = encode
        self._newlines = NewlineJoiner(encode)
        self._decoder = ImageDecoder(vision)
        self._store = ImageStore()

    def load(
        self,
        sources: Sequence[ImageSource],
        *,
        allowed_domains: Sequence[str] = (),
        allows_files: bool = False,
        max_tokens: int,
    ) -> list[LoadedImage]:
        """Read and decode the images of a request, as :meth:`read` and :meth:`decode` do."""
        files = self.read(sources, allowed_domains=allowed_domains, allows_files=allows_files)
        details = [source.detail for source in sources]
        return self.decode(files, details, max_tokens=max_tokens)

    @staticmethod
    def read(
        sources: Sequence[ImageSource], *, allowed_domains: Sequence[str] = (), allows_files: bool = False
    ) -> list[bytes]:
        """Return the content of each image file of a request.

        Args:
            sources: images of the request.
            allowed_domains: hosts from which files may be downloaded.
            allows_files: True to read files on this machine.

        Raises:
            ImageError: a file cannot be read, there are too many files, or all files together are too large or take too
                long to download.
            Cancelled: the request was cancelled.
        """
        if len(sources) > MAX_IMAGES:
            raise ImageError(MAX_IMAGES, f" is one too many: a request may have {MAX_IMAGES} images")
        files: list[bytes] = []
        num_bytes, deadline = 0, time.monotonic() + _DOWNLOAD_SECONDS
        for i, source in enumerate(sources):
            if time.monotonic() > deadline:
                raise ImageError(i, f": the images of a request must be downloaded within {_DOWNLOAD_SECONDS:g} s")
            try:
                files.append(source.read(allowed_domains, allows_files=allows_files))
            except SourceError as error:
                raise ImageError(i, str(error)) from error
            num_bytes += len(files[-1])
            if num_bytes > MAX_TOTAL_BYTES:
                raise ImageError(i, f" and the images before it have more than {MAX_TOTAL_BYTES >> 20} MiB")
        return files

    def decode(self, files: Sequence[bytes], details: Sequence[Detail], *, max_tokens: int) -> list[LoadedImage]:
        """Decode the images of a request. Files whose images are in the store are not decoded again.

        Args:
            files: contents of image files.
            details: ``high`` or ``low`` for each file.
            max_tokens: maximum number of tokens of all images together. If they have more, some images have no inputs.
                0 if only the numbers of tokens are needed.

        Raises:
            ImageError: an image cannot be used.
            OverloadedError: the images of all requests take too much memory, or no process can be started.
            Cancelled: the request was cancelled.
        """
        keys = [_file_hash(data, detail) for data, detail in zip(files, details, strict=True)]
        found: dict[bytes, LoadedImage] = {}
        missing: dict[bytes, int] = {}  # file -> index of the first image with it
        for i, key in enumerate(keys):
            known = self._store.find(key)
            if known is None or (max_tokens and known.inputs is None):
                missing.setdefault(key, i)
            else:
                found[key] = known
        if missing:
            places = list(missing.values())
            num_known = sum(self._family.num_tokens(found[key].grid) for key in keys if key in found)
            try:
                decoded = self._decoder.decode(
                    [files[i] for i in places], [details[i] for i in places], max_tokens=max_tokens - num_known
                )
            except ImageError as error:
                raise ImageError(places[error.index], error.message) from error
            for key, one in zip(missing, decoded, strict=True):
                found[key] = self._store.add(key, LoadedImage(one.content_hash, one.grid, one.inputs))
        images = [found[key] for key in keys]
        sizes: dict[bytes, int] = {}
        for i, image in enumerate(images):
            sizes[image.content_hash] = size_of(image.inputs or {})
            check_size(i, sizes)
        return images

    def insert(self, token_ids: list[int], images: Sequence[LoadedImage]) -> tuple[list[int], PromptImages]:
        """Replace the placeholders of a prompt by the tokens of its images.

        Args:
            token_ids: prompt with one placeholder for each image.
            images: images in the order of their placeholders.

        Returns:
            Token ids of the prompt, and its images. Images without inputs have no entries in ``inputs``.

        Raises:
            PromptError: the number of placeholders in the prompt differs from the number of images.
        """
        given = np.array(token_ids, np.int64)
        places = np.flatnonzero(given == self._placeholder_id)
        if len(places) != len(images):
            raise PromptError(
                f"the chat template wrote {len(places)} images instead of {len(images)}: the model takes no images in "
                "some of these messages"
            )
        pieces = np.split(given, [edge for place in places.tolist() for edge in (place, place + 1)])
        all_features = []
        for i, image in enumerate(images):
            pieces[2 * i + 1], features = self._tokens(image.grid)
            all_features.append(features)
        if self._family.joins_newlines:
            self._newlines.join(pieces)
        inserted = []
        spans: list[tuple[int, Grid]] = []  # position of the first feature, and grid
        starts = np.cumsum([0, *map(len, pieces)])
        for i, (image, features) in enumerate(zip(images, all_features, strict=True)):
            offset = starts[2 * i + 1]
            positions = (features + offset).astype(np.int32)
            inputs = dict(image.inputs or {})
            inserted.append(PromptImage(positions, image.content_hash, inputs, self._bidirectional_layers))
            spans.append((int(positions[0]), image.grid))
        whole = np.concatenate(pieces)
        axes = self._axes(len(whole), spans) if self._family.has_axes else None
        return whole.tolist(), PromptImages(tuple(inserted), axes)

    def _tokens(self, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids that replace a placeholder, and the indices of the feature tokens among them."""
        ids: list[np.ndarray] = []
        for segment in self._family.segments(grid):
            if isinstance(segment, int):
                ids.append(np.full(segment, self._image_token_id, np.int64))
            else:
                ids.append(np.array(self._encode(segment), np.int64))
        whole = np.concatenate(ids)
        return whole, np.flatnonzero(whole == self._image_token_id)

    def _axes(self, num_tokens: int, spans: list[tuple[int, Grid]]) -> AxesPositions:
        """Return the positions of a prompt's tokens on the axes time, height and width (M-RoPE), [3, num_tokens] int32.

        A token of an image has the position of the image's first token, plus its place in the image on each axis. The
        text after the image continues at the largest position of the image plus 1.

        Args:
            num_tokens: number of tokens of the prompt.
            spans: for each image, the position of its first feature token in the prompt, and its grid.
        """
        positions = np.empty((3, num_tokens), np.int32)
        at = following = 0
        for start, grid in spans:
            positions[:, at:start] = np.arange(following, following + start - at)
            following += start - at
            lengths = self._family.axes(grid)
            places = np.indices(lengths).reshape(3, -1)
            at = start + places.shape[1]
            positions[:, start:at] = following + places
            following += max(lengths)
        positions[:, at:] = np.arange(following, following + num_tokens - at)
        return AxesPositions(positions, following - at)

    def close(self) -> None:
        """End the process that decodes images."""
        self._decoder.close()


def _file_hash(data: bytes, detail: Detail) -> bytes:
    hasher = hashlib.sha256(detail.encode())
    hasher.update(data)
    return hasher.digest()

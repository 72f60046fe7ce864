"""Loads the images of requests in the server's threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from metal_engine.errors import OverloadedError, PromptError
from metal_engine.media.decoder import ImageError
from metal_engine.media.processing import ImageProcessing, LoadedImage
from metal_engine.media.sources import ImageSource
from metal_engine.server.errors import invalid
from metal_engine.server.generation.admission import overloaded
from metal_engine.server.workers import Weight

if TYPE_CHECKING:
    from metal_engine.server.generation.preparation import ServedModel


async def load_images(served: ServedModel, sources: Sequence[ImageSource], num_bytes: int) -> list[LoadedImage]:
    """Return the images of a request, in order.

    Args:
        num_bytes: size of the request's body in bytes.

    Raises:
        APIError: status 400 with the place of the image that cannot be used, or 503 if too many requests wait.
    """
    if not sources:
        return []
    processing = _processing(served, sources)
    max_tokens = served.engine.config.scheduler.max_model_len
    details = [source.detail for source in sources]

    def decode(files: list[bytes]) -> list[LoadedImage]:
        with _errors_as_api_errors(sources):
            return processing.decode(files, details, max_tokens=max_tokens)

    files = await _read(served, processing, sources, num_bytes)
    return await served.workers.run(Weight.COMPILING, decode, files)


async def with_image_tokens(
    served: ServedModel, sources: Sequence[ImageSource], num_bytes: int, token_ids: list[int]
) -> list[int]:
    """Return the token ids of a prompt with the tokens of its images. Raises as :func:`load_images`."""
    if not sources:
        return token_ids
    processing = _processing(served, sources)
    details = [source.detail for source in sources]

    def insert(files: list[bytes]) -> list[int]:
        with _errors_as_api_errors(sources):
            images = processing.decode(files, details, max_tokens=0)
            return processing.insert(token_ids, images)[0]

    files = await _read(served, processing, sources, num_bytes)
    return await served.workers.run(Weight.COMPILING, insert, files)


async def _read(
    served: ServedModel, processing: ImageProcessing, sources: Sequence[ImageSource], num_bytes: int
) -> list[bytes]:
    def read() -> list[bytes]:
        with _errors_as_api_errors(sources):
            return processing.read(sources, allowed_domains=served.allowed_media_domains)

    # Decoding waits for another process, and a download for another server, so both have threads of their own.
    is_download = any(source.is_download for source in sources)
    return await served.workers.run(Weight.COMPILING if is_download else Weight.of(num_bytes), read)


def _processing(served: ServedModel, sources: Sequence[ImageSource]) -> ImageProcessing:
    processing = served.engine.preparer.images
    if processing is None:
        refusal = served.engine.config.model.image_refusal
        raise invalid(f": images are not supported: {refusal}", where=sources[0].place)
    return processing


@contextmanager
def _errors_as_api_errors(sources: Sequence[ImageSource]) -> Iterator[None]:
    """Within this context, convert errors to an APIError that names the image."""
    try:
        yield
    except ImageError as error:
        raise invalid(error.message, where=sources[error.index].place) from error
    except PromptError as error:
        raise invalid(f": {error}", where="messages") from error
    except OverloadedError as error:
        raise overloaded(str(error)) from error

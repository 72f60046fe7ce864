"""Loads the images of requests in the server's threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from metal_engine.errors import OverloadedError, PromptError
from metal_engine.media.decoder_client import ImageError
from metal_engine.media.image_preparer import ImagePreparer, LoadedImage
from metal_engine.media.sources import ImageSource
from metal_engine.server.errors import invalid
from metal_engine.server.generation.queue_limit import overloaded
from metal_engine.server.workers import Weight

if TYPE_CHECKING:
    from metal_engine.server.generation.preparation import ServedModel


async def load_images(
    served: ServedModel, sources: Sequence[ImageSource], weight: Weight, *, max_tokens: int | None = None
) -> list[LoadedImage]:
    """Return the images of a request, in order.

    Args:
        weight: weight of the request's body (:meth:`Weight.of`). It selects the threads that decode base64.
        max_tokens: maximum number of tokens of all images. None for the context length. 0 if only the numbers of tokens
            are needed, as in :meth:`ImagePreparer.decode`.

    Raises:
        APIError: status 400 if the model takes no images or an image cannot be used. Its message begins with the path
            of the image in the body. Status 503 if too many requests load images, or their images take too much memory.
    """
    if not sources:
        return []
    preparer, workers = _image_preparer(served, sources), served.workers
    most = served.engine.config.scheduler.max_model_len if max_tokens is None else max_tokens
    with _errors_as_api_errors(sources), workers.loading_images():
        # Decoding base64 takes this process's time. Downloads wait for other servers.
        is_download = any(source.is_download for source in sources)
        read = partial(preparer.read, sources, allowed_domains=served.allowed_media_domains)
        files = await workers.run(Weight.IMAGES if is_download else weight, read)
        details = [source.detail for source in sources]
        return await workers.run(Weight.IMAGES, partial(preparer.decode, files, details, max_tokens=most))


async def with_image_tokens(
    served: ServedModel, sources: Sequence[ImageSource], weight: Weight, token_ids: list[int]
) -> list[int]:
    """Return the prompt ``token_ids``, with each placeholder replaced by the tokens of its image.

    Raises as :func:`load_images`, and also APIError, a 400, if the number of placeholders is wrong.
    """
    if not sources:
        return token_ids
    images = await load_images(served, sources, weight, max_tokens=0)
    with _errors_as_api_errors(sources):
        insert = _image_preparer(served, sources).insert
        return (await served.workers.run(weight, insert, token_ids, images))[0]


def _image_preparer(served: ServedModel, sources: Sequence[ImageSource]) -> ImagePreparer:
    preparer = served.engine.preparer.images
    if preparer is None:
        refusal = served.engine.config.model.image_refusal
        raise invalid(f": images are not supported: {refusal}", where=sources[0].place)
    return preparer


@contextmanager
def _errors_as_api_errors(sources: Sequence[ImageSource]) -> Iterator[None]:
    """Within this context, convert errors of loading and inserting images to an APIError.

    ImageError becomes status 400, with the path of the image in the body. PromptError becomes status 400 about
    ``messages``. OverloadedError becomes status 503.
    """
    try:
        yield
    except ImageError as error:
        raise invalid(error.message, where=sources[error.index].place) from error
    except PromptError as error:
        raise invalid(f": {error}", where="messages") from error
    except OverloadedError as error:
        raise overloaded(str(error)) from error

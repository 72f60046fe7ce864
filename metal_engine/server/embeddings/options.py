"""Checks the fields that all pooling endpoints share."""

from __future__ import annotations

from metal_engine.request import RequestOptions
from metal_engine.server.embeddings.protocol import PoolingBody
from metal_engine.server.generation.preparation import ServedModel


async def checked_options(served: ServedModel, body: PoolingBody, num_bytes: int) -> RequestOptions:
    """Check the request's parameters and return the options for the engine.

    Raises:
        APIError: status 400, for a parameter that would change the response.
    """
    await served.workers.run_if_large(num_bytes, served.parameters.check, body)
    return RequestOptions(priority=body.priority or 0, cache_salt=body.cache_salt or "")

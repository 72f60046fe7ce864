"""What the bodies of pooling endpoints have in common, checked."""

from __future__ import annotations

from metal_engine.request import RequestOptions
from metal_engine.server.embeddings.protocol import PoolingBody
from metal_engine.server.generation.preparation import ServedModel


async def checked_options(served: ServedModel, body: PoolingBody, num_bytes: int) -> RequestOptions:
    """How to serve a request, once its parameters have been judged.

    Raises:
        APIError: 400 for a parameter that would change the answer.
    """
    await served.workers.run_if_large(num_bytes, served.parameters.check, body)
    return RequestOptions(priority=body.priority or 0, cache_salt=body.cache_salt or "")

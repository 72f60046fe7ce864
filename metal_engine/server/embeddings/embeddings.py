"""``/v1/embeddings``: computes vectors for the inputs, and encodes them as JSON."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np

from metal_engine.cancellation import check_cancelled
from metal_engine.server.embeddings.pooling import MAX_VALUES, Pooled, PoolingRequest, embed
from metal_engine.server.embeddings.protocol import EmbeddingBody, EmbeddingList, PoolingUsage
from metal_engine.server.errors import APIError
from metal_engine.server.json_parts import JSONParts
from metal_engine.server.workers import Weight

# Maximum number of vector elements in a response with JSON numbers. They take 26 MiB, and twice as much while the
# response is assembled.
MAX_NUMBERS = 1 << 21
# Maximum number of vector elements to encode in the event loop, which takes 5 ms.
FEW = 1 << 14


def numbers(vector: np.ndarray) -> bytes:
    """Encode a float32 vector as a JSON array. The nine digits of each number restore its float32 value exactly."""
    return b"[" + ",".join(["%.9g"] * len(vector)).encode() % tuple(vector.tolist()) + b"]"


async def create_embeddings(pooling: PoolingRequest, body: EmbeddingBody) -> bytes:
    """Return the response of ``/v1/embeddings`` as JSON. Raises as :func:`embed`, and as :func:`vectors_json`."""
    as_base64 = body.encoding_format == "base64"
    pooled = await embed(
        pooling,
        _inputs(body),
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        max_values=MAX_VALUES if as_base64 else MAX_NUMBERS,
    )
    served = pooling.served
    if sum(vector.size for vector in pooled.vectors) <= FEW:
        return _encoded(served.names[0], pooled, as_base64)
    return await served.workers.run(Weight.HEAVY, _encoded, served.names[0], pooled, as_base64)


def _inputs(body: EmbeddingBody) -> list[str | list[int]]:
    """Return the body's input, which has one of four forms, as a list of texts or lists of token ids."""
    given = body.input
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    return cast(list[str | list[int]], [given] if is_one else given)


def vectors_json(pooled: Pooled, write: Callable[[np.ndarray], bytes] = numbers) -> Iterator[bytes]:
    """Yield each vector as JSON. Call it in a thread if there are more than :data:`FEW` numbers.

    Args:
        write: function that encodes a vector.

    Raises:
        APIError: status 500, for a vector that contains NaN or infinity.
        Cancelled: the client has disconnected.
    """
    for index, vector in enumerate(pooled.vectors):
        check_cancelled()
        if not np.isfinite(vector).all():
            raise APIError(
                500, f"the vector of input {index} has values that are not numbers", code="generation_failed"
            )
        yield write(vector)


def _encoded(model: str, pooled: Pooled, as_base64: bool) -> bytes:
    entries = [
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, json)
        for index, json in enumerate(vectors_json(pooled, _base64 if as_base64 else numbers))
    ]
    parts = JSONParts()
    answer = EmbeddingList(
        id=pooled.request_id,
        created=int(time.time()),
        model=model,
        data=parts.add(b"[" + b",".join(entries) + b"]"),
        usage=PoolingUsage(prompt_tokens=pooled.num_prompt_tokens, total_tokens=pooled.num_prompt_tokens),
    )
    del entries
    return parts.encode(answer)


def _base64(vector: np.ndarray) -> bytes:
    return b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"'

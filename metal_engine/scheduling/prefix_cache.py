"""Prefix cache: finds cached blocks for the prefix of a request, and publishes the request's own full blocks.

The K and V of a block depend on its tokens and on all tokens before them. A block's hash therefore covers its tokens,
the parts of images in it, and the hash of the previous block. The hash chain starts with everything else that
determines K and V (model, LoRA adapter), and with the salt that isolates tenants. The hash is SHA-256, because a client
that could construct a collision could read the KV of another tenant.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise

import numpy as np

from metal_engine.kv_transfer.scheduler_side import Missing
from metal_engine.lora_adapter import Adapter
from metal_engine.prompt_images import PromptImages
from metal_engine.request import Request
from metal_engine.scheduling.block_manager import Block, BlockManager
from metal_engine.scheduling.image_planner import last_cut
from metal_engine.scheduling.state_slots import StateSlots
from metal_engine.settings.config import CacheConfig


@lru_cache(maxsize=64)  # the prompts and outputs of a request use the same root
def root_hash(model_fingerprint: str, cache_salt: str, adapter_fingerprint: str = "") -> bytes:
    """Return the root of all hash chains of one model, salt and LoRA adapter.

    An empty ``adapter_fingerprint`` means no adapter.
    """
    salt = cache_salt.encode("utf-8", "surrogatepass")
    adapter = adapter_fingerprint.encode()
    # Each part is hashed separately, so that a salt cannot imitate part of the fingerprint.
    parts = [model_fingerprint.encode(), salt, *([adapter] if adapter else [])]
    return sha256(b"".join(sha256(part).digest() for part in parts)).digest()


def extend_block_hashes(request: Request, block_size: int, model_fingerprint: str) -> list[bytes]:
    """Extend ``request.block_hashes`` in place to all full blocks of the request's known tokens. Return the list."""
    hashes = request.block_hashes
    root = model_fingerprint, request.cache_salt, _fingerprint(request.adapter)
    _extend(hashes, request.token_ids, block_size, root, request.images)
    return hashes


def _fingerprint(adapter: Adapter | None) -> str:
    return "" if adapter is None else adapter.fingerprint


def prompt_block_hashes(
    prompt: list[int],
    config: CacheConfig,
    cache_salt: str,
    adapter: Adapter | None = None,
    images: PromptImages | None = None,
) -> list[bytes]:
    """Return the hashes of a prompt's full blocks; empty if prefix caching is disabled.

    Call it outside the engine thread: it takes 70 ms for a million tokens. The ``n`` outputs of one API request share
    the result.
    """
    hashes: list[bytes] = []
    if config.enable_prefix_caching:
        root = config.model_fingerprint, cache_salt, _fingerprint(adapter)
        _extend(hashes, prompt, config.block_size, root, images)
    return hashes


def _extend(
    hashes: list[bytes], token_ids: list[int], block_size: int, root: tuple[str, str, str], images: PromptImages | None
) -> None:
    """Append the hashes of newly filled blocks. ``root`` holds the arguments of :func:`root_hash`."""
    parent = hashes[-1] if hashes else root_hash(*root)
    parts = {} if images is None else _image_parts(images, block_size, len(hashes))
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        content = array("i", token_ids[end - block_size : end]).tobytes()
        if parts:
            content += parts.get(end // block_size - 1, b"")
        parent = sha256(parent + content).digest()
        hashes.append(parent)


def _image_parts(images: PromptImages, block_size: int, first_block: int) -> dict[int, bytes]:
    """Return bytes that identify the image tokens in each block from ``first_block`` on, by block index.

    A block's hash includes these bytes, because all images have the same placeholder tokens. The bytes consist of the
    image's hash, the range of its features in the block, and their positions within the block.
    """
    parts: dict[int, bytes] = {}
    for image in images.images:
        if image.stop <= first_block * block_size:
            continue
        blocks = image.positions // block_size
        starts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
        for first, end in pairwise(starts):
            block = int(blocks[first])
            places = (image.positions[first:end] - block * block_size).tobytes()
            part = sha256(image.content_hash).digest() + array("i", [first, end]).tobytes() + places
            parts[block] = parts.get(block, b"") + part
    return parts


def _common_length(a: list[bytes], b: list[bytes]) -> int:
    """Return the length of the common prefix of two hash chains. Chains that diverge do not agree again."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])


class PrefixCache:
    """Finds and publishes shared prefixes in a block manager's pool.

    Full blocks are published once the step that fills them is planned, for use in later steps. Steps run in the order
    of their planning. A later step therefore finds the blocks written, even if the step that fills them is still in
    flight when the later step is planned. A block cannot be shared within the step that fills it. Sharing it would
    require every attention backend to write all rows of a layer before it computes attention.

    Args:
        blocks: block pool.
        config: whether prefix caching is enabled, and the model's fingerprint.
        slots: state checkpoints. In models with recurrent layers, a prefix without a state checkpoint cannot be used.
        on_publish: callback ``(request, start, stop)`` after blocks ``start`` to ``stop - 1`` of a running request were
            published. None: no callback.
    """

    def __init__(
        self,
        blocks: BlockManager,
        config: CacheConfig,
        slots: StateSlots,
        on_publish: Callable[[Request, int, int], None] | None = None,
    ) -> None:
        self.is_enabled = config.enable_prefix_caching
        self._blocks = blocks
        self._slots = slots
        self._block_size = config.block_size
        self._model_fingerprint = config.model_fingerprint
        self._on_publish = on_publish

    def find(
        self, request: Request, also: Container[bytes] = (), also_state: bytes | None = None
    ) -> list[Block | None]:
        """Return the cached blocks that a waiting request can start with.

        The blocks exclude the request's last token, and do not end within an image whose tokens attend to each other.
        For models with recurrent layers, the blocks end at a state checkpoint or at ``also_state``.

        Args:
            also: hashes of blocks that are available outside the pool. The result contains None for such a block.
            also_state: hash of the last block of a prefix whose recurrent state has arrived from a store; None if there
                is no such state.
        """
        found = self._find_blocks(request, also)
        if not self._slots.num_slots:
            return found
        hashes = request.block_hashes[: len(found)]
        num_elsewhere = hashes.index(also_state) + 1 if also_state in hashes else 0
        return found[: max(self._slots.longest(hashes, len(found)), num_elsewhere)]

    def num_shared(self, request: Request) -> int:
        """Return how many leading tokens of a waiting request have KV in the pool, even without a state checkpoint.

        Always 0 for models without recurrent layers, which do not use the result.
        """
        return len(self._find_blocks(request)) * self._block_size if self._slots.num_slots else 0

    def _find_blocks(self, request: Request, also: Container[bytes] = ()) -> list[Block | None]:
        hashes = self._usable_hashes(request)
        found = self._blocks.find_cached(hashes, (request.num_tokens - 1) // self._block_size, also)
        stop = last_cut(request.images, 0, len(found) * self._block_size, self._block_size)
        return found[: stop // self._block_size]

    def missing(self, request: Request) -> Missing:
        """Return the parts of a waiting request's KV and recurrent state that the local cache lacks."""
        hashes = self._usable_hashes(request)[: (request.num_tokens - 1) // self._block_size]
        blocks = [block_hash for block_hash in hashes if not self._blocks.is_cached(block_hash)]
        if not self._slots.num_slots:
            return Missing((), blocks)
        prefix = hashes[: hashes.index(blocks[0]) if blocks else None]
        # A producer of the same prompt writes a state checkpoint after this many blocks (`RecurrentStates`).
        wanted = min(request.num_lasting_tokens, request.num_tokens - 1) // self._block_size
        has_state = self._slots.longest(hashes, len(hashes)) >= min(wanted, len(hashes))
        return Missing(prefix, blocks, not has_state, wanted)

    def _usable_hashes(self, request: Request) -> list[bytes]:
        if not self.is_enabled or request.skip_reading_prefix_cache:
            return []
        return extend_block_hashes(request, self._block_size, self._model_fingerprint)

    def find_owner(
        self, request: Request, num_cached_tokens: int, prefills: Iterable[Request]
    ) -> tuple[Request, int] | None:
        """Return a running prefill that will compute at least half of ``request``'s remaining tokens.

        Also return the length of their common prefix in tokens, in full blocks. The result is None in these cases:

        - There is no such prefill.
        - Prefix caching is disabled.
        - The request cannot use cached prefixes (:attr:`Request.skip_reading_prefix_cache`).
        """
        if not self.is_enabled or request.skip_reading_prefix_cache:
            return None
        hashes = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
        for owner in prefills:
            num_common = self._block_size * _common_length(hashes, owner.block_hashes)
            saved = num_common - num_cached_tokens
            if 2 * saved >= request.num_tokens - num_cached_tokens and owner.num_computed_tokens < num_common:
                return owner, num_common
        return None

    def publish(self, request: Request) -> None:
        """Publish the full blocks of a running request, as far as their tokens are known.

        Excludes the last token of a request with a grammar: it may be recomputed (:attr:`ModelOutput.late_req_ids`).
        """
        if not self.is_enabled:
            return
        num_known = request.num_tokens - (request.rules.grammar is not None)
        num_full = min(request.num_computed_tokens, num_known) // self._block_size
        if num_full > request.num_registered_blocks:
            hashes = extend_block_hashes(request, self._block_size, self._model_fingerprint)
            self._blocks.register(request.request_id, hashes, request.num_registered_blocks, num_full)
            if self._on_publish is not None:
                self._on_publish(request, request.num_registered_blocks, num_full)
            request.num_registered_blocks = num_full

    def forget(self) -> None:
        """Drop all cached prefixes and state checkpoints. After a failed step, their contents may be wrong."""
        self._blocks.forget_cached()
        self._slots.forget()

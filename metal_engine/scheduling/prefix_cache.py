"""Shared prefixes: which blocks a request can begin with, and when its own can be shared.

A block's K and V depend on its tokens and on every token before them. So its hash covers its tokens and the hash
of the block before it; the chain begins with what else K and V depend on (the model, an adapter) and with the salt that
keeps tenants apart. SHA-256, because whoever could make two prefixes collide would read someone else's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from hashlib import sha256

from metal_engine.kv_transfer.scheduler_side import Missing
from metal_engine.lora_adapter import Adapter
from metal_engine.request import Request
from metal_engine.scheduling.block_manager import Block, BlockManager
from metal_engine.scheduling.state_slots import StateSlots
from metal_engine.settings.config import CacheConfig


@lru_cache(maxsize=64)  # the prompts and the outputs of a request share theirs
def root_hash(model_fingerprint: str, cache_salt: str, adapter_fingerprint: str = "") -> bytes:
    """Returns the hash with which the chains of one model, one salt and one adapter, or none, begin."""
    salt = cache_salt.encode("utf-8", "surrogatepass")
    adapter = adapter_fingerprint.encode()
    # Hashed apart, so that no salt can pretend to be part of the fingerprint.
    parts = [model_fingerprint.encode(), salt, *([adapter] if adapter else [])]
    return sha256(b"".join(sha256(part).digest() for part in parts)).digest()


def extend_block_hashes(request: Request, block_size: int, model_fingerprint: str) -> list[bytes]:
    """Bring ``request.block_hashes`` up to date with its tokens, hashing only blocks that filled up since."""
    hashes = request.block_hashes
    root = model_fingerprint, request.options.cache_salt, _fingerprint(request.adapter)
    _extend(hashes, request.token_ids, block_size, root)
    return hashes


def _fingerprint(adapter: Adapter | None) -> str:
    return "" if adapter is None else adapter.fingerprint


def prompt_block_hashes(
    prompt: list[int], config: CacheConfig, cache_salt: str, adapter: Adapter | None = None
) -> list[bytes]:
    """Returns the hashes of a prompt's full blocks; none if prefixes are not shared.

    A step must not wait for this: it takes 70 ms for a million tokens, and the outputs of a request share it.
    """
    hashes: list[bytes] = []
    if config.enable_prefix_caching:
        root = config.model_fingerprint, cache_salt, _fingerprint(adapter)
        _extend(hashes, prompt, config.block_size, root)
    return hashes


def _extend(hashes: list[bytes], token_ids: list[int], block_size: int, root: tuple[str, str, str]) -> None:
    """Append the hashes of blocks that filled up; ``root`` is what :func:`root_hash` takes."""
    parent = hashes[-1] if hashes else root_hash(*root)
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        parent = sha256(parent + array("i", token_ids[end - block_size : end]).tobytes()).digest()
        hashes.append(parent)


def _common_length(a: list[bytes], b: list[bytes]) -> int:
    """Returns how many hashes two chains share: they agree up to a point and differ from there on."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])


class PrefixCache:
    """Finds and publishes shared prefixes in a block manager's pool.

    Full blocks are published when a step has been planned, for the steps after it: steps run in the order they
    were planned, so a later one finds the blocks written even if it is planned before this one has run. The same
    step does not share them; that would hang on every backend writing all rows of a layer before it attends.

    Args:
        blocks: the pool.
        config: whether prefixes are shared, and the model's fingerprint.
        slots: checkpoints of recurrent states, for models that have such: a prefix without one is of no use.
        on_publish: called with a request and the range of its blocks that have just been published.
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
        """Returns the cached blocks that a waiting request can begin with; leaves one token to compute at least.

        Args:
            also: hashes of blocks that are at hand elsewhere; None stands for those.
            also_state: hash of the block for the end of which a recurrent state is at hand elsewhere.
        """
        found = self._find_blocks(request, also)
        if not self._slots.num_slots:
            return found
        hashes = request.block_hashes[: len(found)]
        num_elsewhere = hashes.index(also_state) + 1 if also_state in hashes else 0
        return found[: max(self._slots.longest(hashes, len(found)), num_elsewhere)]

    def num_shared(self, request: Request) -> int:
        """Returns how many tokens of a waiting request are cached, with a recurrent state for the last or without.

        Asked only where there are such states: 0 for other models.
        """
        return len(self._find_blocks(request)) * self._block_size if self._slots.num_slots else 0

    def _find_blocks(self, request: Request, also: Container[bytes] = ()) -> list[Block | None]:
        hashes = self._usable_hashes(request)
        return self._blocks.find_cached(hashes, (request.num_tokens - 1) // self._block_size, also)

    def missing(self, request: Request) -> Missing:
        """Returns what a waiting request could begin with and is not cached."""
        hashes = self._usable_hashes(request)[: (request.num_tokens - 1) // self._block_size]
        blocks = [block_hash for block_hash in hashes if not self._blocks.is_cached(block_hash)]
        if not self._slots.num_slots:
            return Missing((), blocks)
        prefix = hashes[: hashes.index(blocks[0]) if blocks else None]
        # Where a request leaves a state for the next one (`RequestStates`).
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
        """Returns a prefill that is about to compute at least half of what ``request`` has to, and up to which token.

        None if there is none, or if the request must compute every token itself.
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
        """Let requests share the running ``request``'s full blocks, as far as their tokens are known.

        The last token of one with a grammar may be computed again (:attr:`ModelOutput.late_req_ids`).
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
        """Forget everything: after a step that failed, blocks may not hold what they should."""
        self._blocks.forget_cached()
        self._slots.forget()

"""What KV transfer has done: one object that its threads count in and that metrics read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class KVTransferStats:
    """Counts since the start. Thread-safe to add to; a reader sees each count whole.

    Attributes:
        loads_started: requests for which the store was asked.
        loads_timed_out: of those, given up at the deadline; what had arrived by then was used.
        loads_failed: of those, ended by an error of the store or a corrupt block.
        loads_deferred: of those, that had to wait for host memory.
        loads_skipped: requests for which a store that had failed lately was not asked.
        states_loaded: recurrent states that went from the store into their slots.
        blocks_loaded: blocks that went from the store into the KV cache; ``bytes_loaded`` their size.
        blocks_unused: blocks that arrived in vain: computed meanwhile, or the request has gone.
        blocks_corrupt: stored blocks that were not what they should be; they are removed.
        blocks_saved: blocks written to the store; ``bytes_saved`` their size.
        blocks_present: blocks not written because the store had them.
        blocks_dropped: blocks not saved because the queue was full, or a failed store was let rest.
        blocks_failed: blocks that the store would not take.
        store_errors: operations of the store that failed, loads and saves together.
        prompt_tokens_local: prompt tokens found in the KV cache's own prefixes, at first admission.
        prompt_tokens_store: prompt tokens whose KV came from the store, likewise.
        prompt_tokens_computed: prompt tokens left to compute, likewise.
    """

    loads_started: int = 0
    loads_timed_out: int = 0
    loads_failed: int = 0
    loads_deferred: int = 0
    loads_skipped: int = 0
    states_loaded: int = 0
    blocks_loaded: int = 0
    bytes_loaded: int = 0
    blocks_unused: int = 0
    blocks_corrupt: int = 0
    blocks_saved: int = 0
    bytes_saved: int = 0
    blocks_present: int = 0
    blocks_dropped: int = 0
    blocks_failed: int = 0
    store_errors: int = 0
    prompt_tokens_local: int = 0
    prompt_tokens_store: int = 0
    prompt_tokens_computed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Add to the counts of those names."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        """All counts by name."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = [name for name in KVTransferStats.__dataclass_fields__ if not name.startswith("_")]

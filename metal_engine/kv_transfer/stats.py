"""Counters of KV transfer: one object that the transfer threads update and that metrics read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class KVTransferStats:
    """Counts since the start. Adding is thread-safe. A reader may see counts of different moments.

    A recurrent state counts as a block in ``blocks_corrupt`` and in the counts of saving (from ``blocks_saved`` to
    ``blocks_failed``).

    Attributes:
        loads_started: requests for which the store was queried.
        loads_timed_out: started loads that ended at the deadline. Blocks that had arrived by then were used, unless the
            load failure policy ended the request.
        loads_failed: started loads that ended with a store error or a corrupt block, or because the store paused.
        loads_deferred: started loads that had to wait for host memory.
        loads_skipped: requests for which the store was not queried because it had failed recently.
        states_loaded: recurrent states that were loaded from the store into their slots.
        blocks_loaded: blocks that were loaded from the store into the KV cache; ``bytes_loaded`` is their size.
        blocks_unused: blocks that arrived too late: computed in the meantime, or for a request that had ended.
        blocks_corrupt: stored blocks that failed a check. Corrupt blocks are removed if the store can be written.
        blocks_saved: blocks written to the store; ``bytes_saved`` is their size.
        blocks_present: blocks that were not written because the store had them already.
        blocks_dropped: blocks that were not saved because the queue was full or the store paused after a failure.
        blocks_failed: blocks whose write failed.
        store_errors: failed store operations, loads and saves together.
        prompt_tokens_local: prompt tokens found in the local prefix cache at first admission.
        prompt_tokens_store: prompt tokens whose KV came from the store, at first admission.
        prompt_tokens_computed: prompt tokens left to compute at first admission.
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
        """Add to the named counts."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        """Return all counts by name."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = [name for name in KVTransferStats.__dataclass_fields__ if not name.startswith("_")]

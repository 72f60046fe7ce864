"""Registry of an engine's LoRA adapters: their names and their slots."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np

from metal_engine.errors import AdapterError
from metal_engine.local_paths import local_path
from metal_engine.lora.files import AdapterFile, open_adapter
from metal_engine.lora_adapter import Adapter, AdapterTargets
from metal_engine.settings.served_names import problem_of_name

Weights = tuple[np.ndarray, np.ndarray]  # A [inputs, rank] and B [rank, outputs], float32
RunInEngine = Callable[[Callable[[], None]], None]
"""Runs a function in the engine's thread, between two steps, and waits for its end."""
SetWeights = Callable[[int, Mapping[str, Weights | None]], Iterator[int]]
# Weights are read in pieces that end after this number of layers or of bytes. About _PIECE_BYTES are copied into a slot
# between two steps, which takes some 5 ms.
_PIECE_LAYERS, _PIECE_BYTES = 8, 2 << 20


class AdapterRegistry:
    """Registry that finds, loads and unloads LoRA adapters by name. Thread-safe.

    A slot belongs to its :class:`Adapter` as long as the Adapter object is referenced. An unloaded adapter therefore
    keeps its weights until the requests that use it have ended.

    Args:
        targets: layers that adapters may modify.
        max_loras: maximum number of adapters loaded at once.
        max_rank: maximum LoRA rank.
        set_weights: writes an adapter's weights for some layers into its slot. Returns an iterator, which is consumed
            in the engine's thread: each item is the size in bytes of the part just written.
    """

    def __init__(self, targets: AdapterTargets, max_loras: int, max_rank: int, set_weights: SetWeights) -> None:
        self.max_loras = max_loras
        self._targets = targets
        self._max_rank = max_rank
        self._set_weights = set_weights
        self._adapters: dict[str, Adapter] = {}
        self._free_slots = deque(range(1, max_loras + 1))
        self._loading = threading.Lock()

    def find(self, name: str | None) -> Adapter | None:
        return self._adapters.get(name) if name is not None else None

    @property
    def adapters(self) -> list[Adapter]:
        """Loaded adapters in the order of loading. An adapter loaded in place may have its predecessor's position."""
        return list(self._adapters.values())

    def load(
        self,
        name: str,
        path: str,
        run: RunInEngine,
        *,
        within: Path | None = None,
        in_place: bool = False,
        base_model_name: str | None = None,
    ) -> Adapter:
        """Read an adapter and copy it into a free slot. Blocks until it is loaded. One adapter is loaded at a time.

        Args:
            name: name under which the adapter is served.
            path: path of the adapter's folder, relative to ``within`` if given.
            run: runs a function in the engine's thread and waits for its end. The weights are copied there. Errors of
                ``run`` are passed on.
            within: folder that must contain the adapter's files, after links are resolved; None for any folder.
            in_place: True if the adapter may replace a loaded adapter of the same name. Requests that use the old
                adapter continue with it. If no slot is free and no request uses the old adapter, the old adapter is
                unloaded first, and the new one takes its slot. If copying then fails, no adapter has the name.
            base_model_name: declared base model of the adapter; None: the served model.

        Raises:
            AdapterError: the files are unreadable or do not fit the model, the rank exceeds ``max_rank``, the name is
                taken or invalid, or all slots are in use.
        """
        if problem := problem_of_name(name):
            raise AdapterError(f"the name {problem}", "lora_name")
        with self._loading:
            if name in self._adapters and not in_place:
                message = f"the LoRA adapter {name!r} has already been loaded; load_inplace replaces it"
                raise AdapterError(message, "lora_name")
            folder = local_path(path) if within is None else within / path
            file = open_adapter(folder, self._targets, within)
            if file.rank > self._max_rank:
                raise AdapterError(f"{folder} has rank {file.rank}, more than the {self._max_rank} of --max-lora-rank")
            adapter = self._put(name, path, file, run, base_model_name)
            self._adapters[name] = adapter
            return adapter

    def _put(self, name: str, path: str, file: AdapterFile, run: RunInEngine, base_model_name: str | None) -> Adapter:
        slot = self._slot_for(name, file)
        try:
            digest = sha256(name.encode("utf-8", "surrogatepass") + b"\0")
            for piece in self._pieces(file):
                for module, weights in piece.items():
                    if weights is not None:
                        digest.update(f"{module} {weights[0].shape} {weights[1].shape}".encode())
                        digest.update(weights[0].data)
                        digest.update(weights[1].data)
                self._put_piece(self._set_weights(slot, piece), run)
        except BaseException:
            self._free_slots.append(slot)
            raise
        adapter = Adapter(name, path, slot, file.rank, digest.hexdigest(), base_model_name)
        weakref.finalize(adapter, self._free_slots.append, slot).atexit = False
        return adapter

    def _slot_for(self, name: str, file: AdapterFile) -> int:
        """Take a free slot. If no slot is free, unload the adapter of this name and take its slot.

        Checks the new weights before it unloads an adapter. Raises AdapterError if the weights are invalid, or if no
        slot is free and the adapter of this name is in use or missing.
        """
        if not self._free_slots and name in self._adapters:
            for _ in self._pieces(file):
                pass  # validates the new weights before the old adapter is unloaded
            if (old := self._adapters.pop(name, None)) is not None:
                reference = weakref.ref(old)
                del old
                while (old := reference()) is None and not self._free_slots:
                    time.sleep(0)  # another thread is just releasing the adapter and will free its slot
                if old is not None:
                    self._adapters[name] = old
                del old  # the traceback of the error below keeps this frame for a while
        try:
            return self._free_slots.popleft()
        except IndexError:
            raise AdapterError(
                f"no room for the LoRA adapter {name!r}: all {self.max_loras} of --max-loras are in use; unload an "
                "adapter, and wait until its requests have ended",
                "lora_name",
            ) from None

    @staticmethod
    def _put_piece(parts: Iterator[int], run: RunInEngine) -> None:
        """Copy all weights into their slot, in pieces of about ``_PIECE_BYTES`` bytes.

        ``run`` copies each piece between two steps.
        """
        is_done = False

        def put_some() -> None:
            nonlocal is_done
            num_bytes = 0
            for more in parts:
                num_bytes += more
                if num_bytes >= _PIECE_BYTES:
                    return
            is_done = True

        while not is_done:
            run(put_some)

    def _pieces(self, file: AdapterFile) -> Iterator[dict[str, Weights | None]]:
        """Yield the weights for all adaptable layers, a few layers at a time. None stands for an unmodified layer."""
        own = set(file.modules)
        piece: dict[str, Weights | None] = {}
        num_bytes = 0
        for module in sorted(self._targets.shapes):
            piece[module] = weights = file.weights(module) if module in own else None
            num_bytes += 0 if weights is None else weights[0].nbytes + weights[1].nbytes
            if len(piece) == _PIECE_LAYERS or num_bytes >= _PIECE_BYTES:
                yield piece
                piece, num_bytes = {}, 0
        yield piece

    def unload(self, name: str) -> bool:
        """Remove an adapter by name. Its slot becomes free after its last request. Return False for an unknown name."""
        return self._adapters.pop(name, None) is not None

"""The memory that several models share: what is free of it, and who has to go for another."""

from __future__ import annotations

from collections.abc import Sequence

from metal_engine.errors import ModelTooLargeError, NoRoomError
from metal_engine.model_pool.model_entry import ModelEntry, ModelState
from metal_engine.settings.fields import format_size


class MemoryBudget:
    """What models may take of the device's memory together. Changes no model.

    Args:
        memory_bytes: all of it.
        entries: those that share it; grows as models are added.
    """

    def __init__(self, memory_bytes: int, entries: Sequence[ModelEntry]) -> None:
        self.memory_bytes = memory_bytes
        self._entries = entries

    @property
    def taken_bytes(self) -> int:
        """What all models have, or have claimed."""
        return sum(one.num_bytes for one in self._entries)

    def free_for(self, entry: ModelEntry) -> int:
        """Bytes that a model may have without another one's going; what it has already is among them."""
        return self.memory_bytes - self.taken_bytes + entry.num_bytes

    def check_fits(self, entry: ModelEntry, num_bytes: int) -> None:
        """Raises ModelTooLargeError for more than all models may take; in any thread."""
        missing = num_bytes - self.memory_bytes
        if missing > 0:
            message = (
                f"{entry.name} takes {format_size(num_bytes)} with its KV cache, and models may take "
                f"{format_size(self.memory_bytes)} (--models-memory): {format_size(missing)} are missing"
            )
            raise ModelTooLargeError(message, missing)

    def out_of_memory_error(self, entry: ModelEntry, num_bytes: int) -> NoRoomError:
        """That a model does not fit beside those that are loaded: how much is missing. Before its step is measured."""
        free = self.free_for(entry)
        return NoRoomError(
            f"{entry.name} takes up to {format_size(num_bytes)} while it is loaded (what its largest step takes is an "
            f"estimate), and {format_size(free)} are free beside the models that are loaded: "
            f"{format_size(num_bytes - free)} are missing"
        )

    def victims(self, entry: ModelEntry, num_bytes: int, *, also_used: bool) -> list[ModelEntry] | None:
        """Those that have to go so that a model may have so many bytes in all: none more than that takes.

        Those that go already come first, then those that nobody uses, then those in use; of each the least recently
        used first.

        Args:
            also_used: whether those that requests use may be among them.

        Returns:
            None if all that may go are not enough.
        """
        missing = num_bytes - self.free_for(entry)
        may_go = [one for one in self._entries if one is not entry and one.num_bytes and _may_go(one, also_used)]
        may_go.sort(key=lambda one: (not one.is_closing, not one.is_idle, one.last_used))
        found: list[ModelEntry] = []
        for one in may_go:
            if missing <= 0:
                break
            found.append(one)
            missing -= one.num_bytes
        if missing > 0:
            return None
        for one in reversed(found[:]):  # a small one need not go where a large one has to
            if missing + one.num_bytes <= 0:
                found.remove(one)
                missing += one.num_bytes
        return found

    def has_room(self, entry: ModelEntry, num_bytes: int) -> bool:
        """Whether there is room at once: in what is free, or in what models have that nobody uses."""
        return self.victims(entry, num_bytes, also_used=False) is not None


def _may_go(entry: ModelEntry, also_used: bool) -> bool:
    return entry.state is not ModelState.LOADING and (also_used or entry.is_idle)

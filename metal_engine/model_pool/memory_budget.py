"""Memory budget shared by several models: how much is free, and which models to unload to make room for another."""

from __future__ import annotations

from collections.abc import Sequence

from metal_engine.errors import InsufficientMemoryError, ModelTooLargeError
from metal_engine.model_pool.model_entry import ModelEntry, ModelState
from metal_engine.settings.fields import format_size


class MemoryBudget:
    """Device memory that all models together may use. Changes no model.

    Args:
        memory_bytes: size of the budget in bytes.
        entries: models that share the budget. The sequence grows as models are added.
    """

    def __init__(self, memory_bytes: int, entries: Sequence[ModelEntry]) -> None:
        self.memory_bytes = memory_bytes
        self._entries = entries

    @property
    def taken_bytes(self) -> int:
        """Memory reserved by all models, in bytes."""
        return sum(one.num_bytes for one in self._entries)

    def free_for(self, entry: ModelEntry) -> int:
        """Return the memory that a model can have while all other models stay loaded, in bytes.

        Includes the memory that the model has reserved already.
        """
        return self.memory_bytes - self.taken_bytes + entry.num_bytes

    def check_fits(self, entry: ModelEntry, num_bytes: int) -> None:
        """Raise ModelTooLargeError if ``num_bytes`` exceeds the budget. Can be called in any thread."""
        missing = num_bytes - self.memory_bytes
        if missing > 0:
            message = (
                f"{entry.name} takes {format_size(num_bytes)} with its KV cache, and models may take "
                f"{format_size(self.memory_bytes)} (--models-memory): {format_size(missing)} are missing"
            )
            raise ModelTooLargeError(message, missing)

    def out_of_memory_error(self, entry: ModelEntry, num_bytes: int) -> InsufficientMemoryError:
        """Return the error for a model that does not fit beside the loaded models. It states the missing memory.

        Args:
            num_bytes: estimate of the model's memory in bytes. Its largest step has not been measured yet.
        """
        free = self.free_for(entry)
        return InsufficientMemoryError(
            f"{entry.name} takes up to {format_size(num_bytes)} during loading (an estimate, since its largest step is "
            f"not measured yet), and {format_size(free)} are available while the loaded models stay in memory: "
            f"{format_size(num_bytes - free)} are missing"
        )

    def victims(self, entry: ModelEntry, num_bytes: int, *, also_used: bool) -> list[ModelEntry] | None:
        """Choose the models to unload so that a model can have ``num_bytes`` in total. Chooses no more than needed.

        The order of preference is: models that are closing, idle models, models in use. The least recently used model
        comes first in each group. Models that are being loaded are never chosen.

        Args:
            also_used: True if models in use may be chosen.

        Returns:
            The chosen models; empty if enough memory is free already. None if unloading all candidates would not free
            enough memory.
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
        for one in reversed(found[:]):  # keep small models if a later, larger victim frees enough
            if missing + one.num_bytes <= 0:
                found.remove(one)
                missing += one.num_bytes
        return found

    def can_free(self, entry: ModelEntry, num_bytes: int) -> bool:
        """Return True if a model can have ``num_bytes`` in total after idle models are unloaded, if necessary."""
        return self.victims(entry, num_bytes, also_used=False) is not None


def _may_go(entry: ModelEntry, also_used: bool) -> bool:
    return entry.state is not ModelState.LOADING and (also_used or entry.is_idle)

"""A model's access to the memory of the device, which several models may share."""

from __future__ import annotations

from dataclasses import replace

from metal_engine.settings.config import DeviceInfo

_ANY_BYTES = 1 << 62


class DeviceAccess:
    """Grants memory to a model while the model is being loaded. This class grants everything to a server's only model.

    With several models, subclasses limit the memory: the registry grants memory within its budget, and the process of a
    model requests memory from the registry.

    Args:
        memory_bytes: memory for all models together, in bytes; None for the only model.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        self.memory_bytes = memory_bytes

    def with_model_memory(self, device: DeviceInfo) -> DeviceInfo:
        """Return ``device`` with its memory replaced by :attr:`memory_bytes`; ``device`` itself for the only model."""
        return device if self.memory_bytes is None else replace(device, memory_bytes=self.memory_bytes)

    def without_memory_limit(self, device: DeviceInfo) -> DeviceInfo:
        """Return ``device`` with unlimited memory for the checks of a model; ``device`` itself for the only model.

        With several models, other models can be unloaded, so :meth:`check_fits` and :meth:`claim` check the memory
        instead.
        """
        return device if self.memory_bytes is None else replace(device, memory_bytes=_ANY_BYTES)

    def check_wanted(self) -> None:
        """Raise LoadCancelledError if the load is cancelled or has no waiters."""

    def check_fits(self, num_bytes: int) -> None:
        """Raise ModelTooLargeError if ``num_bytes`` exceeds the memory for all models. Claims nothing."""

    def claim(self, num_bytes: int, loading_bytes: int = 0, step_bytes: int | None = 0) -> None:
        """Reserve ``num_bytes`` in total for this model. May block until other models are unloaded.

        Args:
            loading_bytes: memory needed until the next claim, if larger than ``num_bytes``.
            step_bytes: estimate of the memory that the largest step needs in addition to ``num_bytes``. None claims the
                whole budget. Ignored after the model's first claim, because the model's size is then known.

        Raises:
            ModelTooLargeError: the claim exceeds the memory for all models.
            ModelLoadError: the load was cancelled.
        """


# Access of the only model on the device: claims are not counted.
FULL_ACCESS = DeviceAccess()

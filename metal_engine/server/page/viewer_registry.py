"""Registry of the live view's viewers for each model. Unloading a model ends the streams of its viewers."""

from __future__ import annotations

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.model_pool.model_entry import LoadedEngine
from metal_engine.server.errors import model_not_loaded
from metal_engine.server.generation.models import Models, MultiModel
from metal_engine.server.page.viewers import Viewers


class ViewerRegistry:
    """Viewers of each loaded model. Must be used in the event loop's thread."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._viewers: dict[AsyncEngine, Viewers] = {}
        if isinstance(models, MultiModel):
            models.registry.at_unload.append(self._unloaded)

    def of(self, model: str | None) -> Viewers:
        """Return the viewers of a model. Without a name, the first loaded model is used.

        Raises:
            APIError: status 404 for an unknown model, or 503 if the model is not loaded. Viewing does not load a model.
        """
        loaded = self._models.loaded
        served = self._models.find_loaded(model) if model is not None else loaded[0] if loaded else None
        if served is None:
            raise model_not_loaded()
        if served.engine not in self._viewers:
            self._viewers[served.engine] = Viewers(served.engine, served.names)
        return self._viewers[served.engine]

    def close(self) -> None:
        """End all streams."""
        for viewers in self._viewers.values():
            viewers.close()

    def _unloaded(self, loaded: LoadedEngine) -> None:
        viewers = self._viewers.pop(loaded.engine, None)
        if viewers is not None:
            viewers.close()
